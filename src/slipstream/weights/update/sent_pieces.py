"""What a trainer process sent last, kept to send only the difference next time (`weights/delta.py`).

A piece is kept in the engine's dtype, once for all engines that get it: 2 bytes for each parameter of the model that this
process sends, in host memory or, where the device finds the changes, in the device's. It is compared, encoded and replaced once
per update, by whichever engine's thread comes first. What an engine holds is known by the update in which it got the piece. If
that is wrong, the engine's checksum differs, and everything is sent again."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from slipstream.tensors.boxes import volume
from slipstream.weights import delta
from slipstream.weights.checksum import PieceScan, PieceScanner, ScanOptions
from slipstream.weights.delta import Encoding
from slipstream.weights.transports.device import DevicePiece
from slipstream.weights.update.device_delta import NEVER, DeviceDelta, DeviceDeltas, SentKey


@dataclass(frozen=True, slots=True)
class SentPiece:
    """A piece of the update in progress."""

    read: Callable[[], np.ndarray]
    """Returns the values in any shape, for engines that need all of them."""
    since: int = NEVER
    """The update whose values `delta` is to be applied to."""
    delta: bytes = b""
    encoding: Encoding = Encoding.DENSE
    """`DENSE` if there is no delta, or if it would not be much smaller than the piece."""
    scan: PieceScan = field(default_factory=PieceScan)


@dataclass
class _KeptPiece:
    values: np.ndarray
    update: int = NEVER
    """The update that they belong to."""
    piece: SentPiece | None = None
    """The piece of the update in progress."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class SentPieces:
    """Shared by the senders to all engines. Thread-safe."""

    def __init__(self, options: ScanOptions, max_bytes: int | None = None, on_device: bool = False) -> None:
        """`max_bytes`: what may be kept. The pieces beyond it are always sent whole. `on_device`: compare JAX arrays where they
        are."""
        self._options, self._max_bytes = options, math.inf if max_bytes is None else max_bytes
        self._kept: dict[SentKey, _KeptPiece] = {}
        self.update = NEVER
        """Number of the update in progress, counted by this object."""
        self._device = DeviceDeltas() if on_device else None
        self._prepared: dict[SentKey, DeviceDelta | None] = {}
        """Pieces of this update that were compared on the device."""
        self._lock = threading.Lock()
        self._host_bytes = self._device_bytes = 0
        """Memory in use."""
        self.num_encoded, self.encode_seconds = 0, 0.0
        """Bytes of whole pieces that were compared since the start, and the time that it took a thread."""

    @property
    def bytes_per_second(self) -> float:
        """Speed of comparing and encoding, by all threads."""
        return delta.NUM_THREADS * self.num_encoded / self.encode_seconds if self.encode_seconds else 0.0

    def begin(self) -> None:
        """Start an update."""
        self.end()
        self.update += 1
        self._device_bytes = 0

    def end(self) -> None:
        """Forget the deltas of the update, but not the values."""
        for kept in self._kept.values():
            kept.piece = None
        self._prepared = {}
        if self._device is not None:
            self._device.keep_only(self.update)

    def clear(self) -> None:
        self._kept, self._prepared = {}, {}
        self._host_bytes = self._device_bytes = 0
        if self._device is not None:
            self._device.keep_only(NEVER)

    def _fits(self, size: int) -> bool:
        return self._host_bytes + self._device_bytes + size <= self._max_bytes

    def prepare(self, find: Callable[[], Mapping[SentKey, DevicePiece]]) -> None:
        """Compare the pieces of an engine that devices hold, before they are asked for one by one."""
        if self._device is None:
            return
        with self._lock:
            new: dict[SentKey, DevicePiece] = {}
            for key, piece in find().items():
                size = delta.ITEMSIZE * volume(key[2])
                if key not in self._prepared and self._fits(size):
                    new[key] = piece
                    self._device_bytes += size
            if new:
                found = self._device.find(new, self.update)
                self._prepared |= {key: found.get(key) for key in new}

    def piece(self, key: SentKey, size: int, dtype: np.dtype, read: Callable[[], np.ndarray]) -> SentPiece:
        """Return a piece of the update, of `size` bytes in `dtype`, as the difference to what was sent before if that is kept.
        `read` returns its present values."""
        if key in self._prepared:
            if (found := self._prepared[key]) is None:
                return SentPiece(read)
            return SentPiece(read, found.since, found.delta, Encoding.DEVICE_DELTA, found.scan)
        with self._lock:
            kept = self._kept.get(key)
            if kept is None and dtype.itemsize == delta.ITEMSIZE and self._fits(size):
                self._host_bytes += size
                kept = self._kept[key] = _KeptPiece(np.empty(size // dtype.itemsize, dtype))
        if kept is None:
            return SentPiece(read)
        with kept.lock:
            if kept.piece is None:
                array = np.ascontiguousarray(read()).reshape(-1)
                if kept.update == NEVER:
                    np.copyto(kept.values, array, casting="same_kind")
                    kept.piece = SentPiece(lambda: kept.values)
                else:
                    kept.piece = self._encode(kept, array)
                kept.update = self.update
            return kept.piece

    def _encode(self, kept: _KeptPiece, array: np.ndarray) -> SentPiece:
        """Compare the kept values with `array`, and replace them."""
        start = time.perf_counter()
        scanner, encoded, num_encoded = PieceScanner(self._options), list[bytes](), 0
        old, is_worthwhile = delta.bits(kept.values), True
        for begin in range(0, array.size, delta.CHUNK):
            end = min(begin + delta.CHUNK, array.size)
            part = array[begin:end].astype(kept.values.dtype, copy=False)
            if is_worthwhile:
                scanner.update(part)
                encoded.append(delta.encode_chunk(old[begin:end], delta.bits(part)))
                num_encoded += len(encoded[-1])
                is_worthwhile = num_encoded <= delta.WORTHWHILE * delta.ITEMSIZE * end
            else:
                old[begin:end] = delta.bits(part)
        with self._lock:
            self.num_encoded += kept.values.nbytes
            self.encode_seconds += time.perf_counter() - start
        if not is_worthwhile:
            return SentPiece(lambda: kept.values)
        return SentPiece(lambda: kept.values, kept.update, b"".join(encoded), Encoding.DELTA, scanner.result)
