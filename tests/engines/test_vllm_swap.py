"""Commits of the vLLM engine that arrive before their weights, and updates that a trainer writes in place, with stand-ins for vLLM and
the weight loader."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config import VllmConfig
from slipstream.engines.frontend.sample_tasks import Attempt
from slipstream.engines.frontend.step_control import StepControl
from slipstream.engines.vllm import engine as engine_module
from slipstream.engines.vllm import request_format
from slipstream.engines.vllm.adapters import VllmAdapters
from slipstream.engines.vllm.direct_loader import DirectLoader
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.in_place import InPlaceUpdates
from slipstream.engines.vllm.samples import VllmSampleTasks
from slipstream.engines.vllm.weight_loading import WeightsPending
from slipstream.errors import EngineFailure, NotReady, UnknownVersion, Unsupported, UpdateInProgress, VersionError
from slipstream.model.families.vllm_parameters import written_parameters
from slipstream.types import CommitReport, Offer
from slipstream.weights.transports.shared.host_memory import ENGINE_NAME
from tests.tiny import tiny_config


class LateLoader:
    """Its weights arrive at the fifth try, or never."""

    is_single_call = True

    def __init__(self, comes: bool = True) -> None:
        self.comes, self.tries, self.staged = comes, 0, True

    def check_staged(self, version: int) -> None:
        if not self.staged:
            raise UnknownVersion(f"version {version} is not staged")

    async def load(self, version: int) -> tuple[tuple[dict[str, int], float], float]:
        self.tries += 1
        await asyncio.sleep(0)
        if self.comes and self.tries == 5:
            return ({"s1": 7}, 100.0), 0.5
        raise WeightsPending("rank 0 has received nothing", 0.25)

    async def restore(self) -> None:
        raise AssertionError("there is nothing to restore")

    def finish(self, version: int) -> None:
        self.staged = False


async def never(*_: Any) -> Any:
    raise AssertionError("steps are not stopped")


def engine_with(loader: LateLoader) -> Any:
    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._name, engine._loader, engine._on_gpu = "engine-0", loader, True
    engine._steps = StepControl("engine-0", never, never)
    engine._in_place = InPlaceUpdates("engine-0", never)
    engine._adapters, engine._changed = VllmAdapters("engine-0", None, "float32", never), None
    engine._samples = VllmSampleTasks(None, lambda doing, error: EngineFailure(str(error)), 8, engine._adapters)
    engine._samples.version = 1
    engine._failure = lambda doing, error: EngineFailure(f"{doing}: {error}")
    return engine


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WORKER_WAIT_SECONDS", 0.001)


def test_vllm_steps_and_others_get_the_lock_between_two_tries() -> None:
    async def scenario() -> None:
        loader = LateLoader()
        engine = engine_with(loader)
        ended, running = attempt_of("s0"), attempt_of("s1")
        engine._samples.running = {ended, running}
        commit = asyncio.create_task(engine.commit(2))
        while loader.tries < 3:
            await asyncio.sleep(0)
        async with asyncio.timeout(30), engine._steps.lock:
            await engine._samples._can_read.wait()
            assert engine._samples.version == 1
            engine._samples.running.remove(ended)  # it had all its tokens
        report = await commit
        assert report == CommitReport(4 * 0.25 + 0.5, pytest.approx(0.0, abs=30.0), 0.5, 100.0)
        assert report.lost_tokens == 150
        assert (loader.tries, engine._samples.version) == (5, 2)
        assert running.versions == [(1, 0), (2, 7)] and not running.interruption and not ended.interruption

    asyncio.run(scenario())


@pytest.mark.parametrize("why", ["idle", "scoring", "paused", "asleep"])
def test_an_engine_that_draws_nothing_loses_nothing(why: str) -> None:
    async def scenario() -> None:
        engine = engine_with(LateLoader())
        attempt = attempt_of("s1")
        attempt.sample.request.is_scoring = why == "scoring"
        attempt.task = SimpleNamespace(cancel=lambda: None)  # type: ignore[assignment]
        engine._samples.running = set() if why == "idle" else {attempt}
        engine._steps.is_paused, engine._steps.asleep = why == "paused", {"kv_cache": 1} if why == "asleep" else {}
        report = await engine.commit(2)
        assert report.pause_seconds > 0 and report.tokens_per_second == 0
        assert report.redrawn_tokens == (7 if why == "scoring" else 0)

    asyncio.run(scenario())


def test_weights_that_never_arrive_fail_the_commit_and_the_old_version_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PENDING_SECONDS", 0.05)

    async def scenario() -> None:
        engine = engine_with(LateLoader(comes=False))
        with pytest.raises(EngineFailure, match="loading version 2: rank 0 has received nothing"):
            await engine.commit(2)
        assert engine._samples.version == 1 and engine._samples._can_read.is_set() and not engine._steps.lock.locked()

    asyncio.run(scenario())


def test_a_rollback_ends_the_wait() -> None:
    async def scenario() -> None:
        loader = LateLoader(comes=False)
        engine = engine_with(loader)
        commit = asyncio.create_task(engine.commit(2))
        while loader.tries < 3:
            await asyncio.sleep(0)
        loader.staged = False
        with pytest.raises(UnknownVersion, match="not staged"):
            await asyncio.wait_for(commit, 30)
        assert engine._samples.version == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("in_flight", ["keep", "requeue"])
def test_a_commit_of_an_adapter_concerns_its_samples_only(in_flight: Any) -> None:
    engine = engine_with(LateLoader())
    base, other, own, fresh, waits = (attempt_of(f"s{i}", name) for i, name in enumerate(["", "b", "a", "a", "b"]))
    engine._samples.running = {base, other, own, fresh, waits}
    engine._changed = ("a",)
    tasks = {name: SimpleNamespace(cancel=lambda: None) for name in ("own", "fresh")}
    own.task, fresh.task = tasks["own"], tasks["fresh"]  # type: ignore[assignment]
    redrawn = asyncio.run(engine._serve(2, in_flight, {"s0": 4, "s1": 5, "s2": 6}))
    assert redrawn == (6 if in_flight == "requeue" else 0)
    assert [a.versions for a in (base, other, waits)] == [[(1, 0), (2, 4)], [(1, 0), (2, 5)], [(1, 0), (2, 0)]]
    assert not base.interruption and not other.interruption and not waits.interruption
    assert fresh.interruption == "restart" and own.interruption == ("restart" if in_flight == "requeue" else "")
    with pytest.raises(Unsupported, match='cannot commit an adapter with in_flight="recompute"'):
        asyncio.run(engine.commit(3, "recompute"))


def test_the_prefix_cache_is_keyed_by_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of an adapter leaves the entries of the others valid; one of the base model leaves none."""
    monkeypatch.setattr(request_format, "sampling_params", lambda sample: None)

    async def scenario() -> None:
        salts: list[str] = []

        def generate(prompt: Any, *_: Any, **__: Any) -> Any:
            salts.append(prompt["cache_salt"])
            raise EngineFailure("enough")

        config = SimpleNamespace(model_config=SimpleNamespace(runner_type="generate"))
        llm, adapters = SimpleNamespace(generate=generate, vllm_config=config), VllmAdapters("e", None, "", never)
        samples = VllmSampleTasks(llm, never, 8, adapters)  # type: ignore[arg-type]
        samples._adapters.request = lambda name: None  # type: ignore[method-assign]

        async def salts_of(*names: str) -> list[str]:
            salts.clear()
            for name in names:
                with pytest.raises(EngineFailure):
                    await samples._generate(attempt_of("s", name))
            return list(salts)

        samples.set_version(3, None)
        before = await salts_of("", "a", "b")
        samples.set_version(4, ("a",))
        after = await salts_of("", "a", "b")
        assert after[::2] == before[::2] and after[1] != before[1]
        samples.set_version(5, None)
        assert not set(await salts_of("", "a", "b")) & {*before, *after}

    asyncio.run(scenario())


def attempt_of(name: str, adapter: str = "") -> Attempt:
    sampling = SimpleNamespace(min_p=0.0, logit_bias={})
    request = SimpleNamespace(is_scoring=False, adapter=adapter, prompt=(1,), sampling=sampling, priority=0)
    sample = SimpleNamespace(request=request)
    return Attempt(sample, None, name, [(1, 0)])  # type: ignore[arg-type]


# --- updates in place ---


class StepCounter:
    """Counts how often vLLM's steps were stopped and started."""

    def __init__(self) -> None:
        self.stops = self.starts = 0

    async def stop(self) -> None:
        self.stops += 1

    async def start(self) -> None:
        self.starts += 1


def sharing_engine() -> tuple[Any, StepCounter]:
    engine, steps = engine_with(LateLoader()), StepCounter()
    engine._loader = DirectLoader(
        *("engine-0", (), written_parameters(tiny_config(), 1, {})[0], (), (), "float32", 1, never, True),
        adapters=engine._adapters,
    )
    engine._options = VllmConfig(share_weights=True)
    answers = {"slipstream_export": b"link", "slipstream_drawn": ({"s1": 7}, 100.0)}

    async def call_workers(method: str, *_: Any) -> list[Any]:
        return [answers[method]]

    engine._call_workers = call_workers
    engine._in_place = InPlaceUpdates("engine-0", call_workers)
    engine._steps = StepControl("engine-0", steps.stop, steps.start, may_start=lambda: engine._in_place.version < 0)
    return engine, steps


OFFER = Offer(b"", "plan", ENGINE_NAME)


def test_no_step_runs_while_a_trainer_writes_the_weights() -> None:
    async def scenario() -> None:
        engine, steps = sharing_engine()
        running = attempt_of("s1")
        engine._samples.running = {running}
        assert (await engine.begin(2, OFFER)).links == ((b"link",),)
        await engine.resume()  # any client may ask for it
        with pytest.raises(UpdateInProgress):
            await engine.begin(3, OFFER)
        with pytest.raises(UpdateInProgress):
            await engine.sleep()
        assert (steps.stops, steps.starts, engine._samples.version) == (1, 0, 1)
        assert (await engine.stage(2, [])).num_bytes == 0
        report = await engine.commit(2)
        assert report.pause_seconds > 0 and report.lost_tokens == 100 * report.pause_seconds
        assert (steps.stops, steps.starts, engine._samples.version) == (1, 1, 2)
        assert running.versions == [(1, 0), (2, 7)]
        with pytest.raises(VersionError, match="serves version 2"):
            await engine.begin(2, OFFER)
        with pytest.raises(Unsupported, match="cannot sleep"):
            await engine.sleep()

    asyncio.run(scenario())


def test_an_update_in_place_that_is_given_up_leaves_no_weights() -> None:
    async def scenario() -> None:
        engine, steps = sharing_engine()
        engine.ended = asyncio.Event()
        await engine.begin(2, OFFER)
        await engine.rollback(2)
        assert steps.starts == 1
        with pytest.raises(NotReady):
            engine._check_ready()
        await engine.begin(2, OFFER)
        await engine.commit(2)
        engine._check_ready()
        engine._options = VllmConfig()
        with pytest.raises(Unsupported, match="share_weights=True"):
            await engine.begin(3, OFFER)

    asyncio.run(scenario())
