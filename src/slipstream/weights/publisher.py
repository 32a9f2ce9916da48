"""The trainer's half of a weight update: plan once, then begin → send → stage → commit over a whole fleet.

All engines stage and verify before any commits. If one cannot, all roll back and go on with the version they had, or, if
so asked, the others go on without it.

In the steady state nothing is waited for before the bytes move: after a commit the trainer knows in which slots the next
version will land, and the engines' answer to `begin` is only compared with that. Where the bytes are quick to move, they go
first, and the three steps are one message (`Fleet.swap`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from slipstream.errors import MappingError, TransferError, Unsupported, wants_elsewhere
from slipstream.types import (
    Berths,
    Checksums,
    CommitReport,
    EngineInfo,
    EngineSync,
    InFlight,
    Offer,
    StageReport,
    SyncReport,
    Unchecked,
    VerifyReport,
)
from slipstream.weights import source, transports
from slipstream.weights.device import PLANES, DeviceOutbox, are_ready, on_accelerator
from slipstream.weights.layout import whole
from slipstream.weights.plan import Plan, Source, make_plan
from slipstream.weights.source import Tensor
from slipstream.weights.transfer import Outbox
from slipstream.weights.unchanged import Memory
from slipstream.weights.verify import compare


class Fleet(Protocol):
    """What an update needs of the engines, behind a gateway or in this process. Keys are engine names.

    `begin`, `stage` and `commit` send; `begun`, `staged` and `committed` wait for the answers, in that order. A step that
    follows one that failed does nothing, so it may be sent before the answer to that one has come."""

    async def begin(self, version: int, offers: Mapping[str, Offer], drop_failed: bool) -> None: ...

    async def begun(self) -> dict[str, Berths]: ...

    async def stage(self, version: int, manifests: Mapping[str, Sequence[Sequence[bytes]]]) -> None: ...

    async def staged(self) -> dict[str, StageReport]: ...

    async def commit(self, version: int, in_flight: InFlight) -> None: ...

    async def committed(self) -> dict[str, CommitReport]: ...

    async def swap(
        self,
        version: int,
        offers: Mapping[str, Offer],
        expected: Mapping[str, Berths],
        manifests: Mapping[str, Sequence[Sequence[bytes]]],
        in_flight: InFlight,
    ) -> None:
        """`begin`, `stage` and `commit` of what was handed over where it was `expected`. `FleetChanged`, and nothing
        committed, where an engine wants it elsewhere."""
        ...

    async def swapped(self) -> tuple[dict[str, StageReport], dict[str, CommitReport]]: ...

    async def rollback(self, version: int) -> None: ...

    async def checksums(self, engine: str = "") -> dict[str, Checksums]: ...


class _Route:
    """The way to one engine: its plan, the streams to its ranks, and what it is known to hold."""

    def __init__(self, engine: EngineInfo, plan: Plan, transport: str, rank: int, hashed: bool) -> None:
        self.engine, self.plan, self.transport, self._hashed = engine, plan, transport, hashed
        self.outbox: Outbox | DeviceOutbox
        if transport in PLANES:
            self.outbox = DeviceOutbox(plan, engine.parameters, rank, engine.name)
        else:
            self.outbox = Outbox(plan, engine.parameters, rank, hashed)
        self.memory = self._later = Memory()
        self.is_quick = transports.is_quick(transport, plan.num_bytes)
        self._known = False
        """The engine has the plan, and we have links to it."""
        self._offered = ""

    @property
    def way(self) -> str:
        """The transport, and what should be known about it."""
        return ", ".join(filter(None, (self.transport, self.outbox.note)))

    def offer(self) -> Offer:
        plan = b"" if self._known else self.plan.to_bytes()
        self._offered = self._offered or transports.invitation(self.transport)
        return Offer(plan, self.plan.fingerprint, self._offered, not self._known, self._hashed)

    def unchanged(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Names that need not be sent."""
        found = self.memory.unchanged(tensors, self.engine.tensors)
        if not transports.takes_all(self.transport) or len(found) == len(self.engine.tensors):
            return found
        if missing := [t.name for t in self.engine.tensors if t.name not in tensors]:
            raise Unsupported(
                f"engine {self.engine.name!r} takes weights over {self.transport}, all tensors or none, and {missing[0]} and "
                f"{len(missing) - 1} more are not in this tree; sync the whole of it"
            )
        return set()

    def close(self) -> None:
        self.outbox.close()
        transports.withdraw(self._offered)

    def foresee(self, tensors: Mapping[str, Tensor]) -> None:
        """What the engine will hold: noted while it is at work, and not when everybody waits for us."""
        self._later = self.memory.after(tensors)

    def committed(self, unchanged: set[str]) -> None:
        self._known = True
        self.outbox.committed(unchanged)
        self.memory = self._later


@dataclass(frozen=True)
class _Run:
    """An update that went through."""

    routes: Mapping[str, _Route]
    stages: Mapping[str, StageReport]
    commits: dict[str, CommitReport]
    num_bytes: int
    handed_over: float
    staged: float
    """When, both."""


def _manifests(sent: Mapping[str, tuple[list[bytes], int]]) -> dict[str, list[list[bytes]]]:
    return {name: [[manifest] for manifest in manifests] for name, (manifests, _) in sent.items()}


def _some(tensors: Sequence[Tensor]) -> list[Tensor]:
    """From all over the tree: usually one program computes them all, or several do so one after the other."""
    return [*tensors[:: 1 + len(tensors) // 8], *tensors[-1:]]


DRAFT = "draft."
"""Before the names of a draft model's tensors: they are part of the policy's version and of its transaction."""


def _named(params: Any, draft: Any) -> dict[str, Tensor]:
    tensors = source.named_tensors(params)
    if draft is not None:
        tensors |= {DRAFT + name: tensor for name, tensor in source.named_tensors(draft).items()}
    return tensors


class Publisher:
    """Keeps plans and routes from one update to the next. Not for concurrent use: one update at a time."""

    def __init__(self, fleet: Fleet, transport: str | None = None, rank: int = 0, checksums: bool = True) -> None:
        self._fleet, self._transport, self._rank, self._hashed = fleet, transport, rank, checksums
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._routes: dict[str, _Route] = {}
        self._describe = source.Descriptions(rank)
        self._best = 0.0
        self._sources: dict[str, Source] = {}
        self._engines: Sequence[EngineInfo] = ()
        self._partial = False
        """What the routes were made for, all three."""

    async def publish(
        self,
        params: Any,
        engines: Sequence[EngineInfo],
        version: int,
        in_flight: InFlight = "keep",
        partial: bool = False,
        drop_failed: bool = False,
        draft: Any = None,
    ) -> SyncReport:
        """Brings `params` to every engine as `version`, or raises and leaves every engine as it was. With `partial`,
        tensors that are not in `params` stay as they are. `draft` is for engines that guess with a draft model; without
        it theirs stays as it is."""
        start = time.perf_counter()
        tensors = _named(params, draft)
        routes = self._routes_for(self._describe(tensors), engines, partial, tensors)
        unchanged = {name: route.unchanged(tensors) for name, route in routes.items()}
        planned = time.perf_counter()
        try:
            expected = {name: route.outbox.berths for name, route in routes.items() if route.outbox.berths is not None}
            if len(expected) == len(routes) and not drop_failed and all(route.is_quick for route in routes.values()):
                run = await self._at_once(routes, tensors, unchanged, version, in_flight, expected)
            else:
                run = await self._step_by_step(routes, tensors, unchanged, version, in_flight, drop_failed)
            routes, commits = dict(run.routes), run.commits
            for name in commits:
                copied = await routes[name].outbox.released()
                found = commits[name]
                slower = max(found.load_seconds, copied)
                commits[name] = replace(found, load_seconds=slower, pause_seconds=max(found.pause_seconds, copied))
        except BaseException:
            self._drop(*routes)  # who knows what is still being written: the next update takes other memory
            await asyncio.shield(self._fleet.rollback(version))
            raise
        committed = time.perf_counter()
        for name, route in routes.items():
            if name in commits:
                route.committed(unchanged[name])
        lost = [e.name for e in engines if e.name not in commits]
        self._drop(*lost)
        report = SyncReport(
            version=version,
            num_bytes=run.num_bytes,
            plan_seconds=planned - start,
            send_seconds=run.handed_over - planned,
            stage_seconds=run.staged - run.handed_over,
            commit_seconds=committed - run.staged,
            total_seconds=committed - start,
            engines=tuple(EngineSync(n, routes[n].way, run.stages[n], commits[n]) for n in routes if n in commits),
            lost=tuple(lost),
        )
        self._best = max(self._best, report.bytes_per_second)
        return replace(report, best_bytes_per_second=self._best)

    async def verify(self, params: Any, engines: Sequence[EngineInfo], draft: Any = None) -> VerifyReport:
        """Compares what the engines hold with `params`, tensor by tensor. Raises `Unsupported` if no engine can tell."""
        tensors = _named(params, draft)
        sources = self._describe(tensors)
        for engine in engines:
            self._plan(sources, engine, partial=False)  # a tree that does not fit is refused by name
        asked = [self._fleet.checksums(engine.name) for engine in engines]
        found: dict[str, Checksums] = {}
        cannot: list[Unchecked] = []
        for engine, answer in zip(engines, await asyncio.gather(*asked, return_exceptions=True)):
            if isinstance(answer, Unsupported):
                cannot.append(Unchecked(engine.name, "", str(answer)))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found |= answer
        if cannot and not found:
            raise Unsupported("no engine can tell what it holds. " + " | ".join(u.why for u in cannot))
        report = await asyncio.to_thread(compare, tensors, engines, found)
        return replace(report, unchecked=(*cannot, *report.unchecked))

    def close(self) -> None:
        self._drop(*self._routes)

    async def _step_by_step(
        self,
        routes: Mapping[str, _Route],
        tensors: Mapping[str, Tensor],
        unchanged: Mapping[str, set[str]],
        version: int,
        in_flight: InFlight,
        drop_failed: bool,
    ) -> _Run:
        await self._fleet.begin(version, {name: route.offer() for name, route in routes.items()}, drop_failed)
        predicted = all(route.outbox.berths is not None for route in routes.values()) and not drop_failed
        if not predicted:
            routes = self._answered(routes, await self._fleet.begun())
        try:
            is_quick = all(route.is_quick for route in routes.values()) and are_ready(tensors.values())
            sent = await self._send(routes, tensors, unchanged, version, in_thread=not is_quick)
        except TransferError:
            if predicted:  # an engine that was started again has other links; if so, the answer to `begin` says it
                self._compare(routes, await self._fleet.begun())
            raise
        handed_over = time.perf_counter()
        await self._fleet.stage(version, _manifests(sent))
        if predicted:
            self._compare(routes, await self._fleet.begun())
        await self._confirmed(routes)
        stages = await self._fleet.staged()
        staged = time.perf_counter()
        await self._fleet.commit(version, in_flight)
        self._foresee(routes, tensors)
        commits = await self._fleet.committed()
        return _Run(routes, stages, commits, sum(size for _, size in sent.values()), handed_over, staged)

    async def _at_once(
        self,
        routes: Mapping[str, _Route],
        tensors: Mapping[str, Tensor],
        unchanged: Mapping[str, set[str]],
        version: int,
        in_flight: InFlight,
        expected: Mapping[str, Berths],
    ) -> _Run:
        # A single rank swaps if it has everything, or not at all. Of several, each has to say that it has before any may.
        is_one = sum(route.engine.num_ranks for route in routes.values()) == 1
        offers = {name: route.offer() for name, route in routes.items()}
        # An engine should not wait for weights that are still computed. With the policies under which it goes on meanwhile,
        # should they be, a few of them speak for all.
        same = set.intersection(*unchanged.values())
        new = [tensor for name, tensor in tensors.items() if name not in same]
        seems_computed = are_ready(_some(new) if in_flight in ("keep", "requeue") else new)
        promised = self._promised(routes, unchanged, version) if is_one and seems_computed else None
        order = None
        if promised is not None:
            # The order goes by way of the gateway, and what it is about does not: they are on their way together, and whichever
            # is there first waits for the other. Until gRPC says that it is rid of the order, the engine may have it.
            order = asyncio.create_task(self._fleet.swap(version, offers, expected, _manifests(promised), in_flight))
        try:
            await asyncio.sleep(0)
            is_computed = seems_computed and are_ready(tensors.values())
            sent = await self._send(routes, tensors, unchanged, version, in_thread=not is_computed)
        finally:
            if order is not None:
                await order
        handed_over = time.perf_counter()
        if not is_one:
            await self._confirmed(routes)
        if promised is None:
            await self._fleet.swap(version, offers, expected, _manifests(sent), in_flight)
        if is_one:
            await self._confirmed(routes)
        self._foresee(routes, tensors)
        stages, commits = await self._fleet.swapped()
        return _Run(routes, stages, commits, sum(size for _, size in sent.values()), handed_over, handed_over)

    def _promised(
        self, routes: Mapping[str, _Route], unchanged: Mapping[str, set[str]], version: int
    ) -> dict[str, tuple[list[bytes], int]] | None:
        """What `_send` will return, if that can be said."""
        found = {name: route.outbox.promise(unchanged[name], version) for name, route in routes.items()}
        return {name: made for name, made in found.items() if made is not None} or None

    def _foresee(self, routes: Mapping[str, _Route], tensors: Mapping[str, Tensor]) -> None:
        for route in routes.values():
            route.foresee(tensors)

    async def _confirmed(self, routes: Mapping[str, _Route]) -> None:
        for route in routes.values():
            await route.outbox.confirmed()

    async def _send(
        self,
        routes: Mapping[str, _Route],
        tensors: Mapping[str, Tensor],
        unchanged: Mapping[str, set[str]],
        version: int,
        in_thread: bool,
    ) -> dict[str, tuple[list[bytes], int]]:
        """Manifests and bytes by engine; in threads to all engines at once, where that takes long enough to pay."""
        if not in_thread:
            return {n: route.outbox.send(tensors, unchanged[n], version, True) for n, route in routes.items()}
        sends = [asyncio.to_thread(route.outbox.send, tensors, unchanged[n], version) for n, route in routes.items()]
        return dict(zip(routes, await asyncio.gather(*sends)))

    def _answered(self, routes: Mapping[str, _Route], berths: Mapping[str, Berths]) -> dict[str, _Route]:
        """Engines that did not begin are left behind."""
        for name, answer in berths.items():
            routes[name].outbox.berths = answer
        return {name: route for name, route in routes.items() if name in berths}

    def _compare(self, routes: Mapping[str, _Route], berths: Mapping[str, Berths]) -> None:
        for name, route in routes.items():
            if berths.get(name) != route.outbox.berths:
                raise wants_elsewhere(name)

    def _routes_for(
        self, sources: dict[str, Source], engines: Sequence[EngineInfo], partial: bool, tensors: Mapping[str, Tensor]
    ) -> dict[str, _Route]:
        is_known = self._engines is engines and self._partial == partial and self._sources == sources
        if is_known and len(self._routes) == len(engines):
            return dict(self._routes)
        routes, on_gpu = {}, on_accelerator(tensors)
        for engine in engines:
            plan = self._plan(sources, engine, partial)
            transport = transports.choose(
                engine.name, engine.transports, engine.host, engine.pid, self._transport, on_gpu
            )
            route = self._routes.get(engine.name)
            same = route is not None and (route.engine.pid, route.engine.host) == (engine.pid, engine.host)
            if route is None or not same or route.plan is not plan or route.transport != transport:
                self._drop(engine.name)
                route = _Route(engine, plan, transport, self._rank, self._hashed)
            routes[engine.name] = route
        self._drop(*(self._routes.keys() - routes.keys()))
        self._routes, self._sources, self._engines, self._partial = routes, sources, engines, partial
        return dict(routes)

    def _plan(self, sources: dict[str, Source], engine: EngineInfo, partial: bool) -> Plan:
        drafted = any(name.startswith(DRAFT) for name in sources)
        may_lack = [t for t in engine.tensors if partial or (not drafted and t.name.startswith(DRAFT))]
        # What does not come is never read; where it would come from does not matter.
        sources = {t.name: Source(t.shape, engine.dtype, ((0, whole(t.shape)),)) for t in may_lack} | sources
        layout = (
            tuple(sorted(sources.items(), key=lambda item: item[0])),
            engine.tensors,
            engine.parameters,
            engine.dtype,
        )
        if layout not in self._plans:
            try:
                self._plans[layout] = make_plan(sources, engine.tensors, engine.parameters, engine.dtype)
            except MappingError as error:
                raise MappingError(f"engine {engine.name!r} ({engine.model}): {error}") from None
        return self._plans[layout]

    def _drop(self, *names: str) -> None:
        for name in names:
            if (route := self._routes.pop(name, None)) is not None:
                route.close()
