"""`shared-cuda`: like `shared`, with memory of a GPU that trainer and engine both see.

    transport = shared-cuda:socket name/nonce/GPU uuid, in the offer
    reply     = size of the memory, with its file descriptor, to each engine that connects

The trainer allocates exportable memory (`cuda/driver.py`) and passes its file descriptor to engines over a Unix socket
(`cuda/fd_passing.py`). They map it read-only. It lives while any process maps it, so either side may die.

On the host a view of such memory is only an address, a shape and strides, and must not be read. It is downloaded to be
hashed; PyTorch and JAX adopt it through DLPack."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np

from slipstream.errors import TransferError
from slipstream.tensors.dlpack import AddressRange, DLPackView
from slipstream.weights.transports.cuda.driver import CudaDriver
from slipstream.weights.transports.cuda.fd_passing import FdListener, connect_fd_socket
from slipstream.weights.transports.shared.host_memory import CUDA_NAME, SharedReceiver

DEADLINE_SECONDS = 30.0
_LINK = re.compile(r"(?P<name>slipstream-[0-9a-f]{32})/(?P<nonce>[0-9a-f]{64})/(?P<device>[0-9a-f]{32})")
_SIZE = struct.Struct("<q")


class SharedCudaMemory:
    """The trainer's half, in GPU memory; see `SharedHostMemory`. Views of `buffer` only give addresses and must not be read."""

    def __init__(self, size: int, device: int, driver: CudaDriver | None = None) -> None:
        self._driver, self._device = driver or CudaDriver(device), device
        region = self._driver.allocate(size, device)
        self.buffer = address_range(region.base, size, partial(self._driver.free, region), self._driver)
        fd = self._driver.export(region)
        assert isinstance(fd, int), "memory from `allocate` has a file descriptor"
        listener = FdListener(partial(_send_fd, region.size, fd), DEADLINE_SECONDS)
        self.close = weakref.finalize(self, _close, listener, fd)
        listener.start()
        self.transport = f"{CUDA_NAME}:{listener.name}/{listener.nonce}/{self._driver.device_uuid(device)}"

    def array(self, view: np.ndarray) -> DLPackView:
        return DLPackView(view, self._driver.device_type, self._device)

    def write(self, view: np.ndarray, values: np.ndarray) -> None:
        self._driver.upload(view.ctypes.data, np.ascontiguousarray(values, view.dtype))

    def read(self, view: np.ndarray) -> np.ndarray:
        return download(self._driver, view)

    def synchronize(self) -> None:
        self._driver.synchronize()


def _send_fd(size: int, fd: int, connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):  # the engine is gone, or the memory closed, which the engine reports
        socket.send_fds(connection, [_SIZE.pack(size)], [fd])


def _close(listener: FdListener, fd: int) -> None:
    listener.close()
    os.close(fd)


def shared_cuda_receiver(address: str, size: int) -> SharedReceiver:
    """Map the trainer's GPU memory. `address` is the part of the offer's transport after its name."""
    link = _LINK.fullmatch(address)
    if link is None:
        raise TransferError(f"malformed address of shared GPU memory: {address[:100]!r}")
    index = CudaDriver().device_index(link["device"])
    driver = CudaDriver(index)
    mapped_size, fd = _receive_fd(link["name"], link["nonce"])
    if mapped_size < size:
        os.close(fd)
        raise TransferError(
            f"the trainer's shared memory holds {mapped_size:,} bytes, the engine's parameters need {size:,}"
        )
    base = driver.map(fd, mapped_size)
    buffer = address_range(base, size, partial(driver.unmap, base, mapped_size), driver)
    return SharedReceiver(buffer, partial(download, driver), lambda view: DLPackView(view, driver.device_type, index))


def _receive_fd(name: str, nonce: str) -> tuple[int, int]:
    """Return the size of the trainer's memory and a file descriptor of it, which the caller must close."""
    try:
        with connect_fd_socket(name, nonce, DEADLINE_SECONDS) as connection:
            message, fds, _, _ = socket.recv_fds(connection, _SIZE.size, 1)
    except OSError as error:
        raise TransferError(
            f"cannot connect to the trainer that shares GPU memory ({error}). Both must run on one host, in one network "
            "namespace (container), as the same user; is it alive?"
        ) from None
    if len(message) != _SIZE.size or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise TransferError("the trainer no longer shares the memory that it offered")
    return _SIZE.unpack(message)[0], fds[0]


def address_range(address: int, size: int, release: Callable[[], None], driver: CudaDriver) -> np.ndarray:
    """Return device memory as bytes that can be sliced but not read; `release` it when the last view is gone."""
    block = AddressRange(address, size)
    # Not at exit: arrays may outlive the interpreter, and the driver frees everything anyway.
    weakref.finalize(block, _release, driver, release).atexit = False
    return np.asarray(block)


def _release(driver: CudaDriver, release: Callable[[], None]) -> None:
    driver.synchronize()
    release()


def download(driver: CudaDriver, view: np.ndarray) -> np.ndarray:
    if not view.flags.c_contiguous:
        raise TransferError(f"cannot download a part of GPU memory with strides {view.strides}; it must be contiguous")
    return driver.download(view.ctypes.data, view.nbytes).view(view.dtype).reshape(view.shape)
