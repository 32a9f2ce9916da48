"""Checksums, and the manifest that carries them: the sender's word on what the receiver must find."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from slipstream.errors import ChecksumMismatch

_HEAD = struct.Struct("<4sqI")
_MAGIC = b"SSM1"


def checksum(data: np.ndarray) -> int:
    """xxh3, 64 bits, of a contiguous array's bytes."""
    return xxhash.xxh3_64_intdigest(data.reshape(-1).view(np.uint8).data)


def pack_manifest(version: int, checksums: Sequence[int]) -> bytes:
    """Checksums of a stream's pieces in order, bound to the version they belong to."""
    return _HEAD.pack(_MAGIC, version, len(checksums)) + struct.pack(f"<{len(checksums)}Q", *checksums)


def unpack_manifest(data: bytes, version: int, count: int) -> tuple[int, ...]:
    """Raises `ChecksumMismatch` when the manifest is of another version or another plan."""
    if len(data) < _HEAD.size or data[:4] != _MAGIC:
        raise ChecksumMismatch(f"the manifest of version {version} cannot be read ({len(data)} bytes)")
    _, got_version, got_count = _HEAD.unpack_from(data)
    if (got_version, got_count) != (version, count) or len(data) != _HEAD.size + 8 * count:
        raise ChecksumMismatch(
            f"the manifest is for version {got_version} with {got_count} pieces; expected version {version} with {count}"
        )
    return struct.unpack_from(f"<{count}Q", data, _HEAD.size)
