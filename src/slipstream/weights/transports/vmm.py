"""Device memory as the CUDA driver sees it: which allocation an address belongs to, and how another process comes to see it.

JAX's allocators (all but `cuda_async`) take their memory as "virtual memory management" allocations, which can be exported as
file descriptors. An importer maps the same physical memory, for reading only. Needs the package cuda-bindings."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from slipstream.errors import ConfigError, TransferError
from slipstream.weights.dlpack import CUDA


class NotExportable(Exception):
    """Memory that other processes cannot be shown."""


class Region(NamedTuple):
    """An allocation: several arrays may lie in it."""

    base: int
    size: int
    identity: int
    """Differs between two allocations that had the same addresses one after the other."""
    device: int


class Driver(Protocol):
    """What the two halves of a transport through mapped memory need; `Vmm`, or a stand-in in tests."""

    kind: int
    """Of its devices, as DLPack numbers them."""

    def region(self, pointer: int) -> Region: ...

    def export(self, region: Region) -> int:
        """A file descriptor of the region's memory, the caller's to close. Raises `NotExportable`."""
        ...

    def allocate(self, size: int, device: int) -> Region:
        """Memory of our own that can be exported."""
        ...

    def copy(self, target: int, source: int, size: int) -> None:
        """Device to device; done when it returns."""
        ...

    def copies(self, runs: Iterable[tuple[int, int, int]], stream: int) -> None:
        """Of `(target, source, bytes)`, device to device, in a stream's order; not done when it returns."""
        ...

    def free(self, region: Region) -> None:
        """What `allocate` gave."""
        ...

    def map(self, fd: int, size: int) -> int:
        """The address at which this process sees an exported region, read-only; `fd` is closed."""
        ...

    def unmap(self, address: int, size: int) -> None: ...

    def upload(self, target: int, values: np.ndarray) -> None:
        """From the host, contiguous; done when it returns."""
        ...

    def download(self, source: int, size: int) -> np.ndarray:
        """Bytes, to the host."""
        ...

    def settle(self) -> None:
        """What this process has asked of the device is done."""
        ...

    def identity(self, device: int) -> str:
        """The same in every process, whatever number it has there."""
        ...

    def index(self, identity: str) -> int:
        """Its number here. Raises `TransferError`."""
        ...


class Vmm:
    """The driver itself. `device` is the one whose kernels will read what is mapped."""

    kind = CUDA

    def __init__(self, device: int = 0) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise ConfigError(
                f"device memory cannot be shared without the package cuda-bindings ({error}): pip install "
                "'slipstream-rl[cuda]', or use another transport"
            ) from None
        self._cu: Any = driver
        self._device = device
        self._do("cuInit", 0)
        self._contexts: dict[int, Any] = {}
        self._granularity = 2 << 20

    def region(self, pointer: int) -> Region:
        self._use(self._device)
        base, size = self._do("cuMemGetAddressRange", pointer)
        attribute = self._cu.CUpointer_attribute
        identity = self._do("cuPointerGetAttribute", attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer)
        device = self._do("cuPointerGetAttribute", attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer)
        return Region(int(base), int(size), int(identity), int(device))

    def export(self, region: Region) -> int:
        try:
            handle = self._do("cuMemRetainAllocationHandle", region.base)
            try:
                return int(self._do("cuMemExportToShareableHandle", handle, self._posix, 0))
            finally:
                self._do("cuMemRelease", handle)
        except TransferError as error:
            raise NotExportable(str(error)) from None

    def allocate(self, size: int, device: int) -> Region:
        self._use(device)
        size = -(-size // self._granularity) * self._granularity
        cu = self._cu
        prop = cu.CUmemAllocationProp()
        prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.requestedHandleTypes = self._posix
        prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = device
        handle = self._do("cuMemCreate", size, prop, 0)
        address = self._mapped(handle, size, device, cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return self.region(address)

    def copy(self, target: int, source: int, size: int) -> None:
        self._use(self._device)
        self._do("cuMemcpyDtoD", target, source, size)
        self._do("cuCtxSynchronize")

    def copies(self, runs: Iterable[tuple[int, int, int]], stream: int) -> None:
        self._use(self._device)
        for target, source, size in runs:
            self._do("cuMemcpyDtoDAsync", target, source, size, stream)

    def free(self, region: Region) -> None:
        self.unmap(region.base, region.size)

    def map(self, fd: int, size: int) -> int:
        self._use(self._device)
        try:
            handle = self._do("cuMemImportFromShareableHandle", fd, self._posix)
        finally:
            os.close(fd)
        flags = self._cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        return self._mapped(handle, size, self._device, flags)

    def unmap(self, address: int, size: int) -> None:
        self._use(self._device)
        self._do("cuMemUnmap", address, size)
        self._do("cuMemAddressFree", address, size)

    def upload(self, target: int, values: np.ndarray) -> None:
        self._use(self._device)
        self._do("cuMemcpyHtoD", target, values.ctypes.data, values.nbytes)

    def download(self, source: int, size: int) -> np.ndarray:
        self._use(self._device)
        found = np.empty(size, np.uint8)
        self._do("cuMemcpyDtoH", found.ctypes.data, source, size)
        return found

    def settle(self) -> None:
        self._use(self._device)
        self._do("cuCtxSynchronize")

    def identity(self, device: int) -> str:
        return bytes(self._do("cuDeviceGetUuid", self._do("cuDeviceGet", device)).bytes).hex()

    def index(self, identity: str) -> int:
        visible = [self.identity(device) for device in range(self._do("cuDeviceGetCount"))]
        if identity not in visible:
            raise TransferError(
                f"GPU {identity} is not among those that this process sees ({', '.join(visible) or 'none'}): let both see it "
                "(CUDA_VISIBLE_DEVICES)"
            )
        return visible.index(identity)

    def _mapped(self, handle: Any, size: int, device: int, access: Any) -> int:
        """The address of a handle's memory. The mapping keeps it alive; the handle is let go."""
        cu = self._cu
        try:
            address = self._do("cuMemAddressReserve", size, 0, 0, 0)
            try:
                self._do("cuMemMap", address, size, 0, handle, 0)
                allowed = cu.CUmemAccessDesc()
                allowed.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
                allowed.location.id = device
                allowed.flags = access
                self._do("cuMemSetAccess", address, size, [allowed], 1)
            except TransferError:
                cu.cuMemUnmap(address, size)
                cu.cuMemAddressFree(address, size)
                raise
        finally:
            self._do("cuMemRelease", handle)
        return int(address)

    @property
    def _posix(self) -> Any:
        return self._cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _use(self, device: int) -> None:
        """The context that JAX and torch use as well, current in this thread."""
        if device not in self._contexts:
            self._contexts[device] = self._do("cuDevicePrimaryCtxRetain", self._do("cuDeviceGet", device))
        self._do("cuCtxSetCurrent", self._contexts[device])

    def _do(self, call: str, *arguments: Any) -> Any:
        code, *results = getattr(self._cu, call)(*arguments)
        if code != self._cu.CUresult.CUDA_SUCCESS:
            raise TransferError(f"{call} failed: {code.name}")
        return results[0] if len(results) == 1 else results
