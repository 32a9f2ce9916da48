"""The rank image: all parameters of one engine rank, one after the other, in one block of memory.

Sender and receiver derive the same layout from the engine's parameters. So a sender can write each piece directly to
its final place, and the engine's arrays can be views of the image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from slipstream.tensors.boxes import slices
from slipstream.types import Box, Parameter
from slipstream.weights.plan import Move

ALIGNMENT = 256
"""Parameters start at multiples of this. XLA adopts memory that is aligned to 64 bytes on CPU, 128 on GPU."""


def align_up(size: int, alignment: int = ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name)) if name == "bfloat16" else np.dtype(name)


@dataclass(frozen=True)
class RankImage:
    """The layout of one rank's parameters."""

    dtype: np.dtype
    places: dict[str, tuple[int, tuple[int, ...]]]
    """Offset in bytes and local shape, by parameter."""
    num_bytes: int

    def byte_range(self, parameter: str) -> slice:
        offset, shape = self.places[parameter]
        return slice(offset, offset + math.prod(shape) * self.dtype.itemsize)

    def view(self, buffer: np.ndarray, parameter: str) -> np.ndarray:
        """Return a parameter as an array over `buffer`."""
        return buffer[self.byte_range(parameter)].view(self.dtype).reshape(self.places[parameter][1])

    def piece(self, buffer: np.ndarray, parameter: str, box: Box) -> np.ndarray:
        """Return a box of a parameter as an array over `buffer`; contiguous only if the box is."""
        index: tuple[Any, ...] = (*slices(box), ...)  # the ellipsis keeps a scalar an array
        return self.view(buffer, parameter)[index]

    def pieces(self, buffer: np.ndarray, moves: Mapping[int, Move]) -> dict[int, np.ndarray]:
        """Return the places that moves write to, by index."""
        return {index: self.piece(buffer, move.parameter, move.local_box) for index, move in moves.items()}


def num_bytes(parameters: Sequence[Parameter], dtype: str) -> int:
    """Return the size of all parameters on all their ranks."""
    return numpy_dtype(dtype).itemsize * sum(math.prod(p.shape) for p in parameters)


def rank_image(parameters: Sequence[Parameter], rank: int, dtype: str) -> RankImage:
    """Lay out the parameters of `rank`."""
    image_dtype, places, end = numpy_dtype(dtype), {}, 0
    for parameter in parameters:
        if parameter.rank == rank:
            offset = align_up(end)
            places[parameter.name] = (offset, parameter.shape)
            end = offset + math.prod(parameter.shape) * image_dtype.itemsize
    return RankImage(image_dtype, places, end)
