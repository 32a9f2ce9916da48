"""Layout transforms from a trainer's leaf to a tensor of an HF checkpoint.

Each transform is a small frozen value with three methods:

- `shape(shape)` returns the output shape for a full leaf, or raises `MappingError`.
- `pieces(box, shape)` maps a box of the input, such as the shard that FSDP or tensor parallelism gives to a rank, to
  one or more boxes of the output, each with the slice of the input it comes from. It works on integers only.
- `apply(array, shape)` lays that slice of the input out as the output. It uses only methods and operators that numpy,
  JAX and torch share, and returns a view wherever strides allow one.

`expand` plans a chain of transforms; the `View`s it returns execute it. A shard that ends inside a head, inside a
rotary pair or across merged dimensions becomes several boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from slipstream.errors import MappingError
from slipstream.tensors.boxes import shape_of, shift, slices
from slipstream.types import Box

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransformPiece:
    """A box of a transform's output: `apply(array[index], shape_of(box))`, where `array` is the input box."""

    index: tuple[slice, ...]
    box: Box
    placeholders: tuple[tuple[str, int], ...] = ()
    """Values for placeholders in the target's name: `(("layer", 3),)` for entry 3 of a stack of layers."""


class Transform:
    __slots__ = ()

    def shape(self, shape: Shape) -> Shape:
        return shape

    def pieces(self, box: Box, shape: Shape) -> Iterator[TransformPiece]:
        yield TransformPiece(_full_index(box), box)

    def apply(self, array: Any, shape: Shape) -> Any:
        return array.reshape(shape)


@dataclass(frozen=True, slots=True)
class View:
    """Computes one box of an HF tensor from the array of a leaf's shard (numpy, JAX or torch)."""

    steps: tuple[tuple[Transform, TransformPiece], ...] = ()

    def __call__(self, array: Any) -> Any:
        for transform, piece in self.steps:
            array = transform.apply(array[piece.index], shape_of(piece.box))
        return array


@dataclass(frozen=True, slots=True)
class TransformedBox:
    """A box of the output of a chain of transforms, made from a leaf's shard."""

    placeholders: dict[str, int]
    shape: Shape
    """Shape of the full output."""
    box: Box
    view: View


def expand(transforms: Sequence[Transform], shape: Shape, box: Box) -> list[TransformedBox]:
    """Return what the chain makes of the box `box` of a leaf of this `shape`."""
    outputs = [TransformedBox({}, shape, box, View())]
    for transform in transforms:
        new_shape = transform.shape(shape)
        outputs = [
            TransformedBox(
                before.placeholders | dict(piece.placeholders),
                new_shape,
                piece.box,
                View((*before.view.steps, (transform, piece))),
            )
            for before in outputs
            for piece in transform.pieces(before.box, shape)
        ]
        shape = new_shape
    return outputs


@dataclass(frozen=True, slots=True)
class Permute(Transform):
    """Reorder dimensions like `numpy.transpose`: `Permute((1, 0))` turns an `[in, out]` kernel into `[out, in]`."""

    axes: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        if sorted(self.axes) != list(range(len(shape))):
            raise MappingError(f"{self} needs {len(self.axes)} dimensions, the shape is {list(shape)}")
        return tuple(shape[axis] for axis in self.axes)

    def pieces(self, box: Box, shape: Shape) -> Iterator[TransformPiece]:
        yield TransformPiece(_full_index(box), tuple(box[axis] for axis in self.axes))

    def apply(self, array: Any, shape: Shape) -> Any:
        return _permute(array, self.axes)


@dataclass(frozen=True, slots=True)
class Merge(Transform):
    """Merge `count` neighbouring dimensions: `Merge(0, 2)` turns `[H, K, D]` into `[H * K, D]`."""

    dim: int
    count: int = 2

    def shape(self, shape: Shape) -> Shape:
        merged = shape[self.dim : self.dim + self.count]
        if len(merged) != self.count:
            raise MappingError(f"{self} needs {self.dim + self.count} dimensions or more, the shape is {list(shape)}")
        return (*shape[: self.dim], math.prod(merged), *shape[self.dim + self.count :])

    def pieces(self, box: Box, shape: Shape) -> Iterator[TransformPiece]:
        end = self.dim + self.count
        ranges, sizes = box[self.dim : end], shape[self.dim : end]
        # Trailing dimensions that the box covers in full, together with the one before them, are a single range of the merged
        # dimension. Each index of the dimensions further left gives a separate range.
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
            index = list(_full_index(box))
            for offset, position in enumerate(outer):
                start = position - ranges[offset][0]
                index[self.dim + offset] = slice(start, start + 1)
            yield TransformPiece(tuple(index), (*box[: self.dim], merged, *box[end:]))


@dataclass(frozen=True, slots=True)
class Split(Transform):
    """Invert `Merge`: `Split(0, (heads, head_dim))` turns `[heads * head_dim, D]` into `[heads, head_dim, D]`."""

    dim: int
    sizes: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        if self.dim >= len(shape) or shape[self.dim] != math.prod(self.sizes):
            raise MappingError(
                f"{self} needs size {math.prod(self.sizes)} in dimension {self.dim}, the shape is {list(shape)}"
            )
        return _replace_dim(shape, self.dim, *self.sizes)

    def pieces(self, box: Box, shape: Shape) -> Iterator[TransformPiece]:
        start, stop = box[self.dim]
        offset = 0
        for part in _unravel(start, stop, self.sizes):
            length = math.prod(shape_of(part))
            yield _piece(box, self.dim, slice(offset, offset + length), part)
            offset += length


@dataclass(frozen=True, slots=True)
class Take(Transform):
    """Keep `[start, stop)` of a dimension: one tensor of a fused leaf (`[q; k; v]`), a vocabulary without padding."""

    dim: int
    start: int
    stop: int

    def shape(self, shape: Shape) -> Shape:
        if self.dim >= len(shape) or not 0 <= self.start < self.stop <= shape[self.dim]:
            raise MappingError(f"{self} is not inside the shape {list(shape)}")
        return _replace_dim(shape, self.dim, self.stop - self.start)

    def pieces(self, box: Box, shape: Shape) -> Iterator[TransformPiece]:
        first, last = box[self.dim]
        start, stop = max(first, self.start), min(last, self.stop)
        if start < stop:
            kept = (start - self.start, stop - self.start)
            yield _piece(box, self.dim, slice(start - first, stop - first), [kept])

    def apply(self, array: Any, shape: Shape) -> Any:
        return array


@dataclass(frozen=True, slots=True)
class Within(Transform):
    """The leaf is only a part, from `start`, of dimension `dim`, where the full tensor has `size`."""

    dim: int
    start: int
    size: int

    def shape(self, shape: Shape) -> Shape:
        if self.dim >= len(shape) or self.start + shape[self.dim] > self.size:
            raise MappingError(f"{list(shape)} does not fit in {self}")
        return _replace_dim(shape, self.dim, self.size)

    def pieces(self, box: Box, shape: Shape) -> Iterator[TransformPiece]:
        low, high = box[self.dim]
        yield _piece(box, self.dim, slice(0, high - low), [(low + self.start, high + self.start)])


@dataclass(frozen=True, slots=True)
class Unstack(Transform):
    """Split a stack into one tensor per index of `dim`. The index fills the placeholder `name`, and the dimension is
    removed. `Unstack(1, "layer")` turns a scanned `[D, L, F]` into L tensors `[D, F]`, named by their `{layer}`."""

    dim: int
    name: str

    def shape(self, shape: Shape) -> Shape:
        if self.dim >= len(shape):
            raise MappingError(f"{self} needs {self.dim + 1} dimensions or more, the shape is {list(shape)}")
        return _replace_dim(shape, self.dim)

    def pieces(self, box: Box, shape: Shape) -> Iterator[TransformPiece]:
        first, last = box[self.dim]
        for position in range(first, last):
            index = slice(position - first, position - first + 1)
            yield _piece(box, self.dim, index, [], ((self.name, position),))


@dataclass(frozen=True, slots=True)
class Rotary(Transform):
    """Reorder a dimension of one or more heads between the two layouts of rotary embeddings. The interleaved layout
    rotates the pairs (0, 1), (2, 3), …; the half-split layout, used by HF, rotates (0, K/2), (1, K/2 + 1), …

    `Rotary(0, 128)` converts interleaved to half-split; `to_half=False` does the reverse. Complete heads are one box
    and one copy; a head cut by a shard boundary becomes one strided view per evenly spaced run."""

    dim: int
    head_dim: int
    to_half: bool = True

    def shape(self, shape: Shape) -> Shape:
        if self.head_dim % 2 or self.dim >= len(shape) or shape[self.dim] % self.head_dim:
            raise MappingError(f"{self} needs complete heads of even size in dimension {self.dim} of {list(shape)}")
        return shape

    def pieces(self, box: Box, shape: Shape) -> Iterator[TransformPiece]:
        start, stop = box[self.dim]
        first, last = -(-start // self.head_dim) * self.head_dim, stop // self.head_dim * self.head_dim
        if first < last:
            yield _piece(box, self.dim, slice(first - start, last - start), [(first, last)])
        # The parts before the first complete head and after the last one, or everything if both ends are inside one head.
        cuts = [(start, first), (last, stop)] if first <= last else [(start, stop)]
        for low, high in cuts:
            for source, target in self._runs(low, high):
                index = slice(source.start - start, source.stop - start, source.step)
                yield _piece(box, self.dim, index, [target])

    def _runs(self, low: int, high: int) -> Iterator[tuple[slice, tuple[int, int]]]:
        """Split `[low, high)`, inside one head, into runs with evenly spaced input and contiguous output."""
        if low >= high:
            return
        base, half = low - low % self.head_dim, self.head_dim // 2
        if self.to_half:
            for parity, shifted in ((0, base), (1, base + half)):
                first = low + (low - base + parity) % 2
                count = len(range(first, high, 2))
                if count:
                    target = shifted + (first - base) // 2
                    yield slice(first, high, 2), (target, target + count)
        else:
            for position in range(low, high):
                offset = position - base
                target = base + (2 * offset if offset < half else 2 * (offset - half) + 1)
                yield slice(position, position + 1, 1), (target, target + 1)

    def apply(self, array: Any, shape: Shape) -> Any:
        size, lead = array.shape[self.dim], tuple(array.shape[: self.dim])
        if size % self.head_dim:
            return array
        rest, pairs = tuple(array.shape[self.dim + 1 :]), (self.head_dim // 2, 2)
        array = array.reshape((*lead, size // self.head_dim, *(pairs if self.to_half else pairs[::-1]), *rest))
        axes = list(range(len(array.shape)))
        axes[self.dim + 1], axes[self.dim + 2] = axes[self.dim + 2], axes[self.dim + 1]
        return _permute(array, tuple(axes)).reshape(shape)


@dataclass(frozen=True, slots=True)
class Scale(Transform):
    """Multiply in at least float32 and round once. For trainers whose query kernel includes `1 / sqrt(head_dim)`."""

    factor: float

    def apply(self, array: Any, shape: Shape) -> Any:
        if hasattr(array, "astype"):
            wide = array.astype(np.float32) if array.dtype.itemsize < 4 else array
            return (wide * wide.dtype.type(self.factor)).astype(array.dtype)
        wide = array.float() if array.element_size() < 4 else array  # torch
        return (wide * self.factor).to(array.dtype)


def _full_index(box: Box) -> tuple[slice, ...]:
    return slices(shift(box, box))


def _replace_dim(items: tuple[Any, ...], dim: int, *new: Any) -> tuple[Any, ...]:
    return (*items[:dim], *new, *items[dim + 1 :])


def _piece(
    box: Box, dim: int, index: slice, ranges: Sequence[tuple[int, int]], placeholders: tuple[tuple[str, int], ...] = ()
) -> TransformPiece:
    """Return the piece that takes `index` of `dim` of the input box and replaces the dimension by `ranges`."""
    full_index = _replace_dim(_full_index(box), dim, index)
    return TransformPiece(full_index, _replace_dim(box, dim, *ranges), placeholders)


def _permute(array: Any, axes: tuple[int, ...]) -> Any:
    # torch's `transpose` swaps two dimensions
    return array.permute(axes) if hasattr(array, "permute") else array.transpose(axes)


def _unravel(start: int, stop: int, sizes: Shape) -> Iterator[Box]:
    """Yield boxes that together are `[start, stop)` of the flattened array, in order: part of the first row, complete
    rows, part of the last row, recursively."""
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
