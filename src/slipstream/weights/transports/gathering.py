"""To servers that somebody else started: what the trainer's half does before their own ways begin.

There is no landing. Such a server takes whole tensors, in its own words, and overwrites the weights that it serves. So a
version is gathered in the trainer's memory, once the size of the model, and goes on from there: as broadcasts that wait for
the server (`BroadcastSender`), or as a checkpoint that it reads (`checkpoint.py`). Nothing is compared, as the servers do not
say what they received."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from slipstream.errors import DeadlineExceeded, TransferError
from slipstream.weights.image import Image
from slipstream.weights.plan import Move
from slipstream.weights.transports.memory import anonymous

CLOSE_SECONDS = 30.0
"""A broadcast that was asked for ends within this, or is aborted."""


class Gathering:
    """The pieces of a version, put together."""

    def __init__(self, image: Image, moves: Mapping[int, Move]) -> None:
        self._image, self._moves = image, moves
        self._buffer = anonymous(image.num_bytes)
        self._pieces = {i: image.piece(self._buffer, move.parameter, move.local_box) for i, move in moves.items()}
        self._sent: set[int] = set()

    def begin(self, version: int) -> None:
        self._sent = set()

    def send(self, index: int, array: np.ndarray) -> int:
        np.copyto(self._pieces[index], array, casting="same_kind")
        self._sent.add(index)
        return 0  # nobody could compare it: the server does not tell the bytes that it got

    def _gathered(self) -> dict[str, np.ndarray]:
        """What was sent, in the plan's order; the server is told the same names in the same order."""
        names = dict.fromkeys(move.parameter for index, move in self._moves.items() if index in self._sent)
        return {name: self._image.view(self._buffer, name) for name in names}


class Communicator(Protocol):
    """Of the trainer, rank 0, with the server's workers. Each method blocks, has a deadline of its own and raises
    `TransferError`."""

    def broadcast(self, buffer: np.ndarray) -> None:
        """Bytes, from here to all; they may be overwritten once it returns."""
        ...

    def abort(self) -> None:
        """Ends what is under way in another thread, too. May be called twice."""
        ...

    def close(self) -> None: ...


class BroadcastSender(Gathering):
    """`flush` leaves a version to a thread, and the first broadcast waits for the server, whose engine asks for it when every
    engine of the fleet has staged. Tensors that travel together are one broadcast of at most `limit` bytes and a tensor."""

    def __init__(
        self, name: str, server: str, communicator: Communicator, image: Image, moves: Mapping[int, Move], limit: int
    ) -> None:
        super().__init__(image, moves)
        self._name, self._server, self._communicator, self._limit = name, server, communicator, limit
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None

    def begin(self, version: int) -> None:
        self._wait()
        super().begin(version)

    def flush(self) -> None:
        self._thread = threading.Thread(target=self._broadcast, name=self._name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What is under way is broken off: the server then reports a failed update."""
        thread, self._thread = self._thread, None
        try:
            if thread is not None and thread.is_alive():
                self._communicator.abort()
                thread.join(CLOSE_SECONDS)
            elif self._problem is None:
                self._communicator.close()
        finally:
            self._pieces = {}

    def _broadcast(self) -> None:
        arrays = list(self._gathered().values())
        try:
            for chunk in chunks([array.nbytes for array in arrays], self._limit):
                self._communicator.broadcast(_packed([arrays[i] for i in chunk]))
        except Exception as error:
            self._problem = error
            self._communicator.abort()

    def _wait(self) -> None:
        """For the version before: its broadcasts ended with the server's commit, or never will."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                raise DeadlineExceeded(
                    f"{self._name}: the server at {self._server} has not taken the last version within {CLOSE_SECONDS:g} s"
                )
            self._thread = None
        if self._problem is not None:
            raise TransferError(
                f"{self._name}: the last broadcast to the server at {self._server} failed: {self._problem}"
            )


def chunks(sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Indices of the tensors that travel together: a chunk is closed by the tensor that makes it larger than the limit."""
    chunk: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        chunk.append(index)
        total += size
        if total > limit:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def _packed(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
