"""`shm`: trainer and engine on one host. A file of the engine's in shared memory, mapped by both.

Names are random and the file is private (0600). It is unlinked as soon as every sender has mapped it, so a crash later
on leaves nothing; a crash before that leaves a file whose name tells its dead owner, and `sweep` removes it. (The
standard library's `SharedMemory` is not used: up to Python 3.12 the attaching side's resource tracker unlinks it.)"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

import numpy as np

from slipstream.errors import TransferError
from slipstream.weights.transports.base import fact, pack_link, unpack_link
from slipstream.weights.transports.inplace import InPlaceLanding, InPlaceSender, Pieces

_NAME = re.compile(r"slipstream-(?P<user>\d+)-(?P<space>\d+)-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{16}")
_NONCE_BYTES = 64


def directory() -> Path:
    """Where segments lie: in memory that all processes of a host see. SLIPSTREAM_SHM_DIR names another such place, the same for
    trainer and engines, where `/dev/shm` is too small."""
    if named := os.environ.get("SLIPSTREAM_SHM_DIR"):
        return Path(named)
    return Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


class ShmLanding(InPlaceLanding):
    """Made by the engine: the file's head is a nonce, then come the marks, then, from the next page on, the image."""

    def __init__(self, size: int, num_pieces: int) -> None:
        owner = f"{os.getuid()}-{_pid_space()}-{os.getpid()}-{started(os.getpid())}"
        self.path = directory() / f"slipstream-{owner}-{secrets.token_hex(8)}"
        nonce, start = secrets.token_bytes(_NONCE_BYTES), _image_start(num_pieces)
        fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # Claim the pages now: with a sparse file, running out of shared memory is a SIGBUS in mid-copy.
            os.posix_fallocate(fd, 0, start + size)
            memory = mmap.mmap(fd, start + size)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise TransferError(
                f"cannot get {size:,} bytes of shared memory in {directory()}: {error.strerror}; free some, or enlarge "
                "the mount (in a container: --shm-size)"
            ) from None
        finally:
            os.close(fd)
        memory[:_NONCE_BYTES] = nonce
        view = np.frombuffer(memory, np.uint8)
        super().__init__(view[start:], view[_NONCE_BYTES : _NONCE_BYTES + num_pieces])
        self.start = start
        self.link = pack_link("shm", path=str(self.path), size=size, pieces=num_pieces, nonce=nonce.hex())

    def settle(self) -> None:
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        super().close()
        self.settle()


def shm_sender(link: bytes, pieces: Pieces, hashed: bool) -> InPlaceSender:
    """Maps the engine's file, after making sure that it is one, of this user, and the one that the link describes."""
    facts = unpack_link(link)
    path, nonce = Path(fact(facts, "path", str)), fact(facts, "nonce", str)
    size, num_pieces = fact(facts, "size", int), fact(facts, "pieces", int)
    if path.parent != directory() or not _NAME.fullmatch(path.name) or num_pieces < 0:
        raise TransferError(f"the shm link names {path}, which is not a segment of Slipstream in {directory()}")
    start = _image_start(num_pieces)
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(f"cannot open the engine's shared memory {path}: {error.strerror}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise TransferError(f"shared memory {path} belongs to user {found.st_uid}, not to this one ({os.getuid()})")
        if found.st_size != start + size:
            raise TransferError(f"shared memory {path} holds {found.st_size - start} bytes, the link says {size}")
        memory = mmap.mmap(fd, found.st_size)
    finally:
        os.close(fd)
    if memory[:_NONCE_BYTES].hex() != nonce:
        raise TransferError(f"shared memory {path} is not the segment that the link describes")
    view = np.frombuffer(memory, np.uint8)
    return InPlaceSender(pieces(view[start:]), view[_NONCE_BYTES : _NONCE_BYTES + num_pieces], hashed)


def _image_start(num_pieces: int) -> int:
    return -(-(_NONCE_BYTES + num_pieces) // mmap.PAGESIZE) * mmap.PAGESIZE


def sweep() -> list[Path]:
    """Removes segments whose owner is dead. Safe at any time, in any process; returns what it removed."""
    removed = []
    for path in directory().glob(f"slipstream-{os.getuid()}-{_pid_space()}-*"):
        match = _NAME.fullmatch(path.name)
        if match and started(int(match["pid"])) != int(match["started"]):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _pid_space() -> int:
    """Containers may share /dev/shm and not their pids: a segment of another pid namespace is never swept."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def started(pid: int) -> int:
    """When a process started, in the kernel's ticks, so that a recycled pid is not taken for its predecessor; 0 when
    there is no such process, or only its zombie."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if facts[0] in "ZX" else int(facts[19])
    except (FileNotFoundError, ProcessLookupError):
        pass
    if Path("/proc/self").exists():
        return 0
    try:  # no /proc (macOS): alive or not is all we can tell
        os.kill(pid, 0)
    except ProcessLookupError:
        return 0
    except PermissionError:
        pass
    return 1
