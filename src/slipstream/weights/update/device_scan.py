"""Checksums of an update's pieces, and a count of their values that are not finite, computed on the trainer's devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from slipstream.tensors.strided import Strided
from slipstream.weights.checksum import EXPONENT_BITS, PieceScan, ScanOptions
from slipstream.weights.device_checksum import jax_checksum
from slipstream.weights.rank_image import numpy_dtype
from slipstream.weights.transports.device import DevicePiece

PieceKey: TypeAlias = tuple[int, int]
"""Engine rank and index of a move."""


class DeviceScanner:
    """Compiles one program per shape of a piece and of its array, of which a model has few. The layers of a stacked array
    share one: where a piece starts is an argument.

    Starting a program takes longer than most of them run. So the pieces of an update are scanned by one program, which is
    compiled again for a set of pieces that comes twice in a row."""

    def __init__(self, options: ScanOptions, dtype: str, casts: bool) -> None:
        """`dtype` is the engine's. Checksums are of values in it if the sender `casts`, otherwise of the trainer's bytes."""
        self._options, self._dtype, self._casts = options, numpy_dtype(dtype), casts
        self._programs: dict[object, Any] = {}
        """By what they read."""
        self._known: dict[PieceKey, tuple[Any, Any]] = {}
        """The program of a piece, and where the piece starts in its array. Both are the same in every update."""
        self._last: dict[Any, list[PieceKey]] = {}
        """By device, the pieces of the last update."""
        self._together: dict[Any, tuple[list[PieceKey], Any]] = {}
        """By device, pieces and the program that scans them all."""

    def scan(self, pieces: Mapping[PieceKey, DevicePiece]) -> dict[PieceKey, PieceScan]:
        """Wait for the arrays and the scan."""
        by_device: dict[Any, list[PieceKey]] = defaultdict(list)
        for key, piece in pieces.items():
            by_device[next(iter(piece.array.devices()))].append(key)
            if key not in self._known:
                self._add(key, piece)
        running = [(keys, self._start(device, keys, pieces)) for device, keys in by_device.items()]
        return {key: PieceScan(*row) for keys, rows in running for key, row in zip(keys, np.asarray(rows).tolist())}

    def _start(self, device: Any, keys: list[PieceKey], pieces: Mapping[PieceKey, DevicePiece]) -> Any:
        """Start scanning pieces on one device. Return a row for each."""
        import jax
        import jax.numpy as jnp

        programs = [self._known[key][0] for key in keys]

        def scan_all(arrays: list[jax.Array], starts: list[jax.Array]) -> jax.Array:
            return jnp.stack([program(array, start) for program, array, start in zip(programs, arrays, starts)])

        compiled_for, scan = self._together.get(device, ([], scan_all))
        if compiled_for != keys:
            scan = scan_all
            if self._last.get(device, keys) == keys:
                scan = jax.jit(scan_all)
                self._together[device] = keys, scan
        self._last[device] = keys
        return scan([pieces[key].array for key in keys], [self._known[key][1] for key in keys])

    def _add(self, key: PieceKey, piece: DevicePiece) -> None:
        import jax.numpy as jnp

        form, values_of = _reader(piece)
        if form not in self._programs:
            self._programs[form] = self._compiled(values_of)
        self._known[key] = self._programs[form], jnp.asarray(np.uint32(piece.strides.offset if piece.strides else 0))

    def _compiled(self, values_of: Callable[[Any, Any], Any]) -> Any:
        import jax
        import jax.numpy as jnp

        def scan(array: jax.Array, start: jax.Array) -> jax.Array:
            piece = values_of(array, start)
            values = piece.astype(self._dtype)
            checksum = jax_checksum(values if self._casts else piece) if self._options.checksums else jnp.uint32(0)
            return jnp.stack([checksum, self._num_nonfinite(values) if self._options.finite else jnp.uint32(0)])

        return jax.jit(scan)

    def _num_nonfinite(self, values: Any) -> Any:
        """Look at the bits: XLA may skip a cast whose result it converts back, and then `isfinite` misses an overflow."""
        import jax
        import jax.numpy as jnp

        kind = np.dtype(f"u{self._dtype.itemsize}")
        exponent = kind.type(EXPONENT_BITS[self._dtype.name])
        bits = jax.lax.bitcast_convert_type(values, kind)
        return jnp.sum((bits & exponent) == exponent, dtype=jnp.uint32)


def _reader(piece: DevicePiece) -> tuple[object, Callable[[Any, Any], Any]]:
    """Return a function of an array and a start that returns the piece's values, and what identifies it. It keeps no array
    alive."""
    view, shape, cut = piece.strides, tuple(piece.array.shape), piece.slice
    if view is None or piece.array.size >= 1 << 32:
        return repr(cut), lambda array, start: cut(array)
    if view == Strided.row_major(shape):
        return "all", lambda array, start: array

    def strided(array: Any, start: Any) -> Any:
        import jax
        import jax.numpy as jnp

        index = jnp.broadcast_to(start, view.shape)
        for dimension, stride in enumerate(view.strides):
            index += np.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, view.shape, dimension)
        return array.reshape(-1).at[index].get(mode="promise_in_bounds")

    return (view.shape, view.strides), strided
