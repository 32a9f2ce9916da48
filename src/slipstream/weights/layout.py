"""Rectangles of tensors. A box is `(start, stop)` per dimension; `()` is the whole of a scalar."""

from __future__ import annotations

import math

from slipstream.types import Box


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    return math.prod(shape_of(box))


def intersect(a: Box, b: Box) -> Box | None:
    """The part that both cover, or None. `intersect(((0, 4),), ((2, 8),))` is `((2, 4),)`."""
    both = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def shift(box: Box, frame: Box) -> Box:
    """`box` as seen from the corner of `frame`: `shift(((6, 8),), ((4, 8),))` is `((2, 4),)`."""
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, frame, strict=True))


def place(box: Box, frame: Box) -> Box:
    """The inverse of `shift`: a box relative to `frame`'s corner, in absolute terms."""
    return tuple((start + origin, stop + origin) for (start, stop), (origin, _) in zip(box, frame, strict=True))


def land(box: Box, tensor_box: Box, local_box: Box) -> Box:
    """Where `box`, a piece of `tensor_box`, comes to lie when `tensor_box` is laid into `local_box`. Leading dimensions
    that only `local_box` has are kept as they are."""
    extra = len(local_box) - len(tensor_box)
    return (*local_box[:extra], *place(shift(box, tensor_box), local_box[extra:]))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box) == len(shape) and all(0 <= a <= b <= size for (a, b), size in zip(box, shape))


def run_start(box: Box, shape: tuple[int, ...]) -> int | None:
    """Where `box` begins in the memory of an array of `shape`, in elements, if it is one run of it; None if it is not.
    `run_start(((2, 4), (0, 8)), (4, 8))` is 16."""
    start, stride, closed = 0, 1, False
    for (first, last), size in zip(reversed(box), reversed(shape), strict=True):
        if closed and last - first != 1:
            return None
        closed = closed or last - first != size
        start, stride = start + first * stride, stride * size
    return start


def split(box: Box, dim: int | None, index: int, count: int) -> Box:
    """The `index`-th of `count` equal parts along `dim`; the whole where `dim` is None."""
    if dim is None:
        return box
    start, stop = box[dim]
    size, remainder = divmod(stop - start, count)
    if remainder:
        raise ValueError(f"dimension {dim} of {box} does not divide into {count}")
    return (*box[:dim], (start + index * size, start + (index + 1) * size), *box[dim + 1 :])


def cut(box: Box, most: int) -> list[Box]:
    """The box in pieces of at most `most` elements each, cut along the first dimensions that need it."""
    if volume(box) <= most or not box:
        return [box]
    (start, stop), rest = box[0], box[1:]
    rows = max(1, most // max(1, volume(rest)))
    bands = [((first, min(first + rows, stop)), *rest) for first in range(start, stop, rows)]
    if volume(bands[0]) <= most:
        return bands
    return [(band[0], *piece) for band in bands for piece in cut(band[1:], most)]


def exact_cover(boxes: list[Box], frame: Box) -> str | None:
    """None when the boxes cover `frame` with no gap and no overlap, else what is wrong.

    Volumes must add up and no two may meet. Sorted by their first dimension, a box is compared only with those whose
    ranges there overlap its own, which are few for the splits that occur."""
    for box in boxes:
        if intersect(box, frame) != box:
            return f"{box} sticks out of {frame}"
    if not frame:
        return None if len(boxes) == 1 else f"a scalar written {len(boxes)} times"
    ordered = sorted(boxes)
    for i, box in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if other[0][0] >= box[0][1]:
                break
            if intersect(box, other) is not None:
                return f"{box} and {other} overlap"
    missing = volume(frame) - sum(volume(b) for b in boxes)
    return f"{missing} of {volume(frame)} elements are not written" if missing else None
