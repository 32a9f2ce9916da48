"""`shared`: engines map the trainer's host memory read-only and serve from it; nothing is sent. (`cuda_memory.py`: GPU
memory.)

    memory    = a page that starts with a nonce, then the image
    transport = shared:pid/fd/nonce, in the offer

The memory is an anonymous file (memfd) of the trainer. It has no name, so nothing can be left behind, and it lives
while any process maps it, so either side may die. Engines on the same host open it through the trainer's entry in
`/proc`, which the kernel grants only to the same user. Its size is sealed, and so is writing through later mappings.

Engines see the trainer's writes at once; the transaction in `weights/update/shared.py` decides when it may write."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping

import numpy as np

from slipstream.errors import TransferError, Unsupported
from slipstream.tensors.dlpack import DLPackView
from slipstream.weights.checksum import checksum
from slipstream.weights.transports.contract import HostReceiver

NAME, CUDA_NAME, ENGINE_NAME = "shared", "shared-cuda", "shared-engine"

_LINK = re.compile(r"(?P<pid>\d+)/(?P<fd>\d+)/(?P<nonce>[0-9a-f]{64})")
_HEAD = mmap.PAGESIZE
"""Bytes before the image."""
_F_SEAL_FUTURE_WRITE = 0x10  # from linux/fcntl.h; Python's module does not have it before 3.13


def is_shared(transport: str) -> bool:
    """Whether an offer's transport is memory shared by the trainer."""
    return transport.partition(":")[0] in (NAME, CUDA_NAME)


class SharedHostMemory:
    """The trainer's half, in host memory. `transport` is for offers: name and address. `buffer` is the image as bytes."""

    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise Unsupported("shared weights need Linux (memfd_create); elsewhere bridge.sync copies them")
        self._file = os.fdopen(os.memfd_create("slipstream-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "rb+", 0)
        fd, nonce = self._file.fileno(), secrets.token_bytes(32)
        try:
            os.posix_fallocate(fd, 0, _HEAD + size)  # otherwise running out of memory is a SIGBUS during a copy
            memory = mmap.mmap(fd, _HEAD + size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | _F_SEAL_FUTURE_WRITE)
        except OSError as error:
            self._file.close()
            raise TransferError(f"cannot allocate {size:,} bytes of shared memory (memfd): {error.strerror}") from None
        memory[: len(nonce)] = nonce
        self.buffer = np.frombuffer(memory, np.uint8)[_HEAD:]
        self.transport = f"{NAME}:{os.getpid()}/{fd}/{nonce.hex()}"

    def array(self, view: np.ndarray) -> np.ndarray:
        """Return a view as an array that the trainer can write to."""
        return view

    def write(self, view: np.ndarray, values: np.ndarray) -> None:
        view[...] = values

    def read(self, view: np.ndarray) -> np.ndarray:
        return view

    def synchronize(self) -> None:
        """Wait until the trainer's writes are visible."""

    def close(self) -> None:
        """Prevent further mappings. Views stay valid, here and in engines."""
        self._file.close()


class SharedReceiver(HostReceiver):
    """The engine's half, for host and GPU memory. `read` copies a view to the host if needed; `array` wraps a view so
    that JAX adopts it without a copy."""

    def __init__(
        self,
        buffer: np.ndarray,
        read: Callable[[np.ndarray], np.ndarray] = lambda view: view,
        array: Callable[[np.ndarray], DLPackView] = DLPackView,
    ) -> None:
        super().__init__(buffer)
        self._read, self.array = read, array

    def checksums(self, expected: Mapping[int, int]) -> dict[int, int]:
        return {index: checksum(self._read(self._pieces[index])) if self._hashed else 0 for index in expected}


def shared_receiver(address: str, size: int) -> SharedReceiver:
    """Map the trainer's memory. `address` is the part of the offer's transport after its name."""
    return SharedReceiver(_map(address, size)[_HEAD:])


def _map(address: str, size: int) -> np.ndarray:
    """Map the memory read-only, after checking that it is what the trainer offers."""
    link = _LINK.fullmatch(address)
    if link is None:
        raise TransferError(f"malformed address of shared memory: {address[:100]!r}")
    path = f"/proc/{link['pid']}/fd/{link['fd']}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransferError(
            f"cannot open the shared memory of trainer process {link['pid']} ({path}): {error.strerror}. Both must run on one "
            "host, in one pid namespace (container), as the same user"
        ) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not _is_sealed(fd):
            raise TransferError(f"{path} is not the shared memory of a trainer")
        if status.st_size != _HEAD + size:
            raise TransferError(
                f"the shared memory of trainer process {link['pid']} holds {status.st_size - _HEAD:,} bytes, the engine's "
                f"parameters need {size:,}"
            )
        memory = mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    if memory[:32].hex() != link["nonce"]:
        raise TransferError(f"{path} is not the memory that the offer describes; was the trainer restarted?")
    return np.frombuffer(memory, np.uint8)


def _is_sealed(fd: int) -> bool:
    """Whether the size is fixed. Otherwise the trainer could truncate the memory while the engine reads it."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
