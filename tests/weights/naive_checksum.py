"""A reference for `weights/device_checksum.py`."""

from __future__ import annotations

import numpy as np

from slipstream.weights.device_checksum import ROW


def naive_checksum(array: np.ndarray) -> int:
    kind = np.int16 if array.dtype.itemsize == 2 else np.int32
    elements = np.ascontiguousarray(array).reshape(-1).view(kind).astype(np.int64).astype(np.uint64)
    index = np.arange(len(elements), dtype=np.uint64)
    return int((elements * _mix(index % ROW) * _mix(index // ROW)).sum()) % 2**32


def _mix(x: np.ndarray) -> np.ndarray:
    x = x * 0x9E3779B1 % 2**32
    return (x ^ x >> 15) | 1
