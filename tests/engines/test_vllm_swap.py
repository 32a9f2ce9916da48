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
    engine._in_place = InPlaceUpdates("engine-0", never)
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
        "engine-0", written_parameters(tiny_config(), 1, {})[0], (), (), "float32", 1, never, True
    )
    engine._options = VllmConfig(share_weights=True)
    answers = {"slipstream_export": b"link", "slipstream_token_counts": {"s1": 7}}

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
        assert (await engine.commit(2)).pause_seconds > 0
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
