"""From synchronous code, or another event loop, into the event loop: one loop, on one daemon thread, for the whole process.

One, because gRPC's asyncio layer wants all its channels and servers of a process on a single loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner = 0


def loop() -> asyncio.AbstractEventLoop:
    global _loop, _owner
    with _lock:
        if _loop is None or _owner != os.getpid():  # a forked child has no such thread
            _loop, _owner = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="slipstream-loop", daemon=True).start()
        return _loop


def start(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Begins a coroutine. Cancelling the future cancels it."""
    return asyncio.run_coroutine_threadsafe(work, loop())


def start_then(work: Coroutine[Any, Any, T], then: Callable[[], None]) -> Future[T]:
    """As `start`. However it ends, `then` has been called when anybody hears of it."""
    has_begun = False

    async def whole() -> T:
        nonlocal has_begun
        has_begun = True
        try:
            return await work
        finally:
            then()

    def never_began(_: Future[T]) -> None:
        if not has_begun:  # cancelled too soon
            work.close()
            then()

    future = start(whole())
    future.add_done_callback(never_began)
    return future


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end and returns its result. Interrupting the caller (Ctrl-C) cancels it."""
    return result(start(work))


def result(future: Future[T]) -> T:
    """Of what was begun. Interrupting the caller cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def arun(work: Coroutine[Any, Any, T]) -> T:
    """As `run`, for a caller on an event loop of its own, which goes on meanwhile. Cancelling the caller cancels it."""
    return await asyncio.wrap_future(start(work))


def iterate(work: AsyncGenerator[T, None]) -> Iterator[T]:
    """An async generator as a plain one; leaving it early closes the other."""
    try:
        while True:
            try:
                yield run(anext(work))
            except StopAsyncIteration:
                return
    finally:
        run(_close(work))


async def aiterate(work: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """As `iterate`, for a caller on an event loop of its own."""
    try:
        while True:
            try:
                yield await arun(_next(work))
            except _Ended:
                return
    finally:
        await arun(_close(work))


class _Ended(Exception):
    """A future cannot carry `StopAsyncIteration` out of a coroutine: Python turns it into a `RuntimeError`."""


async def _next(work: AsyncGenerator[T, None]) -> T:
    """Begins the generator on this loop, which is then the one that looks after it."""
    try:
        return await anext(work)
    except StopAsyncIteration:
        raise _Ended from None


async def _close(work: AsyncGenerator[T, None]) -> None:
    """An interrupted `anext` is cancelled on the loop a moment later, and until then the generator cannot be closed."""
    for _ in range(500):
        try:
            return await work.aclose()
        except RuntimeError:
            await asyncio.sleep(0.01)
