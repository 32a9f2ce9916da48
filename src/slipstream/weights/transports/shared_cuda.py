"""`shared-cuda`: as `shared`, with memory of a GPU that trainer and engine both see.

The trainer allocates it so that it can be exported (`vmm.py`), and hands its file descriptor to engines at a door of its own.
They map it, read-only. It lives as long as someone maps it, so that either side may die.

On the host a view of such memory is an address, a shape and strides. Nobody can read it there: it is downloaded to be hashed,
and PyTorch and JAX adopt it through DLPack."""

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
from slipstream.weights.dlpack import Foreign
from slipstream.weights.transports.door import Door, knock
from slipstream.weights.transports.shared import CUDA_NAME, SharedLanding
from slipstream.weights.transports.vmm import Driver, Vmm

DEADLINE_SECONDS = 30.0
_LINK = re.compile(r"(?P<door>slipstream-[0-9a-f]{32})/(?P<nonce>[0-9a-f]{64})/(?P<device>[0-9a-f]{32})")
_SIZE = struct.Struct("<q")


class DeviceMemory:
    """The trainer's half; see `shared.Memory`."""

    def __init__(self, size: int, device: int, driver: Driver | None = None) -> None:
        self._driver, self._device = driver or Vmm(device), device
        region = self._driver.allocate(size, device)
        self.buffer = _addresses(region.base, size, partial(self._driver.free, region), self._driver)
        fd = self._driver.export(region)
        door = Door(partial(_show, region.size, fd), DEADLINE_SECONDS)
        self.close = weakref.finalize(self, _close, door, fd)
        door.open()
        self.transport = f"{CUDA_NAME}:{door.name}/{door.nonce}/{self._driver.identity(device)}"

    def array(self, view: np.ndarray) -> Foreign:
        return Foreign(view, self._driver.kind, self._device)

    def write(self, view: np.ndarray, values: np.ndarray) -> None:
        self._driver.upload(view.ctypes.data, np.ascontiguousarray(values, view.dtype))

    def read(self, view: np.ndarray) -> np.ndarray:
        return _downloaded(self._driver, view)

    def settle(self) -> None:
        self._driver.settle()


def _show(size: int, fd: int, guest: socket.socket) -> None:
    with guest, contextlib.suppress(OSError):  # it is gone, or we are closed, and it hears that
        socket.send_fds(guest, [_SIZE.pack(size)], [fd])


def _close(door: Door, fd: int) -> None:
    door.close()
    os.close(fd)


def device_landing(where: str, size: int) -> SharedLanding:
    """The engine's half. `where` is what an offer says after the transport's name."""
    link = _LINK.fullmatch(where)
    if link is None:
        raise TransferError(f"an offer of a GPU's memory cannot be read: {where[:100]!r}")
    index = Vmm().index(link["device"])
    driver = Vmm(index)
    held, fd = _asked(link["door"], link["nonce"])
    if held < size:
        os.close(fd)
        raise TransferError(
            f"the memory that the trainer shares holds {held:,} bytes, the engine's parameters {size:,}"
        )
    address = driver.map(fd, held)
    buffer = _addresses(address, size, partial(driver.unmap, address, held), driver)
    return SharedLanding(buffer, partial(_downloaded, driver), lambda view: Foreign(view, driver.kind, index))


def _asked(door: str, nonce: str) -> tuple[int, int]:
    """The size of the trainer's memory, and a file descriptor of it, ours to close."""
    try:
        with knock(door, nonce, DEADLINE_SECONDS) as guest:
            message, fds, _, _ = socket.recv_fds(guest, _SIZE.size, 1)
    except OSError as error:
        raise TransferError(
            f"the trainer that shares a GPU's memory cannot be reached ({error}). Both must run on one host, in one network "
            "namespace (container), as the same user; is it alive?"
        ) from None
    if len(message) != _SIZE.size or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise TransferError("the trainer no longer shares the memory that it offered")
    return _SIZE.unpack(message)[0], fds[0]


class _Block:
    """Memory of a device; numpy's views of it keep it."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}


def _addresses(address: int, size: int, end: Callable[[], None], driver: Driver) -> np.ndarray:
    """The bytes of a device's memory, to be cut into views. When the last of them is gone, and the device has done what it
    was asked, `end` is called."""
    block = _Block(address, size)
    # Not at exit: arrays may outlive the interpreter there, and the driver takes all back.
    weakref.finalize(block, _end, driver, end).atexit = False
    return np.asarray(block)


def _end(driver: Driver, end: Callable[[], None]) -> None:
    driver.settle()
    end()


def _downloaded(driver: Driver, view: np.ndarray) -> np.ndarray:
    if not view.flags.c_contiguous:
        raise TransferError(f"a part of a GPU's memory with strides {view.strides} cannot be compared")
    return driver.download(view.ctypes.data, view.nbytes).view(view.dtype).reshape(view.shape)
