"""Generations in flight over HTTP: deadlines, aborts by id, and draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Collection
from typing import TypeVar

from slipstream.errors import DeadlineExceeded
from slipstream.http.errors import HttpError

T = TypeVar("T")


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

    async def track(self, request_id: str, work: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield what `work` yields until it ends, is aborted, or exceeds the deadline; closing this closes `work`.

        Results are queued without bound, so a slow reader never holds up the engines."""
        deadline = asyncio.get_running_loop().time() + self._max_seconds
        await self._before(deadline, self._admitting.wait())
        results: asyncio.Queue[T | None] = asyncio.Queue()
        task = self._start(request_id, work, results)
        try:
            while (item := await self._before(deadline, results.get())) is not None:
                yield item
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

    def _start(
        self, request_id: str, work: AsyncGenerator[T, None], results: asyncio.Queue[T | None]
    ) -> asyncio.Task[None]:
        def finished(task: asyncio.Task[None]) -> None:
            del self._running[task]
            if not self._running:
                self._idle.set()

        task = asyncio.create_task(_collect(work, results))
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


async def _collect(work: AsyncGenerator[T, None], results: asyncio.Queue[T | None]) -> None:
    """Queue what `work` yields, then None."""
    try:
        async for item in work:
            results.put_nowait(item)
    finally:
        await work.aclose()
        results.put_nowait(None)
