"""Weights that a trainer left as a checkpoint, made the policy of every engine: by the same transaction as `bridge.sync`.

The trainer's half of it runs here. What it may read is under one directory, chosen when the front is started: a name that
came over HTTP never leads anywhere else. In `/dev/shm` such a directory is memory, and no disk is touched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import RequestError, Unsupported, UpdateInProgress
from slipstream.fleet import Fleet, with_engines
from slipstream.types import EngineInfo, SyncReport


class Weights:
    """One update at a time. `connect` gives a connection to the fleet that holds its updates while it is open; another trainer
    may hold them instead, and is not disturbed."""

    def __init__(self, connect: Callable[[], Fleet], root: Path | None) -> None:
        self._connect, self._root = connect, root.resolve() if root is not None else None
        self._busy = False
        self.count = 0
        """Updates that this front has committed."""
        self.last_time = 0.0
        self.notified = -1
        """The highest count of a trainer's whose update was loaded."""
        self.pending: list[str] | None = None
        """Of an update in steps: the checkpoints named so far; None when there is none."""
        self.finished: int | None = None
        """The version that the last such update became."""
        self._label: tuple[int, str] = (-1, "")

    @property
    def root(self) -> Path:
        if self._root is None:
            raise Unsupported(
                "no checkpoints may be loaded over HTTP here; start the front with the directory under which they lie "
                "(slipstream gateway --http PORT weights=DIRECTORY, slipstream launch --http PORT --front weights=DIRECTORY)"
            )
        return self._root

    def find(self, name: str) -> Path:
        """A directory of safetensors by its name, relative to the root or absolute; empty is the root itself."""
        from slipstream.weights.stored import weight_files

        try:
            found = (self.root / name).resolve()
            is_there = found.is_dir()
        except (OSError, ValueError, RuntimeError):  # too long, a zero byte, links in a circle
            raise RequestError(f"{name[:100]!r} is no name of a directory") from None
        if not found.is_relative_to(self.root):
            raise RequestError(f"{name[:100]!r} is not under {self.root}, and only what is there may be loaded")
        if not is_there:
            raise RequestError(f"there is no directory {name[:100]!r} under {self.root}")
        for file in weight_files(found):
            if not file.resolve().is_relative_to(self.root):
                raise RequestError(f"{file} leads out of {self.root}, and only what is there may be loaded")
        return found

    async def publish(self, names: Sequence[str], partial: bool = False, label: str | None = None) -> SyncReport:
        """Makes the checkpoints, which complete one another, the fleet's next version; all engines or none. With `partial`,
        tensors that are in none of them stay as they are."""
        if self._busy:
            raise UpdateInProgress("another update over HTTP is under way; one at a time")
        self._busy = True
        try:
            tensors = await asyncio.to_thread(self._tensors, names)
            report = await self._published(tensors, partial)
        finally:
            self._busy = False
        self.count += 1
        self.last_time = time.time()
        if label is not None:
            self.set_label(report.version, label)
        return report

    def set_label(self, version: int, label: str) -> None:
        """What a client calls a version; forgotten with the next one."""
        self._label = (version, label)

    def label(self, version: int) -> str:
        return self._label[1] if self._label[0] == version else str(version)

    def _tensors(self, names: Sequence[str]) -> dict[str, Any]:
        from slipstream.weights.stored import stored_tensors

        tensors: dict[str, Any] = {}
        for name in names:
            tensors |= stored_tensors(self.find(name))
        return tensors

    async def _published(self, tensors: dict[str, Any], partial: bool) -> SyncReport:
        from slipstream.weights.publisher import Publisher

        fleet = self._connect()
        publisher = Publisher(fleet)

        async def publish(engines: tuple[EngineInfo, ...], version: int) -> SyncReport:
            return await publisher.publish(tensors, engines, version + 1, partial=partial)

        try:
            return await with_engines(fleet, publish, "to bring weights to")
        finally:
            publisher.close()
            await fleet.close()
