"""The few steps that lead from a trainer's leaf to the tensor of an HF checkpoint.

Each step is a small frozen value with three faces:

- `shape(shape)`: what it makes of a whole leaf's shape; refuses one that it does not fit.
- `pieces(box, shape)`: what becomes of a rectangle of its input, as FSDP or tensor parallelism leaves it with a rank:
  one or more rectangles of the output, each with the slice of the input that it comes from. Pure integers.
- `turn(array, shape)`: that slice of the input, laid out as the output. Only methods and operators that numpy, JAX and
  torch share are used, so one step serves all three. A view wherever strides allow one.

A chain of steps is planned by `expand` and run by the `View`s that it returns. What cuts across a step (a shard that ends
inside a head, in the middle of a rotary pair, across merged dimensions) comes out as several rectangles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import numpy as np

from slipstream.errors import MappingError
from slipstream.types import Box
from slipstream.weights.layout import shape_of, shift, slices

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """`turn(array[index], shape_of(box))` is what the step's output holds at `box`; `array` is the input's rectangle."""

    index: tuple[slice, ...]
    box: Box
    bound: tuple[tuple[str, int], ...] = ()
    """Placeholders of the target's name that this piece fixes: `(("layer", 3),)` for entry 3 of a stack of layers."""


class Step(Protocol):
    def shape(self, shape: Shape) -> Shape: ...

    def pieces(self, box: Box, shape: Shape) -> Iterator[Piece]: ...

    def turn(self, array: Any, shape: Shape) -> Any: ...


@dataclass(frozen=True, slots=True)
class View:
    """Makes one rectangle of an HF tensor from the array of a leaf's shard: numpy, JAX or torch, whichever it is given."""

    steps: tuple[tuple[Step, Piece], ...] = ()

    def __call__(self, array: Any) -> Any:
        for step, piece in self.steps:
            array = step.turn(array[piece.index], shape_of(piece.box))
        return array


@dataclass(frozen=True, slots=True)
class Expanded:
    """A rectangle that a chain of steps makes of a leaf's shard."""

    bound: dict[str, int]
    shape: Shape
    """Of the whole output."""
    box: Box
    view: View


def expand(steps: Sequence[Step], shape: Shape, box: Box) -> list[Expanded]:
    """What `steps` make of the rectangle `box` of a leaf of this `shape`."""
    found = [Expanded({}, shape, box, View())]
    for step in steps:
        after = step.shape(shape)
        found = [
            Expanded(e.bound | dict(piece.bound), after, piece.box, View((*e.view.steps, (step, piece))))
            for e in found
            for piece in step.pieces(e.box, shape)
        ]
        shape = after
    return found


@dataclass(frozen=True, slots=True)
class Permute:
    """Reorders dimensions as `numpy.transpose` does: `Permute((1, 0))` turns an `[in, out]` kernel into `[out, in]`."""

    axes: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        if sorted(self.axes) != list(range(len(shape))):
            raise MappingError(f"{self} needs {len(self.axes)} dimensions, the shape is {list(shape)}")
        return tuple(shape[axis] for axis in self.axes)

    def pieces(self, box: Box, shape: Shape) -> Iterator[Piece]:
        yield Piece(_all(box), tuple(box[axis] for axis in self.axes))

    def turn(self, array: Any, shape: Shape) -> Any:
        return _permute(array, self.axes)


@dataclass(frozen=True, slots=True)
class Merge:
    """Makes one dimension of `count` neighbours: `Merge(0, 2)` turns `[heads, head_dim, D]` into `[heads * head_dim, D]`."""

    dim: int
    count: int = 2

    def shape(self, shape: Shape) -> Shape:
        merged = shape[self.dim : self.dim + self.count]
        if len(merged) != self.count:
            raise MappingError(f"{self} needs {self.dim + self.count} dimensions or more, the shape is {list(shape)}")
        return (*shape[: self.dim], math.prod(merged), *shape[self.dim + self.count :])

    def pieces(self, box: Box, shape: Shape) -> Iterator[Piece]:
        end = self.dim + self.count
        ranges, sizes = box[self.dim : end], shape[self.dim : end]
        # From the right, dimensions that are whole: they and the one before them are a single range of the merged
        # dimension. Of those further left each index gives a range of its own.
        last = self.count - 1
        while last > 0 and ranges[last] == (0, sizes[last]):
            last -= 1
        inner = math.prod(sizes[last + 1 :])
        for outer in product(*(range(*r) for r in ranges[:last])):
            base = 0
            for position, size in zip(outer, sizes[:last]):
                base = base * size + position
            base *= sizes[last]
            merged = ((base + ranges[last][0]) * inner, (base + ranges[last][1]) * inner)
            index = list(_all(box))
            for offset, position in enumerate(outer):
                start = position - ranges[offset][0]
                index[self.dim + offset] = slice(start, start + 1)
            yield Piece(tuple(index), (*box[: self.dim], merged, *box[end:]))

    def turn(self, array: Any, shape: Shape) -> Any:
        return array.reshape(shape)


@dataclass(frozen=True, slots=True)
class Split:
    """The inverse of `Merge`: `Split(0, (heads, head_dim))` turns `[heads * head_dim, D]` into `[heads, head_dim, D]`."""

    dim: int
    sizes: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        if self.dim >= len(shape) or shape[self.dim] != math.prod(self.sizes):
            raise MappingError(
                f"{self} needs dimension {self.dim} of {math.prod(self.sizes)}, the shape is {list(shape)}"
            )
        return (*shape[: self.dim], *self.sizes, *shape[self.dim + 1 :])

    def pieces(self, box: Box, shape: Shape) -> Iterator[Piece]:
        start, stop = box[self.dim]
        at = 0
        for part in _unravel(start, stop, self.sizes):
            length = math.prod(shape_of(part))
            index = list(_all(box))
            index[self.dim] = slice(at, at + length)
            at += length
            yield Piece(tuple(index), (*box[: self.dim], *part, *box[self.dim + 1 :]))

    def turn(self, array: Any, shape: Shape) -> Any:
        return array.reshape(shape)


@dataclass(frozen=True, slots=True)
class Take:
    """Keeps `[start, stop)` of a dimension: how one of several tensors is taken from a fused leaf (`[q; k; v]`), or the
    rows that pad a vocabulary are left out."""

    dim: int
    start: int
    stop: int

    def shape(self, shape: Shape) -> Shape:
        if self.dim >= len(shape) or not 0 <= self.start < self.stop <= shape[self.dim]:
            raise MappingError(f"{self} does not lie inside the shape {list(shape)}")
        return (*shape[: self.dim], self.stop - self.start, *shape[self.dim + 1 :])

    def pieces(self, box: Box, shape: Shape) -> Iterator[Piece]:
        first, last = box[self.dim]
        start, stop = max(first, self.start), min(last, self.stop)
        if start < stop:
            index = list(_all(box))
            index[self.dim] = slice(start - first, stop - first)
            kept = (start - self.start, stop - self.start)
            yield Piece(tuple(index), (*box[: self.dim], kept, *box[self.dim + 1 :]))

    def turn(self, array: Any, shape: Shape) -> Any:
        return array


@dataclass(frozen=True, slots=True)
class Unstack:
    """Takes a stack apart: one tensor for each index of `dim`, which goes and fills the placeholder `name`.
    `Unstack(1, "layer")` turns a scanned `[D, L, F]` into L tensors `[D, F]`, named by their `{layer}`."""

    dim: int
    name: str

    def shape(self, shape: Shape) -> Shape:
        if self.dim >= len(shape):
            raise MappingError(f"{self} needs {self.dim + 1} dimensions or more, the shape is {list(shape)}")
        return (*shape[: self.dim], *shape[self.dim + 1 :])

    def pieces(self, box: Box, shape: Shape) -> Iterator[Piece]:
        first, last = box[self.dim]
        for position in range(first, last):
            index = list(_all(box))
            index[self.dim] = slice(position - first, position - first + 1)
            yield Piece(tuple(index), (*box[: self.dim], *box[self.dim + 1 :]), ((self.name, position),))

    def turn(self, array: Any, shape: Shape) -> Any:
        return array.reshape(shape)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Reorders a dimension of one or more heads between the two customs of rotary embeddings. Interleaved turns
    neighbours (0, 1), (2, 3), …; half-split, HF's custom, turns (0, K/2), (1, K/2 + 1), …

    `Rotary(0, 128)` goes from interleaved to half-split, with `to_half=False` the other way. Whole heads are one
    rectangle and one copy; of a head that a shard cuts, each run that stays together is a strided view."""

    dim: int
    head_dim: int
    to_half: bool = True

    def shape(self, shape: Shape) -> Shape:
        if self.head_dim % 2 or self.dim >= len(shape) or shape[self.dim] % self.head_dim:
            raise MappingError(f"{self} needs whole heads of even size in dimension {self.dim} of {list(shape)}")
        return shape

    def pieces(self, box: Box, shape: Shape) -> Iterator[Piece]:
        start, stop = box[self.dim]
        first, last = -(-start // self.head_dim) * self.head_dim, stop // self.head_dim * self.head_dim
        if first < last:
            yield self._piece(box, slice(first - start, last - start), (first, last))
        # Before the first whole head and after the last; or all of it, where both ends lie inside one head.
        cuts = [(start, first), (last, stop)] if first <= last else [(start, stop)]
        for low, high in cuts:
            for source, target in self._runs(low, high):
                yield self._piece(box, slice(source.start - start, source.stop - start, source.step), target)

    def _piece(self, box: Box, kept: slice, target: tuple[int, int]) -> Piece:
        index = list(_all(box))
        index[self.dim] = kept
        return Piece(tuple(index), (*box[: self.dim], target, *box[self.dim + 1 :]))

    def _runs(self, low: int, high: int) -> Iterator[tuple[slice, tuple[int, int]]]:
        """Of `[low, high)`, inside one head: where the input is evenly spaced and the output has no gap."""
        if low >= high:
            return
        base, half = low - low % self.head_dim, self.head_dim // 2
        if self.to_half:
            for parity, shifted in ((0, base), (1, base + half)):
                first = low + (low - base + parity) % 2
                count = len(range(first, high, 2))
                if count:
                    at = shifted + (first - base) // 2
                    yield slice(first, high, 2), (at, at + count)
        else:
            for position in range(low, high):
                offset = position - base
                at = base + (2 * offset if offset < half else 2 * (offset - half) + 1)
                yield slice(position, position + 1, 1), (at, at + 1)

    def turn(self, array: Any, shape: Shape) -> Any:
        size, lead = array.shape[self.dim], tuple(array.shape[: self.dim])
        if size % self.head_dim:
            return array
        rest, pairs = tuple(array.shape[self.dim + 1 :]), (self.head_dim // 2, 2)
        array = array.reshape((*lead, size // self.head_dim, *(pairs if self.to_half else pairs[::-1]), *rest))
        axes = list(range(len(array.shape)))
        axes[self.dim + 1], axes[self.dim + 2] = axes[self.dim + 2], axes[self.dim + 1]
        return _permute(array, tuple(axes)).reshape(shape)


@dataclass(frozen=True, slots=True)
class Scale:
    """Multiplies, in float32 at least, and rounds to the leaf's dtype once. For trainers that fold the attention's
    `1 / sqrt(head_dim)` into the query kernel."""

    factor: float

    def shape(self, shape: Shape) -> Shape:
        return shape

    def pieces(self, box: Box, shape: Shape) -> Iterator[Piece]:
        yield Piece(_all(box), box)

    def turn(self, array: Any, shape: Shape) -> Any:
        if hasattr(array, "astype"):
            wide = array.astype(np.float32) if array.dtype.itemsize < 4 else array
            return (wide * wide.dtype.type(self.factor)).astype(array.dtype)
        wide = array.float() if array.element_size() < 4 else array  # torch
        return (wide * self.factor).to(array.dtype)


def _all(box: Box) -> tuple[slice, ...]:
    return slices(shift(box, box))


def _permute(array: Any, axes: tuple[int, ...]) -> Any:
    return (
        array.permute(axes) if hasattr(array, "permute") else array.transpose(axes)
    )  # torch's own `transpose` swaps two


def _unravel(start: int, stop: int, sizes: Shape) -> Iterator[Box]:
    """`[start, stop)` of a flattened array as rectangles of it, in order: a part of the first row, whole rows, a part of
    the last, and so on inside the parts."""
    if len(sizes) == 1:
        yield ((start, stop),)
        return
    inner = math.prod(sizes[1:])
    while start < stop:
        row, offset = divmod(start, inner)
        if offset == 0 and stop - start >= inner:
            rows = (stop - start) // inner
            yield ((row, row + rows), *((0, size) for size in sizes[1:]))
            start += rows * inner
        else:
            end = min(stop, (row + 1) * inner)
            for part in _unravel(offset, end - row * inner, sizes[1:]):
                yield ((row, row + 1), *part)
            start = end
