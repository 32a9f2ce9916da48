"""Checksums, and the manifest that carries them: the sender's word on what the receiver must find."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from slipstream.errors import ChecksumMismatch

CHUNK_BYTES = 512 << 10
"""Copied and hashed at a time, so that the bytes are still in the cache when they are hashed."""

_HEAD = struct.Struct("<4sqI")
_ENTRY = struct.Struct("<IQ")
_MAGIC = b"SSM2"


def chunks(array: np.ndarray) -> list[tuple[Any, ...]]:
    """Index expressions that cut an array into runs of rows of about `CHUNK_BYTES`, in order."""
    if array.ndim == 0 or array.nbytes <= CHUNK_BYTES:
        return [(...,)]
    rows = max(1, CHUNK_BYTES * array.shape[0] // array.nbytes)
    return [(slice(start, start + rows),) for start in range(0, array.shape[0], rows)]


def checksum(array: np.ndarray, dtype: np.dtype | None = None) -> int:
    """xxh3, 64 bits, of an array's bytes in row order, cast to `dtype` if given; an array that is not contiguous is hashed as
    its copy would be."""
    digest = xxhash.xxh3_64()
    for part in chunks(array):
        digest.update(_bytes(array[part] if dtype is None else array[part].astype(dtype, copy=False)))
    return digest.intdigest()


def copy_and_checksum(target: np.ndarray, source: np.ndarray, hashed: bool = True) -> int:
    """Writes `source` into `target`, cast to its dtype, and returns the checksum of what `target` then holds."""
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
    """Checksums of the pieces that were sent, by their index in the plan, bound to the version they belong to."""
    return with_version(version, pack_rows(checksums))


def pack_rows(checksums: Mapping[int, int]) -> bytes:
    """A manifest without its version."""
    return b"".join(_ENTRY.pack(index, value) for index, value in checksums.items())


def with_version(version: int, rows: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, version, len(rows) // _ENTRY.size) + rows


def without_version(data: bytes, version: int) -> bytes:
    """The rows of a manifest. Raises `ChecksumMismatch` when it is of another version."""
    if len(data) < _HEAD.size or data[:4] != _MAGIC:
        raise ChecksumMismatch(f"the manifest of version {version} cannot be read ({len(data)} bytes)")
    _, got_version, got_count = _HEAD.unpack_from(data)
    if got_version != version or len(data) != _HEAD.size + _ENTRY.size * got_count:
        raise ChecksumMismatch(
            f"a manifest of {got_count} pieces for version {got_version} came; expected version {version}"
        )
    return data[_HEAD.size :]


def unpack_manifest(data: bytes, version: int, count: int) -> dict[int, int]:
    """Raises `ChecksumMismatch` when the manifest is of another version, or speaks of pieces that the plan (of `count`
    moves) does not have."""
    rows = without_version(data, version)
    found = dict(_ENTRY.iter_unpack(rows))
    if len(found) * _ENTRY.size != len(rows) or max(found, default=-1) >= count:
        raise ChecksumMismatch(
            f"the manifest of version {version} names pieces twice, or some that the plan does not have"
        )
    return found
