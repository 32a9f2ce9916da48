"""The asynchronous face that engines share: requests in, and what becomes of their samples out, each once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from slipstream.engines.intake import MANY, Intake
from slipstream.engines.sequence import Failed, Grown, Job, Outcome, Sample, Ticket
from slipstream.errors import EngineLost, NotReady
from slipstream.types import Completion, Failure, Progress, Request, Score


class Desk:
    """`submit` hands tickets to whoever draws their samples and tells each ticket's job; `cancel` says that nobody waits for a
    job any more. `check` raises while nothing can be taken."""

    def __init__(
        self,
        intake: Intake,
        submit: Callable[[Sequence[Ticket]], None],
        cancel: Callable[[Job], None],
        check: Callable[[], None],
    ) -> None:
        self._intake, self._submit, self._cancel, self._check = intake, submit, cancel, check

    async def generate(
        self, requests: Sequence[Request]
    ) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        try:
            self._check()
            job = _Mailbox()
            tickets, failures = await self._tickets(requests, job)
            self._submit(tickets)
        except (NotReady, EngineLost) as error:
            yield [Failure(request.id, error) for request in requests]
            return
        owed = {ticket: ticket.sampling.n for ticket in tickets}
        try:
            if failures:
                yield [*failures]
            while owed:
                if answers := self._answers(await job.outcomes(), owed):
                    yield answers
        finally:
            if owed:
                with contextlib.suppress(EngineLost):
                    self._cancel(job)

    async def score(self, sequences: Sequence[Sequence[int]], top_k: int = 0) -> list[Score]:
        self._check()
        job = _Mailbox()
        tickets = await asyncio.to_thread(self._intake.scoring_tickets, sequences, top_k, job)
        self._submit(tickets)
        scores: dict[int, Score] = {}
        try:
            while len(scores) < len(tickets):
                for outcome in await job.outcomes():
                    if isinstance(outcome, Failed):
                        raise outcome.error
                    assert isinstance(outcome, Sample), "scores are told at once"
                    scores[int(outcome.ticket.request_id)] = self._intake.score(outcome)
        finally:
            if len(scores) < len(tickets):
                with contextlib.suppress(EngineLost):
                    self._cancel(job)
        return [scores[i] for i in range(len(sequences))]

    async def _tickets(self, requests: Sequence[Request], job: Job) -> tuple[list[Ticket], list[Completion | Failure]]:
        if len(requests) < MANY:
            return self._intake.tickets(requests, job)
        return await asyncio.to_thread(self._intake.tickets, requests, job)

    def _answers(self, outcomes: Sequence[Outcome], owed: dict[Ticket, int]) -> list[Completion | Failure | Progress]:
        """Completions and failures, counted off from what is owed. A request that has failed owes nothing more."""
        finished: list[Sample] = []
        failures: list[Failure] = []
        progress: list[Progress] = []
        for outcome in outcomes:
            if outcome.ticket not in owed:
                continue
            if isinstance(outcome, Grown):
                progress.append(outcome.progress)
            elif isinstance(outcome, Failed):
                failures.append(Failure(outcome.ticket.request_id, outcome.error))
                del owed[outcome.ticket]
            else:
                finished.append(outcome)
                owed[outcome.ticket] -= 1
                if not owed[outcome.ticket]:
                    del owed[outcome.ticket]
        return [*progress, *self._intake.completions(finished), *failures]


class _Mailbox:
    """Of one call, on its loop; filled from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Sequence[Outcome]] = asyncio.Queue()

    def deliver(self, outcomes: Sequence[Outcome]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, outcomes)

    async def outcomes(self) -> list[Outcome]:
        """All that has come; waits until there is something."""
        found = [*await self._queue.get()]
        while not self._queue.empty():
            found += self._queue.get_nowait()
        return found
