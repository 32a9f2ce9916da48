"""The offset, shape and strides of a view, without its memory: what numpy's would be after slicing, transposing and
reshaping.

A few integers are enough to describe a region of an array that lives in another process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

Shape = tuple[int, ...]


class NotAView(Exception):
    """No strides describe the result; making it needs a copy."""


@dataclass(frozen=True, slots=True)
class Strided:
    """Offset and strides, in elements. It implements the array methods that `weights.sources.transforms` uses."""

    shape: Shape
    strides: Shape
    offset: int = 0

    @classmethod
    def row_major(cls, shape: Shape) -> Strided:
        """Return the view of a full row-major array."""
        return cls(shape, tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))))

    def __getitem__(self, index: Sequence[slice]) -> Strided:
        """Slice the leading dimensions; those beyond `index` are kept in full."""
        ranges = [range(*part.indices(size)) for part, size in zip(index, self.shape)]
        num_sliced = len(ranges)
        offset = self.offset + sum(r.start * stride for r, stride in zip(ranges, self.strides))
        strides = (*(r.step * stride for r, stride in zip(ranges, self.strides)), *self.strides[num_sliced:])
        return Strided((*map(len, ranges), *self.shape[num_sliced:]), strides, offset)

    def transpose(self, axes: Sequence[int]) -> Strided:
        return Strided(tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes), self.offset)

    def reshape(self, shape: Shape) -> Strided:
        """Raise `NotAView` where numpy would copy."""
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"cannot reshape {list(self.shape)} to {list(shape)}")
        # Dimensions of size 1 do not matter. Neighbouring dimensions without a gap between them form one run, and each new
        # dimension must come from a single run.
        runs: list[list[int]] = []  # [size, stride of its last dimension]
        for size, stride in zip(self.shape, self.strides):
            if size == 1:
                continue
            if runs and runs[-1][1] == size * stride:
                runs[-1] = [runs[-1][0] * size, stride]
            else:
                runs.append([size, stride])
        strides: list[int] = []
        remaining_runs = list(reversed(runs))
        remaining = 1  # elements of the current run that are not assigned to a new dimension yet
        for size in shape:
            if size == 1:
                strides.append(0)
                continue
            if remaining == 1 and remaining_runs:
                remaining = remaining_runs[-1][0]
            if size == 0 or remaining % size:
                raise NotAView(f"{list(self.shape)} with strides {list(self.strides)} as {list(shape)}")
            remaining //= size
            strides.append(remaining_runs[-1][1] * remaining)
            if remaining == 1:
                remaining_runs.pop()
        return Strided(shape, tuple(strides), self.offset)

    @property
    def astype(self) -> NoReturn:
        """Raise `NotAView`: only arithmetic asks for it."""
        raise NotAView("the values must be computed")

    @property
    def extent(self) -> int:
        """Number of elements from the start of the array to the last element of the view."""
        return self.offset + 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))


def strided_view(function: Any, shape: Shape) -> Strided | None:
    """Return the view that `function` makes of an array of this shape, or None if it must copy or compute."""
    try:
        view = function(Strided.row_major(shape))
    except NotAView:
        return None
    assert isinstance(view, Strided)
    return view
