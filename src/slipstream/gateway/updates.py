"""A weight update over the fleet, as the gateway runs it: stage and verify everywhere, then commit everywhere.

One trainer at a time holds the update stream. When an engine cannot stage, or the trainer's stream breaks, everything
begun is rolled back and the old version goes on. A commit that has started runs to its end whatever the trainer does
(`trainers.py` runs every step in a task of its own), so that the fleet's version and the engines' agree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from slipstream.errors import (
    DeadlineExceeded,
    EngineLost,
    FleetChanged,
    SlipstreamError,
    UnknownVersion,
    wants_elsewhere,
)
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.attach import EngineLink
from slipstream.gateway.fanout import each, together
from slipstream.gateway.registry import Registry

log = logging.getLogger(__name__)

T = TypeVar("T")

ROLLBACK_SECONDS = 5.0


class FleetUpdate:
    """The updates of one trainer's stream, one after the other."""

    def __init__(
        self, registry: Registry, links: Mapping[str, EngineLink], on_commit: Callable[[int], None] | None = None
    ) -> None:
        """`on_commit` is told the version that the fleet serves from now on, before anything else happens."""
        self._registry, self._links, self._on_commit = registry, links, on_commit
        self._version: int | None = None
        self._engines: list[str] = []
        self._drop_failed = False

    @property
    def under_way(self) -> bool:
        return self._version is not None

    async def begin(self, step: pb.Begin, timeout: float) -> pb.UpdateReply:
        self._check_begin(step)
        self._version, self._engines, self._drop_failed = step.version, list(step.offers), step.drop_failed

        async def one(name: str) -> pb.Berths:
            message = pb.ToEngine(begin=pb.EngineBegin(version=step.version, offer=step.offers[name]))
            return (await self._links[name].ask(message, timeout, f"begin version {step.version}")).begun

        return pb.UpdateReply(begun=pb.Begun(engines=await self._on_all(one, step.version, "begun")))

    async def stage(self, step: pb.Stage, timeout: float) -> pb.UpdateReply:
        self._check(step.version)

        async def one(name: str) -> pb.StageReport:
            if name not in step.manifests:
                raise UnknownVersion(f"no checksums came for engine {name!r}, which began version {step.version}")
            message = pb.ToEngine(stage=pb.EngineStage(version=step.version, manifests=step.manifests[name]))
            answer = await self._links[name].ask(message, timeout, f"stage version {step.version}")
            return answer.staged

        return pb.UpdateReply(staged=pb.Staged(engines=await self._on_all(one, step.version, "staged")))

    async def commit(self, step: pb.Commit, timeout: float) -> pb.UpdateReply:
        self._check(step.version)
        names, self._version, self._engines = self._engines, None, []

        async def one(name: str) -> pb.CommitReport:
            answer = await self._links[name].ask(pb.ToEngine(commit=step), timeout, f"commit version {step.version}")
            return answer.committed

        done, failed = await each({name: one(name) for name in names})
        for name, error in failed.items():
            log.warning("engine %s did not commit version %d: %s", name, step.version, error)
        # Else they would take no later update. Those that do not answer would not answer this either.
        await self._roll_back(
            step.version, [name for name, error in failed.items() if not isinstance(error, DeadlineExceeded)]
        )
        if not done:
            raise together(failed, f"no engine committed version {step.version}")
        self._committed(step.version, done)
        return pb.UpdateReply(committed=pb.Committed(engines=done))

    async def swap(self, step: pb.Swap, timeout: float) -> pb.UpdateReply:
        """All three steps. An engine that is alone takes them as one; of several, all stage before any commits."""
        if len(step.begin.offers) != 1:
            begun = (await self.begin(step.begin, timeout)).begun
            for name in step.begin.offers:
                if begun.engines[name] != step.expected[name]:
                    raise wants_elsewhere(name)
            staged = (await self.stage(step.stage, timeout)).staged
            committed = (await self.commit(step.commit, timeout)).committed
            return pb.UpdateReply(swapped=pb.Swapped(staged=staged, committed=committed))
        self._check_begin(step.begin)
        ((name, offer),) = step.begin.offers.items()
        version = step.begin.version
        message = pb.EngineSwap(
            begin=pb.EngineBegin(version=version, offer=offer),
            expected=step.expected[name],
            stage=pb.EngineStage(version=version, manifests=step.stage.manifests[name]),
            commit=step.commit,
        )

        try:
            answer = await self._links[name].ask(pb.ToEngine(swap=message), timeout, f"swap to version {version}")
        except SlipstreamError as error:
            if not isinstance(error, DeadlineExceeded):
                await self._roll_back(version, [name])
            serving = f"the fleet goes on with version {self._registry.version}"
            raise together({name: error}, f"version {version} was not committed; {serving}") from None
        self._committed(version, [name])
        done = answer.swapped
        return pb.UpdateReply(
            swapped=pb.Swapped(
                staged=pb.Staged(engines={name: done.staged}),
                committed=pb.Committed(engines={name: done.committed}),
            )
        )

    async def rollback(self) -> None:
        """Undoes what was begun, on every engine that still answers. Nothing to undo is fine."""
        if self._version is None:
            return
        version, engines, self._version, self._engines = self._version, self._engines, None, []
        await self._roll_back(version, engines)

    async def release(self) -> None:
        """The trainer is gone."""
        names = [member.info.name for member in self._registry.alive()]
        await self._tell(names, pb.ToEngine(release=pb.Release()), "let go of the trainer")

    async def _roll_back(self, version: int, engines: Iterable[str]) -> None:
        await self._tell(engines, pb.ToEngine(rollback=pb.Rollback(version=version)), f"roll back version {version}")

    async def _tell(self, engines: Iterable[str], message: pb.ToEngine, doing: str) -> None:
        """Whoever does not do it is only complained of."""

        async def one(name: str) -> None:
            own = pb.ToEngine()
            own.CopyFrom(message)  # each call has a number of its own
            await self._links[name].ask(own, ROLLBACK_SECONDS, doing)

        _, failed = await each({name: one(name) for name in engines})
        for name, error in failed.items():
            log.warning("engine %s did not %s: %s", name, doing, error)

    async def _on_all(self, one: Callable[[str], Coroutine[Any, Any, T]], version: int, what: str) -> dict[str, T]:
        """A step on every engine. Those that fail end the update for all, or, if so asked, are left behind."""
        done, failed = await each({name: one(name) for name in self._engines})
        if failed and (not done or not self._drop_failed):
            raise together(
                failed, f"version {version} was not {what}; the fleet goes on with version {self._registry.version}"
            )
        if failed:
            log.warning("%s", together(failed, f"version {version} goes on without {', '.join(failed)}"))
            self._engines = list(done)
            await self._roll_back(version, failed)
        return done

    def _committed(self, version: int, names: Iterable[str]) -> None:
        is_new = version != self._registry.version  # else engines that had missed it have it now
        self._registry.commit(version, names)
        if is_new and self._on_commit is not None:
            self._on_commit(version)

    def _check_begin(self, step: pb.Begin) -> None:
        if step.epoch != self._registry.epoch:
            raise FleetChanged("engines came or went since the trainer looked")
        self._registry.check_version(step.version, step.offers)
        for name in step.offers:
            self._check_alive(name)

    def _check_alive(self, name: str) -> None:
        if why := self._registry.get(name).lost:
            raise EngineLost(f"engine {name!r} is lost: {why}")

    def _check(self, version: int) -> None:
        if version != self._version:
            raise UnknownVersion(f"version {version} was not begun (under way: {self._version})")
