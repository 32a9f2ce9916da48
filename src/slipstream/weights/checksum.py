"""Checksums of pieces, a check that their values are finite, and the manifests that carry checksums from trainer to engine.

A manifest is a header (magic, version, number of entries) followed by entries of (index in the plan, checksum)."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import xxhash

from slipstream.errors import ChecksumMismatch, NonFiniteWeights
from slipstream.types import Box

CHUNK_BYTES = 2 << 20
"""Bytes copied and scanned at a time, so that they are still in the CPU cache when they are scanned. With smaller ones, threads
of several ranks wait for Python's lock: at 512 KB a sync takes a fifth longer."""

EXPONENT_BITS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000}
"""By dtype. All of them are set in infinities and NaNs, and in no other value."""

_HEADER = struct.Struct("<4sqI")
_ENTRY = struct.Struct("<IQ")
_MAGIC = b"SSM2"


def chunks(array: np.ndarray) -> list[tuple[Any, ...]]:
    """Return index expressions that split an array into consecutive blocks of rows of about `CHUNK_BYTES`."""
    if array.ndim == 0 or array.nbytes <= CHUNK_BYTES:
        return [(...,)]
    rows = max(1, CHUNK_BYTES * array.shape[0] // array.nbytes)
    return [(slice(start, start + rows),) for start in range(0, array.shape[0], rows)]


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """What a sender finds out about the bytes that pass through it."""

    checksums: bool = True
    finite: bool = True
    """Count the values that are not finite."""


class PieceScan(NamedTuple):
    """What was found out about a piece, in the engine's dtype."""

    checksum: int = 0
    num_nonfinite: int = 0


class PieceScanner:
    """Scans a piece part by part, in row-major order."""

    def __init__(self, options: ScanOptions) -> None:
        self._options, self._digest, self._num_nonfinite = options, xxhash.xxh3_64(), 0

    def update(self, array: np.ndarray) -> None:
        if self._options.checksums or self._options.finite:
            array = np.ascontiguousarray(array).reshape(-1)
        if self._options.checksums:
            self._digest.update(array.view(np.uint8).data)
        if self._options.finite:
            self._num_nonfinite += count_nonfinite(array)

    @property
    def result(self) -> PieceScan:
        return PieceScan(self._digest.intdigest() if self._options.checksums else 0, self._num_nonfinite)


def copy_and_scan(target: np.ndarray, source: np.ndarray, options: ScanOptions) -> PieceScan:
    """Copy `source` into `target`, cast to its dtype, and scan the result."""
    scanner = PieceScanner(options)
    for part in chunks(target):
        np.copyto(target[part], source[part], casting="same_kind")
        scanner.update(target[part])
    return scanner.result


def scan(array: np.ndarray, options: ScanOptions, dtype: np.dtype | None = None) -> PieceScan:
    """Scan an array, cast to `dtype` if given."""
    scanner = PieceScanner(options)
    for part in chunks(array):
        scanner.update(array[part] if dtype is None else array[part].astype(dtype, copy=False))
    return scanner.result


def checksum(array: np.ndarray, dtype: np.dtype | None = None) -> int:
    """Return the 64-bit xxh3 of an array's bytes in row-major order, whatever its strides, cast to `dtype` if given."""
    return scan(array, ScanOptions(finite=False), dtype).checksum


def count_nonfinite(array: np.ndarray) -> int:
    """Count the infinities and NaNs of a one-dimensional, contiguous array.

    The usual case, none, is found out without a temporary array. If there is one, the sum is not finite; numpy adds 16-bit
    floats slowly, and among their bit patterns the others are smaller."""
    if array.itemsize > 2:
        if math.isfinite(np.einsum("i->", array)):  # twice as fast as `array.sum()`
            return 0
    elif not array.size or (
        array.view(np.int16).max() < (exponent := _exponent_bits(array.dtype))
        and array.view(np.uint16).max() < exponent | 1 << 15
    ):
        return 0
    bits, exponent = array.view(f"i{array.itemsize}"), _exponent_bits(array.dtype)
    return int(((bits & exponent) == exponent).sum())


@cache
def _exponent_bits(dtype: np.dtype) -> int:
    return EXPONENT_BITS[dtype.name]  # numpy takes longer to name a dtype than to scan a small tensor


def check_finite(counts: Mapping[tuple[str, Box], int], shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    """Raise `NonFiniteWeights` if values that are not finite were counted. `counts` is by tensor and box: several ranks may
    hold the same box. `shapes` are those of the whole tensors."""
    by_tensor = Counter[str]()
    for (tensor, _), count in counts.items():
        by_tensor[tensor] += count
    found = [
        f"{name} ({count:,} of {math.prod(shapes[name]):,} values)"
        for name, count in sorted(by_tensor.items())
        if count
    ]
    if found:
        more = f" and {len(found) - 8} more tensors" if len(found) > 8 else ""
        raise NonFiniteWeights(
            f"NaN or infinity in {dtype}, the engine's dtype: {', '.join(found[:8])}{more}. No engine uses this version. Look "
            "for the training step that made them, or for values beyond the range of the dtype; check_finite=False syncs "
            "them anyway"
        )


def pack_manifest(version: int, checksums: Mapping[int, int]) -> bytes:
    """Pack the checksums of the pieces that were sent, by index in the plan, together with their version."""
    return add_manifest_header(version, pack_entries(checksums))


def pack_entries(checksums: Mapping[int, int]) -> bytes:
    """Pack the entries of a manifest, without its header."""
    return b"".join(_ENTRY.pack(index, value) for index, value in checksums.items())


def add_manifest_header(version: int, entries: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, version, len(entries) // _ENTRY.size) + entries


def strip_manifest_header(data: bytes, version: int) -> bytes:
    """Return the entries of a manifest. Raise `ChecksumMismatch` if it belongs to another version."""
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        raise ChecksumMismatch(f"the manifest of version {version} is malformed ({len(data)} bytes)")
    _, got_version, got_count = _HEADER.unpack_from(data)
    if got_version != version or len(data) != _HEADER.size + _ENTRY.size * got_count:
        raise ChecksumMismatch(
            f"expected a manifest of version {version}, got one of version {got_version} with {got_count} pieces"
        )
    return data[_HEADER.size :]


def unpack_manifest(data: bytes, version: int, count: int) -> dict[int, int]:
    """Return the checksums by index. Raise `ChecksumMismatch` if the manifest belongs to another version, repeats a
    piece, or names one beyond the plan's `count` moves."""
    entries = strip_manifest_header(data, version)
    checksums = dict(_ENTRY.iter_unpack(entries))
    if len(checksums) * _ENTRY.size != len(entries) or max(checksums, default=-1) >= count:
        raise ChecksumMismatch(
            f"the manifest of version {version} repeats a piece or names one that is not among the plan's {count}"
        )
    return checksums
