"""Weights that a trainer and its engines share, as the trainer sees them: arrays to write to, and when it may.

    shared = bridge.share(params)              the next version; engines serve from the very memory of shared.arrays
    with shared.updating():                    engines stop at a step boundary: nothing reads while this writes
        shared.arrays["lm_head.weight"] *= 2
                                               the next version; prefix caches are empty, and engines go on

`hold` and `notify_update` are the two ends of the block, for loops that cannot have one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from slipstream import portal
from slipstream.errors import Unsupported, UpdateInProgress, VersionError
from slipstream.fleet import Fleet, with_engines
from slipstream.types import EngineInfo, InFlight, SyncReport
from slipstream.weights import source
from slipstream.weights.sharing import Sharing


class SharedWeights:
    """Made by `Bridge.share`. Used by one thread.

    A block that raises, and a trainer that dies inside one, leave weights that nobody can vouch for: engines have no policy
    then, and say so (`NotReady`), until the next update, of this or another trainer. An engine that was started anew, or
    that took other weights by `bridge.sync`, comes back with the next update."""

    def __init__(
        self, fleet: Fleet, updates: threading.Lock, on_commit: Callable[[int], None], checksums: bool
    ) -> None:
        """`updates` is held while one is under way, so that the bridge begins no other."""
        self._fleet, self._updates, self._on_commit, self._checksums = fleet, updates, on_commit, checksums
        self._sharing: Sharing | None = None
        self.report: SyncReport | None = None
        """Of the last update."""

    def start(self, params: Any, device: int = 0) -> None:
        """Puts `params` into memory of their own, and makes that the engines' policy."""
        with self._exclusive():
            portal.run(self._begin(source.named_tensors(params), device))
        self.notify_update()

    @property
    def arrays(self) -> dict[str, Any]:
        """The weights by their names in the checkpoint: numpy's arrays, or, where engines are on a GPU, what
        `torch.from_dlpack` makes tensors of without a copy. Written to only between `hold` and `notify_update`."""
        return self._started.arrays

    @property
    def version(self) -> int:
        """Of the last update."""
        return -1 if self.report is None else self.report.version

    def hold(self) -> None:
        """Once this returns, no engine runs a step until `notify_update` or `release`: the weights may be written to."""
        with self._exclusive():
            portal.run(self._begin())

    def notify_update(self, in_flight: InFlight = "keep") -> SyncReport:
        """What the arrays hold now is the next version: engines forget what older ones have cached, and go on.

        `in_flight` is as for `sync`, but for `finish`: the weights that running requests could finish under are no more."""
        _check_in_flight(in_flight)
        self._check_held()
        try:
            self.report = portal.run(self._started.commit(in_flight))
        finally:
            self._updates.release()
        self._on_commit(self.report.version)
        return self.report

    def release(self) -> None:
        """Gives an update up after `hold`. What the arrays hold is no version: engines have no policy until the next update."""
        self._check_held()
        try:
            portal.run(self._started.rollback())
        finally:
            self._updates.release()

    @contextlib.contextmanager
    def updating(self, in_flight: InFlight = "keep") -> Iterator[SharedWeights]:
        """`hold`, and `notify_update` at the end of the block, or `release` if it raises."""
        _check_in_flight(in_flight)
        self.hold()
        try:
            yield self
        except BaseException:
            self.release()
            raise
        self.notify_update(in_flight)

    def close(self) -> None:
        """Engines that come later cannot join. Arrays, and the engines that serve from them, go on."""
        if self._sharing is not None:
            self._sharing.close()

    async def _begin(self, tensors: Any = None, device: int = 0) -> None:
        async def begin(engines: tuple[EngineInfo, ...], version: int) -> None:
            if self._sharing is None:
                self._sharing = await asyncio.to_thread(Sharing, self._fleet, tensors, engines, self._checksums, device)
            await self._sharing.begin(engines, version + 1)

        await with_engines(self._fleet, begin, "to share weights with")

    @property
    def _started(self) -> Sharing:
        assert self._sharing is not None, "Bridge.share has started it"
        return self._sharing

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Takes the bridge's updates, and gives them back only if what follows fails."""
        if not self._updates.acquire(blocking=False):
            raise UpdateInProgress(
                "an update is under way: end it (notify_update, or bridge.sync) before the next begins"
            )
        try:
            yield
        except BaseException:
            self._updates.release()
            raise

    def _check_held(self) -> None:
        if self._sharing is None or not self._sharing.is_under_way:
            raise VersionError(
                "the engines are not held, so that what is written may be read half-way: call hold() before the weights are "
                "written to, or write them inside `with shared.updating():`"
            )


def _check_in_flight(in_flight: InFlight) -> None:
    if in_flight not in ("keep", "recompute", "requeue"):
        raise Unsupported(
            f"in_flight of shared weights must be keep, recompute or requeue, got {in_flight!r}; to let requests finish under "
            "the old weights, wait for their completions before hold(): afterwards these weights are overwritten"
        )
