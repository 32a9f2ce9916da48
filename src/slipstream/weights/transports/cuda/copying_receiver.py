"""`cuda` for an engine whose weights are JAX arrays: copies out of mapped memory (`mapped_memory.py`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.tensors.dlpack import AddressRange, DLPackView
from slipstream.tensors.strided import Strided
from slipstream.weights.rank_image import numpy_dtype
from slipstream.weights.transports.cuda.driver import CudaDriver
from slipstream.weights.transports.cuda.mapped_memory import DEADLINE_SECONDS, CudaReceiver
from slipstream.weights.transports.device_copy import CopyProgram


@dataclass(frozen=True)
class StridedCut:
    """Cuts a piece out of a flat array. Equal pieces have the same object."""

    geometry: Strided

    def __call__(self, flat: jax.Array) -> jax.Array:
        view = self.geometry
        if view.strides == Strided.row_major(view.shape).strides:
            return flat[view.offset : view.extent].reshape(view.shape)
        index = jnp.full(view.shape, np.uint32(view.offset))
        for dimension, stride in enumerate(view.strides):
            index += np.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, view.shape, dimension)
        return flat.at[index].get(mode="promise_in_bounds")


_strided_cut = cache(StridedCut)


@dataclass(frozen=True)
class MappedArray:
    """A piece in mapped memory: the memory from the start of its array to its last element, and where it is in there."""

    flat: jax.Array
    cut: StridedCut

    @property
    def nbytes(self) -> int:
        return math.prod(self.cut.geometry.shape) * self.flat.dtype.itemsize


class MappedJaxMemory:
    """Memory of another process, mapped into this one; see `MappedRegion`."""

    def __init__(self, address: int, size: int, device_type: int, device_index: int) -> None:
        self._bytes = np.asarray(AddressRange(address, size))
        self._device = device_type, device_index

    def view(self, dtype: str, geometry: Strided, offset: int) -> MappedArray:
        kind = numpy_dtype(dtype)
        part = self._bytes[offset : offset + geometry.extent * kind.itemsize].view(kind)
        return MappedArray(jax.dlpack.from_dlpack(DLPackView(part, *self._device)), _strided_cut(geometry))


class CopyingReceiver(CudaReceiver):
    """`cuda`, with `source` returning a copy, as an array on the engine rank's device."""

    def __init__(
        self,
        senders: Collection[int],
        program: CopyProgram,
        driver: CudaDriver,
        device_index: int,
        deadline: float = DEADLINE_SECONDS,
    ) -> None:
        self._program, self._taken = program, dict[int, jax.Array]()
        super().__init__(
            senders,
            lambda address, size: MappedJaxMemory(address, size, driver.device_type, device_index),
            driver,
            deadline,
            compute_checksums=self._copy_with_checksums,
        )

    def _copy_with_checksums(self, pieces: Mapping[int, MappedArray]) -> Mapping[int, int]:
        copies, sums = self._program({i: (piece.flat, piece.cut) for i, piece in pieces.items()}, checksums=True)
        jax.block_until_ready(copies)
        self._taken |= copies
        return dict(zip(pieces, np.asarray(sums).tolist()))

    def source(self, index: int) -> jax.Array:
        if index not in self._taken:  # without checksums, nothing was read yet
            pieces = {i: super(CopyingReceiver, self).source(i) for i in self._pieces if i not in self._taken}
            copies, _ = self._program({i: (piece.flat, piece.cut) for i, piece in pieces.items()}, checksums=False)
            self._taken |= jax.block_until_ready(copies)
        return self._taken[index]

    def _forget_version(self) -> None:
        self._taken = {}
        super()._forget_version()
