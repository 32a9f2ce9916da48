"""Deltas of JAX arrays, found and coded on the device that holds them (`delta="device"`).

One program per device casts the pieces, compares them with what was sent before, which it keeps there, and gathers the entries
of `weights/delta.py`. Shapes are static: entries go to a buffer for one in `ENTRIES_SHARE` elements; an update with more is
sent whole. The host fetches the used part and compresses it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from slipstream.types import Box
from slipstream.weights import delta
from slipstream.weights.checksum import EXPONENT_BITS, PieceScan
from slipstream.weights.delta import BLOCK, CHUNK
from slipstream.weights.device_checksum import jax_checksum
from slipstream.weights.rank_image import align_up, numpy_dtype
from slipstream.weights.transports.device import DevicePiece

SentKey: TypeAlias = tuple[str, str, Box]
"""The engine's dtype, the tensor and the box."""

NEVER = 0
"""The number of no update."""
MAX_GROUP = 1 << 28
"""Elements that are compared as one array."""
ENTRIES_SHARE = 8
NUM_FETCH_SIZES = 16
"""The used part of a buffer is fetched in this many sizes, each of which is compiled once."""
WORD = 32


@dataclass
class _PieceGroup:
    """Pieces that lie one after the other in one array of bit patterns, each from a multiple of `BLOCK` on."""

    keys: list[SentKey] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    length: int = 0

    @property
    def capacity(self) -> int:
        return align_up(max(self.length // ENTRIES_SHARE, 2 * self.length // BLOCK), NUM_FETCH_SIZES)

    def chunk_blocks(self) -> np.ndarray:
        """Return the first block of each chunk of each piece."""
        places = zip(self.starts, self.sizes)
        return np.array([(start + skip) // BLOCK for start, size in places for skip in range(0, size, CHUNK)], np.int32)


class DeviceDelta(NamedTuple):
    since: int
    """The update whose values it is to be applied to."""
    delta: bytes
    scan: PieceScan
    """With the checksum of `device_checksum`."""


@dataclass
class _KeptSet:
    """What is kept of the pieces that are sent together from one device."""

    groups: list[_PieceGroup]
    program: Any
    bases: list[Any]
    update: int = NEVER


class DeviceDeltas:
    """Keeps the values of sets of pieces. For a set that is new it starts again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, tuple[SentKey, ...]], _KeptSet] = {}

    def keep_only(self, update: int) -> None:
        """Forget the values of sets that were not part of an update."""
        self._kept = {key: kept for key, kept in self._kept.items() if kept.update == update}

    def find(self, pieces: Mapping[SentKey, DevicePiece], update: int) -> dict[SentKey, DeviceDelta]:
        """Return the deltas of pieces. Those that are left out have to be sent whole."""
        by_device: dict[Any, list[SentKey]] = defaultdict(list)
        for key, piece in pieces.items():
            by_device[next(iter(piece.array.devices()))].append(key)
        running = [self._start(device, keys, pieces, update) for device, keys in by_device.items()]
        return {key: piece for started in running for key, piece in self._fetch(*started).items()}

    def _start(
        self, device: Any, keys: list[SentKey], pieces: Mapping[SentKey, DevicePiece], update: int
    ) -> tuple[_KeptSet, int, list[Any]]:
        """Start the program of a device. Return what it keeps, the update whose values it compares with, and the results."""
        import jax.numpy as jnp

        if (kept := self._kept.get((device, tuple(keys)))) is None:
            groups = _groups(keys, pieces)
            zeros = [jnp.zeros(group.length, jnp.uint16, device=device) for group in groups]
            kept = self._kept[device, tuple(keys)] = _KeptSet(groups, _compiled(groups, pieces), zeros)
        since, kept.update = kept.update, update
        arrays = [[pieces[key].array for key in group.keys] for group in kept.groups]
        kept.bases, found = kept.program(arrays, kept.bases)
        return kept, since, found

    def _fetch(self, kept: _KeptSet, since: int, found: Sequence[Any]) -> dict[SentKey, DeviceDelta]:
        if since == NEVER:
            return {}
        result: dict[SentKey, DeviceDelta] = {}
        for group, (planes, firsts, scans) in zip(kept.groups, found):
            bounds = np.asarray(firsts)
            if bounds[-1] > group.capacity:
                continue
            step = group.capacity // NUM_FETCH_SIZES
            host = np.asarray(_head(planes, -(-int(bounds[-1]) // step) * step))
            result |= _encoded(group, host, bounds, np.asarray(scans), since)
        return result


def _encoded(
    group: _PieceGroup, planes: np.ndarray, bounds: np.ndarray, scans: np.ndarray, since: int
) -> dict[SentKey, DeviceDelta]:
    """Compress the entries of each piece. `bounds` are the first entries of its chunks."""
    result, chunk = dict[SentKey, DeviceDelta](), 0
    for key, size, row in zip(group.keys, group.sizes, scans.tolist()):
        encoded = []
        for begin in range(0, size, CHUNK):
            is_cut = begin + CHUNK > size and size % BLOCK  # the last entry is of a block that the piece only begins
            entries = planes[:, bounds[chunk] : bounds[chunk + 1] - bool(is_cut)]
            encoded.append(delta.pack_chunk(entries))
            chunk += 1
        if sum(map(len, encoded)) <= delta.WORTHWHILE * delta.ITEMSIZE * size:
            result[key] = DeviceDelta(since, b"".join(encoded), PieceScan(*row))
    return result


def _groups(keys: Sequence[SentKey], pieces: Mapping[SentKey, DevicePiece]) -> list[_PieceGroup]:
    import jax

    groups = [_PieceGroup()]
    for key in keys:
        size = jax.eval_shape(pieces[key].slice, pieces[key].array).size
        if groups[-1].length + align_up(size, BLOCK) > MAX_GROUP and groups[-1].keys:
            groups.append(_PieceGroup())
        group = groups[-1]
        group.keys.append(key)
        group.starts.append(group.length)
        group.sizes.append(size)
        group.length += align_up(size, BLOCK)
    return groups


def _compiled(groups: Sequence[_PieceGroup], pieces: Mapping[SentKey, DevicePiece]) -> Any:
    """Return the program. It takes arrays and kept values by group, and returns the new kept values and, by group, entries,
    first entries of the chunks and scans."""
    import jax

    cuts = [[pieces[key].slice for key in group.keys] for group in groups]

    def program(arrays: list[list[jax.Array]], bases: list[jax.Array]) -> tuple[list[jax.Array], list[Any]]:
        kept, found = [], []
        for group, own, cut, base in zip(groups, arrays, cuts, bases):
            dtypes = [numpy_dtype(dtype) for dtype, _, _ in group.keys]
            values = [function(array).astype(dtype) for function, array, dtype in zip(cut, own, dtypes)]
            new = _one_array(group, values)
            kept.append(new)
            found.append((*_entries(group, base, new), _scans(values)))
        return kept, found

    return jax.jit(program, donate_argnums=1)


def _one_array(group: _PieceGroup, values: Sequence[Any]) -> Any:
    """Return the bit patterns of a group."""
    import jax
    import jax.numpy as jnp

    parts = []
    for value, size in zip(values, group.sizes):
        bits = jax.lax.bitcast_convert_type(value, jnp.uint16).reshape(-1)
        parts.append(jnp.pad(bits, (0, align_up(size, BLOCK) - size)))
    return jnp.concatenate(parts)


def _entries(group: _PieceGroup, base: Any, new: Any) -> tuple[Any, Any]:
    """Return gaps, low and high bytes of the entries, and the first entry of each chunk; at its end the number of entries.

    An entry goes to the place that the entries before it leave: those of earlier blocks, of earlier words of its block, and of
    earlier bits of its word."""
    import jax
    import jax.numpy as jnp

    capacity, length = group.capacity, group.length
    index = jax.lax.iota(jnp.uint32, length)
    position = index % BLOCK
    is_entry = (base != new) | (position == BLOCK - 1)
    bit = jax.lax.broadcasted_iota(jnp.uint32, (length // BLOCK, BLOCK // WORD, WORD), 2)
    words = jnp.sum(is_entry.reshape(bit.shape).astype(jnp.uint32) << bit, axis=2, dtype=jnp.uint32)
    counts = jax.lax.population_count(words).astype(jnp.int32)
    by_block = counts.sum(1)
    ends = jnp.cumsum(by_block)
    before_word = (ends - by_block)[:, None] + jnp.cumsum(counts, axis=1) - counts
    before_bit = jax.lax.population_count(words[:, :, None] & ((jnp.uint32(1) << bit) - 1)).astype(jnp.int32)
    place = (before_word[:, :, None] + before_bit).reshape(-1)
    place = jnp.where(is_entry, place, capacity + index.astype(jnp.int32))  # the others are dropped
    difference = jax.lax.bitcast_convert_type(new - base, jnp.int16)
    zigzag = jax.lax.bitcast_convert_type((difference << 1) ^ (difference >> 15), jnp.uint16)
    packed = (
        jnp.zeros(capacity, jnp.uint32)
        .at[place]
        .set(position << 16 | zigzag.astype(jnp.uint32), mode="drop", unique_indices=True)
    )
    positions = (packed >> 16).astype(jnp.uint8)
    before = jnp.concatenate([jnp.full(1, BLOCK - 1, jnp.uint8), positions[:-1]])
    planes = jnp.stack([positions - before - jnp.uint8(1), packed.astype(jnp.uint8), (packed >> 8).astype(jnp.uint8)])
    return planes, jnp.append((ends - by_block)[group.chunk_blocks()], ends[-1])


def _scans(values: Sequence[Any]) -> Any:
    """Return checksum and number of values that are not finite, of each piece."""
    import jax
    import jax.numpy as jnp

    rows = []
    for value in values:
        exponent = np.uint16(EXPONENT_BITS[value.dtype.name])
        bits = jax.lax.bitcast_convert_type(value, jnp.uint16)
        num_nonfinite = jnp.sum((bits & exponent) == exponent, dtype=jnp.uint32)
        rows.append(jnp.stack([jax_checksum(value), num_nonfinite]))
    return jnp.stack(rows)


def _head(planes: Any, size: int) -> Any:
    """Return the first entries of each plane."""
    import jax

    return jax.jit(_slice_head, static_argnums=1)(planes, size)


def _slice_head(planes: Any, size: int) -> Any:
    return planes[:, :size]
