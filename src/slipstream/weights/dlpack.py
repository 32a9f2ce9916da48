"""Memory at an address as an array of JAX or PyTorch, without a copy: a producer of DLPack capsules.

    leaf = jax.dlpack.from_dlpack(Foreign(view, CUDA, 0))       views know where; whose memory it is, says the device

The array that is made keeps `view`, and so its memory, for as long as it needs it."""

from __future__ import annotations

import atexit
import ctypes
import itertools
from typing import Any

import numpy as np

CPU, CUDA = 1, 2
"""Kinds of device, as DLPack numbers them."""

_FLOAT, _BFLOAT = 2, 4


class _Tensor(ctypes.Structure):
    """`DLTensor` and the rest of `DLManagedTensor`, of DLPack before 1.0, which every consumer reads."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_kind", ctypes.c_int32),
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


class Foreign:
    """An array over memory that is not its maker's. `view` is contiguous, and need not be readable here: of a device's memory
    only its address counts."""

    def __init__(self, view: np.ndarray, device_kind: int = CPU, device_index: int = 0) -> None:
        if not view.flags.c_contiguous:
            raise ValueError(f"an array over foreign memory must be contiguous, got strides {view.strides}")
        self.view, self._device = view, (device_kind, device_index)

    @property
    def address(self) -> int:
        return self.view.ctypes.data

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        """Who asks has said on which stream it will read; what was written here was waited for."""
        shape = self.view.shape
        tensor = _Tensor(
            data=self.address,
            device_kind=self._device[0],
            device_index=self._device[1],
            num_dims=len(shape),
            type_code=_BFLOAT if self.view.dtype.name == "bfloat16" else _FLOAT,
            type_bits=self.view.dtype.itemsize * 8,
            type_lanes=1,
            shape=(ctypes.c_int64 * len(shape))(*shape),
            context=next(_numbers),
            deleter=ctypes.cast(_forget, ctypes.c_void_p),
        )
        _kept[tensor.context] = (tensor, self.view)
        return _new_capsule(ctypes.addressof(tensor), _NAME, None)


_NAME = b"dltensor"
_numbers = itertools.count(1)
_kept: dict[int, tuple[_Tensor, np.ndarray]] = {}
"""What consumers have, with the memory that it shows."""

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@ctypes.CFUNCTYPE(None, ctypes.POINTER(_Tensor))
def _forget(tensor: Any) -> None:
    """Called by the consumer, from any of its threads, once it needs the memory no longer."""
    _kept.pop(tensor.contents.context, None)


@atexit.register
def _let_be() -> None:
    """Consumers that end after the interpreter must not call into it. They do call, JAX without another look whether there is
    anybody: so they get a function of C's that does nothing, and what they have is never freed."""
    nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
    for tensor, _ in list(_kept.values()):
        tensor.deleter = nothing
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))
