"""Pause, sleep, wake, and the exact effect of commits on running requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from slipstream.bridge.bridge import Bridge
from slipstream.bridge.in_process import LocalFleet
from slipstream.config import EmbeddedConfig, SyncOptions
from slipstream.engines.embedded import compute_thread
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.errors import EngineFailure, FleetChanged, NotReady, Unsupported, UpdateInProgress
from slipstream.types import CommitReport, Completion, Failure, MemoryReport, Request, VersionSpan
from tests.conformance.engines import Subject, other_params, request, update_of
from tests.engines.subjects import (
    CONFIG,
    OPTIONS,
    Hold,
    assert_nothing_leaked,
    collect,
    opened,
    publish,
    scheduler_of,
    stage,
    stats,
)
from tests.tiny import random_params

LONG = request("long", [7, 8, 9], max_tokens=40)


async def interrupted(
    subject: Subject, deed: Callable[[], Awaitable[Any]], tick: int = 20, one: Request = LONG
) -> tuple[asyncio.Task[list[Completion | Failure]], Any]:
    """Run `one`, and call `deed` after `tick` ticks, when `LONG` has that many tokens."""
    hold = Hold(subject, tick)
    generating = asyncio.create_task(collect(subject, one))
    await hold.reached()
    doing = asyncio.ensure_future(deed())
    await hold.release()
    return generating, await doing


async def only(generating: Awaitable[list[Completion | Failure]]) -> Completion:
    (outcome,) = await generating
    assert isinstance(outcome, Completion), outcome
    return outcome


def assert_same_draws(found: Completion, expected: Completion) -> None:
    assert (found.token_ids, found.logprobs, found.raw_logprobs) == (
        expected.token_ids,
        expected.logprobs,
        expected.raw_logprobs,
    )


def test_diverged_weights_leave_no_trace() -> None:
    """A version full of NaN does not affect the next one."""
    with opened() as subject:
        before = subject.complete(LONG.prompt, max_tokens=40)
        diverged = jax.tree.map(lambda p: np.full(p.shape, np.nan, p.dtype), subject.params)
        broken = subject.runner.run(publish(subject, diverged, options=SyncOptions(check_finite=False)))
        assert broken == 1
        found = subject.complete(LONG.prompt, max_tokens=40)
        assert np.isnan(found.raw_logprobs).all() and all(0 <= t < subject.config.vocab_size for t in found.token_ids)
        subject.runner.run(publish(subject, subject.params))
        assert_same_draws(subject.complete(LONG.prompt, max_tokens=40), before)


def test_a_swap_that_fails_leaves_the_old_version_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as subject:
        before = subject.complete(LONG.prompt)
        executor = subject.engine._compute._executor  # type: ignore[attr-defined]

        def no_room(policy: Any) -> Any:
            raise MemoryError("no room on the device")

        with monkeypatch.context() as broken, pytest.raises(EngineFailure, match="no room on the device"):
            broken.setattr(executor, "to_devices", no_room)
            subject.runner.run(publish(subject, other_params(subject)))
        assert subject.engine.describe().version == 0
        assert_same_draws(subject.complete(LONG.prompt), before)
        assert subject.runner.run(publish(subject, other_params(subject))) == 1  # the next update is not blocked


# --- pause ---


def test_pause_and_resume_do_not_change_tokens() -> None:
    with opened() as subject:
        engine, alone = subject.engine, subject.complete(LONG.prompt, max_tokens=40)
        other = subject.complete([5, 6])

        async def scenario() -> tuple[Completion, Completion]:
            generating, _ = await interrupted(subject, engine.pause)
            await engine.pause()  # again
            ticks = stats(subject)["ticks"]
            waiting = asyncio.create_task(collect(subject, request("late", [5, 6])))
            scoring = asyncio.create_task(engine.score([[5, 6, 7]]))
            await asyncio.sleep(0.1)
            assert stats(subject)["ticks"] == ticks
            assert not (generating.done() or waiting.done() or scoring.done())
            await engine.resume()
            await engine.resume()
            await scoring
            return await only(generating), await only(waiting)

        long, late = subject.runner.run(scenario())
        assert_same_draws(long, alone)
        assert long.spans == (VersionSpan(0, 0, 40),)
        assert_same_draws(late, other)


def test_requests_of_a_paused_engine_can_be_canceled() -> None:
    with opened() as subject:

        async def scenario() -> None:
            await subject.engine.pause()
            waiting = asyncio.create_task(collect(subject, LONG))
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await subject.engine.resume()

        subject.runner.run(scenario())
        subject.complete([5, 6])
        assert_nothing_leaked(subject)


# --- commits ---


@pytest.mark.parametrize("in_flight", ["keep", "finish", "recompute", "requeue"])
def test_a_commit_with_requests_in_flight(in_flight: Any) -> None:
    with opened() as subject:
        new, tokens_before = other_params(subject), 20
        alone = subject.complete(LONG.prompt, max_tokens=40)

        async def scenario() -> Completion:
            await stage(subject, new)
            generating, _ = await interrupted(subject, lambda: subject.engine.commit(1, in_flight), tokens_before)
            return await only(generating)

        found = subject.runner.run(scenario())
        assert subject.engine.describe().version == 1
        tokens = found.prompt_token_ids + found.token_ids
        place = (np.arange(2, 42), found.token_ids)
        old_rows, new_rows = (subject.logprobs(tokens, params)[place] for params in (subject.params, new))
        raw = np.array(found.raw_logprobs)
        if in_flight == "finish":
            assert found.spans == (VersionSpan(0, 0, 40),)
            assert_same_draws(found, alone)
        elif in_flight == "requeue":
            assert found.spans == (VersionSpan(1, 0, 40),)
            assert_same_draws(found, subject.complete(LONG.prompt, max_tokens=40))
            np.testing.assert_allclose(raw, new_rows, atol=1e-5)
        else:
            assert found.spans == (VersionSpan(0, 0, 20), VersionSpan(1, 20, 40))
            assert found.token_ids[:20] == alone.token_ids[:20]
            np.testing.assert_allclose(raw[:20], old_rows[:20], atol=1e-5)
            # The new weights over the whole sequence, or over the KV cache of the old ones.
            assert (np.abs(raw[20:] - new_rows[20:]) < 1e-5).all() == (in_flight == "recompute")
            assert np.abs(raw[20] - old_rows[20]) > 1e-3


@pytest.mark.parametrize("in_flight", ["keep", "finish", "recompute", "requeue"])
def test_a_commit_reports_what_generation_lost(in_flight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own: a tick, which draws one token, takes 0.5 s, and applying a version takes 0.25 s."""
    clock = SimpleNamespace(now=100.0, sleep=time.sleep)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(compute_thread, "time", clock)
    with opened() as subject:
        compute = subject.engine._compute  # type: ignore[attr-defined]

        def slow(method: Callable[..., Any], seconds: float) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                clock.now += seconds
                return method(*arguments)

            return call

        compute._apply = slow(compute._apply, 0.25)
        compute._executor.dispatch = slow(compute._executor.dispatch, 0.5)

        async def scenario() -> list[CommitReport]:
            await stage(subject, other_params(subject))
            generating, report = await interrupted(subject, lambda: subject.engine.commit(1, in_flight))
            await only(generating)
            reports = [report]
            for paused in (False, True):  # without requests, and with one that would draw nothing anyway
                if paused:
                    await subject.engine.pause()
                    generating = asyncio.create_task(collect(subject, LONG))
                await stage(subject, subject.params)
                reports.append(await subject.engine.commit(2 + paused))
            await subject.engine.resume()
            await generating
            return reports

        busy, idle, paused = subject.runner.run(scenario())
        assert busy.pause_seconds == idle.pause_seconds == paused.pause_seconds == 0.25
        assert idle.lost_tokens == paused.lost_tokens == 0
        if in_flight == "finish":  # when it commits, there is nothing left to lose
            assert busy.lost_tokens == 0
        else:
            assert busy.tokens_per_second == 2
            assert busy.lost_tokens == 0.5 + (20 if in_flight == "requeue" else 0)


@pytest.mark.parametrize("in_flight", ["keep", "finish", "recompute", "requeue"])
def test_a_commit_during_prefill(in_flight: Any) -> None:
    """All tokens are of one version, so all keys and values must be, too."""
    prompt, version = tuple(range(5, 26)), 0 if in_flight == "finish" else 1
    assert OPTIONS["max_num_batched_tokens"] < len(prompt) - 1, "it should take two ticks"
    with opened() as subject:
        weights = subject.params, other_params(subject)

        async def scenario() -> Completion:
            await stage(subject, weights[1])
            one = request("two ticks", prompt)
            generating, _ = await interrupted(subject, lambda: subject.engine.commit(1, in_flight), tick=1, one=one)
            return await only(generating)

        found = subject.runner.run(scenario())
        assert found.spans == (VersionSpan(version, 0, 8),)
        rows = subject.logprobs(prompt + found.token_ids, weights[version])
        np.testing.assert_allclose(found.raw_logprobs, rows[np.arange(20, 28), found.token_ids], atol=1e-5)


def test_finish_waits_for_preempted_samples() -> None:
    with opened(num_pages=12) as subject:
        requests = [request(str(i), [5 + i, 6], max_tokens=30) for i in range(4)]

        async def scenario() -> list[Completion | Failure]:
            await stage(subject, other_params(subject))
            hold = Hold(subject, 20)
            generating = asyncio.create_task(collect(subject, *requests))
            await hold.reached()
            assert stats(subject)["preemptions"] > 0
            waiting = [*scheduler_of(subject).waiting]
            assert waiting and all(sample.tokens for sample in waiting), "all have begun, and some lost their pages"
            commit = asyncio.create_task(subject.engine.commit(1, "finish"))
            await hold.release()
            late = await only(collect(subject, request("late", [9, 9])))
            assert late.spans == (VersionSpan(1, 0, 8),)
            await commit
            return await generating

        outcomes = subject.runner.run(scenario())
        assert len(outcomes) == 4
        assert [isinstance(o, Completion) and o.spans for o in outcomes] == [(VersionSpan(0, 0, 30),)] * 4


def test_finish_on_a_paused_engine_with_requests_running_changes_nothing() -> None:
    with opened() as subject:
        engine, alone = subject.engine, subject.complete(LONG.prompt, max_tokens=40)

        async def scenario() -> Completion:
            generating, _ = await interrupted(subject, engine.pause)
            await stage(subject, other_params(subject))
            with pytest.raises(Unsupported, match="paused"):
                await engine.commit(1, "finish")
            assert engine.describe().version == 0
            await engine.rollback(1)
            await engine.resume()
            return await only(generating)

        assert_same_draws(subject.runner.run(scenario()), alone)


def test_finish_on_a_paused_engine_commits_at_once_when_nothing_runs() -> None:
    with opened() as subject:

        async def scenario() -> Completion:
            await subject.engine.pause()
            waiting = asyncio.create_task(collect(subject, LONG))
            await asyncio.sleep(0.05)
            ticks = stats(subject)["ticks"]
            await publish(subject, other_params(subject), "finish")
            await asyncio.sleep(0.05)
            assert stats(subject)["ticks"] == ticks  # still paused
            await subject.engine.resume()
            return await only(waiting)

        assert subject.runner.run(scenario()).spans == (VersionSpan(1, 0, 40),)


# --- sleep and wake ---


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_does_not_change_the_tokens_of_a_running_request(level: int) -> None:
    with opened() as subject:
        engine, alone = subject.engine, subject.complete(LONG.prompt, max_tokens=40)

        async def scenario() -> tuple[Completion, list[MemoryReport]]:
            reports = [await engine.memory()]
            generating, asleep = await interrupted(subject, lambda: engine.sleep(level))
            reports.append(asleep)
            late = asyncio.create_task(collect(subject, request("late", [5, 6])))
            await asyncio.sleep(0.05)
            assert not generating.done() and not late.done()
            if level == 2:
                await publish(subject, subject.params)
            reports.append(await engine.wake())
            await late
            return await only(generating), reports

        found, (before, asleep, after) = subject.runner.run(scenario())
        assert_same_draws(found, alone)
        assert before.asleep == after.asleep == ()
        assert asleep.asleep == ("kv_cache", "weights")
        assert before.kv_cache == after.kv_cache == 2 * 2 * 8 * 512 * 4  # K and V, heads, head_dim, tokens, bytes
        assert before.weights == after.weights == sum(p.nbytes for p in flat(subject.params))
        assert asleep.kv_cache == 0
        assert level == 1 or asleep.weights == 0
        assert found.spans[-1].version == level - 1


def flat(tree: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(tree)


@pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
def test_waking_tags_one_by_one(order: tuple[Any, Any]) -> None:
    with opened() as subject:
        engine, expected = subject.engine, subject.complete([5, 6])

        async def scenario() -> Completion:
            await engine.sleep()
            waiting = asyncio.create_task(collect(subject, request("r", [5, 6])))
            first = await engine.wake([order[0]])
            assert first.asleep == (order[1],)
            assert (await engine.wake([order[0]])).asleep == (order[1],)  # awake already
            ticks = stats(subject)["ticks"]
            await asyncio.sleep(0.05)
            assert stats(subject)["ticks"] == ticks and not waiting.done()
            assert (await engine.wake([order[1]])).asleep == ()
            return await only(waiting)

        assert_same_draws(subject.runner.run(scenario()), expected)


def test_paused_and_asleep_are_independent() -> None:
    with opened() as subject:
        engine, expected = subject.engine, subject.complete([5, 6])

        async def scenario() -> Completion:
            await engine.pause()
            await engine.sleep()
            waiting = asyncio.create_task(collect(subject, request("r", [5, 6])))
            await engine.resume()
            await asyncio.sleep(0.02)
            assert not waiting.done()
            await engine.pause()
            await engine.wake()
            await asyncio.sleep(0.02)
            assert not waiting.done()
            await engine.resume()
            return await only(waiting)

        assert_same_draws(subject.runner.run(scenario()), expected)


def test_dropped_weights_come_back_with_an_update_only() -> None:
    with opened() as subject:
        engine, run = subject.engine, subject.runner.run
        run(engine.sleep(1))
        assert run(engine.sleep(2)).weights == 0
        assert run(engine.sleep(1)).weights == 0  # never to the lighter level
        with pytest.raises(NotReady, match="level 2"):
            run(engine.wake(["weights"]))
        assert run(engine.wake()).asleep == ("weights",)
        run(publish(subject, subject.params))
        report = run(engine.memory())
        assert report.asleep == () and report.weights > 0
        assert len(subject.complete([5, 6]).token_ids) == 8


def test_an_update_with_a_part_of_the_tensors_does_not_replace_dropped_weights() -> None:
    with opened() as subject:
        engine, run, names = subject.engine, subject.runner.run, {t.name for t in subject.engine.describe().tensors}
        run(stage(subject, subject.params))
        run(engine.commit(1))
        run(engine.sleep(2))
        update = update_of(engine.describe(), subject.params, 2)
        destinations = run(engine.begin(2, update.offer))
        with pytest.raises(FleetChanged, match="every tensor"):
            run(engine.stage(2, update.send(destinations, unchanged=names - {"model.norm.weight"})))
        run(engine.rollback(2))
        run(engine.wake())
        run(publish(subject, subject.params))
        assert len(subject.complete([5, 6]).token_ids) == 8


def test_a_bridge_sends_everything_to_an_engine_that_dropped_its_weights() -> None:
    with opened() as subject:
        bridge = Bridge(LocalFleet(subject.engine))
        expected = subject.complete([5, 6])
        bridge.sync(subject.params)
        assert bridge.sync(subject.params).num_bytes == 0  # nothing changed
        bridge.sleep(2)
        assert bridge.sync(subject.params).num_bytes > 0
        bridge.wake()
        assert_same_draws(subject.complete([5, 6]), expected)


def test_invalid_calls_are_rejected() -> None:
    with opened() as subject:
        engine, run = subject.engine, subject.runner.run
        for level in (0, 3):
            with pytest.raises(Unsupported, match="level must be 1"):
                run(engine.sleep(level))
        with pytest.raises(Unsupported, match="lungs"):
            run(engine.wake(["lungs"]))  # type: ignore[list-item]
        update = update_of(engine.describe(), subject.params, 1)
        run(engine.begin(1, update.offer))
        with pytest.raises(UpdateInProgress, match="roll it back"):
            run(engine.sleep())
        run(engine.rollback(1))
        assert run(engine.memory()).asleep == ()
        run(engine.sleep())
        run(engine.wake())
        assert len(subject.complete([5, 6]).token_ids) == 8


def test_checksums_are_of_one_version_despite_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as subject:
        engine: Any = subject.engine
        hashes, commits = engine._hash, [1]

        def slow(policy: Any) -> Any:
            if commits[0]:
                commits[0] -= 1
                loop_of_its_own(publish(subject, random_params(CONFIG, policy.version + 1)))
            return hashes(policy)

        monkeypatch.setattr(engine, "_hash", slow)
        found = subject.runner.run(engine.checksums())
        assert found.version == engine.describe().version == 1
        assert found == subject.runner.run(engine.checksums())
        commits[0] = 100
        with pytest.raises(UpdateInProgress, match="3 attempts"):
            subject.runner.run(engine.checksums())


def loop_of_its_own(work: Any) -> None:
    thread = threading.Thread(target=asyncio.run, args=(work,))
    thread.start()
    thread.join()


def test_an_engine_without_weights_has_nothing_to_verify() -> None:
    engine = EmbeddedEngine(CONFIG, None, options=EmbeddedConfig(**OPTIONS))
    with asyncio.Runner() as runner:
        with pytest.raises(NotReady):
            runner.run(engine.checksums())
        runner.run(engine.close())


def test_a_bridge_does_not_verify_during_a_sync() -> None:
    with opened() as subject:
        bridge = Bridge(LocalFleet(subject.engine))
        with bridge._without_syncs("free"), pytest.raises(UpdateInProgress):
            bridge.verify(subject.params)
        assert bridge.verify(subject.params).is_same
