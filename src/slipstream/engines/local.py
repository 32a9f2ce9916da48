"""A fleet of one: an engine in this process, seen by the bridge as the gateway's fleet is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

from slipstream.engines.base import Engine
from slipstream.errors import UnknownEngine
from slipstream.types import (
    Berths,
    CommitReport,
    Completion,
    EngineInfo,
    EngineStatus,
    Failure,
    FleetStatus,
    InFlight,
    Offer,
    Request,
    Score,
    StageReport,
)


class LocalFleet:
    def __init__(self, engine: Engine) -> None:
        self._engine, self._started = engine, time.monotonic()
        self._num_completions = self._num_requests = 0
        self._begun: dict[str, Berths] = {}
        self._staged: dict[str, StageReport] = {}

    async def status(self) -> FleetStatus:
        info = self._engine.describe()
        state = EngineStatus(info, "ready" if info.version >= 0 else "empty", self._num_requests, 0.0)
        return FleetStatus(info.version, time.monotonic() - self._started, self._num_completions, (state,))

    async def refresh(self) -> tuple[tuple[EngineInfo, ...], int]:
        info = self._engine.describe()
        return (info,), info.version

    async def generate(
        self, requests: Sequence[Request], engine: str = ""
    ) -> AsyncGenerator[list[Completion | Failure], None]:
        self._check(engine)
        self._num_requests += len(requests)
        try:
            async with contextlib.aclosing(self._engine.generate(requests)) as batches:
                async for batch in batches:
                    self._num_completions += sum(isinstance(r, Completion) for r in batch)
                    yield batch
        finally:
            self._num_requests -= len(requests)

    async def score(self, sequences: Sequence[Sequence[int]], engine: str = "") -> list[Score]:
        self._check(engine)
        return await self._engine.score(sequences)

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

    async def commit(self, version: int, in_flight: InFlight) -> dict[str, CommitReport]:
        return {self._engine.describe().name: await self._engine.commit(version, in_flight)}

    async def rollback(self, version: int) -> None:
        await self._engine.rollback(version)

    async def close(self) -> None:
        await self._engine.close()

    def _check(self, name: str) -> None:
        own = self._engine.describe().name
        if name not in ("", own):
            raise UnknownEngine(f"no engine is named {name!r}; this process has {own!r}")
