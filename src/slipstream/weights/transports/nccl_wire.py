"""What the two halves of `nccl` agree on: the link, the header of an update, and the buckets that follow it. Pure."""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.errors import TransferError
from slipstream.weights.plan import Move, Plan
from slipstream.weights.transports.base import fact, pack_link, unpack_link
from slipstream.weights.transports.nccl_pair import HOWS, ID_BYTES, How

BUCKET = 256 << 20
"""Bytes of a bucket that are staged, on either side."""

DEADLINE = 30.0
IN_FLIGHT = 2
"""Buckets: while one is sent, the next is packed."""

LARGE_BYTES, LARGE_SHARE = 1 << 20, 4
"""A move of so many bytes, or of this part of a bucket, is a message of its own."""
_MOST_BUCKETS = 16
"""A bucket with moves that nobody stages has up to this many times its size: each bucket is a kernel, and where two ranks share
a GPU, their kernels meet only when both have their turn."""

lost: list[object] = []
"""Memory that a kernel may still read or write, because its communicator could not be aborted. Never given back."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One group of messages: one for each of `alone`, then one for all of `together`, end to end. Indices of moves."""

    alone: tuple[int, ...]
    together: tuple[int, ...]


def buckets_of(sizes: Mapping[int, int], direct: Set[int], limit: int) -> list[Bucket]:
    """The moves that are sent, in groups. `sizes` are their bytes, `direct` are those that neither side stages (heeded for
    large ones only: many small messages are slower than one). What is staged of a bucket is at most `limit` bytes, unless
    it is a single move."""
    buckets: list[Bucket] = []
    alone: list[int] = []
    together: list[int] = []
    staged = total = 0
    for index in sorted(sizes):
        size = sizes[index]
        room = 0 if index in direct and is_large(size, limit) else size
        if (alone or together) and (staged + room > limit or total + size > _MOST_BUCKETS * limit):
            buckets.append(Bucket(tuple(alone), tuple(together)))
            alone, together, staged, total = [], [], 0, 0
        (alone if is_large(size, limit) else together).append(index)
        staged, total = staged + room, total + size
    return [*buckets, Bucket(tuple(alone), tuple(together))] if alone or together else buckets


def is_large(size: int, limit: int) -> bool:
    return size >= LARGE_BYTES or size * LARGE_SHARE >= limit


@dataclass(frozen=True)
class Header:
    """What goes before the buckets. Indices are those of moves in the pair's stream."""

    version: int
    limit: int
    sent: frozenset[int]
    direct: frozenset[int]

    _FIXED = struct.Struct("<8sqqI")
    _MAGIC = b"slipnccl"

    @classmethod
    def num_bytes(cls, num_moves: int) -> int:
        return cls._FIXED.size + 2 * -(-num_moves // 8)

    def pack(self, stream: Collection[int]) -> bytes:
        fixed = self._FIXED.pack(self._MAGIC, self.version, self.limit, len(stream))
        return fixed + pack_indices(self.sent, stream) + pack_indices(self.direct, stream)

    @classmethod
    def unpack(cls, data: bytes, stream: Collection[int], peer: str) -> Header:
        magic, version, limit, num_moves = cls._FIXED.unpack_from(data)
        if magic != cls._MAGIC or num_moves != len(stream) or limit <= 0:
            raise TransferError(
                f"nccl: the header from {peer} cannot be read ({num_moves} moves, {len(stream)} are planned); do both sides "
                "hold the same plan, and run the same Slipstream?"
            )
        half = -(-num_moves // 8)
        bits = data[cls._FIXED.size :]
        return cls(version, limit, unpack_indices(bits[:half], stream), unpack_indices(bits[half:], stream))


def pack_indices(chosen: Set[int], stream: Collection[int]) -> bytes:
    """A bit for each of `stream`."""
    return np.packbits(np.fromiter((i in chosen for i in sorted(stream)), bool, len(stream))).tobytes()


def unpack_indices(bits: bytes, stream: Collection[int]) -> frozenset[int]:
    marks = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(stream))
    return frozenset(index for index, mark in zip(sorted(stream), marks) if mark)


@dataclass(frozen=True)
class Link:
    """What the trainer has to know of the receiver."""

    unique_id: bytes
    nccl: str
    how: How
    plan: str
    dense: bytes
    """A bit for each move of the stream: whether its place in the image is one run of memory."""

    def pack(self) -> bytes:
        unique_id, dense = base64.b64encode(self.unique_id).decode(), base64.b64encode(self.dense).decode()
        return pack_link("nccl", id=unique_id, nccl=self.nccl, how=self.how, plan=self.plan, dense=dense)

    @classmethod
    def unpack(cls, data: bytes, num_moves: int) -> Link:
        facts = unpack_link(data)
        if facts["transport"] != "nccl":
            raise TransferError(f"a link of transport {facts['transport']!r} came where one of nccl was expected")
        unique_id, dense = _decoded(facts, "id", ID_BYTES), _decoded(facts, "dense", -(-num_moves // 8))
        how = fact(facts, "how", str)
        if how not in HOWS:
            raise TransferError(f"the nccl link's field 'how' should be one of {', '.join(HOWS)}, got {how!r}")
        return cls(unique_id, fact(facts, "nccl", str), how, fact(facts, "plan", str), dense)


def _decoded(facts: dict[str, Any], name: str, size: int) -> bytes:
    try:
        value = base64.b64decode(fact(facts, name, str), validate=True)
    except (binascii.Error, ValueError):
        value = b""
    if len(value) != size:
        raise TransferError(f"the nccl link's field {name!r} should be {size} bytes as base64, got {facts[name]!r:.40}")
    return value


def check_versions(ours: str, theirs: str, peer: str) -> None:
    if ours != theirs:
        raise TransferError(
            f"NCCL {ours} here, NCCL {theirs} at {peer}: NCCL refuses to connect different versions. Install the same in both "
            f"environments (for CUDA 13: pip install nvidia-nccl-cu13=={max(ours, theirs, key=_numbers)}), or preload one "
            "library into both (LD_PRELOAD=…/libnccl.so.2)"
        )


def _numbers(version: str) -> list[int]:
    return [int(part) if part.isdecimal() else 0 for part in version.split(".")]


def sizes_of(plan: Plan, moves: Mapping[int, Move], indices: Iterable[int]) -> dict[int, int]:
    return {index: plan.size_of(moves[index]) for index in indices}
