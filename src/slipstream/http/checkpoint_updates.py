"""Publishes checkpoints of a trainer to every engine, by the same transaction as `bridge.sync`.

The trainer's side of the transaction runs here. Only checkpoints under one configured directory can be loaded: a path sent
over HTTP never leads outside it. In `/dev/shm` the directory is memory, and no disk is involved. Files are opened in a thread
of their own, as a file system that hangs must not stop the server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from slipstream.bridge.fleet import Fleet, with_engines
from slipstream.errors import DeadlineExceeded, RequestError, Unsupported, UpdateInProgress
from slipstream.types import EngineInfo, SyncReport

OPEN_SECONDS = 60.0
"""Time limit for finding a checkpoint and reading what tensors it holds."""

T = TypeVar("T")


class CheckpointUpdates:
    """Runs one update at a time. `connect` opens a connection to the fleet, which holds the fleet's update lease while it is
    open. If another trainer holds the lease, the update fails and that trainer is not affected."""

    def __init__(self, connect: Callable[[], Fleet], root: Path | None) -> None:
        self._connect, self._root = connect, root.resolve() if root is not None else None
        self._busy = False
        self._hanging: asyncio.Future[Any] | None = None
        """The last attempt to open a checkpoint that took too long."""
        self.is_initialized = False
        """A trainer has chosen checkpoints as its way to transfer weights, in vLLM's update protocol."""
        self.num_committed = 0
        self.last_time = 0.0
        """Time of the last commit; 0 before the first."""
        self.last_update_count = -1
        """Highest `update_count` of a trainer whose update was loaded."""
        self.pending: list[str] | None = None
        """Checkpoints named so far in vLLM's update protocol; None outside of an update."""
        self.received: list[Path] = []
        """Directories among them that hold what came over NCCL; deleted after the update."""
        self.finished_version: int | None = None
        """Version of the last update in vLLM's protocol."""
        self._label: tuple[int, str] = (-1, "")

    def require_enabled(self) -> Path:
        """Return the directory of checkpoints. Raises `Unsupported` if none is configured."""
        if self._root is None:
            raise Unsupported(
                "this server loads no checkpoints over HTTP; start it with the directory that holds them (slipstream gateway "
                "--http PORT weights=DIRECTORY, slipstream launch --http PORT --http-option weights=DIRECTORY)"
            )
        return self._root

    async def check(self, name: str) -> None:
        """Raise unless `find` finds the checkpoint."""
        async with self._exclusive():
            await self._in_thread(lambda: self.find(name), name)

    def find(self, name: str) -> Path:
        """Return a directory of safetensors by its path, absolute or relative to the root; empty is the root itself."""
        from slipstream.tensors.safetensors_dir import weight_files

        root = self.require_enabled()
        try:
            path = (root / name).resolve()
            exists = path.is_dir()
        except (OSError, ValueError, RuntimeError):  # too long, a zero byte, a loop of links
            raise RequestError(f"{name[:100]!r} is not a valid path") from None
        if not path.is_relative_to(root):
            raise RequestError(f"{name[:100]!r} is not under {root}; only checkpoints there can be loaded")
        if not exists:
            raise RequestError(f"there is no directory {name[:100]!r} under {root}")
        for file in weight_files(path):
            if not file.resolve().is_relative_to(root):
                raise RequestError(f"{file} links to a file outside {root}; only files there can be loaded")
        return path

    async def publish(self, names: Sequence[str], partial: bool = False, label: str | None = None) -> SyncReport:
        """Make the checkpoints, which complement each other, the fleet's next version, on all engines or none. With `partial`,
        tensors that none of them holds stay as they are."""
        async with self._exclusive():
            tensors = await self._in_thread(lambda: self._open(names), ", ".join(names))
            report = await self._publish(tensors, partial)
        self.num_committed += 1
        self.last_time = time.time()
        if label is not None:
            self.set_label(report.version, label)
        return report

    def set_label(self, version: int, label: str) -> None:
        """Name a version. The name is forgotten with the next version."""
        self._label = (version, label)

    def label(self, version: int) -> str:
        return self._label[1] if self._label[0] == version else str(version)

    @contextlib.asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        if self._busy or (self._hanging is not None and not self._hanging.done()):
            raise UpdateInProgress("another update over HTTP is in progress")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    async def _in_thread(self, work: Callable[[], T], names: str) -> T:
        """Run `work` in a thread that does not keep the process alive. If it hangs, no update starts until it ends."""
        opening: Future[T] = Future()

        def run() -> None:
            try:
                opening.set_result(work())
            except BaseException as error:
                opening.set_exception(error)

        threading.Thread(target=run, name="slipstream-checkpoint", daemon=True).start()
        opened = asyncio.wrap_future(opening)
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                return await asyncio.shield(opened)
        except TimeoutError:
            self._hanging = opened
            opened.add_done_callback(lambda ended: ended.exception())  # nobody else asks for it
            raise DeadlineExceeded(
                f"the checkpoint {names[:100]!r} could not be opened within {OPEN_SECONDS:g} s; does its file system answer?"
            ) from None

    def _open(self, names: Sequence[str]) -> dict[str, Any]:
        from slipstream.tensors.safetensors_dir import stored_tensors

        tensors: dict[str, Any] = {}
        for name in names:
            tensors |= stored_tensors(self.find(name))
        return tensors

    async def _publish(self, tensors: dict[str, Any], partial: bool) -> SyncReport:
        from slipstream.weights.update.publisher import Publisher

        fleet = self._connect()
        publisher = Publisher(fleet)

        async def publish(engines: tuple[EngineInfo, ...], version: int) -> SyncReport:
            return await publisher.publish(tensors, engines, version, partial=partial)

        try:
            return await with_engines(fleet, publish, "to bring weights to")
        finally:
            publisher.close()
            await fleet.close()
