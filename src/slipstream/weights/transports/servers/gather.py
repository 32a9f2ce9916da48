"""Senders to external servers: gather a version in host memory, then broadcast it.

There is no receiver of ours. Such a server takes complete tensors through its own API and overwrites the weights it
serves. So a version is gathered in the trainer's host memory, which takes the size of the model once. From there it
goes out as broadcasts that wait for the server (`BroadcastSender`) or as a checkpoint that the server reads
(`checkpoint_dir.py`). Checksums are not compared, since these servers do not report what they received."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from slipstream.errors import DeadlineExceeded, TransferError
from slipstream.weights.checksum import PieceScan, ScanOptions, copy_and_scan
from slipstream.weights.plan import Move
from slipstream.weights.rank_image import RankImage
from slipstream.weights.transports.contract import HostSender
from slipstream.weights.transports.host.memory import anonymous_memory

CLOSE_SECONDS = 30.0
"""Time limit for a broadcast to end before the next version or `close`; then it is aborted."""


class GatheringSender(HostSender):
    """Collects the pieces of a version in host memory."""

    def __init__(self, image: RankImage, moves: Mapping[int, Move], options: ScanOptions) -> None:
        self._image, self._moves = image, moves
        self._options = replace(options, checksums=False)  # the server has none to compare with
        self._buffer = anonymous_memory(image.num_bytes)
        self._pieces = image.pieces(self._buffer, moves)
        self._sent: set[int] = set()

    def begin(self, version: int) -> None:
        super().begin(version)
        self._sent = set()

    def send(self, index: int, array: np.ndarray) -> PieceScan:
        self._sent.add(index)
        return copy_and_scan(self._pieces[index], array, self._options)

    def _gathered(self) -> dict[str, np.ndarray]:
        """Return what was sent, in the plan's order, in which the engine announces it to the server."""
        names = dict.fromkeys(move.parameter for index, move in self._moves.items() if index in self._sent)
        return {name: self._image.view(self._buffer, name) for name in names}


class ServerCommunicator(Protocol):
    """Connects the trainer, rank 0, with the server's workers. Methods have deadlines and raise `TransferError`."""

    def broadcast(self, buffer: np.ndarray) -> None:
        """Send bytes to all workers. The buffer may be overwritten once it returns."""

    def abort(self) -> None:
        """Cancel a broadcast, also one in another thread. May be called twice."""

    def close(self) -> None: ...


class BroadcastSender(GatheringSender):
    """Broadcasts versions, in groups of tensors (`group_by_bytes`), in a thread that `flush` starts. The first
    broadcast waits for the server, whose engine requests the update once every engine of the fleet has staged."""

    def __init__(
        self,
        name: str,
        server: str,
        communicator: ServerCommunicator,
        image: RankImage,
        moves: Mapping[int, Move],
        options: ScanOptions,
        limit: int,
    ) -> None:
        super().__init__(image, moves, options)
        self._name, self._server, self._communicator, self._limit = name, server, communicator, limit
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self, version: int) -> None:
        self._wait()
        super().begin(version)

    def flush(self) -> None:
        self._thread = threading.Thread(target=self._broadcast, name=self._name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Abort a broadcast that is running; the server then reports a failed update."""
        thread, self._thread = self._thread, None
        try:
            if thread is not None and thread.is_alive():
                self._communicator.abort()
                thread.join(CLOSE_SECONDS)
            elif self._error is None:
                self._communicator.close()
        finally:
            self._pieces = {}

    def _broadcast(self) -> None:
        arrays = list(self._gathered().values())
        try:
            for group in group_by_bytes([array.nbytes for array in arrays], self._limit):
                self._communicator.broadcast(_concatenate([arrays[i] for i in group]))
        except Exception as error:
            self._error = error
            self._communicator.abort()

    def _wait(self) -> None:
        """Wait for the previous version: its broadcasts ended with the server's commit, or never will."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                raise DeadlineExceeded(
                    f"{self._name}: the server at {self._server} did not receive the last version within {CLOSE_SECONDS:g} s"
                )
            self._thread = None
        if self._error is not None:
            raise TransferError(
                f"{self._name}: the last broadcast to the server at {self._server} failed: {self._error}"
            )


def group_by_bytes(sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Group consecutive tensors, as servers do: a group ends with the tensor that makes it exceed `limit` bytes."""
    group: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        group.append(index)
        total += size
        if total > limit:
            yield group
            group, total = [], 0
    if group:
        yield group


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
