"""How vLLM's engine takes a version when the order to do so is there before the weights, with stand-ins for vLLM and for the
delivery."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engines.vllm import engine as engine_module
from slipstream.engines.vllm.delivery import NotHere
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.runs import Run, Runs
from slipstream.errors import EngineFailure, UnknownVersion
from slipstream.types import CommitReport


class Late:
    """A delivery whose weights come with the fifth try, or never."""

    is_one_call = True

    def __init__(self, comes: bool = True) -> None:
        self.comes, self.tries, self.staged = comes, 0, True

    def check_staged(self, version: int) -> None:
        if not self.staged:
            raise UnknownVersion(f"version {version} is not staged")

    async def load(self, version: int) -> tuple[dict[str, int], float]:
        self.tries += 1
        await asyncio.sleep(0)
        if self.comes and self.tries == 5:
            return {"s1": 7}, 0.5
        raise NotHere("rank 0 has nothing within reach", 0.25)

    async def restore(self) -> None:
        raise AssertionError("there is nothing to restore")

    def finish(self, version: int) -> None:
        self.staged = False


def engine_with(delivery: Late) -> Any:
    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._name, engine._delivery, engine._on_gpu, engine._asleep = "engine-0", delivery, True, {}
    engine._turn, engine._runs = asyncio.Lock(), Runs(None, lambda doing, error: EngineFailure(str(error)))
    engine._paused, engine._is_still, engine._runs.version = False, False, 1
    engine._failure = lambda doing, error: EngineFailure(f"{doing}: {error}")
    return engine


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PATIENCE_SECONDS", 0.001)


def test_between_two_tries_vllm_answers_and_others_have_their_turn() -> None:
    async def scenario() -> None:
        delivery = Late()
        engine = engine_with(delivery)
        ended, running = run_of("s0"), run_of("s1")
        engine._runs.running = {"s0": ended, "s1": running}
        commit = asyncio.create_task(engine.commit(2))
        while delivery.tries < 3:
            await asyncio.sleep(0)
        async with asyncio.timeout(30), engine._turn:
            await engine._runs._booked.wait()
            assert engine._runs.version == 1
            del engine._runs.running["s0"]  # it had all its tokens
        assert await commit == CommitReport(4 * 0.25 + 0.5, pytest.approx(0.0, abs=30.0), 0.5)
        assert (delivery.tries, engine._runs.version) == (5, 2)
        assert running.versions == [(1, 0), (2, 7)] and not running.again and not ended.again

    asyncio.run(scenario())


def test_weights_that_never_come_are_an_error_and_the_old_version_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LATE_SECONDS", 0.05)

    async def scenario() -> None:
        engine = engine_with(Late(comes=False))
        with pytest.raises(EngineFailure, match="loading version 2: rank 0 has nothing within reach"):
            await engine.commit(2)
        assert engine._runs.version == 1 and engine._runs._booked.is_set() and not engine._turn.locked()

    asyncio.run(scenario())


def test_a_rollback_ends_the_waiting() -> None:
    async def scenario() -> None:
        delivery = Late(comes=False)
        engine = engine_with(delivery)
        commit = asyncio.create_task(engine.commit(2))
        while delivery.tries < 3:
            await asyncio.sleep(0)
        delivery.staged = False
        with pytest.raises(UnknownVersion, match="not staged"):
            await asyncio.wait_for(commit, 30)
        assert engine._runs.version == 1

    asyncio.run(scenario())


def run_of(name: str) -> Run:
    sample = SimpleNamespace(ticket=SimpleNamespace(is_scoring=False))
    return Run(sample, None, name, [(1, 0)])  # type: ignore[arg-type]
