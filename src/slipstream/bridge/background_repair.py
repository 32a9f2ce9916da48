"""Sends the last committed version to engines that lack it while the trainer does something else.

An engine that starts, restarts or missed an update has no weights or old ones, and gets no requests. The bridge keeps what it
synced last (`weights/update/snapshot.py`), asks the gateway now and then whether an engine lacks it, and sends it. This runs on
the event loop's thread, so it needs neither a call of the trainer nor the end of its step. A sync does not wait for a repair:
it interrupts it, and brings the engines a newer version."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from slipstream.errors import SlipstreamError, UpdateInProgress
from slipstream.runtime import event_loop
from slipstream.types import SyncReport

log = logging.getLogger(__name__)

INTERVAL_SECONDS, MOST_SECONDS = 0.2, 15.0
"""Time between two looks at the fleet, and the longest one after repairs that failed."""
GIVE_WAY_SECONDS = 60.0
"""How long an interrupted repair may take to roll back."""


class UpdateLock:
    """Keeps the updates of one bridge apart. A repair gives way to the others. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None
        """Ends the repair that holds the lock."""
        self._is_wanted = False
        """An update waits for a repair to end. The next repair must not take the lock first."""

    def acquire(self, error: str) -> None:
        """Raise `UpdateInProgress` with this text if another update runs that is no repair."""
        if self._lock.acquire(blocking=False):
            return
        if (interrupt := self._interrupt) is not None:
            self._is_wanted = True
            try:
                interrupt()
                if self._lock.acquire(timeout=GIVE_WAY_SECONDS):
                    return
            finally:
                self._is_wanted = False
        raise UpdateInProgress(error)

    def acquire_for_repair(self, interrupt: Callable[[], None]) -> bool:
        """Return whether there was no other update. `interrupt` is called, in any thread, if one wants to start."""
        self._interrupt = interrupt  # first: who finds the lock taken looks for it
        if not self._is_wanted and self._lock.acquire(blocking=False):
            return True
        self._interrupt = None
        return False

    def release(self) -> None:
        self._interrupt = None
        self._lock.release()


class BackgroundRepair:
    def __init__(
        self,
        is_needed: Callable[[], Awaitable[bool]],
        repair: Callable[[], Awaitable[SyncReport | None]],
        lock: UpdateLock,
    ) -> None:
        self._is_needed, self._repair, self._lock = is_needed, repair, lock
        self._task: Future[None] | None = None
        self._last_error = ""

    def start(self) -> None:
        """May be called again."""
        if self._task is None:
            self._task = event_loop.start(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        delay = INTERVAL_SECONDS
        while True:
            await asyncio.sleep(delay)
            try:
                is_done = not await self._is_needed() or await self._attempt()
            except SlipstreamError:  # the gateway is gone, and may come back
                is_done = True
            delay = INTERVAL_SECONDS if is_done else min(2 * delay, MOST_SECONDS)

    async def _attempt(self) -> bool:
        """Repair, unless another update runs. Return whether to look again soon."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(self._repair())

        def interrupt() -> None:
            loop.call_soon_threadsafe(task.cancel)

        if not self._lock.acquire_for_repair(interrupt):
            task.cancel()
            return True
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            self._lock.release()
        if task.cancelled():
            return True
        error = task.exception()
        if error is not None and not isinstance(error, SlipstreamError):
            raise error
        text = "" if error is None else str(error)
        if error is not None and text != self._last_error:
            log.warning("engines without the present version are not repaired yet: %s", error)
        elif error is None and (report := task.result()) is not None:
            log.warning("sent version %d to %s", report.version, ", ".join(e.engine for e in report.engines))
        self._last_error = text
        return error is None
