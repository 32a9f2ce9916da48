"""Calls into a user's own code, with a deadline: reward functions and environments, synchronous or asynchronous.

Never on the process's event loop, where code that blocks would stop every connection. A synchronous function runs in a
thread of its own, an asynchronous one on a second loop, which all of a `Callbacks` share, so that clients and sessions
can be kept between calls. What the code does is told as data: an exception of its own is never taken for one of ours."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, TypeAlias

MAX_TRACE = 6000
"""Characters kept of a traceback; its end says most."""


@dataclass(frozen=True, slots=True)
class Returned:
    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    what: str
    """`ValueError: no digits`"""
    trace: str
    """The traceback, from the user's code on."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """No answer in time. A thread cannot be ended: a synchronous function may still be running."""


Outcome: TypeAlias = Returned | Raised | Overdue


class Callbacks:
    """`await callbacks.call(function, ("text",), timeout=10)`, from any event loop. A context manager; calls that
    overran their time do not hold up its end, nor that of the process."""

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
                _awaited(function, arguments, named), self._own_loop()
            )
        else:
            work = Future()
            threading.Thread(
                target=_run, args=(work, function, arguments, named), name="slipstream-callback", daemon=True
            ).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work), timeout)
        except TimeoutError:  # ours: what the function raises comes as `Raised`
            return Overdue()

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(_wind_up, loop)

    def __enter__(self) -> Callbacks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), name="slipstream-callbacks", daemon=True).start()
            return self._loop


@functools.cache
def shared() -> Callbacks:
    """For code that outlives a call: what an environment opened in one run is still on its loop in the next."""
    return Callbacks()


def is_async(function: Callable[..., Any]) -> bool:
    """Also of an object that is called, and of what `functools.partial` makes."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def raised(error: BaseException) -> Raised:
    """What there is to say of a user's exception, beginning at the user's own code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).strip()
    what = traceback.format_exception_only(error)[-1].strip()
    return Raised(what[:500], text if len(text) <= MAX_TRACE else f"…{text[-MAX_TRACE:]}")


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _wind_up(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.call_soon, loop.stop)  # once they have heard of it


def _run(work: Future[Outcome], function: Callable[..., Any], arguments: Any, named: Any) -> None:
    if not work.set_running_or_notify_cancel():
        return
    try:
        value = function(*arguments, **named)
        # A plain function may still hand back a coroutine (a lambda, a decorator).
        work.set_result(Returned(asyncio.run(_finish(value)) if inspect.isawaitable(value) else value))
    except BaseException as error:  # SystemExit too: it would end this thread without a word
        work.set_result(raised(error))


async def _awaited(function: Callable[..., Any], arguments: Any, named: Any) -> Outcome:
    task = asyncio.current_task()
    try:
        return Returned(await function(*arguments, **named))
    except BaseException as error:  # SystemExit would end the loop, and every other call with it
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        return raised(error)


async def _finish(value: Awaitable[Any]) -> Any:
    return await value
