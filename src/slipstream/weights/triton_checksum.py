"""The sum of `device_checksum.py` on an NVIDIA GPU: one kernel for many tensors, which reads each byte once, and counts values
that are not finite on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

CHUNK = 1 << 18
"""Elements that one program of the kernel adds up: whole rows, which are whole blocks."""
BLOCK = 4096


class Part(NamedTuple):
    """Elements of a tensor that lie one behind the other."""

    tensor: int
    """Whose sum they belong to."""
    address: int
    first: int
    """Index of the first one in the tensor, where a row begins."""
    length: int


def add_parts(
    sums: torch.Tensor, parts: Sequence[Part], itemsize: int, row: int, counts: torch.Tensor, exponent: int
) -> None:
    """Add parts to the sums of their tensors, on the current stream. Elements have 2 or 4 bytes. Unless `exponent` is 0, also
    count the elements that have all of its bits."""
    if not parts:
        return
    table = np.array(parts, np.int64)
    num_chunks = -(-table[:, 3] // CHUNK)
    table = np.repeat(table, num_chunks, axis=0)
    skipped = CHUNK * (np.arange(len(table)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks))
    table += skipped[:, None] * np.array([0, itemsize, 1, -1])
    table[:, 3] = np.minimum(table[:, 3], CHUNK)
    places = torch.from_numpy(table).to(sums.device)
    _add_chunk[(len(table),)](places, sums, counts, row, BLOCK, itemsize == 2, exponent)


@triton.jit
def _add_chunk(  # type: ignore[no-untyped-def]
    table, sums, counts, ROW: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, EXPONENT: tl.constexpr
):
    chunk = table + 4 * tl.program_id(0)
    tensor, row, length = tl.load(chunk), (tl.load(chunk + 2) // ROW).to(tl.int32), tl.load(chunk + 3).to(tl.int32)
    data = tl.load(chunk + 1).to(tl.pointer_type(tl.int16 if SHORT else tl.int32))
    total = tl.zeros([BLOCK], tl.int32)
    num_nonfinite = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        element = tl.load(data + place, mask=place < length, other=0).to(tl.int32)
        weight = _mix((place % ROW).to(tl.uint32)) * _mix((row + start // ROW).to(tl.uint32))
        total += element * weight.to(tl.int32, bitcast=True)
        if EXPONENT != 0:
            num_nonfinite += ((element & EXPONENT) == EXPONENT).to(tl.int32)
    tl.atomic_add(sums + tensor, tl.sum(total))
    if EXPONENT != 0:
        tl.atomic_add(counts + tensor, tl.sum(num_nonfinite))


@triton.jit
def _mix(index):  # type: ignore[no-untyped-def]
    product = index * 0x9E3779B1
    return (product ^ (product >> 15)) | 1
