"""Weights shared by a trainer and its engines: arrays that the trainer writes to while the engines stand still.

    shared = bridge.share(params)              next version; the engines serve from the memory of shared.arrays
    with shared.updating():                    the engines stop at a step boundary
        shared.arrays["lm_head.weight"] *= 2
                                               next version; prefix caches are reset and the engines continue

`hold` and `notify_update` are the two ends of the block, for loops that cannot use one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from slipstream.bridge.background_repair import UpdateLock
from slipstream.bridge.fleet import Fleet, with_engines
from slipstream.config import SyncOptions
from slipstream.errors import Unsupported, VersionError
from slipstream.runtime import event_loop
from slipstream.types import EngineInfo, InFlight, SyncReport
from slipstream.weights.checksum import ScanOptions
from slipstream.weights.sources import named_tensors
from slipstream.weights.update.shared import Sharing


class SharedWeights:
    """Made by `Bridge.share`. For one thread.

    A block that raises, or a trainer that dies inside one, may leave half-written weights. `notify_update` refuses values that
    are not finite, except in GPU memory, which it does not read. The engines then have no policy and answer `NotReady` until
    the next update, by this or another trainer. An engine that restarts, or that receives other weights by `bridge.sync`,
    attaches again with the next update."""

    def __init__(
        self, fleet: Fleet, updates: UpdateLock, on_commit: Callable[[int], None], options: SyncOptions
    ) -> None:
        """`updates` is held during an update, so that the bridge starts no other."""
        self._fleet, self._updates, self._on_commit = fleet, updates, on_commit
        self._options = ScanOptions(options.checksums, options.check_finite)
        self._sharing: Sharing | None = None
        self.report: SyncReport | None = None
        """Report of the last update."""

    def start(self, params: Any, device: int = 0) -> None:
        """Copy `params` into shared memory and make it the engines' policy."""
        with self._exclusive():
            event_loop.run(self._begin(named_tensors.named_tensors(params), device))
        self.notify_update()

    @property
    def arrays(self) -> dict[str, Any]:
        """The weights by checkpoint name: numpy arrays, or, on a GPU, objects that `torch.from_dlpack` adopts without a copy.
        Write to them only between `hold` and `notify_update`."""
        return self._sharing.arrays if self._sharing else {}

    @property
    def version(self) -> int:
        """Version of the last update."""
        return -1 if self.report is None else self.report.version

    def hold(self) -> None:
        """Stop the engines until `notify_update` or `release`. Once this returns, the arrays may be written to."""
        with self._exclusive():
            event_loop.run(self._begin())

    def notify_update(self, in_flight: InFlight = "keep") -> SyncReport:
        """Make the arrays' content the next version. The engines reset their prefix caches and continue.

        `in_flight` is as for `sync`, without `finish`: the weights that running requests would finish under are overwritten."""
        _check_in_flight(in_flight)
        sharing = self._held()
        try:
            self.report = event_loop.run(sharing.commit(in_flight))
        finally:
            self._updates.release()
        self._on_commit(self.report.version)
        return self.report

    def release(self) -> None:
        """Give up an update after `hold`. The engines have no policy until the next update."""
        sharing = self._held()
        try:
            event_loop.run(sharing.rollback())
        finally:
            self._updates.release()

    @contextlib.contextmanager
    def updating(self, in_flight: InFlight = "keep") -> Iterator[SharedWeights]:
        """Call `hold`, then `notify_update` at the end of the block, or `release` if it raises."""
        _check_in_flight(in_flight)
        self.hold()
        try:
            yield self
        except BaseException:
            self.release()
            raise
        self.notify_update(in_flight)

    def close(self) -> None:
        """Let no more engines attach. The arrays and the engines that serve from them continue."""
        if self._sharing is not None:
            self._sharing.close()

    async def _begin(self, tensors: Any = None, device: int = 0) -> None:
        async def begin(engines: tuple[EngineInfo, ...], version: int) -> None:
            if self._sharing is None:
                self._sharing = await asyncio.to_thread(Sharing, self._fleet, tensors, engines, self._options, device)
            await self._sharing.begin(engines, version)

        await with_engines(self._fleet, begin, "to share weights with")

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Acquire the bridge's update lock; release it only if the block raises."""
        self._updates.acquire("an update is in progress; end it (notify_update or bridge.sync) before the next one")
        try:
            yield
        except BaseException:
            self._updates.release()
            raise

    def _held(self) -> Sharing:
        if self._sharing is None or not self._sharing.is_updating:
            raise VersionError(
                "the engines are not held and may read half-written weights; call hold() before writing, or write inside "
                "`with shared.updating():`"
            )
        return self._sharing


def _check_in_flight(in_flight: InFlight) -> None:
    if in_flight not in ("keep", "recompute", "requeue"):
        raise Unsupported(
            f"in_flight of shared weights must be keep, recompute or requeue, got {in_flight!r}; to let requests finish under "
            "the old weights, wait for their completions before hold()"
        )
