"""The generations that came over HTTP and are under way: who they are, how to end them, how to wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Collection
from typing import TypeVar

from slipstream.errors import DeadlineExceeded
from slipstream.http.answers import HttpError

T = TypeVar("T")


class Flights:
    """On one event loop. Others than ours (a trainer's, over gRPC) are not among them."""

    def __init__(self, seconds: float) -> None:
        """No flight takes longer than `seconds`."""
        self._seconds = seconds
        self._running: dict[asyncio.Task[None], str] = {}
        self._aborted: set[asyncio.Task[None]] = set()
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._running)

    async def watch(self, name: str, work: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """What `work` yields, until it ends, is aborted, or takes too long. Closing this closes `work`. It does not wait for
        whoever reads this: a slow client holds up nobody."""
        until = asyncio.get_running_loop().time() + self._seconds
        await self._in_time(self._open.wait(), until)
        found: asyncio.Queue[T | _End] = asyncio.Queue()
        task = self._start(name, work, found)
        try:
            while not isinstance(item := await self._in_time(found.get(), until), _End):
                yield item
            if task in self._aborted:
                raise HttpError(409, "this request was aborted by a call to the server", "aborted")
            if item.error is not None:
                raise item.error
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._aborted.discard(task)

    async def abort(self, names: Collection[str] | None = None) -> int:
        """Ends those named, or all; returns how many. They answer their clients that they were."""
        chosen = [task for task, name in self._running.items() if names is None or name in names]
        self._aborted.update(chosen)
        for task in chosen:
            task.cancel()
        await asyncio.gather(*chosen, return_exceptions=True)
        return len(chosen)

    async def drain(self) -> None:
        """Waits until none is under way; those that come meanwhile wait for it, too."""
        self._open.clear()
        try:
            async with asyncio.timeout(self._seconds):
                await self._idle.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{len(self)} request(s) did not finish within {self._seconds:g} s") from None
        finally:
            self._open.set()

    def _start(self, name: str, work: AsyncGenerator[T, None], found: asyncio.Queue[T | _End]) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            del self._running[task]
            if not self._running:
                self._idle.set()

        task = asyncio.create_task(_follow(work, found))
        self._running[task] = name
        self._idle.clear()
        task.add_done_callback(ended)
        return task

    async def _in_time(self, waiting: Awaitable[T], until: float) -> T:
        try:
            async with asyncio.timeout_at(until):
                return await waiting
        except TimeoutError:
            raise DeadlineExceeded(
                f"not finished within {self._seconds:g} s (request_seconds); are the engines paused or asleep?"
            ) from None


class _End:
    """Of what there was to read, and why if it was no good end."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


async def _follow(work: AsyncGenerator[T, None], found: asyncio.Queue[T | _End]) -> None:
    end = _End()
    try:
        async for item in work:
            found.put_nowait(item)
    except Exception as error:
        end = _End(error)
    finally:
        await work.aclose()
        found.put_nowait(end)
