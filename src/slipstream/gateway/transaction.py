"""A weight update across the fleet: every engine stages and verifies a version before any engine commits it.

One trainer at a time holds the update stream. If an engine cannot stage, or the trainer's stream breaks, the gateway rolls
the update back and the engines keep the version they have. A commit that has started runs to its end even if the trainer
disappears (`trainer_group.py` runs every message in its own task), so the fleet's version and the engines' versions agree."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from slipstream.errors import (
    DeadlineExceeded,
    EngineLost,
    FleetChanged,
    ProtocolMismatch,
    SlipstreamError,
    UnknownVersion,
)
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.control import call_all, combined_error
from slipstream.gateway.engine_stream import EngineLink
from slipstream.gateway.registry import Registry
from slipstream.gateway.update_history import UpdateHistory
from slipstream.observe.recorder.fleet_recorder import GATEWAY, FleetRecorder
from slipstream.runtime import failpoints

log = logging.getLogger(__name__)

STEPS = ("begin", "stage", "commit")
ROLLBACK_SECONDS = 5.0


def steps_of(message: pb.UpdateMessage) -> tuple[int, tuple[str, ...]]:
    """Return the version and the steps of a message. Every engine in it must have the same ones."""
    found = {(s.version, tuple(step for step in STEPS if s.HasField(step))) for s in message.engines.values()}
    if len(found) != 1:
        raise ProtocolMismatch(
            f"an update message must have the same version and steps for every engine, got {sorted(found) or 'no engines'}"
        )
    version, steps = found.pop()
    if not steps or steps == ("begin", "commit"):
        raise ProtocolMismatch(f"an update message must have consecutive steps of {STEPS}, got {steps}")
    return version, steps


class FleetUpdate:
    """The updates of one trainer, one after the other."""

    def __init__(
        self,
        registry: Registry,
        links: Mapping[str, EngineLink],
        before_commit: Callable[[int], None],
        on_commit: Callable[[int], None],
        history: UpdateHistory | None = None,
        recorder: FleetRecorder | None = None,
    ) -> None:
        """`before_commit` is called with each new version before an engine can commit it, and `on_commit` once the fleet serves
        it, before the trainer gets its reply."""
        self._registry, self._links, self._before_commit, self._on_commit = registry, links, before_commit, on_commit
        self._history = history or UpdateHistory()
        self._recorder = recorder or FleetRecorder()
        self._version: int | None = None
        self._engines: list[str] = []
        self._drop_failed = False
        self._hung: set[str] = set()
        """Engines that did not answer a step of the update in time."""
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def in_progress(self) -> bool:
        """Whether an update was begun that can still be rolled back."""
        return self._version is not None

    async def run(self, message: pb.UpdateMessage, timeout: float) -> pb.UpdateReply:
        """Run the steps of a message on every engine of the update.

        A single engine gets all steps in one message. With several engines, all finish a step before any starts the next."""
        version, steps = steps_of(message)
        if "begin" in steps:
            self._check_begin(message, version)
            self._version, self._engines, self._drop_failed = version, list(message.engines), message.drop_failed
            self._hung = set()
            self._history.begin(version)
        elif (
            version == self._version and self._drop_failed and (left_out := set(self._engines) - message.engines.keys())
        ):
            self._hung |= left_out
            unreachable = DeadlineExceeded("the trainer could not send it the weights in time")
            remaining = [name for name in self._engines if name not in left_out]
            await self._drop(version, remaining, dict.fromkeys(left_out, unreachable))
        reports: dict[str, pb.UpdateReports] = {}
        for bundle in [steps] if len(self._engines) == 1 else [(step,) for step in steps]:
            try:
                done = await self._run_on_all(message, version, bundle, timeout)
            except SlipstreamError as error:
                self._history.end(str(error))
                raise
            for name in done.keys() & reports.keys():
                done[name].MergeFrom(reports[name])
            reports = done
        self._history.add(reports.values())
        if "commit" in steps:
            self._history.end()
        return pb.UpdateReply(engines=reports)

    async def _run_on_all(
        self, message: pb.UpdateMessage, version: int, steps: tuple[str, ...], timeout: float
    ) -> dict[str, pb.UpdateReports]:
        """Run steps on every engine at once; return the reports of the engines that completed them."""
        self._check_in_progress(message, version)
        engines = self._engines
        if "commit" in steps:  # a commit cannot be rolled back on the trainer's behalf
            self._version, self._engines = None, []
            if version != self._registry.version:
                self._before_commit(version)
        doing = f"{' and '.join(steps)} version {version}"
        failpoints.step(f"gateway.{steps[-1]}", version=version, engines=engines)

        started = time.perf_counter()

        async def call(name: str) -> pb.UpdateReports:
            selected = _select(message.engines[name], steps)
            reports = (await self._links[name].ask(pb.ToEngine(update=selected), timeout, doing)).updated
            self._note(name, version, steps, started, reports)
            return reports

        self._registry.is_committing = "commit" in steps
        try:
            done, failed = await call_all({name: call(name) for name in engines})
        finally:
            self._registry.is_committing = False
            self._recorder.span(GATEWAY, steps[-1], started, time.perf_counter(), version=version, detail=doing)
        for name, error in failed.items():
            if not isinstance(error, DeadlineExceeded):  # which the engine's stream has recorded
                self._recorder.event("fault", name, f"did not {doing}: {error}", version)
        self._hung |= {name for name, error in failed.items() if isinstance(error, DeadlineExceeded)}
        if "commit" in steps:
            await self._finish_commit(version, done.keys(), failed)
        elif failed:
            await self._drop(version, done.keys(), failed)
        return done

    def _note(
        self, engine: str, version: int, steps: tuple[str, ...], started: float, reports: pb.UpdateReports
    ) -> None:
        """Record what an engine has just done. Of steps that came in one message only its reports say when each began."""
        stage, commit, end = reports.stage, reports.commit, time.perf_counter()
        parts = {
            "begin": {},
            "stage": {
                "receive": stage.receive_seconds,
                "verify": max(0.0, stage.verify_seconds - stage.receive_seconds),
            },
            "commit": {"wait": commit.wait_seconds, "pause": commit.pause_seconds},
        }
        ends, at = [], end
        for step in reversed(steps):
            ends.append((step, at, parts[step]))
            at = max(started, at - sum(parts[step].values()))
        self._recorder.update(engine, version, started, ends[::-1])
        if "commit" in steps:
            self._recorder.committed(version, engine)

    async def _finish_commit(self, version: int, done: Iterable[str], failed: Mapping[str, SlipstreamError]) -> None:
        """Record a commit. Engines that failed it become stale; they must roll back to accept a later update."""
        committed = list(done)
        is_new = version != self._registry.version  # a repair brings the present version to engines that lack it
        if committed:  # first of all: whatever fails from here on, engines serve this version
            self._registry.commit(version, committed)
        await self._roll_back(version, failed.keys() - self._hung)
        failpoints.step("gateway.committed", version=version, engines=committed)
        if not committed:
            if any(isinstance(error, (EngineLost, DeadlineExceeded)) for error in failed.values()):
                self._registry.burn(version)
            raise self._not_done(version, failed)
        for name, error in failed.items():
            log.warning("engine %s did not commit version %d: %s", name, version, error)
        self._move_requests(failed)
        if is_new:
            self._on_commit(version)
        failpoints.step("gateway.recorded", version=version, engines=committed)

    async def _drop(self, version: int, done: Iterable[str], failed: Mapping[str, SlipstreamError]) -> None:
        """Continue without the engines that failed, if the trainer allows it; otherwise raise, which ends the update."""
        remaining = list(done)
        if not remaining or not self._drop_failed:
            raise self._not_done(version, failed)
        log.warning("%s", combined_error(failed, f"version {version} continues without {', '.join(failed)}"))
        self._engines = remaining
        self._move_requests(failed)
        await self._roll_back(version, failed)

    def _move_requests(self, failed: Mapping[str, SlipstreamError]) -> None:
        """Give the requests of engines that did not answer in time to the others: a rank may be frozen while its engine's
        connection lives."""
        for name, error in failed.items():
            if isinstance(error, DeadlineExceeded):
                self._links[name].interrupt(error)

    async def rollback(self) -> None:
        """Roll back the update in progress on every engine that answers; do nothing if there is none."""
        if self._version is None:
            return
        self._recorder.event("rollback", detail=f"version {self._version}", version=self._version)
        version, engines, self._version, self._engines = self._version, self._engines, None, []
        self._history.end("the trainer rolled it back, or is gone")
        await self._roll_back(version, engines)

    async def release(self) -> None:
        """Tell every engine that the trainer is gone."""
        names = [member.info.name for member in self._registry.alive()]
        await self._notify(names, pb.ToEngine(release=pb.Release()), "release the trainer's memory")

    async def _roll_back(self, version: int, engines: Iterable[str]) -> None:
        """Tell engines to roll back. The trainer waits for this, but not for engines that hang."""
        message, doing = pb.ToEngine(rollback=pb.Rollback(version=version)), f"roll back version {version}"
        names = set(engines)
        if hung := names & self._hung:
            telling = asyncio.create_task(self._notify(hung, message, doing))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)
        await self._notify(names - hung, message, doing)

    async def _notify(self, engines: Iterable[str], message: pb.ToEngine, doing: str) -> None:
        """Send a message to each engine. Best effort: failures are logged, not raised."""

        async def call(name: str) -> None:
            own = pb.ToEngine()
            own.CopyFrom(message)  # each call sets its own id
            await self._links[name].ask(own, ROLLBACK_SECONDS, doing)

        _, failed = await call_all({name: call(name) for name in engines})
        for name, error in failed.items():
            log.warning("engine %s did not %s: %s", name, doing, error)

    def _not_done(self, version: int, failed: Mapping[str, SlipstreamError]) -> SlipstreamError:
        return combined_error(
            failed, f"version {version} was not committed; the fleet stays at version {self._registry.version}"
        )

    def _check_begin(self, message: pb.UpdateMessage, version: int) -> None:
        if message.epoch != self._registry.epoch:
            raise FleetChanged("engines joined or left the fleet since the trainer last looked")
        self._registry.check_version(version, message.engines)
        for name in message.engines:
            if reason := self._registry.get(name).lost:
                raise EngineLost(f"engine {name!r} is lost: {reason}")

    def _check_in_progress(self, message: pb.UpdateMessage, version: int) -> None:
        if version != self._version:
            raise UnknownVersion(f"version {version} was not begun (in progress: {self._version})")
        for name in self._engines:
            if name not in message.engines:
                raise UnknownVersion(f"engine {name!r} began version {version}, and this message has no step for it")


def _select(all_steps: pb.UpdateSteps, steps: tuple[str, ...]) -> pb.UpdateSteps:
    """Return a message with only these steps of it."""
    if all(step in steps for step in STEPS if all_steps.HasField(step)):
        return all_steps
    selected = pb.UpdateSteps(version=all_steps.version)
    for step in steps:
        getattr(selected, step).CopyFrom(getattr(all_steps, step))
    return selected
