"""Boxes: rectangular regions of tensors, as `(start, stop)` per dimension. `()` is the box of a scalar."""

from __future__ import annotations

import math

from slipstream.types import Box


def full_box(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a tensor of this shape."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    return math.prod(shape_of(box))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the region that both cover, or None. `intersect(((0, 4),), ((2, 8),))` is `((2, 4),)`."""
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def shift(box: Box, frame: Box) -> Box:
    """Return `box` relative to the corner of `frame`: `shift(((6, 8),), ((4, 8),))` is `((2, 4),)`."""
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, frame, strict=True))


def unshift(box: Box, frame: Box) -> Box:
    """Invert `shift`: turn a box relative to the corner of `frame` into an absolute one."""
    return tuple((start + origin, stop + origin) for (start, stop), (origin, _) in zip(box, frame, strict=True))


def translate(box: Box, tensor_box: Box, local_box: Box) -> Box:
    """Map `box`, a region of `tensor_box`, to the matching region of `local_box`. Leading dimensions that only
    `local_box` has are kept unchanged."""
    extra = len(local_box) - len(tensor_box)
    return (*local_box[:extra], *unshift(shift(box, tensor_box), local_box[extra:]))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box) == len(shape) and all(0 <= a <= b <= size for (a, b), size in zip(box, shape))


def contiguous_start(box: Box, shape: tuple[int, ...]) -> int | None:
    """Return the offset of `box`, in elements, in a row-major array of `shape`, or None if the box is not contiguous
    there. `contiguous_start(((2, 4), (0, 8)), (4, 8))` is 16."""
    start, stride, is_partial = 0, 1, False
    for (first, last), size in zip(reversed(box), reversed(shape), strict=True):
        if is_partial and last - first != 1:
            return None
        is_partial = is_partial or last - first != size
        start, stride = start + first * stride, stride * size
    return start


def split(box: Box, dim: int | None, index: int, count: int) -> Box:
    """Return the `index`-th of `count` equal parts along `dim`; the full box if `dim` is None."""
    if dim is None:
        return box
    start, stop = box[dim]
    size, remainder = divmod(stop - start, count)
    if remainder:
        raise ValueError(f"dimension {dim} of {box} does not divide into {count}")
    return (*box[:dim], (start + index * size, start + (index + 1) * size), *box[dim + 1 :])


def split_by_volume(box: Box, max_volume: int) -> list[Box]:
    """Split a box into boxes of at most `max_volume` elements, along the leading dimensions first."""
    if volume(box) <= max_volume or not box:
        return [box]
    (start, stop), rest = box[0], box[1:]
    rows = max(1, max_volume // max(1, volume(rest)))
    bands = [((first, min(first + rows, stop)), *rest) for first in range(start, stop, rows)]
    if volume(bands[0]) <= max_volume:
        return bands
    return [(band[0], *inner) for band in bands for inner in split_by_volume(band[1:], max_volume)]


def exact_cover(boxes: list[Box], frame: Box) -> str | None:
    """Return None if the boxes cover `frame` without gaps or overlaps, else a description of the problem.

    Volumes must add up and no two boxes may overlap. The boxes are sorted by their first dimension, so each one is
    compared only with those that overlap it there; for the splits used in practice these are few."""
    for box in boxes:
        if intersect(box, frame) != box:
            return f"{box} is not inside {frame}"
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
