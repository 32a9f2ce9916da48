"""Planes whose sender writes straight into the image: both halves see the same memory.

Beside the image lies a mark per piece that the sender sets once the piece is written. It is a hint, not a promise: the
landing hashes pieces while the sender is busy with the next ones, and what the control plane says decides. A piece whose
early hash turns out wrong is hashed again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from slipstream.weights.checksum import checksum, copy_and_checksum

POLL_SECONDS = 0.0005
HASH_EARLY_BYTES = 8 << 20
"""Below this much, starting a thread costs more than it saves."""

Pieces: TypeAlias = Callable[[np.ndarray], Mapping[int, np.ndarray]]
"""From an image's buffer to the pieces that a sender writes in it, by index."""


def mark_of(version: int) -> int:
    """A byte that differs between versions that follow each other, and is never 0."""
    return version % 255 + 1


class InPlaceLanding:
    """`buffer` and `marks` are made by the plane; `marks` has a byte for every piece that an update may have."""

    link: bytes

    def __init__(self, buffer: np.ndarray, marks: np.ndarray) -> None:
        self.buffer, self.marks = buffer, marks
        self._pieces: Mapping[int, np.ndarray] = {}
        self._early: dict[int, int] = {}
        self._mark, self._hashed = 0, True
        self._stop = threading.Event()
        self._hasher: threading.Thread | None = None

    def expect(self, version: int, pieces: Mapping[int, np.ndarray], hashed: bool) -> None:
        self._halt()
        self._mark, self._hashed = mark_of(version), hashed
        self._pieces, self._early, self._stop = pieces, {}, threading.Event()
        if hashed and sum(p.nbytes for p in pieces.values()) > HASH_EARLY_BYTES:
            self._hasher = threading.Thread(target=self._hash_early, args=(self._stop,), daemon=True)
            self._hasher.start()

    def checksums(self, expected: Mapping[int, int]) -> dict[int, int]:
        """All senders have said that they are done, so nothing is waited for."""
        self._halt()
        if not self._hashed:
            return dict.fromkeys(expected, 0)
        found = {}
        for index, wanted in expected.items():
            early = self._early.get(index)
            found[index] = early if early == wanted else checksum(self._pieces[index])
        return found

    def settle(self) -> None: ...

    def close(self) -> None:
        self._halt()

    def _hash_early(self, stop: threading.Event) -> None:
        waiting: Sequence[int] = list(self._pieces)
        while waiting and not stop.is_set():
            marks = self.marks.tobytes()
            ready = [i for i in waiting if marks[i] == self._mark]
            for index in ready:
                if stop.is_set():
                    return
                self._early[index] = checksum(self._pieces[index])
            if ready:
                waiting = [i for i in waiting if i not in self._early]
            else:
                stop.wait(POLL_SECONDS)

    def _halt(self) -> None:
        self._stop.set()
        if self._hasher is not None:
            self._hasher.join()
            self._hasher = None


class InPlaceSender:
    def __init__(self, pieces: Mapping[int, np.ndarray], marks: np.ndarray, hashed: bool) -> None:
        self._pieces, self._marks, self._hashed = pieces, marks, hashed
        self._mark = 0

    def begin(self, version: int) -> None:
        self._mark = mark_of(version)

    def send(self, index: int, array: np.ndarray) -> int:
        value = copy_and_checksum(self._pieces[index], array, self._hashed)
        self._marks[index] = self._mark
        return value

    def flush(self) -> None: ...

    def close(self) -> None:
        self._pieces = {}
