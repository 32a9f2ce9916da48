"""The CUDA driver's view of device memory: which allocation an address belongs to, and how to share it with other
processes.

JAX's allocators, except `cuda_async`, allocate through CUDA's virtual memory management API. Such allocations can be
exported as file descriptors; an importing process maps the same physical memory read-only. PyTorch's allocator calls
`cudaMalloc`. Such allocations have a CUDA IPC handle, which an importing process opens; it could write there too. Needs the
package cuda-bindings."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from slipstream.errors import ConfigError, TransferError
from slipstream.tensors.dlpack import CUDA
from slipstream.weights.rank_image import align_up


class NotExportable(Exception):
    """The memory cannot be shared with other processes."""


class Region(NamedTuple):
    """An allocation, which may hold several arrays."""

    base: int
    size: int
    buffer_id: int
    """The driver's id of the allocation; a later allocation at the same addresses has another."""
    device: int


class CudaDriver:
    """`device` is the one whose kernels read mapped memory. Tests replace the driver by shared memory of the host."""

    device_type = CUDA
    """DLPack device type of the memory."""

    def __init__(self, device: int = 0) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise ConfigError(
                f"sharing device memory needs the package cuda-bindings ({error}): pip install 'slipstream-rl[cuda]', or use "
                "another transport"
            ) from None
        self._cu: Any = driver
        self._device = device
        self._do("cuInit", 0)
        self._contexts: dict[int, Any] = {}
        self._granularity = 2 << 20
        self._opened: set[int] = set()
        """Addresses of allocations that were opened by their CUDA IPC handle."""

    def region(self, pointer: int) -> Region:
        """Return the allocation that contains an address."""
        self._use(self._device)
        base, size = self._do("cuMemGetAddressRange", pointer)
        attribute = self._cu.CUpointer_attribute
        buffer_id = self._do("cuPointerGetAttribute", attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer)
        device = self._do("cuPointerGetAttribute", attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer)
        return Region(int(base), int(size), int(buffer_id), int(device))

    def export(self, region: Region) -> int | bytes:
        """Return a file descriptor of the region's memory, which the caller closes, or a CUDA IPC handle. Raise
        `NotExportable`."""
        self._use(region.device)
        try:
            handle = self._do("cuMemRetainAllocationHandle", region.base)
            try:
                return int(self._do("cuMemExportToShareableHandle", handle, self._posix, 0))
            finally:
                self._do("cuMemRelease", handle)
        except TransferError as no_fd:
            try:
                return bytes(self._do("cuIpcGetMemHandle", region.base).reserved)
            except TransferError as no_handle:
                raise NotExportable(f"{no_fd}; {no_handle}") from None

    def allocate(self, size: int, device: int) -> Region:
        """Allocate memory that can be exported."""
        self._use(device)
        size = align_up(size, self._granularity)
        cu = self._cu
        prop = cu.CUmemAllocationProp()
        prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.requestedHandleTypes = self._posix
        prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = device
        handle = self._do("cuMemCreate", size, prop, 0)
        address = self._map_handle(handle, size, device, cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return self.region(address)

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy from device to device and wait for it."""
        self._use(self._device)
        self._do("cuMemcpyDtoD", target, source, size)
        self._do("cuCtxSynchronize")

    def copy_async(self, runs: Iterable[tuple[int, int, int]], stream: int) -> None:
        """Enqueue device-to-device copies of `(target, source, bytes)` in a stream."""
        self._use(self._device)
        for target, source, size in runs:
            self._do("cuMemcpyDtoDAsync", target, source, size, stream)

    def free(self, region: Region) -> None:
        """Free memory from `allocate`."""
        self.unmap(region.base, region.size)

    def map(self, exported: int | bytes, size: int) -> int:
        """Map an exported region, read-only where possible, and return its address. Close the file descriptor."""
        self._use(self._device)
        if isinstance(exported, bytes):
            ipc = self._cu.CUipcMemHandle()
            ipc.reserved = exported
            flags = self._cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            address = int(self._do("cuIpcOpenMemHandle", ipc, flags.value))
            self._opened.add(address)
            return address
        try:
            handle = self._do("cuMemImportFromShareableHandle", exported, self._posix)
        finally:
            os.close(exported)
        flags = self._cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        return self._map_handle(handle, size, self._device, flags)

    def unmap(self, address: int, size: int) -> None:
        self._use(self._device)
        if address in self._opened:
            self._opened.discard(address)
            self._do("cuIpcCloseMemHandle", address)
            return
        self._do("cuMemUnmap", address, size)
        self._do("cuMemAddressFree", address, size)

    def upload(self, target: int, values: np.ndarray) -> None:
        """Copy a contiguous host array to the device and wait for it."""
        self._use(self._device)
        self._do("cuMemcpyHtoD", target, values.ctypes.data, values.nbytes)

    def download(self, source: int, size: int) -> np.ndarray:
        self._use(self._device)
        data = np.empty(size, np.uint8)
        self._do("cuMemcpyDtoH", data.ctypes.data, source, size)
        return data

    def synchronize(self) -> None:
        """Wait for all work that this process has given to the device."""
        self._use(self._device)
        self._do("cuCtxSynchronize")

    def device_uuid(self, device: int) -> str:
        """Return an id of a device that is the same in every process."""
        return bytes(self._do("cuDeviceGetUuid", self._do("cuDeviceGet", device)).bytes).hex()

    def device_index(self, uuid: str) -> int:
        """Return the number of a device in this process. Raise `TransferError` if it is not visible."""
        visible = [self.device_uuid(device) for device in range(self._do("cuDeviceGetCount"))]
        if uuid not in visible:
            raise TransferError(
                f"GPU {uuid} is not visible to this process (visible: {', '.join(visible) or 'none'}); set "
                "CUDA_VISIBLE_DEVICES so that trainer and engine both see it"
            )
        return visible.index(uuid)

    def _map_handle(self, handle: Any, size: int, device: int, access: Any) -> int:
        """Map a handle's memory, release the handle and return the address. The mapping keeps the memory alive."""
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
        """Make the primary context, which JAX and torch use too, current in this thread."""
        if device not in self._contexts:
            self._contexts[device] = self._do("cuDevicePrimaryCtxRetain", self._do("cuDeviceGet", device))
        self._do("cuCtxSetCurrent", self._contexts[device])

    def _do(self, call: str, *arguments: Any) -> Any:
        code, *results = getattr(self._cu, call)(*arguments)
        if code != self._cu.CUresult.CUDA_SUCCESS:
            raise TransferError(f"{call} failed: {code.name}")
        return results[0] if len(results) == 1 else results
