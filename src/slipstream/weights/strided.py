"""The geometry of a view, without memory behind it: what numpy's offset, shape and strides would be after slicing, transposing
and reshaping. With it, a rectangle of an array in another process can be described in a few integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

Shape = tuple[int, ...]


class NotAView(Exception):
    """No strides describe it: whoever wants it must make a copy."""


@dataclass(frozen=True, slots=True)
class Strided:
    """Offset and strides count elements. It has the methods that the steps of a mapping use on arrays (see `transforms`)."""

    shape: Shape
    strides: Shape
    offset: int = 0

    @classmethod
    def of(cls, shape: Shape) -> Strided:
        """A whole array in row order."""
        return cls(shape, tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))))

    def __getitem__(self, index: Sequence[slice]) -> Strided:
        """Every dimension that `index` does not name stays whole."""
        ranges = [range(*part.indices(size)) for part, size in zip(index, self.shape)]
        cut = len(ranges)
        offset = self.offset + sum(r.start * stride for r, stride in zip(ranges, self.strides))
        strides = (*(r.step * stride for r, stride in zip(ranges, self.strides)), *self.strides[cut:])
        return Strided((*map(len, ranges), *self.shape[cut:]), strides, offset)

    def transpose(self, axes: Sequence[int]) -> Strided:
        return Strided(tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes), self.offset)

    def reshape(self, shape: Shape) -> Strided:
        """Raises `NotAView` where numpy would copy."""
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"{list(self.shape)} cannot become {list(shape)}")
        # Dimensions of one element have no say. Neighbours without a gap between them are one run; the new shape is cut
        # from the runs, each new dimension from one of them.
        runs: list[list[int]] = []  # [size, stride of its last dimension]
        for size, stride in zip(self.shape, self.strides):
            if size == 1:
                continue
            if runs and runs[-1][1] == size * stride:
                runs[-1] = [runs[-1][0] * size, stride]
            else:
                runs.append([size, stride])
        strides: list[int] = []
        left = list(reversed(runs))
        room = 1
        for size in shape:
            if size == 1:
                strides.append(0)
                continue
            if room == 1 and left:
                room = left[-1][0]
            if size == 0 or room % size:
                raise NotAView(f"{list(self.shape)} with strides {list(self.strides)} as {list(shape)}")
            room //= size
            strides.append(left[-1][1] * room)
            if room == 1:
                left.pop()
        return Strided(shape, tuple(strides), self.offset)

    @property
    def astype(self) -> NoReturn:
        """Whoever asks for this wants to calculate."""
        raise NotAView("values are computed")

    @property
    def reach(self) -> int:
        """Elements from the array's first to the view's last."""
        return self.offset + 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))


def geometry(turn: Any, shape: Shape) -> Strided | None:
    """What `turn` (a chain of views) makes of an array of this shape; None when it must copy or compute."""
    try:
        found = turn(Strided.of(shape))
    except NotAView:
        return None
    assert isinstance(found, Strided)
    return found
