"""`shm`: trainer and engine on one host. The engine creates a shared-memory file (segment) that both sides map.

    segment = nonce (64 bytes), one mark per piece, padding to the next page, image

Names are random and the file is private (0600). It is unlinked as soon as every sender has mapped it, so a later crash
leaves nothing behind. After an earlier crash, `sweep` finds the dead owner in the file name and removes the file. (The
standard library's `SharedMemory` is not used: up to Python 3.12 the resource tracker of the attaching process unlinks
it.)"""

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
from slipstream.runtime.failpoints import step
from slipstream.runtime.process_times import process_start_time
from slipstream.weights.checksum import ScanOptions
from slipstream.weights.rank_image import align_up
from slipstream.weights.transports.contract import link_field, pack_link, unpack_link
from slipstream.weights.transports.host.in_place import InPlaceReceiver, InPlaceSender, MakePieces

_NAME = re.compile(r"slipstream-(?P<user>\d+)-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{16}")
_NONCE_BYTES = 64


def directory() -> Path:
    """Return the directory of segments. SLIPSTREAM_SHM_DIR overrides `/dev/shm`, for example if that is too small;
    trainer and engines must use the same directory."""
    if override := os.environ.get("SLIPSTREAM_SHM_DIR"):
        return Path(override)
    return Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


class ShmReceiver(InPlaceReceiver):
    """The engine's half, which creates the segment."""

    def __init__(self, size: int, num_pieces: int) -> None:
        owner = f"{os.getuid()}-{_pid_namespace()}-{os.getpid()}-{process_start_time(os.getpid())}"
        self.path = directory() / f"slipstream-{owner}-{secrets.token_hex(8)}"
        nonce, start = secrets.token_bytes(_NONCE_BYTES), _image_start(num_pieces)
        fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            step("engine.allocate", bytes=start + size)
            # Allocate the pages now. With a sparse file, running out of shared memory is a SIGBUS during a copy.
            os.posix_fallocate(fd, 0, start + size)
            memory = mmap.mmap(fd, start + size)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise TransferError(
                f"cannot allocate {size:,} bytes of shared memory in {directory()}: {error.strerror}; free some, or enlarge "
                "the mount (in a container: --shm-size)"
            ) from None
        finally:
            os.close(fd)
        memory[:_NONCE_BYTES] = nonce
        view = np.frombuffer(memory, np.uint8)
        super().__init__(view[start:], view[_NONCE_BYTES : _NONCE_BYTES + num_pieces])
        self.start = start
        self.link = pack_link("shm", path=str(self.path), size=size, pieces=num_pieces, nonce=nonce.hex())

    def senders_opened(self) -> None:
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        super().close()
        self.path.unlink(missing_ok=True)


def shm_sender(link: bytes, make_pieces: MakePieces, options: ScanOptions) -> InPlaceSender:
    """Map the engine's segment, after checking that it is a regular file of this user and the one in the link."""
    fields = unpack_link(link)
    path, nonce = Path(link_field(fields, "path", str)), link_field(fields, "nonce", str)
    size, num_pieces = link_field(fields, "size", int), link_field(fields, "pieces", int)
    if path.parent != directory() or not _NAME.fullmatch(path.name) or num_pieces < 0:
        raise TransferError(f"the shm link names {path}, which is not a segment of Slipstream in {directory()}")
    start = _image_start(num_pieces)
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(f"cannot open the engine's shared memory {path}: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise TransferError(
                f"shared memory {path} belongs to user {status.st_uid}, not to this user ({os.getuid()})"
            )
        if status.st_size != start + size:
            raise TransferError(f"shared memory {path} holds {status.st_size - start} bytes, the link says {size}")
        memory = mmap.mmap(fd, status.st_size)
    finally:
        os.close(fd)
    if memory[:_NONCE_BYTES].hex() != nonce:
        raise TransferError(f"shared memory {path} is not the segment that the link describes")
    view = np.frombuffer(memory, np.uint8)
    return InPlaceSender(make_pieces(view[start:]), view[_NONCE_BYTES : _NONCE_BYTES + num_pieces], options)


def _image_start(num_pieces: int) -> int:
    return align_up(_NONCE_BYTES + num_pieces, mmap.PAGESIZE)


def sweep() -> list[Path]:
    """Remove segments whose owner is dead and return their paths. Safe at any time, in any process."""
    dead = [path for path, pid, started in segments() if process_start_time(pid) != started]
    for path in dead:
        path.unlink(missing_ok=True)
    return dead


def segments() -> list[tuple[Path, int, int]]:
    """Return the segments of this user: path, and pid and start time of the owner."""
    paths = directory().glob(f"slipstream-{os.getuid()}-{_pid_namespace()}-*")
    return [(p, int(match["pid"]), int(match["started"])) for p in paths if (match := _NAME.fullmatch(p.name))]


def _pid_namespace() -> int:
    """Return the pid namespace. Containers may share /dev/shm but not pids, so `sweep` ignores other namespaces."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
