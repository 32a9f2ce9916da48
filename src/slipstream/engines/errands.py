"""Samples in somebody else's hands, as tasks: for engines that ask another engine, token by token or all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slipstream.engines.sequence import Failed, Job, Sample, Ticket
from slipstream.errors import SlipstreamError


class Errands:
    """A task for each sample; `_run` is what it does, from the first token to the last."""

    def __init__(self) -> None:
        self.version = -1
        """Under which samples begin."""
        self.gate = asyncio.Event()
        """While it is closed, none begins."""
        self.gate.set()
        self._tasks: dict[Job, dict[asyncio.Task[None], Sample]] = {}
        """All that is unfinished."""

    def start(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            tasks = self._tasks.setdefault(ticket.job, {})
            for sample in ticket.samples():
                task = asyncio.create_task(self._run(sample))
                tasks[task] = sample
                task.add_done_callback(lambda task, job=ticket.job: self._forget(job, task))  # type: ignore[misc]

    def cancel(self, job: Job) -> None:
        for task in list(self._tasks.get(job, ())):
            task.cancel()

    def fail(self, error: SlipstreamError) -> None:
        """Everything unfinished ends with `error`."""
        for job, tasks in list(self._tasks.items()):
            job.deliver([Failed(sample.ticket, error) for sample in tasks.values()])
            self.cancel(job)

    async def over(self, seconds: float) -> None:
        """Returns when nothing is unfinished any more, or after so long."""
        if tasks := [task for tasks in self._tasks.values() for task in tasks]:
            await asyncio.wait(tasks, timeout=seconds)

    async def _run(self, sample: Sample) -> None:
        raise NotImplementedError

    def _forget(self, job: Job, task: asyncio.Task[None]) -> None:
        self._tasks[job].pop(task)
        if not self._tasks[job]:
            del self._tasks[job]
