"""A checksum that a device computes where the data lies: with JAX at the trainer, with torch at the engine. An engine that gets
weights through host memory can compute it there.

    checksum = Σ element(i) · weight(i)   modulo 2³²
    weight(i) = mix(i mod ROW) · mix(i div ROW)

An element is the bit pattern of a value as a signed integer, extended to 32 bits; a float64 is two of them. The sum does not
depend on the order of its terms, so each device may add in its own. Weights are odd: one wrong element is always noticed.
They differ from place to place: elements in the wrong places are noticed with a probability of all but 2⁻³². This finds wrong
places, stale memory and damaged bytes; it does not withstand an attacker."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.weights.checksum import EXPONENT_BITS

if TYPE_CHECKING:
    import jax
    import torch

ROW = 1 << 16
SLAB = 16 << 20
"""Elements that torch multiplies at a time, into a temporary of four bytes each."""


def _mix(index: Any) -> Any:
    """Return odd weights, as numpy or JAX arrays of uint32."""
    product = index * np.uint32(0x9E3779B1)
    return (product ^ (product >> np.uint32(15))) | np.uint32(1)


def jax_checksum(values: jax.Array) -> jax.Array:
    """Return the checksum of an array in row-major order, as a uint32. Traceable."""
    import jax
    import jax.numpy as jnp

    kind = jnp.int16 if values.dtype.itemsize == 2 else jnp.int32
    elements = jax.lax.bitcast_convert_type(values, kind).reshape(-1).astype(jnp.int32).astype(jnp.uint32)
    index = jax.lax.iota(jnp.uint32, elements.size)
    weights = _mix(index % np.uint32(ROW)) * _mix(index // np.uint32(ROW))
    return jnp.sum(elements * weights, dtype=jnp.uint32)


def host_checksum(bits: np.ndarray) -> int:
    """Return the checksum of values in host memory, given as a contiguous array of 16-bit patterns."""
    weights, sums = _mix(np.arange(min(ROW, bits.size), dtype=np.uint32)), []
    for start in range(0, bits.size, ROW):
        elements = bits[start : start + ROW].view(np.int16).astype(np.int32).view(np.uint32)
        sums.append(np.dot(elements, weights[: elements.size]))
    return int(np.dot(np.array(sums, np.uint32), _mix(np.arange(len(sums), dtype=np.uint32))))


def torch_checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the checksums of tensors on one device. Waits for the current stream."""
    return torch_scans(tensors, finite=False)[0]


def torch_scans(tensors: Sequence[torch.Tensor], finite: bool = True) -> tuple[list[int], list[int]]:
    """Return the checksums of tensors on one device, and how many values of each are not finite. Waits for the current
    stream."""
    if not tensors or not tensors[0].is_cuda or importlib.util.find_spec("triton") is None:
        return _row_by_row(tensors), [int((~t.isfinite()).sum()) if finite else 0 for t in tensors]
    import torch

    from slipstream.weights.triton_checksum import Part, add_parts

    found = torch.zeros(2, len(tensors), dtype=torch.int32, device=tensors[0].device)
    sums, counts = found
    by_dtype: dict[torch.dtype, list[Part]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.is_contiguous():
            size = 2 if tensor.element_size() == 2 else 4
            part = Part(number, tensor.data_ptr(), 0, tensor.nbytes // size)
            by_dtype.setdefault(tensor.dtype, []).append(part)
            continue
        first = 0
        for elements in _slabs(tensor):  # copies, one at a time
            part = Part(number, elements.data_ptr(), first, elements.numel())
            add_parts(sums, [part], elements.element_size(), ROW, counts, _exponent(tensor.dtype) if finite else 0)
            first += elements.numel()
    for dtype, parts in by_dtype.items():
        add_parts(sums, parts, 2 if dtype.itemsize == 2 else 4, ROW, counts, _exponent(dtype) if finite else 0)
    for number, tensor in enumerate(tensors):
        if finite and tensor.element_size() == 8:  # two elements each, which have no exponent of their own
            counts[number] = (~tensor.isfinite()).sum()
    checksums, num_nonfinite = found.cpu().numpy().view(np.uint32).tolist()
    return checksums, num_nonfinite


def _exponent(dtype: torch.dtype) -> int:
    return EXPONENT_BITS[str(dtype).removeprefix("torch.")] if dtype.itemsize < 8 else 0


def _row_by_row(tensors: Sequence[torch.Tensor]) -> list[int]:
    import torch

    sums: list[torch.Tensor] = []
    counts = []
    for tensor in tensors:
        before = len(sums)
        for elements in _slabs(tensor):
            weights, num_rows = _row_weights(elements.device), elements.numel() // ROW
            whole, rest = elements[: num_rows * ROW].view(num_rows, ROW), elements[num_rows * ROW :]
            sums.append((whole * weights).sum(1))
            if rest.numel():
                sums.append((rest * weights[: rest.numel()]).sum().reshape(1))
        counts.append(sum(part.numel() for part in sums[before:]))
    by_row = torch.cat(sums).cpu().numpy().astype(np.uint64) if sums else np.empty(0, np.uint64)
    parts = np.split(by_row, np.cumsum(counts)[:-1]) if counts else []
    return [int((part * _mix(np.arange(len(part), dtype=np.uint32))).sum()) & 0xFFFFFFFF for part in parts]


def _slabs(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements in row-major order, in parts that all but the last are whole rows. Parts of a tensor that is not
    contiguous are copied."""
    import torch

    if not tensor.numel():
        return
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    kind = torch.int16 if tensor.element_size() == 2 else torch.int32
    length = tensor[0].numel() * max(1, tensor.element_size() // 4)
    step = ROW // math.gcd(ROW, length)
    for part in tensor.split(max(step, SLAB // length // step * step)):
        yield part.contiguous().reshape(-1).view(kind)


@cache
def _row_weights(device: torch.device) -> torch.Tensor:
    import torch

    return torch.from_numpy(_mix(np.arange(ROW, dtype=np.uint32)).view(np.int32)).to(device)
