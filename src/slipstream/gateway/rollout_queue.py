"""The rollout queue of a run: prompts are accepted once, generated as often as needed, and taken once.

    submit ──► journal ──► start, when the staleness bound has room ──► engines ──► journal ──► take

A trainer that crashes submits the same prompts again and takes from its last saved position; it gets the same groups. A
gateway that crashes finds everything in the journal. When an engine dies, another one repeats its work; duplicates count
once.

Memory follows the journal: it changes after the journal has. While the journal cannot be written, because the disk is full,
samples that have arrived are kept, and everything is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from slipstream.errors import (
    DeadlineExceeded,
    EngineLost,
    JournalUnavailable,
    NotReady,
    Overloaded,
    PeerError,
    RolloutError,
    SlipstreamError,
    SuspectRequest,
)
from slipstream.gateway import convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.dispatch import MAX_LOSSES
from slipstream.gateway.journal import FinishedSample, Group, Journal, TakenGroup
from slipstream.gateway.request_traces import QueueTraces
from slipstream.gateway.staleness import RolloutBound, StalenessTracker
from slipstream.runtime import tracing
from slipstream.runtime.failpoints import step
from slipstream.types import Request, RolloutStatus

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
"""Delay between two attempts to find an engine, or to write to the journal."""
LOSSES_TO_RUN_ALONE, LOSSES_TO_FAIL = 3, 6
"""A prompt may be why engines are lost. After this many losses it runs while no other such prompt does, so that those which
only shared its engines finish; after this many it fails."""
MAX_AGE = 16
"""Groups of this age and older are counted together."""
MAX_WAITING = 100_000
"""Prompts that wait in memory for the staleness bound to have room."""


Generate: TypeAlias = Callable[[bytes], AsyncGenerator[pb.Results, None]]
"""Generates a serialized request. Ends when all samples have arrived, or after a failure."""


class RolloutQueue:
    """All methods run on one event loop."""

    def __init__(self, journal: Journal, bound: RolloutBound, version: int, generate: Generate) -> None:
        """`version` is what the fleet serves. Groups in the journal continue from their state there."""
        self._journal, self._generate = journal, generate
        taken = Counter({at: journal.num_taken_at(at) for at in (version, version + 1)})
        self._staleness = StalenessTracker(bound, version, taken)
        self._waiting: deque[Group] = deque(journal.waiting())
        self._running: dict[int, asyncio.Task[None]] = {}
        self._samples: dict[int, dict[int, FinishedSample]] = {}
        """By running group: the samples that have arrived."""
        self._renewed: dict[int, Group] = {}
        """Groups to start again. They keep their place in the staleness bound."""
        self._drops: deque[tuple[str, int, str]] = deque()
        """Engines whose finished groups are to be generated again: name, version and reason, as `drop` takes them."""
        self._retry: asyncio.TimerHandle | None = None
        """Set while something could not be started."""
        self._losses: Counter[int] = Counter()
        """By group: how many engines were lost while they served it."""
        self._suspects = asyncio.Lock()
        self._finished: dict[int, int] = {}
        """By group: the version of its oldest token, -1 if it failed."""
        self._newest: dict[int, int] = {}
        """By group that finished since the queue was made: the version of its newest token."""
        self._held: int | None = None
        """Groups with tokens of this version or later are not taken at the moment."""
        self._changed = asyncio.Event()
        self._num_failed = self._num_renewed = 0
        self._taken_by_age: Counter[int] = Counter()
        self._traces = QueueTraces()
        for number, oldest in journal.finished().items():
            self._finish(number, oldest)
            self._staleness.start(number, oldest if oldest >= 0 else version)
        self._advance()

    @property
    def bound(self) -> RolloutBound:
        return self._staleness.bound

    @property
    def counts(self) -> dict[str, int]:
        """Number of groups by state."""
        return {
            "waiting": len(self._waiting),
            "running": len(self._running),
            "finished": len(self._finished),
            "taken": self._journal.num_taken(),
        }

    @property
    def status(self) -> RolloutStatus:
        ages, bound = self._taken_by_age, self.bound
        return RolloutStatus(
            waiting=len(self._waiting),
            running=len(self._running),
            finished=len(self._finished),
            taken=self._journal.last_position(),  # unlike a count, it does not read every row
            failed=self._num_failed,
            renewed=self._num_renewed,
            max_staleness=bound.max_staleness,
            batch=bound.batch,
            taken_by_age=tuple(ages[age] for age in range(max(ages, default=-1) + 1)),
        )

    def rebind(self, bound: RolloutBound) -> None:
        self._staleness.bound = bound
        self._advance()

    def submit(self, prompts: Mapping[str, tuple[bytes, int]], traces: Mapping[str, str] | None = None) -> int:
        """Accept prompts, given by id as `(serialized request, number of samples)`. Return how many of them are new. `traces`
        are the trace contexts of those that are traced. Raises `Overloaded` if too many are waiting."""
        if len(self._waiting) >= MAX_WAITING and not self._journal.has_all(prompts):
            raise Overloaded(
                f"{len(self._waiting)} prompts wait to be generated, and at most {MAX_WAITING} may; take groups and sync "
                "before submitting more"
            )
        step("gateway.accept", ids=list(prompts))
        new = self._journal.accept(prompts)
        self._waiting.extend(new)
        for group in new if traces else ():
            self._traces.accepted(group.number, (traces or {}).get(group.id, ""))
        step("gateway.accepted", ids=list(prompts))
        self._advance()
        return len(new)

    async def take(
        self, after: int, count: int, timeout: float, saved: int = 0, version: int = 0, more: bool = False
    ) -> list[TakenGroup]:
        """Return `count` groups behind position `after`: groups that were taken before, then finished ones, oldest first.

        `StalenessTracker.lacking` says which groups to wait for. Ages are counted for a trainer at `version`, which the fleet
        serves or will serve next. Takes all of the groups, or none and raises `DeadlineExceeded`. Positions up to `saved` will
        not be taken again. With `more`, the trainer may take more than the bound's batch before a sync."""
        self._journal.count_from(after)
        self._journal.forget(min(saved, after))
        missing = count - len(self._journal.taken(after, count))
        if missing > 0:
            # On-policy, only groups started under `version` itself are young enough.
            needed = version if self.bound.max_staleness == 0 else version - 1
            try:
                async with asyncio.timeout(timeout):
                    await self._wait_for_version(needed)
                    ready, at = await self._wait_for_groups(missing, version, more)
            except TimeoutError:
                raise self._timed_out(missing, version, needed, timeout) from None
            numbers = sorted(ready, key=self._staleness.turn)[:missing]
            step("gateway.take", after=after, groups=numbers)
            self._journal.take(numbers, at)
            for number in numbers:
                del self._finished[number]
                self._newest.pop(number, None)
                self._staleness.take(number, at)
                self._traces.taken(number)
            self._advance()
            step("gateway.taken", after=after, groups=numbers)
        groups = self._journal.taken(after, count)
        if missing > 0:
            self._taken_by_age.update(min(group.age, MAX_AGE) for group in groups[-missing:])
        return groups

    async def _wait_for_version(self, version: int) -> None:
        while self._staleness.version < version:
            self._changed.clear()
            await self._changed.wait()

    async def _wait_for_groups(self, count: int, version: int, more: bool) -> tuple[list[int], int]:
        """Wait until `count` groups are ready, among them those that must not wait longer. Return the groups that are ready,
        and the version they are taken for."""
        while True:
            at = self._staleness.at(version)
            if more:
                self._staleness.ask_more(count, at)
                self._advance()
            ready = self._ready(at)
            if len(ready) >= count and not self._staleness.lacking(ready, count, at):
                return ready, at
            if not self._running and not self._finished and at == self._staleness.version:
                self._staleness.check_can_take()
            is_settled = not self._drops and self._held is None
            if is_settled and not self._running and not self._waiting:
                raise RolloutError(
                    f"take asked for {count} groups, but only {len(self._finished)} submitted prompts are left to take; "
                    "submit more prompts first"
                )
            self._changed.clear()
            await self._changed.wait()

    def _ready(self, at: int) -> list[int]:
        """Return the groups that can be taken for version `at`. Errors do not age."""
        if self._drops:  # which of them are to be generated again is not known yet
            return []
        return [number for number, oldest in self._finished.items() if oldest < 0 or self._may_take(number, at)]

    def _may_take(self, number: int, at: int) -> bool:
        is_held = self._held is not None and self._newest.get(number, -1) >= self._held
        return not is_held and self._staleness.fits(number, at)

    def hold(self, version: int | None) -> None:
        """Let no group be taken that has tokens of this version or later, because engines are being checked. None lets all."""
        self._held = version
        self._changed.set()

    def _timed_out(self, missing: int, version: int, needed: int, timeout: float) -> DeadlineExceeded:
        if self._staleness.version < needed:
            return DeadlineExceeded(
                f"take waited {timeout:g} s for version {needed}, and the fleet still serves {self._staleness.version}; did "
                "the sync fail?"
            )
        at = self._staleness.at(version)
        ready = self._ready(at)
        lacking = self._staleness.lacking(ready, missing, at)
        why = f"; {lacking} more must be among them, or they would be too old later" if lacking else ""
        states = ", ".join(f"{count} {state}" for state, count in self.counts.items())
        return DeadlineExceeded(f"{len(ready)} of {missing} groups finished within {timeout:g} s ({states}){why}")

    def on_commit(self, version: int) -> None:
        """The fleet serves a new version: renew the groups that are too old now, and start waiting ones."""
        self._staleness.synced(version)
        self._advance()
        self._changed.set()

    def drop(self, engine: str, since: int, reason: str) -> None:
        """Generate again what an engine has generated with version `since` or later and nobody has taken."""
        for samples in self._samples.values():
            for index, sample in list(samples.items()):
                if sample.engine == engine and sample.newest >= since:
                    del samples[index]  # the next attempt generates what is missing
        self._drops.append((engine, since, reason))
        self._advance()

    async def close(self) -> None:
        """Stop the running groups. They stay in the journal, and the next queue starts them again."""
        if self._retry is not None:
            self._retry.cancel()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- one group ---

    def _advance(self) -> None:
        """Renew the groups that must be, and start waiting ones while the staleness bound has room. What fails, because the
        journal cannot be written, is tried again later."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        try:
            while self._drops:
                engine, since, reason = self._drops[0]
                for number in self._journal.generated_by(engine, since):
                    self._renew(number, reason)
                self._drops.popleft()
            for number in self._staleness.too_old():
                self._renew(number, "it is too old")
            while self._renewed:
                self._start(next(iter(self._renewed.values())))
            while self._waiting and self._staleness.room:
                self._start(self._waiting[0])
                self._staleness.start(self._waiting.popleft().number)
        except (SlipstreamError, OSError) as error:
            log.warning("prompts wait to be started: %s", error)
            self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._advance)

    def _start(self, group: Group) -> None:
        step("gateway.start", id=group.id, version=self._staleness.version)
        self._journal.started(group, self._staleness.version)
        self._renewed.pop(group.number, None)
        self._running[group.number] = asyncio.create_task(self._run(group))

    async def _run(self, group: Group) -> None:
        samples = self._samples[group.number] = {}
        parent = self._traces.started(group.number, self._staleness.version)
        trace = tracing.span("gateway.generate", parent, prompt=group.id) if parent else contextlib.nullcontext()
        try:
            with trace:
                while True:
                    is_suspect = self._losses[group.number] >= LOSSES_TO_RUN_ALONE
                    async with self._suspects if is_suspect else contextlib.nullcontext():
                        if await self._attempt(group, samples):
                            return
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            if self._running.get(group.number) is asyncio.current_task():
                del self._running[group.number], self._samples[group.number]
                del self._losses[group.number]
                self._changed.set()

    async def _attempt(self, group: Group, samples: dict[int, FinishedSample]) -> bool:
        """Generate the samples that are missing, and store the group when none is. Return whether the group has ended.

        Samples are written to the journal together: a transaction for each would cost more than a small model's tokens."""
        try:
            if len(samples) == group.num_samples:  # the journal could not be written before
                return self._store(group, samples)
            async with contextlib.aclosing(self._generate(group.request)) as batches:
                async for results in batches:
                    for completion in results.completions:
                        versions = [span.version for span in completion.spans] or [self._staleness.version]
                        facts = (completion.SerializeToString(), min(versions), max(versions), completion.engine)
                        samples.setdefault(completion.sample_index, FinishedSample(*facts))
                    if len(samples) == group.num_samples:
                        return self._store(group, samples)
                    for failure in results.failures:
                        error = convert.error_from_pb(failure.error)
                        if isinstance(error, (PeerError, NotReady, DeadlineExceeded, SuspectRequest)):
                            return self._interrupted(group, error)
                        return self._fail(group, failure.error.SerializeToString())
            return False
        except (SlipstreamError, OSError) as error:
            return self._interrupted(group, error)
        except Exception as error:  # a bug, which must not lose the group
            log.exception("prompt %s failed", group.id)
            return self._fail(group, convert.error_bytes(error))

    def _store(self, group: Group, samples: Mapping[int, FinishedSample]) -> bool:
        step("gateway.finish", id=group.id)
        if (oldest := self._journal.finish(group, samples)) is not None:
            self._newest[group.number] = max(sample.newest for sample in samples.values())
            self._finish(group.number, oldest)
        step("gateway.finished", id=group.id)
        return True

    def _interrupted(self, group: Group, error: SlipstreamError | OSError) -> bool:
        """No engine could continue the group at the moment. Return whether it is given up."""
        log.info("prompt %s was interrupted: %s", group.id, error)
        losses = MAX_LOSSES if isinstance(error, SuspectRequest) else int(isinstance(error, EngineLost))
        self._losses[group.number] += losses
        if self._losses[group.number] < LOSSES_TO_FAIL:
            return False
        reason = f"{self._losses[group.number]} engines were lost while they served this prompt; the last time: {error}"
        return self._fail(group, convert.error_bytes(SuspectRequest(reason)))

    def _fail(self, group: Group, error: bytes) -> bool:
        try:
            if self._journal.fail(group, error):
                self._num_failed += 1
                self._finish(group.number, -1)
        except JournalUnavailable as unavailable:
            log.warning("prompt %s has failed, which cannot be recorded: %s", group.id, unavailable)
            return False
        return True

    def _finish(self, number: int, oldest: int) -> None:
        self._finished[number] = oldest
        self._changed.set()

    def _renew(self, number: int, reason: str) -> None:
        """Have a group generated again, under the present version."""
        if self._finished.get(number, 0) < 0:
            return  # errors do not age
        group = self._journal.renew(number, reason)
        if (task := self._running.pop(number, None)) is not None:
            task.cancel()
        self._finished.pop(number, None)
        self._newest.pop(number, None)
        if group is not None:
            self._num_renewed += 1
            self._staleness.renew(number)
            self._renewed[number] = group


class RolloutRun:
    """The journal of a run and its rollout queue, which starts with the first call of a trainer."""

    def __init__(
        self, journal: Journal, send: Callable[[pb.GenerateRequest], AsyncGenerator[pb.Results, None]]
    ) -> None:
        """`send` generates a request on any engine."""
        self._journal, self._send = journal, send
        self._queue: RolloutQueue | None = None
        self._request_numbers = itertools.count(1)
        self._unrecorded: deque[Callable[[], None]] = deque()
        """Writes to the journal that could not be made yet."""
        self._retry: asyncio.TimerHandle | None = None

    @property
    def version(self) -> int:
        """Last version that the fleet served according to the journal; -1 if none."""
        return int(self._journal.fact("version") or -1)

    @property
    def last_begun(self) -> int:
        """Last version that engines may have committed, whether or not the journal knows that they did; -1 if none."""
        return int(self._journal.fact("begun") or -1)

    @property
    def position(self) -> int:
        """Position of the last group that was taken."""
        return self._journal.last_position()

    def status(self) -> RolloutStatus | None:
        return None if self._queue is None else self._queue.status

    def queue(self, bound: RolloutBound, version: int) -> RolloutQueue:
        """Return the queue, with this bound from now on. `version` is what the fleet serves."""
        if self._queue is None:
            self._queue = RolloutQueue(self._journal, bound, version, self._generate)
        elif self._queue.bound != bound:
            self._queue.rebind(bound)
        return self._queue

    def _generate(self, request: bytes) -> AsyncGenerator[pb.Results, None]:
        message = pb.GenerateRequest.FromString(request)
        # Every attempt is a new request to the engines.
        message.requests[0].id = f"rollout-{next(self._request_numbers)}"
        message.requests[0].traceparent = tracing.current()
        return self._send(message)

    def before_commit(self, version: int) -> None:
        """Engines are about to commit a new version. If they and the gateway die now, its number stays in use."""
        self._record(partial(self._journal.remember, begun=str(version)))

    def on_commit(self, version: int) -> None:
        """The fleet serves a new version. Engines have committed it, so this does not fail: what the journal cannot record at
        the moment, it records later."""
        self._record(partial(self._journal.synced, version))
        if self._queue is not None:
            self._queue.on_commit(version)

    def on_decision(self, kind: str, engine: str, reason: str, version: int) -> None:
        """Record a decision about an engine (`engine_watch.py`)."""
        self._record(partial(self._journal.decided, kind, engine, reason, version))

    def drop(self, engine: str, since: int, reason: str) -> None:
        """Generate again what an engine has generated with version `since` or later and nobody has taken."""
        if self._queue is not None:
            self._queue.drop(engine, since, reason)
        else:
            self._record(partial(self._journal.renew_all, engine, since, reason))

    def hold(self, version: int | None) -> None:
        """See `RolloutQueue.hold`."""
        if self._queue is not None:
            self._queue.hold(version)

    def _record(self, write: Callable[[], None]) -> None:
        self._unrecorded.append(write)
        if self._retry is None:
            self._write_unrecorded()

    def _write_unrecorded(self) -> None:
        self._retry = None
        while self._unrecorded:
            try:
                self._unrecorded[0]()
            except JournalUnavailable as error:
                log.warning("%d events are not recorded yet: %s", len(self._unrecorded), error)
                self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._write_unrecorded)
                return
            self._unrecorded.popleft()

    async def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._queue is not None:
            await self._queue.close()
        self._journal.close()


def prompts_by_id(requests: Sequence[Request]) -> dict[str, tuple[bytes, int]]:
    """Return requests as `RolloutQueue.submit` takes them. Raises `RolloutError` if two have the same id."""
    prompts: dict[str, tuple[bytes, int]] = {}
    for request in requests:
        if request.id in prompts:
            raise RolloutError(f"two prompts have the id {request.id!r}; give every prompt of a run its own id")
        prompts[request.id] = (convert.request_bytes(request), request.sampling.n)
    return prompts
