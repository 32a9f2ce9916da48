"""Generations in flight over HTTP: admission, deadlines, aborts by id, and draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Collection, Coroutine
from typing import TypeVar

from slipstream.errors import DeadlineExceeded
from slipstream.gateway.admission import Ticket
from slipstream.http.errors import HttpError
from slipstream.types import Completion, Progress

T = TypeVar("T")

BYTES_PER_TOKEN, BYTES_PER_TOP_LOGPROB = 100, 80
"""Memory of a result, about."""


class InFlightRequests:
    """Belongs to one event loop. Requests over gRPC, such as a trainer's, are not among them."""

    def __init__(self, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._running: dict[asyncio.Task[None], str] = {}
        self._aborted: set[asyncio.Task[None]] = set()
        self._admitting, self._idle = asyncio.Event(), asyncio.Event()
        self._admitting.set()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._running)

    async def track(
        self, request_id: str, ticket: Ticket, work: AsyncGenerator[Completion | Progress, None]
    ) -> AsyncGenerator[Completion | Progress, None]:
        """Yield what `work` yields until it ends, is aborted, or exceeds the deadline; closing this closes `work`.

        A slow reader does not hold up the engines: its results are queued as long as `ticket` has room, then it fails."""
        ticket.take(requests=1)
        deadline = asyncio.get_running_loop().time() + self._max_seconds
        await self._before(deadline, self._admitting.wait())
        results: asyncio.Queue[Completion | Progress | None] = asyncio.Queue()
        task = self._start(request_id, _collect(work, results, ticket))
        try:
            while (item := await self._before(deadline, results.get())) is not None:
                yield item
                if isinstance(item, Progress):  # completions are kept until the end
                    ticket.give_back(num_bytes=_num_bytes(item))
            if task in self._aborted:
                raise HttpError(409, "this request was aborted by a call to the server", "aborted")
            await task  # raises its error
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._aborted.discard(task)

    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        """Abort the named requests, or all; return how many. Their clients get an error."""
        tasks = [task for task, name in self._running.items() if request_ids is None or name in request_ids]
        self._aborted.update(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)

    async def drain(self) -> None:
        """Wait until no request is in flight. Requests that arrive meanwhile wait for the drain to end."""
        self._admitting.clear()
        try:
            async with asyncio.timeout(self._max_seconds):
                await self._idle.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{len(self)} request(s) did not finish within {self._max_seconds:g} s") from None
        finally:
            self._admitting.set()

    def _start(self, request_id: str, collecting: Coroutine[None, None, None]) -> asyncio.Task[None]:
        def finished(task: asyncio.Task[None]) -> None:
            del self._running[task]
            if not self._running:
                self._idle.set()

        task = asyncio.create_task(collecting)
        self._running[task] = request_id
        self._idle.clear()
        task.add_done_callback(finished)
        return task

    async def _before(self, deadline: float, awaitable: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(deadline):
                return await awaitable
        except TimeoutError:
            raise DeadlineExceeded(
                f"not finished within {self._max_seconds:g} s (request_seconds); are the engines paused or asleep?"
            ) from None


async def _collect(
    work: AsyncGenerator[Completion | Progress, None],
    results: asyncio.Queue[Completion | Progress | None],
    ticket: Ticket,
) -> None:
    """Queue what `work` yields, then None."""
    try:
        async for item in work:
            ticket.take(num_bytes=_num_bytes(item))
            results.put_nowait(item)
    finally:
        await work.aclose()
        results.put_nowait(None)


def _num_bytes(result: Completion | Progress) -> int:
    num_top = sum(len(top.token_ids) for top in result.top_logprobs)
    return BYTES_PER_TOKEN * len(result.token_ids) + BYTES_PER_TOP_LOGPROB * num_top
