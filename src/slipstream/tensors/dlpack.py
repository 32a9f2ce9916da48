"""A DLPack producer: memory at a given address becomes a JAX or PyTorch array without a copy.

    leaf = jax.dlpack.from_dlpack(DLPackView(view, CUDA, 0))    `view` gives address, shape and dtype

The consumer's array keeps `view`, and with it the memory, alive."""

from __future__ import annotations

import atexit
import ctypes
import itertools
from typing import Any

import numpy as np

CPU, CUDA = 1, 2
"""DLPack device types."""

_FLOAT, _BFLOAT = 2, 4


class _DLManagedTensor(ctypes.Structure):
    """`DLManagedTensor` of DLPack before 1.0, which every consumer reads."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("num_dims", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class DLPackView:
    """A contiguous array over memory owned elsewhere. For device memory only the address of `view` is used; the view
    need not be readable on the host."""

    def __init__(self, view: np.ndarray, device_type: int = CPU, device_index: int = 0) -> None:
        if not view.flags.c_contiguous:
            raise ValueError(f"DLPackView needs a contiguous array, got strides {view.strides}")
        self.view, self._device = view, (device_type, device_index)

    @property
    def address(self) -> int:
        return self.view.ctypes.data

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        """Ignore the consumer's stream: all writes to this memory have completed."""
        shape = self.view.shape
        tensor = _DLManagedTensor(
            data=self.address,
            device_type=self._device[0],
            device_index=self._device[1],
            num_dims=len(shape),
            type_code=_BFLOAT if self.view.dtype.name == "bfloat16" else _FLOAT,
            type_bits=self.view.dtype.itemsize * 8,
            type_lanes=1,
            shape=(ctypes.c_int64 * len(shape))(*shape),
            context=next(_tensor_ids),
            deleter=ctypes.cast(_release, ctypes.c_void_p),
        )
        _exported[tensor.context] = (tensor, self.view)
        return _new_capsule(ctypes.addressof(tensor), _CAPSULE_NAME, None)


class AddressRange:
    """Memory at an address, for `np.asarray`. Memory of a device can be sliced that way, and must not be read. Views keep this
    object alive."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}


_CAPSULE_NAME = b"dltensor"
_tensor_ids = itertools.count(1)
_exported: dict[int, tuple[_DLManagedTensor, np.ndarray]] = {}
"""Tensors that consumers hold, with the memory behind them."""

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
def _release(tensor: Any) -> None:
    """DLPack deleter; the consumer calls it from any thread."""
    _exported.pop(tensor.contents.context, None)


@atexit.register
def _disarm_deleters() -> None:
    """Replace the deleters by a harmless C function. JAX calls them after the interpreter has shut down, when Python
    code can no longer run. The remaining tensors are never freed."""
    harmless = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
    for tensor, _ in list(_exported.values()):
        tensor.deleter = harmless
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_exported))
