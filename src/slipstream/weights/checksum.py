"""Checksums of pieces, and the manifests that carry them from trainer to engine.

A manifest is a header (magic, version, number of entries) followed by entries of (index in the plan, checksum)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from slipstream.errors import ChecksumMismatch

CHUNK_BYTES = 512 << 10
"""Bytes copied and hashed at a time, so that they are still in the CPU cache when they are hashed."""

_HEADER = struct.Struct("<4sqI")
_ENTRY = struct.Struct("<IQ")
_MAGIC = b"SSM2"


def chunks(array: np.ndarray) -> list[tuple[Any, ...]]:
    """Return index expressions that split an array into consecutive blocks of rows of about `CHUNK_BYTES`."""
    if array.ndim == 0 or array.nbytes <= CHUNK_BYTES:
        return [(...,)]
    rows = max(1, CHUNK_BYTES * array.shape[0] // array.nbytes)
    return [(slice(start, start + rows),) for start in range(0, array.shape[0], rows)]


def checksum(array: np.ndarray, dtype: np.dtype | None = None) -> int:
    """Return the 64-bit xxh3 of an array's bytes in row-major order, whatever its strides, cast to `dtype` if given."""
    digest = xxhash.xxh3_64()
    for part in chunks(array):
        digest.update(_bytes(array[part] if dtype is None else array[part].astype(dtype, copy=False)))
    return digest.intdigest()


def copy_and_checksum(target: np.ndarray, source: np.ndarray, hashed: bool = True) -> int:
    """Copy `source` into `target`, cast to its dtype, and return the checksum of the result (0 unless `hashed`)."""
    if not hashed:
        np.copyto(target, source, casting="same_kind")
        return 0
    digest = xxhash.xxh3_64()
    for part in chunks(target):
        np.copyto(target[part], source[part], casting="same_kind")
        digest.update(_bytes(target[part]))
    return digest.intdigest()


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


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
