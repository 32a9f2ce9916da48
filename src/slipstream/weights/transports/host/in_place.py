"""Both halves of transports whose sender writes directly into the image (`memory`, `shm`).

Beside the image is one mark per piece, which the sender sets once the piece is written. Marks are only hints: they let
the receiver hash finished pieces while the sender is still writing others. The checksums that arrive over the control
plane decide; a piece whose early hash does not match is hashed again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from slipstream.weights.checksum import PieceScan, ScanOptions, checksum, copy_and_scan
from slipstream.weights.transports.contract import HostReceiver, HostSender

POLL_SECONDS = 0.0005
HASH_EARLY_BYTES = 8 << 20
"""For fewer bytes, starting a thread costs more than it saves."""

MakePieces: TypeAlias = Callable[[np.ndarray], Mapping[int, np.ndarray]]
"""Makes, from an image's buffer, the views that a sender writes to, by index."""


def version_mark(version: int) -> int:
    """Return a non-zero byte that differs between consecutive versions."""
    return version % 255 + 1


class InPlaceReceiver(HostReceiver):
    """The engine's half. Subclasses provide the memory: `buffer` is the image, `marks` has one byte per piece."""

    def __init__(self, buffer: np.ndarray, marks: np.ndarray) -> None:
        super().__init__(buffer)
        self.marks = marks
        self._early: dict[int, int] = {}
        self._stop = threading.Event()
        self._hasher: threading.Thread | None = None

    def expect(self, version: int, pieces: Mapping[int, np.ndarray], hashed: bool) -> None:
        self._stop_hashing()
        super().expect(version, pieces, hashed)
        self._early, self._stop = {}, threading.Event()
        if hashed and sum(p.nbytes for p in pieces.values()) > HASH_EARLY_BYTES:
            self._hasher = threading.Thread(target=self._hash_early, args=(self._stop,), daemon=True)
            self._hasher.start()

    def checksums(self, expected: Mapping[int, int]) -> dict[int, int]:
        """Return at once: senders are done before they send the expected checksums."""
        self._stop_hashing()
        if not self._hashed:
            return dict.fromkeys(expected, 0)
        checksums = {}
        for index, sent in expected.items():
            early = self._early.get(index)
            checksums[index] = early if early == sent else checksum(self._pieces[index])
        return checksums

    def close(self) -> None:
        self._stop_hashing()

    def _hash_early(self, stop: threading.Event) -> None:
        waiting, mark = list(self._pieces), version_mark(self._version)
        while waiting and not stop.is_set():
            marks = self.marks.tobytes()
            ready = [i for i in waiting if marks[i] == mark]
            for index in ready:
                if stop.is_set():
                    return
                self._early[index] = checksum(self._pieces[index])
            if ready:
                waiting = [i for i in waiting if i not in self._early]
            else:
                stop.wait(POLL_SECONDS)

    def _stop_hashing(self) -> None:
        self._stop.set()
        if self._hasher is not None:
            self._hasher.join()
            self._hasher = None


class InPlaceSender(HostSender):
    def __init__(self, pieces: Mapping[int, np.ndarray], marks: np.ndarray, options: ScanOptions) -> None:
        self._pieces, self._marks, self._options = pieces, marks, options

    def send(self, index: int, array: np.ndarray) -> PieceScan:
        scan = copy_and_scan(self._pieces[index], array, self._options)
        self._marks[index] = version_mark(self._version)
        return scan

    def close(self) -> None:
        """Let go of the memory, even if an exception in a reference cycle still holds this sender."""
        self._pieces, self._marks = {}, np.empty(0, np.uint8)
