"""The image of a rank: all its parameters, one after the other, in one block of memory.

Weights land where they will be used. Sender and receiver derive the same layout from the engine's parameters, so that a
sender can write a piece straight into its place, and an engine's arrays can be views of the image itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from slipstream.types import Box, Parameter
from slipstream.weights.layout import slices

ALIGNMENT = 256
"""Parameters start at multiples of this: XLA adopts memory without a copy when it is so aligned (64 on CPU, 128 on a GPU)."""


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name)) if name == "bfloat16" else np.dtype(name)


@dataclass(frozen=True)
class Image:
    """Where each parameter of one rank lies: offset in bytes and local shape."""

    dtype: np.dtype
    places: dict[str, tuple[int, tuple[int, ...]]]
    num_bytes: int

    def view(self, buffer: np.ndarray, parameter: str) -> np.ndarray:
        """A parameter as an array over `buffer`."""
        offset, shape = self.places[parameter]
        size = math.prod(shape) * self.dtype.itemsize
        return buffer[offset : offset + size].view(self.dtype).reshape(shape)

    def piece(self, buffer: np.ndarray, parameter: str, box: Box) -> np.ndarray:
        """A rectangle of a parameter; contiguous only where the box is."""
        index: tuple[Any, ...] = (*slices(box), ...)  # the ellipsis keeps a scalar an array
        return self.view(buffer, parameter)[index]


def num_bytes(parameters: Sequence[Parameter], dtype: str) -> int:
    """Of all of them, on all their ranks."""
    return numpy_dtype(dtype).itemsize * sum(math.prod(p.shape) for p in parameters)


def image_of(parameters: Sequence[Parameter], rank: int, dtype: str) -> Image:
    kind, places, end = numpy_dtype(dtype), {}, 0
    for parameter in parameters:
        if parameter.rank == rank:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            places[parameter.name] = (offset, parameter.shape)
            end = offset + math.prod(parameter.shape) * kind.itemsize
    return Image(kind, places, end)
