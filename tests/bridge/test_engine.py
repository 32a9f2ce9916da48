"""`slipstream.Engine`, the library interface of the embedded engine, which is itself tested in tests/engines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from slipstream import EmbeddedConfig, Engine, SamplingParams
from slipstream.errors import BridgeClosed, ConfigError, InvalidPrompt, InvalidSampling, RequestError, Unsupported
from slipstream.model.checkpoints import hf_weights
from slipstream.types import Completion, Failure
from tests.tiny import random_params, tiny_config, write_tokenizer

CONFIG = tiny_config(max_position_embeddings=64)
PARAMS = random_params(CONFIG)
LONG = SamplingParams(max_tokens=16, seed=7, ignore_eos=True)
UNSEEDED = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    hf_weights.save(path, PARAMS, CONFIG)
    return write_tokenizer(path)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    with Engine(directory, max_num_seqs=8) as engine:
        yield engine


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [c.token_ids for c in completions]


# --- making one -------------------------------------------------------------------------------------------------------


def test_from_a_directory_and_from_memory_alike(engine: Engine) -> None:
    (by_text,) = engine.generate(["abc"], LONG)
    assert by_text.prompt_token_ids == (4, 5, 6) and by_text.text and len(by_text.token_ids) == 16
    with Engine(CONFIG, PARAMS, config=EmbeddedConfig(max_num_seqs=8)) as other:
        assert tokens(other.generate([(4, 5, 6)], LONG)) == [by_text.token_ids]
        with pytest.raises(InvalidPrompt, match="no tokenizer"):
            other.session("abc")


def test_a_mistyped_option_is_refused_with_the_right_one(directory: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        Engine(directory, max_num_seq=8)
    with pytest.raises(ConfigError, match="not both"):
        Engine(directory, config=EmbeddedConfig(), tensor_parallel_size=1)
    with pytest.raises(ConfigError, match=r"engine\.update"):
        Engine(directory, PARAMS)


def test_closed_twice_and_used_after() -> None:
    engine = Engine(CONFIG, PARAMS, max_num_seqs=8)
    engine.close()
    engine.close()
    with pytest.raises(BridgeClosed):
        engine.generate([(4,)], LONG)


# --- synchronous and asynchronous -------------------------------------------------------------------------------------


def test_each_verb_and_its_twin_give_the_same(engine: Engine) -> None:
    prompts, sampling = ["abc", "de"], SamplingParams(n=2, max_tokens=5, seed=3)

    async def twins() -> tuple[list[Completion], list[Completion | Failure], list[float]]:
        found = [c async for c in engine.astream(prompts, sampling)]
        (score,) = await engine.ascore([(4, 5, 6)])
        return await engine.agenerate(prompts, sampling, priority=-1), found, list(score.logprobs)

    generated, streamed, logprobs = asyncio.run(twins())
    wanted = tokens(engine.generate(prompts, sampling))
    assert tokens(generated) == wanted and len(wanted) == 4
    assert sorted(c.token_ids for c in streamed if isinstance(c, Completion)) == sorted(wanted)
    assert sorted(c.token_ids for c in engine.stream(prompts, sampling) if isinstance(c, Completion)) == sorted(wanted)
    assert list(engine.score([(4, 5, 6)])[0].logprobs) == logprobs and len(logprobs) == 2


def test_nothing_asked_nothing_given(engine: Engine) -> None:
    async def nothing() -> list[object]:
        return [await engine.agenerate([]), [c async for c in engine.astream([])], await engine.ascore([])]

    assert engine.generate([]) == list(engine.stream([])) == engine.score([]) == []
    assert asyncio.run(nothing()) == [[], [], []]


def test_failures_are_raised_by_generate_and_streamed_by_stream(engine: Engine) -> None:
    too_long = (4,) * 100

    async def main() -> None:
        with pytest.raises(InvalidPrompt, match="prompt 1 of 2"):
            await engine.agenerate([(4,), too_long], LONG)
        kinds = [type(r) async for r in engine.astream([(4,), too_long], LONG)]
        assert set(kinds) == {Completion, Failure}

    asyncio.run(main())
    with pytest.raises(InvalidPrompt, match="prompt 1 of 2"):
        engine.generate([(4,), too_long], LONG)


def test_cancelling_and_leaving_early_leave_the_engine_usable(engine: Engine) -> None:
    many = SamplingParams(n=64, max_tokens=60, ignore_eos=True)

    async def main() -> None:
        stream = engine.astream([(4,)], many)
        await anext(stream)
        await stream.aclose()
        engine._bridge.pause()  # so that neither can end before it is cancelled
        nexts = engine.astream([(4,)], many)
        for waiting in (engine.agenerate([(4,)], many), anext(nexts)):
            task = asyncio.ensure_future(waiting)
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        engine._bridge.resume()

    asyncio.run(main())
    assert len(engine.generate([(4, 5)], LONG)) == 1
    deadline = time.monotonic() + 10
    while engine._bridge.status().engines[0].num_requests:  # what was cancelled is cleared away on another loop
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_many_event_loops_at_once(engine: Engine) -> None:
    wanted, found = tokens(engine.generate([(4, 5)], LONG)), []

    def one() -> None:
        found.append(tokens(asyncio.run(engine.agenerate([(4, 5)], LONG))))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 4


def test_what_does_not_fit_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidSampling, match="priority"):
        engine.generate([(4,)], LONG, priority=2**40)
    with pytest.raises(InvalidSampling, match="top_k"):
        engine.score([(4, 5)], top_k=999)
    with pytest.raises(Unsupported, match="level must be 1"):
        engine.sleep(3)
    with pytest.raises(RequestError, match="'kv_cache', got 'tea'"):
        engine.wake("tea")  # type: ignore[arg-type]


# --- weights and memory -----------------------------------------------------------------------------------------------


@pytest.fixture
def own() -> Iterator[Engine]:
    """An engine that a test may change."""
    with Engine(CONFIG, PARAMS, max_num_seqs=8) as engine:
        yield engine


def test_updates_whole_and_in_part(own: Engine) -> None:
    assert own.version == 0
    other = jax.tree.map(lambda p: p * 1.5, PARAMS)
    report = own.update(other)
    (changed,) = own.generate([(4, 5)], LONG)
    assert own.version == report.version == changed.version == 1 and report.num_bytes > 0
    with Engine(CONFIG, other, max_num_seqs=8) as fresh:
        assert tokens(fresh.generate([(4, 5)], LONG)) == [changed.token_ids]
    part = own.update({"model": {"norm": PARAMS["model"]["norm"]}}, partial=True, in_flight="recompute")
    assert 0 < part.num_bytes < report.num_bytes and own.version == 2


def test_an_engine_without_weights_gets_them_by_update() -> None:
    with Engine(CONFIG, max_num_seqs=8) as engine:
        assert engine.version == -1
        engine.update(PARAMS)
        assert engine.version == 0 and len(engine.generate([(4,)], LONG)) == 1


def test_paused_requests_wait_and_come_out_the_same(own: Engine) -> None:
    wanted = tokens(own.generate([(4, 5)], LONG))
    own.pause()
    own.pause()
    found: list[list[tuple[int, ...]]] = []
    thread = threading.Thread(target=lambda: found.append(tokens(own.generate([(4, 5)], LONG))))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    own.resume()
    thread.join(60)
    assert found == [wanted]


def test_sleep_and_wake(own: Engine) -> None:
    wanted, held = tokens(own.generate([(4, 5)], LONG)), own.memory()
    assert held.weights > 0 and held.kv_cache > 0 and held.asleep == ()
    asleep = own.sleep()
    assert set(asleep.asleep) == {"weights", "kv_cache"} and asleep.weights == asleep.kv_cache == 0
    assert own._bridge.status().engines[0].state == "asleep"
    assert own.wake("kv_cache").asleep == ("weights",)
    assert own.wake() == own.memory() and own.memory().asleep == ()
    assert tokens(own.generate([(4, 5)], LONG)) == wanted


def test_after_the_deeper_sleep_everything_is_sent_again(own: Engine) -> None:
    wanted = tokens(own.generate([(4, 5)], LONG))
    full = own.update(PARAMS).num_bytes
    assert own.update(PARAMS).num_bytes == 0 < full
    own.sleep(level=2)
    assert own.update(PARAMS).num_bytes == full
    own.wake()
    assert tokens(own.generate([(4, 5)], LONG)) == wanted


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_eight_and_eight_tokens_are_sixteen(engine: Engine) -> None:
    (at_once,) = engine.generate([(4, 5, 6)], LONG)
    with engine.session((4, 5, 6), seed=7) as session:
        first, second = session.generate(LONG, max_tokens=8), session.generate(LONG, max_tokens=8)
    assert first.token_ids + second.token_ids == at_once.token_ids
    assert session.token_ids == (4, 5, 6, *at_once.token_ids) and session.turns == (first, second)
    assert second.prompt_token_ids == (4, 5, 6, *first.token_ids)


def test_turns_with_text_from_outside(engine: Engine) -> None:
    session = engine.session("ab", seed=1)
    turn = session.generate(SamplingParams(ignore_eos=True), max_tokens=3)
    assert session.extend("cd") == (6, 7) and session.extend([8]) == (8,) and session.extend("") == ()
    assert session.token_ids == (4, 5, *turn.token_ids, 6, 7, 8)

    async def again() -> Completion:
        return await session.agenerate(max_tokens=2)

    last = asyncio.run(again())
    assert last.prompt_token_ids == (4, 5, *turn.token_ids, 6, 7, 8)
    assert session.token_ids == last.prompt_token_ids + last.token_ids


def test_seeds_of_sessions(engine: Engine) -> None:
    one, same, other = (engine.session((4,), seed=s).generate(UNSEEDED) for s in (5, 5, 6))
    assert one.token_ids == same.token_ids != other.token_ids
    assert engine.session((4,)).seed != engine.session((4,)).seed


def test_a_session_that_fails_is_as_before(engine: Engine) -> None:
    session = engine.session()
    with pytest.raises(InvalidPrompt, match="no tokens"):
        session.generate()
    session.extend((4,) * 63)
    session.generate()
    before = session.token_ids
    with pytest.raises(InvalidPrompt):
        session.generate()
    assert session.token_ids == before and len(session.turns) == 1
    with pytest.raises(InvalidSampling, match="open 4 sessions"):
        session.generate(SamplingParams(n=4))
    with pytest.raises(InvalidPrompt, match="integers"):
        session.extend([0.5])  # type: ignore[list-item]
    session.close()
    with pytest.raises(RequestError, match="closed"):
        session.extend("a")


def test_one_turn_at_a_time(engine: Engine) -> None:
    async def main() -> None:
        session = engine.session((4,), seed=1)
        turn = asyncio.create_task(session.agenerate(LONG))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="a turn of this session is running"):
            session.extend("a")
        await turn
        session.extend("a")

    asyncio.run(main())
