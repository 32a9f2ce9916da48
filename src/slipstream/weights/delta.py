"""Lossless deltas: what changed in a piece of 16-bit values since the version that the receiver holds.

    delta = chunk, chunk, …       each of `CHUNK` elements, the last one of what is left
    chunk = count, length, compressed (gaps, low bytes, high bytes)

An entry is an element whose bits changed, or the last element of a block of `BLOCK`, so that the gap from one entry to the next
fits in a byte. Its value is the difference of the bit patterns, zigzag coded: most changes are to a neighbouring value, and
compress well. `apply` returns the checksum of the result: a delta that was applied to other values than it was made from, or
that was damaged, does not go unnoticed."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import zstandard

from slipstream.errors import TransferError
from slipstream.weights.checksum import PieceScanner, ScanOptions
from slipstream.weights.device_checksum import host_checksum

BLOCK = 256
CHUNK = 1 << 20
"""Elements that are compared and coded at a time; a multiple of `BLOCK`."""
ITEMSIZE = 2
LANE_SHIFT = 2
LANE = 1 << LANE_SHIFT
"""Elements in 64 bits."""
BYTES_PER_ENTRY = 3
WORTHWHILE = 0.5
"""A delta larger than this part of the piece is not sent. Coding it stops early."""
LEVEL = 1
NUM_THREADS = min(8, os.cpu_count() or 1)
"""Pieces that are encoded, or applied, at a time. numpy and zstd release Python's lock."""

_CHUNK = struct.Struct("<II")


class DeltaError(TransferError):
    """A delta is malformed, or there is nothing to apply it to."""


class Encoding(IntEnum):
    """How a piece travels."""

    DENSE = 0
    DELTA = 1
    """The checksum of the result is an xxh3."""
    DEVICE_DELTA = 2
    """Made on the trainer's device: the checksum of the result is that of `device_checksum`."""


def is_faster(bytes_per_second: float, codec_bytes_per_second: float, share: float) -> bool:
    """Whether deltas pay off over a link of this speed, if they are made at `codec_bytes_per_second` of whole weights and are
    expected to have `share` of their size. Assumes that nothing overlaps, and asks for a gain of a fifth."""
    dense, delta = 1 / bytes_per_second, share / bytes_per_second + 1 / codec_bytes_per_second
    return delta < 0.8 * dense


def bits(array: np.ndarray) -> np.ndarray:
    """Return a contiguous array of 16-bit values as its bit patterns in one dimension."""
    return array.reshape(-1).view(np.uint16)


def encode_chunk(base: np.ndarray, new: np.ndarray) -> bytes:
    """Encode the difference of two arrays of bit patterns, and make `base` equal to `new`."""
    difference = new - base
    np.copyto(base, new)
    if missing := -base.size % LANE:
        planes = _entries(np.pad(difference, (0, missing)))
        is_beyond = (base.size + missing) % BLOCK == 0  # the last entry
        return pack_chunk(planes[:, :-1] if is_beyond else planes)
    return pack_chunk(_entries(difference))


def _entries(difference: np.ndarray) -> np.ndarray:
    """Return gaps, low and high bytes of the entries. Looks at `LANE` elements at a time, and into those that changed."""
    lanes = difference.view(np.uint64)
    is_changed = lanes != 0
    is_changed[BLOCK // LANE - 1 :: BLOCK // LANE] = True
    changed = np.flatnonzero(is_changed)
    values = lanes.take(changed).view(np.uint16)
    is_entry = values != 0
    starts = changed.astype(np.uint8) * np.uint8(LANE)  # within the block
    is_entry[LANE - 1 :: LANE] |= starts == BLOCK - LANE
    entries = np.flatnonzero(is_entry)  # with indices, `take` is four times as fast as a mask
    positions = starts.take(entries >> LANE_SHIFT) + (entries.astype(np.uint8) & np.uint8(LANE - 1))
    signed = values.take(entries).view(np.int16)
    planes = np.empty((BYTES_PER_ENTRY, len(positions)), np.uint8)
    planes[0, :1], planes[0, 1:] = positions[:1], positions[1:] - positions[:-1] - np.uint8(1)
    zigzag = ((signed << 1) ^ (signed >> 15)).view(np.uint16)
    planes[1], planes[2] = zigzag, zigzag >> 8
    return planes


def pack_chunk(planes: np.ndarray) -> bytes:
    """Compress the entries of a chunk: gaps, low and high bytes of the differences."""
    data = _compressor().compress(planes.tobytes())
    return _CHUNK.pack(planes.shape[1], len(data)) + data


_of_thread = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    """One per thread: making one takes as long as compressing a small chunk."""
    if not hasattr(_of_thread, "compressor"):
        _of_thread.compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    return _of_thread.compressor


def apply(delta: bytes | bytearray, base: np.ndarray, target: np.ndarray, encoding: Encoding) -> int:
    """Write `base` with the changes to `target`; return the checksum of the result. Raise `DeltaError` if that is impossible.

    Both arrays have the shape of the piece, with any strides. Nothing else is written to, whatever the bytes are."""
    result = target if target.flags.c_contiguous else np.empty(target.shape, target.dtype)
    old, new = bits(np.ascontiguousarray(base)), bits(result)
    scanner = PieceScanner(ScanOptions(checksums=encoding == Encoding.DELTA, finite=False))
    parts = _chunks(memoryview(delta))
    for start in range(0, new.size, CHUNK):
        part = new[start : start + CHUNK]
        np.copyto(part, old[start : start + CHUNK])
        _apply_chunk(part, *next(parts, (0, memoryview(b""))))
        scanner.update(part)
    if next(parts, None) is not None:
        raise DeltaError(f"the delta has more chunks than the piece, which has {new.size} elements")
    if result is not target:
        target[...] = result
    return scanner.result.checksum if encoding == Encoding.DELTA else host_checksum(new)


def _chunks(delta: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield count and compressed entries of each chunk."""
    while delta:
        if len(delta) < _CHUNK.size:
            raise DeltaError(f"the delta ends with {len(delta)} bytes that are no chunk")
        count, length = _CHUNK.unpack_from(delta)
        data, delta = delta[_CHUNK.size : _CHUNK.size + length], delta[_CHUNK.size + length :]
        if len(data) != length:
            raise DeltaError(f"the delta ends after {len(data)} of {length} bytes of a chunk")
        yield count, data


def _apply_chunk(part: np.ndarray, count: int, data: memoryview) -> None:
    """Add the differences to `part`."""
    if not part.size // BLOCK <= count <= part.size:
        raise DeltaError(f"a chunk of {part.size} elements cannot have {count} entries")
    size = BYTES_PER_ENTRY * count
    try:
        with zstandard.ZstdDecompressor(max_window_size=CHUNK * 4).stream_reader(data) as reader:
            planes = np.frombuffer(reader.read(size + 1), np.uint8)
    except zstandard.ZstdError as error:
        raise DeltaError(f"a chunk of the delta cannot be decompressed: {error}") from None
    if len(planes) != size:
        raise DeltaError(f"a chunk of the delta has {len(planes)} bytes for {count} entries")
    gaps, low, high = planes.reshape(BYTES_PER_ENTRY, count)
    entries = np.cumsum(gaps, dtype=np.int64)
    entries += np.arange(count)
    if count and entries[-1] >= part.size:
        raise DeltaError(f"the delta changes element {entries[-1]} of a chunk of {part.size}")
    zigzag = low | high.astype(np.uint16) << 8
    part[entries] += (zigzag >> 1) ^ -(zigzag & 1)
