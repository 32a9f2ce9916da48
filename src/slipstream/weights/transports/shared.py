"""`shared`: the trainer's own memory is the engine's. Nothing is sent: engines map it, read-only, and serve from it. This is
memory of the host; that of a GPU is in `shared_cuda.py`.

The memory is an anonymous file of the trainer's (memfd): it has no name, so that nothing can be left behind, and lives as
long as someone maps it, so that either side may die. Engines on the same host open it through the trainer's entry in
`/proc`, which the kernel grants to the same user alone. Its size is sealed, and so is writing by anyone who maps it later.

What the trainer writes is seen by engines at once. When it may write is a matter of the transaction (`weights/sharing.py`)."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from slipstream.errors import TransferError, Unsupported
from slipstream.weights.checksum import checksum
from slipstream.weights.dlpack import Foreign

NAME, CUDA_NAME = "shared", "shared-cuda"

_LINK = re.compile(r"(?P<pid>\d+)/(?P<fd>\d+)/(?P<nonce>[0-9a-f]{64})")
_HEAD = mmap.PAGESIZE
"""The first page is a nonce's; the image starts behind it."""
_F_SEAL_FUTURE_WRITE = 0x10  # from linux/fcntl.h; Python's module does not have it before 3.13


def is_shared(transport: str) -> bool:
    """Of an offer's transport."""
    return transport.partition(":")[0] in (NAME, CUDA_NAME)


class Memory(Protocol):
    """The trainer's half."""

    transport: str
    """What an offer names it by."""
    buffer: np.ndarray
    """The image, as bytes. Its views say where things lie; only on the host can they be read."""

    def array(self, view: np.ndarray) -> Any:
        """For the trainer, to write to."""
        ...

    def write(self, view: np.ndarray, values: np.ndarray) -> None: ...

    def read(self, view: np.ndarray) -> np.ndarray: ...

    def settle(self) -> None:
        """What the trainer has written is there."""
        ...

    def close(self) -> None:
        """Nobody else can map it any more. Views stay valid, here and in engines."""
        ...


class SharedMemory:
    """See `Memory`."""

    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise Unsupported("shared weights need Linux (memfd_create); elsewhere bridge.sync copies them")
        self._file = os.fdopen(os.memfd_create("slipstream-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "rb+", 0)
        fd, nonce = self._file.fileno(), secrets.token_bytes(32)
        try:
            os.posix_fallocate(fd, 0, _HEAD + size)  # or running out of memory is a SIGBUS in mid-copy
            memory = mmap.mmap(fd, _HEAD + size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | _F_SEAL_FUTURE_WRITE)
        except OSError as error:
            self._file.close()
            raise TransferError(f"cannot make {size:,} bytes of memory to share (memfd): {error.strerror}") from None
        memory[: len(nonce)] = nonce
        self.buffer = np.frombuffer(memory, np.uint8)[_HEAD:]
        self.transport = f"{NAME}:{os.getpid()}/{fd}/{nonce.hex()}"

    def array(self, view: np.ndarray) -> np.ndarray:
        return view

    def write(self, view: np.ndarray, values: np.ndarray) -> None:
        view[...] = values

    def read(self, view: np.ndarray) -> np.ndarray:
        return view

    def settle(self) -> None: ...

    def close(self) -> None:
        self._file.close()


class SharedLanding:
    """The engine's half: what lands here has been here all along. `read` brings a view of it to the host, `array` makes it
    one that JAX adopts."""

    def __init__(
        self,
        buffer: np.ndarray,
        read: Callable[[np.ndarray], np.ndarray] = lambda view: view,
        array: Callable[[np.ndarray], Foreign] = Foreign,
    ) -> None:
        self.buffer, self._read, self.array = buffer, read, array
        self.link = b""
        self._pieces: Mapping[int, np.ndarray] = {}
        self._hashed = True

    def expect(self, version: int, pieces: Mapping[int, np.ndarray], hashed: bool) -> None:
        self._pieces, self._hashed = pieces, hashed

    def checksums(self, expected: Mapping[int, int]) -> dict[int, int]:
        return {index: checksum(self._read(self._pieces[index])) if self._hashed else 0 for index in expected}

    def settle(self) -> None: ...

    def close(self) -> None: ...


def shared_landing(where: str, size: int) -> SharedLanding:
    """`where` is what an offer says after the transport's name."""
    return SharedLanding(_mapped(where, size)[_HEAD:])


def _mapped(where: str, size: int) -> np.ndarray:
    """The whole of the memory, read-only, after making sure that it is what the trainer offers."""
    link = _LINK.fullmatch(where)
    if link is None:
        raise TransferError(f"an offer of shared memory cannot be read: {where[:100]!r}")
    path = f"/proc/{link['pid']}/fd/{link['fd']}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransferError(
            f"cannot open the memory that trainer process {link['pid']} shares ({path}): {error.strerror}. Both must run on "
            "one host, in one pid namespace (container), as the same user"
        ) from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or not _is_sealed(fd):
            raise TransferError(f"{path} is not memory that a trainer shares")
        if found.st_size != _HEAD + size:
            raise TransferError(
                f"the memory that trainer process {link['pid']} shares holds {found.st_size - _HEAD:,} bytes, the engine's "
                f"parameters {size:,}"
            )
        memory = mmap.mmap(fd, found.st_size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    if memory[:32].hex() != link["nonce"]:
        raise TransferError(f"{path} is not the memory that the offer describes; has the trainer been started anew?")
    return np.frombuffer(memory, np.uint8)


def _is_sealed(fd: int) -> bool:
    """Whether its size is fixed: else the trainer could cut it off under the engine's feet."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
