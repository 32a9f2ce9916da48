"""The trainer's half of a weight update: plan once, then begin → send → stage → commit over a whole fleet.

All engines stage and verify before any commits. If one cannot, all roll back and go on with the version they had."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.errors import FleetChanged, MappingError
from slipstream.types import CommitReport, EngineInfo, EngineSync, InFlight, Offer, StageReport, SyncReport
from slipstream.weights import source, transports
from slipstream.weights.plan import Plan, Source, make_plan
from slipstream.weights.source import Tensor
from slipstream.weights.transfer import TRAINER_RANK, send
from slipstream.weights.transports.base import Sender


class Fleet(Protocol):
    """What an update needs of the engines, behind a gateway or in this process. Keys are engine names.

    `begin` may return before the engines have answered; what it could not do is raised by `stage`."""

    async def begin(self, version: int, offers: Mapping[str, Offer]) -> None: ...

    async def stage(self, version: int, manifests: Mapping[str, Sequence[bytes]]) -> dict[str, StageReport]: ...

    async def commit(self, version: int, in_flight: InFlight) -> dict[str, CommitReport]: ...

    async def rollback(self, version: int) -> None: ...


@dataclass
class _Route:
    """Engines that can read the same streams: same layout, same transport. Packed once, read by all."""

    plan: Plan
    transport: str
    engines: tuple[EngineInfo, ...]
    streams: list[Sender] = field(default_factory=list)
    attached: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        return self.plan.fingerprint, self.transport, tuple((e.name, e.pid, e.host) for e in self.engines)

    def open(self) -> None:
        sizes = [self.plan.stream_bytes(TRAINER_RANK, rank) for rank in range(self.engines[0].num_ranks)]
        for size in sizes:
            self.streams.append(transports.SENDERS[self.transport](size))

    def offer(self) -> Offer:
        """The plan goes along until the engines have it."""
        plan = b"" if self.attached else self.plan.to_bytes()
        return Offer(plan, self.plan.fingerprint, tuple(stream.link for stream in self.streams))

    def send(self, tensors: Mapping[str, Tensor], version: int) -> list[bytes]:
        return [send(self.plan, rank, tensors, stream, version) for rank, stream in enumerate(self.streams)]

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


class Publisher:
    """Keeps plans and streams from one update to the next. Not for concurrent use: one update at a time."""

    def __init__(self, fleet: Fleet, transport: str | None = None) -> None:
        self._fleet, self._transport = fleet, transport
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._routes: list[_Route] = []
        self._routed: tuple[object, object] = (None, None)
        """Sources and engines that the routes were made for."""

    async def publish(
        self, params: Any, engines: Sequence[EngineInfo], version: int, in_flight: InFlight
    ) -> SyncReport:
        """Brings `params` to every engine as `version`, or raises and leaves every engine as it was."""
        start = time.perf_counter()
        tensors = source.named_tensors(params)
        routes = self._routes_for(source.describe(tensors), engines)
        planned = time.perf_counter()
        try:
            await self._fleet.begin(version, {e.name: route.offer() for route in routes for e in route.engines})
            manifests = [await asyncio.to_thread(route.send, tensors, version) for route in routes]
            sent = time.perf_counter()
            per_engine = {e.name: m for route, m in zip(routes, manifests) for e in route.engines}
            stages = await self._fleet.stage(version, per_engine)
            for route in routes:
                route.attached = True
                for stream in route.streams:
                    stream.attached()
            staged = time.perf_counter()
            commits = await self._fleet.commit(version, in_flight)
        except BaseException as error:
            # Engines may or may not have opened these links: the next update makes new ones.
            self._drop_routes()
            if not isinstance(error, FleetChanged):
                await asyncio.shield(self._fleet.rollback(version))
            raise
        committed = time.perf_counter()
        return SyncReport(
            version=version,
            num_bytes=sum(route.plan.num_bytes for route in routes),
            plan_seconds=planned - start,
            send_seconds=sent - planned,
            stage_seconds=staged - sent,
            commit_seconds=committed - staged,
            total_seconds=committed - start,
            engines=tuple(
                EngineSync(e.name, route.transport, stages[e.name], commits[e.name])
                for route in routes
                for e in route.engines
                if e.name in commits
            ),
            lost=tuple(e.name for e in engines if e.name not in commits),
        )

    def close(self) -> None:
        self._drop_routes()

    def _routes_for(self, sources: Mapping[str, Source], engines: Sequence[EngineInfo]) -> list[_Route]:
        if self._routes and self._routed[1] is engines and self._routed[0] == sources:
            return self._routes
        groups: dict[tuple[str, str], _Route] = {}
        for engine in engines:
            plan = self._plan(sources, engine)
            transport = transports.choose(engine.name, engine.transports, engine.host, engine.pid, self._transport)
            route = groups.setdefault((plan.fingerprint, transport), _Route(plan, transport, ()))
            route.engines += (engine,)
        routes = list(groups.values())
        if [r.key for r in routes] != [r.key for r in self._routes]:
            self._drop_routes()
            self._routes = routes
            for route in routes:
                route.open()
        self._routed = (sources, engines)
        return self._routes

    def _plan(self, sources: Mapping[str, Source], engine: EngineInfo) -> Plan:
        layout = (tuple(sources.items()), engine.tensors, engine.parameters, engine.dtype)
        if layout not in self._plans:
            try:
                self._plans[layout] = make_plan(sources, engine.tensors, engine.parameters, engine.dtype)
            except MappingError as error:
                raise MappingError(f"engine {engine.name!r} ({engine.model}): {error}") from None
        return self._plans[layout]

    def _drop_routes(self) -> None:
        for route in self._routes:
            route.close()
        self._routes = []
