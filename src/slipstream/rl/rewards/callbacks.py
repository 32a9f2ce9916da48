"""Calls into user code with a deadline: reward functions and environments, synchronous or asynchronous.

User code never runs on the process's event loop, where blocking code would stop every connection. A synchronous function
runs in its own thread. Asynchronous functions run on a second loop, which all calls of a `Callbacks` share, so that clients
and sessions stay usable between calls. Outcomes are data, so that a user's exception is never mistaken for one of ours."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

MAX_TRACE = 6000
"""Characters kept of a traceback: its end."""


@dataclass(frozen=True, slots=True)
class Returned:
    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    what: str
    """`ValueError: no digits`"""
    trace: str
    """The traceback, starting at the user's code."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """No result in time. A thread cannot be stopped: a synchronous function may still be running."""


Outcome: TypeAlias = Returned | Raised | TimedOut


class Callbacks:
    """`await callbacks.call(function, ("text",), timeout=10)`, from any event loop.

    Calls that timed out delay neither `close` nor the exit of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] = MappingProxyType({}),
        *,
        timeout: float,
    ) -> Outcome:
        if is_async(function):
            work: Future[Outcome] = asyncio.run_coroutine_threadsafe(
                _call_async(function, arguments, named), self._own_loop()
            )
        else:
            work = Future()
            threading.Thread(
                target=_call_sync, args=(work, function, arguments, named), name="slipstream-callback", daemon=True
            ).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work), timeout)
        except TimeoutError:  # ours: exceptions of the function arrive as `Raised`
            return TimedOut()

    def close(self) -> None:
        """Stop the loop of asynchronous functions. May be called twice."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(_stop, loop)

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), name="slipstream-callbacks", daemon=True).start()
            return self._loop


@functools.cache
def shared() -> Callbacks:
    """A process-wide instance, for code whose state outlives a call, such as an environment that keeps a connection."""
    return Callbacks()


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine; also for callable objects and `functools.partial`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def raised(error: BaseException) -> Raised:
    """Describe a user's exception, with a traceback that starts at the user's code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).strip()
    what = traceback.format_exception_only(error)[-1].strip()
    return Raised(what[:500], text if len(text) <= MAX_TRACE else f"…{text[-MAX_TRACE:]}")


async def awaited(value: Awaitable[T]) -> T:
    """A coroutine for any awaitable, as `asyncio.run` needs it."""
    return await value


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently. On the first error, or if the caller is cancelled, cancel the others and wait for them."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.call_soon, loop.stop)  # after the tasks have seen the cancellation


def _call_sync(work: Future[Outcome], function: Callable[..., Any], arguments: Any, named: Any) -> None:
    if not work.set_running_or_notify_cancel():
        return
    try:
        value = function(*arguments, **named)
        # A plain function may still return a coroutine (a lambda, a decorator).
        work.set_result(Returned(asyncio.run(awaited(value)) if inspect.isawaitable(value) else value))
    except BaseException as error:  # SystemExit too: it would end this thread silently
        work.set_result(raised(error))


async def _call_async(function: Callable[..., Any], arguments: Any, named: Any) -> Outcome:
    task = asyncio.current_task()
    try:
        return Returned(await function(*arguments, **named))
    except BaseException as error:  # SystemExit too: it would end the loop and all other calls
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        return raised(error)
