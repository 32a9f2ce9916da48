"""A fleet of one: an engine in this process, seen by the bridge as the gateway's fleet is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.engines.base import Engine
from slipstream.errors import NotReady, UnknownEngine, Unsupported, wants_elsewhere
from slipstream.types import (
    Berths,
    Checksums,
    CommitReport,
    Completion,
    EngineInfo,
    EngineState,
    EngineStatus,
    Failure,
    FleetStatus,
    InFlight,
    MemoryReport,
    MemoryTag,
    Offer,
    Progress,
    Request,
    RolloutGroup,
    Score,
    StageReport,
)

if TYPE_CHECKING:
    from slipstream.gateway import slipstream_pb2 as pb
    from slipstream.gateway.rollouts import Desk, Rollouts
    from slipstream.gateway.staleness import Bound


class LocalFleet:
    def __init__(self, engine: Engine, journal: Path | None = None) -> None:
        """`journal` is the file that rollouts are written down in; without one they live as long as this process. With one,
        versions go on counting where the last process ended."""
        self._engine, self._started, self._journal = engine, time.monotonic(), journal
        self._num_completions = self._num_requests = 0
        self._begun: dict[str, Berths] = {}
        self._staged: dict[str, StageReport] = {}
        self._committed: dict[str, CommitReport] = {}
        self._swap: asyncio.Task[None] | None = None
        self._desk: Desk | None = None
        self._is_paused = False
        self._version = -1
        """The last that was committed; the engine may have lost it since."""

    async def status(self) -> FleetStatus:
        info, asleep = self._engine.describe(), await self._asleep()
        state: EngineState = "empty" if info.version < 0 else "asleep" if asleep else "ready"
        note = f"gave up its {' and '.join(asleep)}; bridge.wake brings it back" if asleep else ""
        status = EngineStatus(info, state, self._num_requests, 0.0, note, self._is_paused)
        return FleetStatus(info.version, time.monotonic() - self._started, self._num_completions, (status,))

    async def _asleep(self) -> tuple[MemoryTag, ...]:
        try:
            return (await self._engine.memory()).asleep
        except Unsupported:
            return ()

    async def refresh(self) -> tuple[tuple[EngineInfo, ...], int]:
        info = self._engine.describe()
        written = self._open_desk().version if self._journal is not None else -1
        return (info,), max(info.version, written, self._version)

    async def generate(
        self, requests: Sequence[Request], engine: str = ""
    ) -> AsyncGenerator[list[Completion | Failure], None]:
        self._check(engine)
        async with contextlib.aclosing(self.stream(requests)) as batches:
            async for batch in batches:
                if found := [result for result in batch if not isinstance(result, Progress)]:
                    yield found

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        self._num_requests += len(requests)
        try:
            async with contextlib.aclosing(self._engine.generate(requests)) as batches:
                async for batch in batches:
                    self._num_completions += sum(isinstance(r, Completion) for r in batch)
                    yield batch
        finally:
            self._num_requests -= len(requests)

    async def score(self, sequences: Sequence[Sequence[int]], engine: str = "", top_k: int = 0) -> list[Score]:
        self._check(engine)
        return await self._engine.score(sequences, top_k)

    async def submit(self, bound: Bound, requests: Sequence[Request]) -> int:
        from slipstream.gateway import convert
        from slipstream.gateway.rollouts import by_id

        return self._run(bound).submit(by_id([(r.id, convert.request_bytes(r), r.sampling.n) for r in requests]))

    async def take(
        self, bound: Bound, after: int, count: int, timeout: float, saved: int = 0, version: int = 0, more: bool = False
    ) -> list[RolloutGroup]:
        from slipstream.gateway import convert

        taken = await self._run(bound).take(after, count, timeout, saved, version, more)
        return [convert.group_from_pb(convert.taken_to_pb(one)) for one in taken]

    def _run(self, bound: Bound) -> Rollouts:
        """As in a gateway."""
        version = self._engine.describe().version
        if version < 0:
            raise NotReady(f"engine {self._name!r} has no weights yet; sync a policy to it first")
        return self._open_desk().rollouts(bound, version)

    def _open_desk(self) -> Desk:
        if self._desk is None:
            from slipstream.gateway.journal import Journal
            from slipstream.gateway.rollouts import Desk

            self._desk = Desk(Journal(self._journal), self._send)
        return self._desk

    async def _send(self, message: pb.GenerateRequest) -> AsyncGenerator[pb.Results, None]:
        from slipstream.gateway import convert

        async with contextlib.aclosing(self.generate(convert.requests_from_pb(message))) as batches:
            async for batch in batches:
                yield convert.results_to_pb(batch)

    async def pause(self, engine: str = "") -> None:
        self._check(engine)
        await self._engine.pause()
        self._is_paused = True

    async def resume(self, engine: str = "") -> None:
        self._check(engine)
        await self._engine.resume()
        self._is_paused = False

    async def sleep(self, level: int = 1, engine: str = "") -> dict[str, MemoryReport]:
        self._check(engine)
        return {self._name: await self._engine.sleep(level)}

    async def wake(self, tags: Sequence[MemoryTag] | None = None, engine: str = "") -> dict[str, MemoryReport]:
        self._check(engine)
        return {self._name: await self._engine.wake(tags)}

    async def forget_prefixes(self, engine: str = "") -> None:
        self._check(engine)
        await self._engine.forget_prefixes()

    async def memory(self, engine: str = "") -> dict[str, MemoryReport]:
        self._check(engine)
        return {self._name: await self._engine.memory()}

    async def checksums(self, engine: str = "") -> dict[str, Checksums]:
        self._check(engine)
        return {self._name: await self._engine.checksums()}

    async def begin(self, version: int, offers: Mapping[str, Offer], drop_failed: bool) -> None:
        for name in offers:
            self._check(name)
        self._begun = {name: await self._engine.begin(version, offer) for name, offer in offers.items()}

    async def begun(self) -> dict[str, Berths]:
        return self._begun

    async def stage(self, version: int, manifests: Mapping[str, Sequence[Sequence[bytes]]]) -> None:
        self._staged = {name: await self._engine.stage(version, ranks) for name, ranks in manifests.items()}

    async def staged(self) -> dict[str, StageReport]:
        return self._staged

    async def commit(self, version: int, in_flight: InFlight) -> None:
        self._committed = {self._name: await self._engine.commit(version, in_flight)}
        self._version = version
        if self._desk is not None:
            self._desk.synced(version)

    async def committed(self) -> dict[str, CommitReport]:
        return self._committed

    async def swap(
        self,
        version: int,
        offers: Mapping[str, Offer],
        expected: Mapping[str, Berths],
        manifests: Mapping[str, Sequence[Sequence[bytes]]],
        in_flight: InFlight,
    ) -> None:
        async def all_of_it() -> None:
            await self.begin(version, offers, False)
            if self._begun != expected:
                raise wants_elsewhere(self._name)
            await self.stage(version, manifests)
            await self.commit(version, in_flight)

        self._swap = asyncio.create_task(all_of_it())  # it may wait for what is sent after this

    async def swapped(self) -> tuple[dict[str, StageReport], dict[str, CommitReport]]:
        assert self._swap is not None
        swap, self._swap = self._swap, None
        await swap
        return self._staged, self._committed

    async def rollback(self, version: int) -> None:
        if self._swap is not None:
            swap, self._swap = self._swap, None
            await asyncio.gather(swap, return_exceptions=True)  # what it waits for does not come: it ends by itself
        await self._engine.rollback(version)

    async def close(self) -> None:
        if self._desk is not None:
            await self._desk.close()
        await self._engine.close()

    @property
    def _name(self) -> str:
        return self._engine.describe().name

    def _check(self, name: str) -> None:
        if name not in ("", self._name):
            raise UnknownEngine(f"no engine is named {name!r}; this process has {self._name!r}")
