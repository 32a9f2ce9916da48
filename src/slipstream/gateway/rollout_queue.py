"""The rollout queue of a run: prompts are accepted once, generated as often as needed, and taken once.

    submit ──► journal ──► start, when the staleness bound has room ──► engines ──► journal ──► take

A trainer that crashes submits the same prompts again and takes from its last saved position; it gets the same groups. A
gateway that crashes finds everything in the journal. When an engine dies, another one repeats its work; duplicates count
once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TypeAlias

from slipstream.errors import DeadlineExceeded, EngineLost, NotReady, PeerError, RolloutError, SlipstreamError
from slipstream.gateway import convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.journal import Group, Journal, TakenGroup
from slipstream.gateway.staleness import RolloutBound, StalenessTracker
from slipstream.types import Request

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
"""Delay between two attempts to find an engine."""
MAX_DEATHS = 10
"""A prompt that this many engines died of fails instead of going to another."""


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
        self._deaths: Counter[int] = Counter()
        self._finished: dict[int, int] = {}
        """By group: the version of its oldest token, -1 if it failed."""
        self._changed = asyncio.Event()
        for number, oldest in journal.finished().items():
            self._finish(number, oldest)
            self._staleness.start(number, oldest if oldest >= 0 else version)
        for number in self._staleness.too_old():
            self._renew(number)
        self._start_waiting()

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

    def rebind(self, bound: RolloutBound) -> None:
        self._staleness.bound = bound
        self._start_waiting()

    def submit(self, prompts: Mapping[str, tuple[bytes, int]]) -> int:
        """Accept prompts, given by id as `(serialized request, number of samples)`. Return how many of them are new."""
        new = self._journal.accept(prompts)
        self._waiting.extend(new)
        self._start_waiting()
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
            self._journal.take(numbers, at)
            for number in numbers:
                del self._finished[number]
                self._staleness.take(number, at)
            self._start_waiting()
        return self._journal.taken(after, count)

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
                self._start_waiting()
            ready = self._ready(at)
            if len(ready) >= count and not self._staleness.lacking(ready, count, at):
                return ready, at
            if not self._running and not self._finished and at == self._staleness.version:
                self._staleness.check_can_take()
            if not self._running and not self._waiting:
                raise RolloutError(
                    f"take asked for {count} groups, but only {len(self._finished)} submitted prompts are left to take; "
                    "submit more prompts first"
                )
            self._changed.clear()
            await self._changed.wait()

    def _ready(self, at: int) -> list[int]:
        """Return the groups that can be taken for version `at`. Errors do not age."""
        return [number for number, oldest in self._finished.items() if oldest < 0 or self._staleness.fits(number, at)]

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
        self._journal.synced(version)
        for number in self._staleness.synced(version):
            self._renew(number)
        self._start_waiting()
        self._changed.set()

    async def close(self) -> None:
        """Stop the running groups. They stay in the journal, and the next queue starts them again."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- one group ---

    def _start_waiting(self) -> None:
        """Start waiting groups while the staleness bound has room."""
        while self._waiting and self._staleness.room:
            group = self._waiting.popleft()
            self._staleness.start(group.number)
            self._start(group)

    def _start(self, group: Group) -> None:
        self._journal.started(group, self._staleness.version)
        self._running[group.number] = asyncio.create_task(self._run(group))

    async def _run(self, group: Group) -> None:
        samples: dict[int, tuple[bytes, int]] = {}
        try:
            while not await self._attempt(group, samples):
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            if self._running.get(group.number) is asyncio.current_task():
                del self._running[group.number]
                self._changed.set()

    async def _attempt(self, group: Group, samples: dict[int, tuple[bytes, int]]) -> bool:
        """Generate the samples that are missing. Return whether the group has ended.

        Samples are written to the journal together: a transaction for each would cost more than a small model's tokens."""
        try:
            async with contextlib.aclosing(self._generate(group.request)) as batches:
                async for results in batches:
                    for completion in results.completions:
                        oldest = min(span.version for span in completion.spans)
                        samples.setdefault(completion.sample_index, (completion.SerializeToString(), oldest))
                    if len(samples) == group.num_samples:
                        if (group_oldest := self._journal.finish(group, samples)) is not None:
                            self._finish(group.number, group_oldest)
                        return True
                    for failure in results.failures:
                        error = convert.error_from_pb(failure.error)
                        if isinstance(error, (PeerError, NotReady, DeadlineExceeded)):
                            return self._interrupted(group, error, engine_died=isinstance(error, EngineLost))
                        return self._fail(group, failure.error.SerializeToString())
            return False
        except SlipstreamError as error:
            return self._interrupted(group, error, engine_died=False)

    def _interrupted(self, group: Group, error: SlipstreamError, engine_died: bool) -> bool:
        """No engine could continue the group at the moment. Return whether it is given up."""
        log.info("prompt %s was interrupted: %s", group.id, error)
        self._deaths[group.number] += engine_died
        return self._deaths[group.number] >= MAX_DEATHS and self._fail(group, convert.error_bytes(error))

    def _fail(self, group: Group, error: bytes) -> bool:
        if self._journal.fail(group, error):
            self._finish(group.number, -1)
        return True

    def _finish(self, number: int, oldest: int) -> None:
        self._finished[number] = oldest
        self._changed.set()

    def _renew(self, number: int) -> None:
        """Generate a group that is too old again, under the present version."""
        if (task := self._running.pop(number, None)) is not None:
            task.cancel()
        if self._finished.get(number, 0) < 0:
            return  # errors do not age
        self._finished.pop(number, None)
        if (group := self._journal.renew(number)) is not None:
            self._staleness.renew(number)
            self._start(group)


class RolloutRun:
    """The journal of a run and its rollout queue, which starts with the first call of a trainer."""

    def __init__(
        self, journal: Journal, send: Callable[[pb.GenerateRequest], AsyncGenerator[pb.Results, None]]
    ) -> None:
        """`send` generates a request on any engine."""
        self._journal, self._send = journal, send
        self._queue: RolloutQueue | None = None
        self._request_numbers = itertools.count(1)

    @property
    def version(self) -> int:
        """Last version that the fleet served according to the journal; -1 if none."""
        return int(self._journal.fact("version") or -1)

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
        return self._send(message)

    def on_commit(self, version: int) -> None:
        """The fleet serves a new version."""
        if self._queue is None:
            self._journal.synced(version)
        else:
            self._queue.on_commit(version)

    async def close(self) -> None:
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
