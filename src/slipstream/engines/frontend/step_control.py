"""Whether an engine steps, for engines that delegate generation to another server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Sized

from slipstream.engines.frontend.checks import never_finish, weights_dropped
from slipstream.types import MemoryTag


class StepControl:
    """An engine steps unless it is paused, asleep, or stopped by an update.

    `stop` and `start` switch the server's steps, and are called only when that changes something. Steps start only if
    `may_start` agrees."""

    def __init__(
        self,
        engine: str,
        stop: Callable[[], Awaitable[None]],
        start: Callable[[], Awaitable[None]],
        *,
        may_start: Callable[[], bool] = lambda: True,
        is_stopped: bool = False,
    ) -> None:
        self._engine, self._stop, self._start, self._may_start = engine, stop, start, may_start
        self.lock = asyncio.Lock()
        """Held while steps are stopped or started, and by anything that must not run meanwhile."""
        self.is_stopped = is_stopped
        self.is_paused = False
        self.asleep: dict[MemoryTag, int] = {}
        """The memory that sleeps, and at which level."""

    async def pause(self) -> None:
        async with self.lock:
            self.is_paused = True
            await self.stop()

    async def resume(self) -> None:
        async with self.lock:
            self.is_paused = False
            await self.start()

    async def stop(self) -> None:
        if not self.is_stopped:
            await self._stop()
            self.is_stopped = True

    async def start(self) -> None:
        """Start steps again, unless something else keeps them stopped."""
        if self.is_stopped and not (self.is_paused or self.asleep) and self._may_start():
            await self._start()
            self.is_stopped = False

    @contextlib.asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        await self.stop()
        try:
            yield
        finally:
            await self.start()

    def check_can_finish(self, running: Sized) -> None:
        """Raise `Unsupported` if these requests would never finish."""
        if (self.is_paused or self.asleep) and running:
            raise never_finish(self._engine, self.is_paused)

    def asleep_among(self, tags: Sequence[MemoryTag] | None) -> list[MemoryTag]:
        """Return which of `tags` (None: all) are asleep and can be woken. Weights that level 2 has dropped cannot: raise
        `NotReady` if `tags` names them."""
        dropped = self.asleep.get("weights") == 2
        if dropped and tags is not None and "weights" in tags:
            raise weights_dropped(self._engine)
        wanted = dict.fromkeys(self.asleep if tags is None else tags)
        return [tag for tag in wanted if tag in self.asleep and not (dropped and tag == "weights")]
