"""A fleet of one engine in the trainer's process, with the same interface as the fleet behind a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from slipstream.bridge.local_queue import LocalQueue
from slipstream.engines.contract import EngineBackend
from slipstream.errors import BridgeClosed, EngineFailure, NotReady, UnknownEngine, Unsupported
from slipstream.gateway.output_check import fault_in, fault_in_completion
from slipstream.gateway.request_traces import GenerateTraces
from slipstream.gateway.update_steps import run_steps
from slipstream.runtime import tracing
from slipstream.types import (
    Checksums,
    Completion,
    EngineState,
    EngineStatus,
    Failure,
    FleetMembers,
    FleetStatus,
    MemoryReport,
    MemoryTag,
    Progress,
    Request,
    RolloutGroup,
    Score,
    UpdateReports,
    UpdateSteps,
)

if TYPE_CHECKING:
    from slipstream.gateway import slipstream_pb2 as pb
    from slipstream.gateway.staleness import RolloutBound


class LocalFleet:
    is_elastic = False

    def __init__(self, engine: EngineBackend, journal: Path | None = None) -> None:
        """`journal` is a file, with which versions continue where the last process ended; None keeps it in memory."""
        self._engine, self._started = engine, time.monotonic()
        self._num_completions = self._num_requests = 0
        self._unanswered: deque[asyncio.Task[dict[str, UpdateReports]]] = deque()
        self._rollouts = LocalQueue(journal, self._send, self._served)
        self._is_paused = False
        self._version = -1
        """Last committed version; the engine may have lost it since."""

    async def status(self) -> FleetStatus:
        info, asleep = self._engine.describe(), await self._asleep()
        state: EngineState = "empty" if info.version < 0 else "asleep" if asleep else "ready"
        note = f"asleep: {' and '.join(asleep)} released; bridge.wake brings them back" if asleep else ""
        find_stats: Callable[[], Mapping[str, Any]] = getattr(self._engine, "stats", dict)
        activity = find_stats().get("activity", "")
        adapters = self._engine.adapters
        status = EngineStatus(
            info, state, self._num_requests, 0.0, note, self._is_paused, activity=activity, adapters=adapters
        )
        uptime, rollouts = time.monotonic() - self._started, self._rollouts.status()
        return FleetStatus(info.version, uptime, self._num_completions, (status,), rollouts=rollouts)

    async def _asleep(self) -> tuple[MemoryTag, ...]:
        try:
            return (await self._engine.memory()).asleep
        except Unsupported:
            return ()

    async def refresh(self) -> FleetMembers:
        info = self._engine.describe()
        version = max(info.version, self._rollouts.version, self._version)
        return FleetMembers((info,), version, version + 1)

    async def generate(
        self, requests: Sequence[Request], engine: str = ""
    ) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        backend = self._checked(engine)
        self._num_requests += len(requests)
        vocab_size, traces = backend.describe().vocab_size, GenerateTraces(tracing.traced(requests), self._name)
        try:
            async with contextlib.aclosing(backend.generate(requests)) as batches:
                async for batch in batches:
                    traces.see(batch)
                    results = [self._checked_result(result, vocab_size) for result in batch]
                    self._num_completions += sum(isinstance(r, Completion) for r in results)
                    yield results
        finally:
            traces.close()
            self._num_requests -= len(requests)

    def _checked_result(
        self, result: Completion | Failure | Progress, vocab_size: int
    ) -> Completion | Failure | Progress:
        """Return a result, or a failure in place of one that cannot be true."""
        if isinstance(result, Failure):
            return result
        check = fault_in_completion if isinstance(result, Completion) else fault_in
        if not (fault := check(result, vocab_size)):
            return result
        error = EngineFailure(f"engine {self._name!r} returned {fault}; are the weights that it serves finite?")
        return Failure(result.request_id, error)

    async def score(
        self, sequences: Sequence[Sequence[int]], engine: str = "", top_k: int = 0, adapter: str = ""
    ) -> list[Score]:
        return await self._checked(engine).score(sequences, top_k, adapter)

    async def submit(self, bound: RolloutBound, requests: Sequence[Request]) -> int:
        return await self._rollouts.submit(bound, requests)

    async def take(
        self,
        bound: RolloutBound,
        after: int,
        count: int,
        timeout: float,
        saved: int = 0,
        version: int = 0,
        more: bool = False,
    ) -> list[RolloutGroup]:
        return await self._rollouts.take(bound, after, count, timeout, saved, version, more)

    def _served(self) -> int:
        version = self._engine.describe().version
        if version < 0:
            raise NotReady(f"engine {self._name!r} has no weights yet; sync a policy to it first")
        return version

    async def _send(self, message: pb.GenerateRequest) -> AsyncGenerator[pb.Results, None]:
        from slipstream.gateway import convert

        async with contextlib.aclosing(self.generate(convert.requests_from_pb(message))) as batches:
            async for batch in batches:
                yield convert.results_to_pb(batch)

    async def pause(self, engine: str = "") -> None:
        await self._checked(engine).pause()
        self._is_paused = True

    async def resume(self, engine: str = "") -> None:
        await self._checked(engine).resume()
        self._is_paused = False

    async def sleep(self, level: int = 1, engine: str = "") -> dict[str, MemoryReport]:
        return {self._name: await self._checked(engine).sleep(level)}

    async def wake(self, tags: Sequence[MemoryTag] | None = None, engine: str = "") -> dict[str, MemoryReport]:
        return {self._name: await self._checked(engine).wake(tags)}

    async def reset_prefix_cache(self, engine: str = "") -> None:
        await self._checked(engine).reset_prefix_cache()

    async def unload_adapter(self, name: str) -> None:
        await self._engine.unload_adapter(name)

    async def memory(self, engine: str = "") -> dict[str, MemoryReport]:
        return {self._name: await self._checked(engine).memory()}

    async def quarantine(self, engine: str, reason: str, since: int | None = None) -> None:
        raise Unsupported(f"engine {self._name!r} is the only one and runs in this process; sync good weights instead")

    async def drain(self, engine: str, *, undo: bool = False, hand_back: bool = False, force: bool = False) -> None:
        raise Unsupported(f"engine {self._name!r} is the only one and runs in this process; bridge.pause stops it")

    async def checksums(self, engine: str = "") -> dict[str, Checksums]:
        return {self._name: await self._checked(engine).checksums()}

    async def send_steps(self, steps: Mapping[str, UpdateSteps], drop_failed: bool = False) -> None:
        running = asyncio.create_task(self._run_steps(steps))
        self._unanswered.append(running)
        if any(engine_steps.offer is None or engine_steps.in_flight is None for engine_steps in steps.values()):
            with contextlib.suppress(Exception):  # `receive_reports` raises it
                await running
        # Otherwise the steps may wait for bytes that the caller sends next.

    async def receive_reports(self) -> dict[str, UpdateReports]:
        return await self._unanswered.popleft()

    async def _run_steps(self, steps: Mapping[str, UpdateSteps]) -> dict[str, UpdateReports]:
        reports = {}
        for name, engine_steps in steps.items():
            reports[name] = await run_steps(self._checked(name), engine_steps)
            if engine_steps.in_flight is not None:
                self._version = engine_steps.version
                self._rollouts.on_commit(engine_steps.version)
        return reports

    async def rollback(self, version: int) -> None:
        unanswered, self._unanswered = self._unanswered, deque()
        await asyncio.gather(*unanswered, return_exceptions=True)  # steps that wait for bytes fail, as none will come
        with contextlib.suppress(BridgeClosed):
            await self._engine.rollback(version)

    async def close(self) -> None:
        engine, self._engine = self._engine, cast(EngineBackend, _ClosedEngine())
        await self._rollouts.close()
        if not isinstance(engine, _ClosedEngine):
            await engine.close()

    @property
    def _name(self) -> str:
        return self._engine.describe().name

    def _checked(self, name: str) -> EngineBackend:
        """Return the engine if that is its name, or if the name is empty."""
        if name not in ("", self._name):
            raise UnknownEngine(f"no engine is named {name!r}; this process has {self._name!r}")
        return self._engine


class _ClosedEngine:
    """Takes the place of an engine that was closed: every use raises."""

    def __getattr__(self, name: str) -> Any:
        raise BridgeClosed("the bridge was closed, and the engine of this process with it; make another one")
