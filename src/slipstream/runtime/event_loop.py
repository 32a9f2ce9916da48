"""The process's event loop, on a daemon thread, and ways to run coroutines on it from synchronous code or another loop.

There is one loop because gRPC's asyncio API requires all channels and servers of a process on the same loop."""

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
        if _loop is None or _owner != os.getpid():  # the thread does not survive a fork
            _loop, _owner = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="slipstream-loop", daemon=True).start()
        return _loop


def start(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine. Cancelling the future cancels it."""
    return asyncio.run_coroutine_threadsafe(work, loop())


def start_then(work: Coroutine[Any, Any, T], then: Callable[[], None]) -> Future[T]:
    """Start a coroutine and call `then` when it ends, for whatever reason, before its result is visible."""
    has_begun = False

    async def with_callback() -> T:
        nonlocal has_begun
        has_begun = True
        try:
            return await work
        finally:
            then()

    def never_began(_: Future[T]) -> None:
        if not has_begun:  # cancelled before it started
            work.close()
            then()

    future = start(with_callback())
    future.add_done_callback(never_began)
    return future


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result. Interrupting the caller (Ctrl-C) cancels it."""
    return result(start(work))


def result(future: Future[T]) -> T:
    """Wait for the result of `start`. Interrupting the caller cancels the coroutine."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def arun(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from another event loop, without blocking it. Cancelling the caller cancels the coroutine."""
    return await asyncio.wrap_future(start(work))


def iterate(work: AsyncGenerator[T, None]) -> Iterator[T]:
    """Iterate over an async generator from synchronous code. Leaving early closes it."""
    try:
        while True:
            try:
                yield run(anext(work))
            except StopAsyncIteration:
                return
    finally:
        run(_close(work))


async def aiterate(work: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Iterate over an async generator from another event loop."""
    try:
        while True:
            try:
                yield await arun(_next(work))
            except _GeneratorEnded:
                return
    finally:
        await arun(_close(work))


class _GeneratorEnded(Exception):
    """Replaces `StopAsyncIteration`, which Python turns into a `RuntimeError` when a coroutine raises it."""


async def _next(work: AsyncGenerator[T, None]) -> T:
    """Advance the generator on this loop, which thereby becomes responsible for finalizing it."""
    try:
        return await anext(work)
    except StopAsyncIteration:
        raise _GeneratorEnded from None


async def _close(work: AsyncGenerator[T, None]) -> None:
    """Close the generator. An interrupted `anext` is cancelled a moment later, and until then closing fails, so retry."""
    for _ in range(500):
        try:
            return await work.aclose()
        except RuntimeError:
            await asyncio.sleep(0.01)
