"""Commits of the vLLM engine that arrive before their weights, with stand-ins for vLLM and the weight loader."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engines.frontend.sample_tasks import Attempt
from slipstream.engines.frontend.step_control import StepControl
from slipstream.engines.vllm import engine as engine_module
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.samples import VllmSampleTasks
from slipstream.engines.vllm.weight_loading import WeightsPending
from slipstream.errors import EngineFailure, UnknownVersion
from slipstream.types import CommitReport


class LateLoader:
    """Its weights arrive at the fifth try, or never."""

    is_single_call = True

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
        raise WeightsPending("rank 0 has received nothing", 0.25)

    async def restore(self) -> None:
        raise AssertionError("there is nothing to restore")

    def finish(self, version: int) -> None:
        self.staged = False


async def never() -> None:
    raise AssertionError("steps are not stopped")


def engine_with(loader: LateLoader) -> Any:
    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._name, engine._loader, engine._on_gpu = "engine-0", loader, True
    engine._steps = StepControl("engine-0", never, never)
    engine._samples = VllmSampleTasks(None, lambda doing, error: EngineFailure(str(error)))
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
        assert await commit == CommitReport(4 * 0.25 + 0.5, pytest.approx(0.0, abs=30.0), 0.5)
        assert (loader.tries, engine._samples.version) == (5, 2)
        assert running.versions == [(1, 0), (2, 7)] and not running.interruption and not ended.interruption

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


def attempt_of(name: str) -> Attempt:
    sample = SimpleNamespace(request=SimpleNamespace(is_scoring=False))
    return Attempt(sample, None, name, [(1, 0)])  # type: ignore[arg-type]
