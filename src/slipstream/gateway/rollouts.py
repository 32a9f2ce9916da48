"""The rollouts of a run: accepted once, generated as often as needed, taken once.

    submit ──► journal ──► start, when the bound on staleness has room ──► engines ──► journal ──► take

A trainer that crashes submits the same prompts again, and takes again from the position that it has saved: it gets the very
groups that it had been given. A gateway that crashes finds everything in the journal. An engine that dies has its work done by
another, and what both have made counts once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slipstream.errors import DeadlineExceeded, EngineLost, NotReady, PeerError, RolloutError, SlipstreamError
from slipstream.gateway import convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.journal import Group, Journal, Taken
from slipstream.gateway.staleness import Bound, Staleness

log = logging.getLogger(__name__)

AGAIN_SECONDS = 0.2
"""Between two attempts to find an engine."""
MAX_DEATHS = 10
"""A prompt that so many engines died of is not given to another."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One of a group's samples has come."""

    index: int
    oldest: int
    """The version that made its oldest token."""
    completion: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The group cannot be generated, whoever tries."""

    error: bytes


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Nobody could go on with it just now."""

    error: SlipstreamError
    died: bool
    """Whether an engine has died of it, or with it."""


Generate: TypeAlias = Callable[[bytes], AsyncGenerator[Sample | Refused | Interrupted, None]]
"""From a request as it was submitted. Ends when all samples have come, or with one of the others."""


class Rollouts:
    """All methods are called on one event loop."""

    def __init__(
        self,
        journal: Journal,
        bound: Bound,
        version: int,
        generate: Generate,
        refusal: Callable[[SlipstreamError], bytes],
    ) -> None:
        """`version` is what the fleet serves. `refusal` writes an error down."""
        self._journal, self._generate, self._refusal = journal, generate, refusal
        taken = Counter({at: journal.num_taken_at(at) for at in (version, version + 1)})
        self._staleness = Staleness(bound, version, taken)
        self._queue: deque[Group] = deque(journal.waiting())
        self._running: dict[int, asyncio.Task[None]] = {}
        self._deaths: Counter[int] = Counter()
        self._finished: dict[int, int] = {}
        self._news = asyncio.Event()
        for number, oldest in journal.finished().items():
            self._end(number, oldest)
            self._staleness.start(number, oldest if oldest >= 0 else version)
        for number in self._staleness.too_old():
            self._renew(number)
        self._pump()

    @property
    def bound(self) -> Bound:
        return self._staleness.bound

    @property
    def counts(self) -> dict[str, int]:
        """Groups by where they are."""
        return {
            "waiting": len(self._queue),
            "running": len(self._running),
            "finished": len(self._finished),
            "taken": self._journal.num_taken(),
        }

    def rebind(self, bound: Bound) -> None:
        self._staleness.bound = bound
        self._pump()

    def submit(self, requests: Mapping[str, tuple[bytes, int]]) -> int:
        """By id: the request, and the samples it asks for. How many of them are new."""
        fresh = self._journal.accept(requests)
        self._queue.extend(fresh)
        self._pump()
        return len(fresh)

    async def take(
        self, after: int, count: int, timeout: float, saved: int = 0, version: int = 0, more: bool = False
    ) -> list[Taken]:
        """`count` groups behind position `after`: those that were taken before, and then finished ones, the oldest first (see
        `Staleness.lacking` for those that are waited for). Their ages are those for a trainer that has `version`, which the
        fleet serves, or will serve next. All of them, or `DeadlineExceeded` and none. Positions up to `saved` will not be
        asked for again. With `more` they may be more than the bound's batch before a sync."""
        self._journal.count_from(after)
        self._journal.forget(min(saved, after))
        missing = count - len(self._journal.taken(after, count))
        if missing > 0:
            try:
                async with asyncio.timeout(timeout):
                    # On-policy, nothing that was begun before a version is for it.
                    needed = version - 1 if self.bound.max_staleness else version
                    await self._serves(needed)
                    ready, at = await self._until(missing, version, more)
            except TimeoutError:
                self._check_serves(needed, timeout)
                at = self._staleness.at(version)
                ready = self._ready(at)
                lacking = self._staleness.lacking(ready, missing, at)
                why = f"; {lacking} would be too old later, and must be among them" if lacking else ""
                raise DeadlineExceeded(
                    f"{len(ready)} of {missing} groups were finished within {timeout:g} s ({self._where()}){why}"
                ) from None
            numbers = sorted(ready, key=self._staleness.turn)[:missing]
            self._journal.take(numbers, at)
            for number in numbers:
                del self._finished[number]
                self._staleness.take(number, at)
            self._pump()
        return self._journal.taken(after, count)

    async def _serves(self, version: int) -> None:
        while self._staleness.version < version:
            self._news.clear()
            await self._news.wait()

    def _check_serves(self, version: int, timeout: float) -> None:
        if self._staleness.version < version:
            raise DeadlineExceeded(
                f"groups for version {version} are asked for, and the fleet still served {self._staleness.version} after "
                f"{timeout:g} s; has its sync failed?"
            )

    def _ready(self, at: int) -> list[int]:
        """Groups that can be taken for version `at`. An error does not age."""
        return [number for number, oldest in self._finished.items() if oldest < 0 or self._staleness.fits(number, at)]

    async def _until(self, count: int, version: int, more: bool) -> tuple[list[int], int]:
        """So many are ready, and among them those that cannot wait: which, and for which version they are taken."""
        while True:
            at = self._staleness.at(version)
            if more:
                self._staleness.ask_more(count, at)
                self._pump()
            ready = self._ready(at)
            if len(ready) >= count and not self._staleness.lacking(ready, count, at):
                return ready, at
            if not self._running and not self._finished and at == self._staleness.version:
                self._staleness.check_can_take()
            if not self._running and not self._queue:
                raise RolloutError(
                    f"{count} groups are asked for, and only {len(self._finished)} prompts were submitted that have not been "
                    "taken; submit more first"
                )
            self._news.clear()
            await self._news.wait()

    def _where(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in self.counts.items())

    def synced(self, version: int) -> None:
        """The fleet serves a new version."""
        self._journal.synced(version)
        for number in self._staleness.synced(version):
            self._renew(number)
        self._pump()
        self._news.set()

    async def close(self) -> None:
        """What runs is stopped; it is in the journal, and begins again with the next of us."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- one group ---

    def _pump(self) -> None:
        while self._queue and self._staleness.room:
            group = self._queue.popleft()
            self._staleness.start(group.number)
            self._start(group)

    def _start(self, group: Group) -> None:
        self._journal.started(group, self._staleness.version)
        self._running[group.number] = asyncio.create_task(self._run(group))

    async def _run(self, group: Group) -> None:
        samples: dict[int, tuple[bytes, int]] = {}
        try:
            while not await self._attempt(group, samples):
                await asyncio.sleep(AGAIN_SECONDS)
        finally:
            if self._running.get(group.number) is asyncio.current_task():
                del self._running[group.number]
                self._news.set()

    async def _attempt(self, group: Group, samples: dict[int, tuple[bytes, int]]) -> bool:
        """Whether the group has ended. `samples` are those that have come so far; they are written down together, since a
        transaction for each would cost more than a small model's tokens do."""
        try:
            async with contextlib.aclosing(self._generate(group.request)) as outcomes:
                async for outcome in outcomes:
                    if isinstance(outcome, Sample):
                        samples.setdefault(outcome.index, (outcome.completion, outcome.oldest))
                        if len(samples) == group.num_samples:
                            oldest = self._journal.finish(group, samples)
                            if oldest is not None:
                                self._end(group.number, oldest)
                            return True
                    elif isinstance(outcome, Refused):
                        return self._fail(group, outcome.error)
                    else:
                        return self._interrupted(group, outcome)
            return False
        except SlipstreamError as error:
            return self._interrupted(group, Interrupted(error, died=False))

    def _interrupted(self, group: Group, outcome: Interrupted) -> bool:
        log.info("prompt %s is interrupted: %s", group.id, outcome.error)
        self._deaths[group.number] += outcome.died
        return self._deaths[group.number] >= MAX_DEATHS and self._fail(group, self._refusal(outcome.error))

    def _fail(self, group: Group, error: bytes) -> bool:
        if self._journal.fail(group, error):
            self._end(group.number, -1)
        return True

    def _end(self, number: int, oldest: int) -> None:
        self._finished[number] = oldest
        self._news.set()

    def _renew(self, number: int) -> None:
        """Too old: it is made anew, under the present version."""
        if (task := self._running.pop(number, None)) is not None:
            task.cancel()
        if self._finished.get(number, 0) < 0:
            return  # an error does not age
        self._finished.pop(number, None)
        if (group := self._journal.renew(number)) is not None:
            self._staleness.renew(number)
            self._start(group)


class Desk:
    """Where the rollouts of a run are asked for. `send` has a request generated, whoever can."""

    def __init__(
        self, journal: Journal, send: Callable[[pb.GenerateRequest], AsyncGenerator[pb.Results, None]]
    ) -> None:
        self._journal, self._send = journal, send
        self._rollouts: Rollouts | None = None
        self._numbers = itertools.count(1)

    @property
    def version(self) -> int:
        """The last that the fleet is known to have served; −1 if there is none."""
        return int(self._journal.fact("version") or -1)

    def rollouts(self, bound: Bound, version: int) -> Rollouts:
        """Begun, or gone on with, when they are first asked for. `version` is what the fleet serves."""
        if self._rollouts is None:
            self._rollouts = Rollouts(self._journal, bound, version, self._generate, convert.error_bytes)
        elif self._rollouts.bound != bound:
            self._rollouts.rebind(bound)
        return self._rollouts

    async def _generate(self, data: bytes) -> AsyncGenerator[Sample | Refused | Interrupted, None]:
        message = pb.GenerateRequest.FromString(data)
        message.requests[0].id = f"rollout-{next(self._numbers)}"  # one that is begun anew is another to an engine
        async with contextlib.aclosing(self._send(message)) as batches:
            async for results in batches:
                for outcome in _outcomes(results):
                    yield outcome

    def synced(self, version: int) -> None:
        """The fleet serves a new version."""
        if self._rollouts is None:
            self._journal.synced(version)
        else:
            self._rollouts.synced(version)

    async def close(self) -> None:
        if self._rollouts is not None:
            await self._rollouts.close()
        self._journal.close()


def _outcomes(results: pb.Results) -> Iterator[Sample | Refused | Interrupted]:
    """What an engine's answer means to a group."""
    for completion in results.completions:
        oldest = min(span.version for span in completion.spans)
        yield Sample(completion.sample_index, oldest, completion.SerializeToString())
    for failure in results.failures:
        error = convert.error_from_pb(failure.error)
        if isinstance(error, (PeerError, NotReady, DeadlineExceeded)):
            yield Interrupted(error, died=isinstance(error, EngineLost))
        else:
            yield Refused(failure.error.SerializeToString())


def by_id(requests: Sequence[tuple[str, bytes, int]]) -> dict[str, tuple[bytes, int]]:
    """As `Rollouts.submit` wants them. Raises `RolloutError` for two of one id."""
    found: dict[str, tuple[bytes, int]] = {}
    for id, request, num_samples in requests:
        if id in found:
            raise RolloutError(f"two prompts have the id {id!r}; give every prompt of a run an id of its own")
        found[id] = (request, num_samples)
    return found
