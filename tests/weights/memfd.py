"""A fake CUDA driver whose device memory is host memory (memfds). File descriptors, sockets and addresses are handled as for a GPU."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.errors import TransferError
from slipstream.tensors.dlpack import CPU
from slipstream.tensors.strided import Strided
from slipstream.weights.transports.cuda.driver import NotExportable, Region
from slipstream.weights.transports.shared import cuda_memory

_buffer_ids = itertools.count(1)


class Memfd:
    device_type = CPU

    def __init__(self, handles: bool = False) -> None:
        """With `handles`, regions are exported by handle, as PyTorch's memory is, and not as file descriptors."""
        self._handles = handles
        self.owned: dict[Region, tuple[int, mmap.mmap]] = {}
        self.mapped: dict[int, mmap.mmap] = {}
        self.num_maps = self.num_copies = 0

    def allocate(self, size: int, device: int = 0) -> Region:
        fd = os.memfd_create("region")
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        region = Region(_address(memory), size, next(_buffer_ids), device)
        self.owned[region] = (fd, memory)
        return region

    def region(self, pointer: int) -> Region:
        for region in self.owned:
            if region.base <= pointer < region.base + region.size:
                return region
        return Region(pointer, 1, 0, 0)  # not allocated here

    def export(self, region: Region) -> int | bytes:
        if region not in self.owned:
            raise NotExportable("not allocated here")
        fd = self.owned[region][0]
        return f"/proc/{os.getpid()}/fd/{fd}".encode() if self._handles else os.dup(fd)

    def copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def copy_async(self, runs: Iterable[tuple[int, int, int]], stream: int) -> None:
        for target, source, size in runs:
            self.copy(target, source, size)
            self.num_copies += 1

    def free(self, region: Region) -> None:
        fd, _ = self.owned.pop(region)
        os.close(fd)

    def map(self, exported: int | bytes, size: int) -> int:
        fd = os.open(exported, os.O_RDWR) if isinstance(exported, bytes) else exported
        try:
            memory = mmap.mmap(fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        self.mapped[_address(memory)] = memory
        self.num_maps += 1
        return _address(memory)

    def unmap(self, address: int, size: int) -> None:
        del self.mapped[address]

    def upload(self, target: int, values: np.ndarray) -> None:
        ctypes.memmove(target, values.ctypes.data, values.nbytes)

    def download(self, source: int, size: int) -> np.ndarray:
        return np.frombuffer(ctypes.string_at(source, size), np.uint8)

    def synchronize(self) -> None: ...

    def device_uuid(self, device: int) -> str:
        return f"{device:032x}"

    def device_index(self, uuid: str) -> int:
        if int(uuid, 16) != 0:
            raise TransferError(f"GPU {uuid} is not visible to this process")
        return 0


class HostMemory:
    """See `MappedRegion`."""

    def __init__(self, address: int, size: int) -> None:
        self._bytes = np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8)

    def view(self, dtype: str, geometry: Strided, offset: int) -> np.ndarray:
        kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
        start = offset + geometry.offset * kind.itemsize
        flat = self._bytes[start : start + self._bytes[start:].size // kind.itemsize * kind.itemsize].view(kind)
        return np.lib.stride_tricks.as_strided(flat, geometry.shape, [s * kind.itemsize for s in geometry.strides])


class FakeArray:
    """An array in a region, with the JAX array attributes that the transport uses."""

    def __init__(self, region: Region, offset: int, values: np.ndarray) -> None:
        self.shape, self.dtype, self.nbytes = values.shape, values.dtype, values.nbytes
        self._pointer = region.base + offset
        ctypes.memmove(self._pointer, np.ascontiguousarray(values).ctypes.data, values.nbytes)

    def unsafe_buffer_pointer(self) -> int:
        return self._pointer


def stand_in(monkeypatch: Any) -> Memfd:
    """Let trainers share the memory of a fake device with embedded engines. JAX and torch adopt it by address, as for a GPU."""
    driver = Memfd()
    monkeypatch.setattr(cuda_memory, "CudaDriver", lambda device=0: driver)
    monkeypatch.setattr(EmbeddedEngine, "_shared_transports", (cuda_memory.CUDA_NAME,))
    return driver


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def as_list(array: Any) -> Any:
    return np.asarray(array, np.float32).tolist()
