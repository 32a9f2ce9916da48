"""Wire format of the `nccl` transport: the link, the header of an update, and the buckets that follow it. Pure.

    update = header, bucket, bucket, …
    header = magic, version, bucket limit, number of moves, whether there are checksums, seat, a bit per move that is sent, a
             bit per move that is direct, a checksum per move
    seat   = rank, size and id of the communicator that the buckets are broadcast over; zeros if they follow the header
    bucket = one NCCL group: one message per large move, then one message with all small moves end to end

Both sides derive the buckets from the header and the plan (`buckets_of`). The sender decides whether a message is sent
from the array itself or from a packed copy; the receiver decides whether it goes directly into the image or through a
buffer."""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.errors import TransferError
from slipstream.weights.plan import Move, Plan
from slipstream.weights.transports.contract import link_field, pack_link, unpack_link
from slipstream.weights.transports.nccl.communicator import PRIMITIVES, UNIQUE_ID_BYTES, Primitive

BUCKET_BYTES = 256 << 20
"""Maximum number of bytes of a bucket that either side stages."""

DEADLINE_SECONDS = 30.0
MAX_IN_FLIGHT = 2
"""Number of buckets: while one is sent, the next is packed."""

LARGE_BYTES, LARGE_SHARE = 1 << 20, 4
"""A move of at least `LARGE_BYTES`, or of 1 / `LARGE_SHARE` of a bucket, is a separate message."""
_MAX_DIRECT_FACTOR = 16
"""A bucket of moves that neither side stages may have this many times the limit. Each bucket is a kernel, and if two
ranks share a GPU, their kernels can only exchange data while both processes have a time slice."""

leaked_memory: list[object] = []
"""Memory that a kernel may still access because its communicator could not be aborted. Kept forever."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One group of messages, as indices of moves: one message for each of `alone`, then one for all of `together`."""

    alone: tuple[int, ...]
    together: tuple[int, ...]


def buckets_of(sizes: Mapping[int, int], direct: Set[int], limit: int) -> list[Bucket]:
    """Group the moves of these `sizes` in bytes. `direct` moves are staged by neither side, which matters only for
    large ones: many small messages are slower than one. A bucket stages at most `limit` bytes, or a single move."""
    buckets: list[Bucket] = []
    alone: list[int] = []
    together: list[int] = []
    staged = total = 0
    for index in sorted(sizes):
        size = sizes[index]
        staged_size = 0 if index in direct and is_large(size, limit) else size
        if (alone or together) and (staged + staged_size > limit or total + size > _MAX_DIRECT_FACTOR * limit):
            buckets.append(Bucket(tuple(alone), tuple(together)))
            alone, together, staged, total = [], [], 0, 0
        (alone if is_large(size, limit) else together).append(index)
        staged, total = staged + staged_size, total + size
    return [*buckets, Bucket(tuple(alone), tuple(together))] if alone or together else buckets


def is_large(size: int, limit: int) -> bool:
    return size >= LARGE_BYTES or size * LARGE_SHARE >= limit


@dataclass(frozen=True)
class Seat:
    """A receiver's place in a communicator over which the trainer rank, which is its rank 0, broadcasts to several replicas."""

    unique_id: bytes
    rank: int
    size: int


@dataclass(frozen=True)
class UpdateHeader:
    """Precedes the buckets. Indices are those of moves between the two ranks (`Plan.stream`)."""

    version: int
    limit: int
    sent: frozenset[int]
    direct: frozenset[int]
    checksums: Mapping[int, int] = field(default_factory=dict)
    """Checksums of the moves that are sent (`device_checksum`); empty if they are not to be compared."""
    seat: Seat | None = None
    """Where the buckets come; None if they follow the header."""

    _FIXED = struct.Struct(f"<8sqqI?II{UNIQUE_ID_BYTES}s")
    _MAGIC = b"slipncc3"

    @classmethod
    def num_bytes(cls, num_moves: int) -> int:
        return cls._FIXED.size + 2 * -(-num_moves // 8) + 4 * num_moves

    def pack(self, stream: Collection[int]) -> bytes:
        seat = self.seat or Seat(b"", 0, 0)
        place = seat.rank, seat.size, seat.unique_id
        fixed = self._FIXED.pack(self._MAGIC, self.version, self.limit, len(stream), bool(self.checksums), *place)
        checksums = np.array([self.checksums.get(index, 0) for index in sorted(stream)], "<u4")
        return fixed + pack_indices(self.sent, stream) + pack_indices(self.direct, stream) + checksums.tobytes()

    @classmethod
    def unpack(cls, data: bytes, stream: Collection[int], peer: str) -> UpdateHeader:
        magic, version, limit, num_moves, has_checksums, rank, size, unique_id = cls._FIXED.unpack_from(data)
        if magic != cls._MAGIC or num_moves != len(stream) or limit <= 0:
            raise TransferError(
                f"nccl: the header from {peer} is malformed ({num_moves} moves, expected {len(stream)}); do both sides have "
                "the same plan and the same version of Slipstream?"
            )
        half = -(-num_moves // 8)
        bits = data[cls._FIXED.size :]
        sent, direct = unpack_indices(bits[:half], stream), unpack_indices(bits[half : 2 * half], stream)
        values = dict(zip(sorted(stream), np.frombuffer(bits[2 * half :], "<u4").tolist()))
        checksums = {index: values[index] for index in sent} if has_checksums else {}
        return cls(version, limit, sent, direct, checksums, Seat(unique_id, rank, size) if size else None)


def pack_indices(chosen: Set[int], stream: Collection[int]) -> bytes:
    """Pack a set of indices as one bit per index of `stream`."""
    return np.packbits(np.fromiter((i in chosen for i in sorted(stream)), bool, len(stream))).tobytes()


def unpack_indices(bits: bytes, stream: Collection[int]) -> frozenset[int]:
    is_chosen = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(stream))
    return frozenset(index for index, chosen in zip(sorted(stream), is_chosen) if chosen)


@dataclass(frozen=True)
class NcclLink:
    """What the trainer needs to know about the receiver."""

    unique_id: bytes
    nccl: str
    """The receiver's NCCL version."""
    primitive: Primitive
    plan: str
    """Fingerprint of the plan."""
    contiguous: bytes
    """One bit per move: whether its place in the image is contiguous."""
    device: str
    """Identifies the receiver's GPU. NCCL wants the ranks of a communicator on different ones."""

    def pack(self) -> bytes:
        return pack_link(
            "nccl",
            id=base64.b64encode(self.unique_id).decode(),
            nccl=self.nccl,
            primitive=self.primitive,
            plan=self.plan,
            contiguous=base64.b64encode(self.contiguous).decode(),
            device=self.device,
        )

    @classmethod
    def unpack(cls, data: bytes, num_moves: int) -> NcclLink:
        fields = unpack_link(data)
        if fields["transport"] != "nccl":
            raise TransferError(f"expected an nccl link, got one of transport {fields['transport']!r}")
        primitive = link_field(fields, "primitive", str)
        if primitive not in PRIMITIVES:
            raise TransferError(
                f"the nccl link's field 'primitive' should be one of {', '.join(PRIMITIVES)}, got {primitive!r}"
            )
        return cls(
            _decoded(fields, "id", UNIQUE_ID_BYTES),
            link_field(fields, "nccl", str),
            primitive,
            link_field(fields, "plan", str),
            _decoded(fields, "contiguous", -(-num_moves // 8)),
            link_field(fields, "device", str),
        )


def _decoded(fields: dict[str, Any], name: str, size: int) -> bytes:
    try:
        value = base64.b64decode(link_field(fields, name, str), validate=True)
    except (binascii.Error, ValueError):
        value = b""
    if len(value) != size:
        raise TransferError(
            f"the nccl link's field {name!r} should be {size} bytes as base64, got {fields[name]!r:.40}"
        )
    return value


def sizes_of(plan: Plan, moves: Mapping[int, Move], indices: Iterable[int]) -> dict[int, int]:
    return {index: plan.size_of(moves[index]) for index in indices}
