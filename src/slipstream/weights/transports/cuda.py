"""`cuda`: trainer and engine on one host's GPUs. The engine reads the trainer's arrays where they lie: nothing is sent.

Once per region of memory, the trainer passes a file descriptor over a Unix socket, and the engine's rank maps it, read-only. Of
each piece it is then told the address, shape, strides and dtype, and copies it device to device, cast, transposed and cut on
the way. The trainer's arrays are kept, and unchanged, until the engine has said that it has copied.

    message = head, JSON (new regions, new shapes, which regions are gone), rows of (index, region, offset) as int64
              + the new regions' file descriptors
    word    = version, seconds, length of an error, the error. One comes when all of it is mapped and found to fit, a
              second when the version is committed and copied, with the seconds that copying took.

Where memory cannot be exported (JAX's `cuda_async` allocator), arrays are first copied into a buffer of our own that can be,
and the sync's report says so."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from slipstream.errors import TransferError
from slipstream.weights.device import DevicePiece
from slipstream.weights.strided import Strided
from slipstream.weights.transports.base import fact, pack_link, unpack_link
from slipstream.weights.transports.door import Door, knock
from slipstream.weights.transports.exports import Exports, Found
from slipstream.weights.transports.vmm import Driver, Vmm

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 30.0
FDS_PER_MESSAGE = 100
_HEAD = struct.Struct("<4sqIII")
_WORD = struct.Struct("<qdI")
_MAGIC = b"SSC1"
_MOST_VIEWS = 8
"""Kept per piece."""
_MAX_TEXT, _MAX_ERROR = 64 << 20, 4096
_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


Shown: TypeAlias = Callable[[int, Mapping[int, Any]], None]
"""Takes a version, and pieces of it by index; raises if they are not what they should be. Pieces that lie where those of an
earlier version lay are the very same mapping."""


class Mapped(Protocol):
    """An exported region as the reader's framework sees it."""

    def view(self, dtype: str, geometry: Strided, offset: int) -> Any:
        """`offset` in bytes, of the geometry's array."""
        ...


# --- the trainer's half ---


class CudaSender:
    def __init__(self, link: bytes, peer: str, driver: Driver | None = None) -> None:
        facts = unpack_link(link)
        self._peer, self._exports = peer, Exports(driver or Vmm())
        self._told: set[int] = set()
        """Indices whose shapes the reader knows."""
        self._made: dict[int, Any] = {}
        """Functions for pieces that are no view of an array, and must be computed."""
        self._computed: list[Any] = []
        self._unheard = -1
        """The version that the rank owes us a word on."""
        self._unreleased = -1
        try:
            self._socket = knock(fact(facts, "name", str), fact(facts, "nonce", str), DEADLINE_SECONDS)
        except (OSError, ValueError) as error:
            raise TransferError(f"engine {peer} cannot be reached for mapped weights: {error}; is it alive?") from None

    @property
    def note(self) -> str:
        return "staged" if self._exports.is_staged else ""

    def send(self, version: int, pieces: Mapping[int, DevicePiece]) -> None:
        """The pieces' arrays have been computed: the reader's stream knows nothing of JAX's."""
        if not pieces:
            return
        arrays = {index: piece.array for index, piece in pieces.items()}
        computed = {index: self._compute(index, piece) for index, piece in pieces.items() if piece.strides is None}
        arrays |= computed
        self._computed = list(computed.values())
        for array in self._computed:
            array.block_until_ready()
        pointers = [array.unsafe_buffer_pointer() for array in arrays.values()]
        found = self._exports.places(dict(zip(pointers, arrays.values())))
        rows = np.empty((len(arrays), 3), np.int64)
        rows[:, 0] = list(arrays)
        rows[:, 1:] = [found.places[pointer] for pointer in pointers]
        shapes = []
        for index in pieces.keys() - self._told:
            array = arrays[index]
            geometry = pieces[index].strides or Strided.of(tuple(array.shape))
            facts = [np.dtype(array.dtype).name, geometry.offset, geometry.shape, geometry.strides]
            shapes.append([index, *facts])
        self._tell(version, found, shapes, rows)
        self._unheard = self._unreleased = version
        self._told.update(pieces)

    async def confirmed(self) -> None:
        version, self._unheard = self._unheard, -1
        if version >= 0:
            await self._hear(version, f"say that it can read version {version}")

    async def released(self) -> float:
        version, self._unreleased = self._unreleased, -1
        return await self._hear(version, f"say that it has copied version {version}") if version >= 0 else 0.0

    def _compute(self, index: int, piece: DevicePiece) -> Any:
        if index not in self._made:
            import jax

            self._made[index] = jax.jit(piece.cut)
        return self._made[index](piece.array)

    def _tell(self, version: int, found: Found, shapes: list[Any], rows: np.ndarray) -> None:
        new = list(found.new.items())
        batches = [new[i : i + FDS_PER_MESSAGE] for i in range(0, len(new), FDS_PER_MESSAGE)] or [[]]
        try:
            for number, batch in enumerate(batches):
                last = number == len(batches) - 1
                tree = {
                    "regions": [[key, region.size] for key, (region, _) in batch],
                    "gone": found.gone if not number else [],
                }
                text = json.dumps(tree | {"shapes": shapes if last else []}, separators=(",", ":")).encode()
                data = rows.tobytes() if last else b""
                fds = [fd for _, (_, fd) in batch]
                head = _HEAD.pack(_MAGIC, version, len(text), len(data), len(fds))
                message = head + text + data
                if rest := message[socket.send_fds(self._socket, [message], fds) :]:
                    self._socket.sendall(rest)
        except OSError as error:
            raise TransferError(
                f"engine {self._peer} went away while it was told of version {version}: {error}"
            ) from None
        finally:
            for _, fd in found.new.values():
                os.close(fd)

    async def _hear(self, version: int, what: str) -> float:
        """The rank's next word, which is on this version."""
        self._socket.setblocking(False)
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                word, seconds, size = _WORD.unpack(await _exactly_soon(self._socket, _WORD.size))
                text = (await _exactly_soon(self._socket, size)).decode(errors="replace") if size else ""
        except (OSError, EOFError, TimeoutError) as error:
            why = "it went away" if isinstance(error, EOFError) else str(error) or f"nothing for {DEADLINE_SECONDS:g} s"
            raise TransferError(f"engine {self._peer} did not {what}: {why}") from None
        finally:
            self._socket.settimeout(DEADLINE_SECONDS)
        if text:
            raise TransferError(f"engine {self._peer} cannot read version {version}: {text}")
        if word != version:
            raise TransferError(f"engine {self._peer} speaks of version {word}; it should {what}")
        return float(seconds)

    def close(self) -> None:
        self._socket.close()
        self._exports.close()
        self._computed = []


# --- the engine's half ---


@dataclass
class _Piece:
    dtype: str
    geometry: Strided


class _Reader:
    """A trainer rank's connection: a thread that maps what it is told of. `changed` guards all that it shares."""

    def __init__(
        self,
        connection: socket.socket,
        driver: Driver,
        wrap: Any,
        changed: threading.Condition,
        on_shown: Callable[[_Reader, int, Mapping[int, Any]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._socket, self._driver, self._wrap, self._changed = connection, driver, wrap, changed
        self._on_shown, self._on_end = on_shown, on_end
        self._regions: dict[int, tuple[int, int, Mapped]] = {}
        self._pieces: dict[int, _Piece] = {}
        self._views: dict[tuple[int, int, int], Any] = {}
        """Of pieces at places where they were seen before: a trainer's arrays come back to the same few."""
        self._shown: dict[bytes, Mapping[int, Any]] = {}
        """The same, of all pieces of a version."""
        self.error: Exception | None = None
        threading.Thread(target=self._read, name="slipstream-mapped", daemon=True).start()

    def _view(self, index: int, number: int, offset: int) -> Any:
        if index not in self._pieces:
            raise TransferError(f"piece {index} has no shape")
        piece = self._pieces[index]
        if number not in self._regions:
            raise TransferError(f"piece {index} is in region {number}, which was not shown")
        size = self._regions[number][1]
        itemsize = _DTYPES[piece.dtype]
        if not 0 <= offset <= offset + piece.geometry.reach * itemsize <= size or offset % itemsize:
            raise TransferError(f"piece {index} sticks out of its region of {size} bytes: {offset}, {piece.geometry}")
        return self._regions[number][2].view(piece.dtype, piece.geometry, offset)

    def say(self, version: int, seconds: float = 0.0, error: str = "") -> None:
        text = error.encode()[:_MAX_ERROR]
        self._socket.sendall(_WORD.pack(version, seconds, len(text)) + text)

    def close(self) -> None:
        """Forgets the trainer's memory. Called with `changed` held."""
        self._forget_views()
        for address, size, _ in self._regions.values():
            self._driver.unmap(address, size)
        self._regions = {}
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # its thread may be reading
        self._socket.close()

    def _read(self) -> None:
        fds: list[int] = []
        try:
            while True:
                head, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, FDS_PER_MESSAGE)
                if not head:
                    raise EOFError
                head += _exactly(self._socket, _HEAD.size - len(head))
                magic, version, text_size, data_size, num_fds = _HEAD.unpack(head)
                if magic != _MAGIC or text_size > _MAX_TEXT or data_size > _MAX_TEXT or num_fds != len(fds):
                    raise TransferError("the trainer's message on mapped weights cannot be read")
                tree = json.loads(_exactly(self._socket, text_size))
                rows = np.frombuffer(_exactly(self._socket, data_size), np.int64).reshape(-1, 3)
                with self._changed:
                    self._take(version, tree, rows, fds)
                    if len(rows):
                        self.say(version)  # before anyone can have copied it, and says that
                    self._changed.notify_all()
        except Exception as error:
            for fd in fds:  # those that were not mapped
                os.close(fd)
            with contextlib.suppress(OSError):
                self.say(-1, error=str(error) or type(error).__name__)
            with self._changed:
                self.error = error
                self._on_end()

    def _take(self, version: int, tree: dict[str, Any], rows: np.ndarray, fds: list[int]) -> None:
        for number in tree["gone"]:
            address, size, _ = self._regions.pop(number)
            self._driver.unmap(address, size)
        if tree["gone"] or tree["shapes"]:
            self._forget_views()
        if len(tree["regions"]) != len(fds):
            raise TransferError(f"{len(tree['regions'])} regions were announced, {len(fds)} came")
        for number, size in tree["regions"]:
            address = self._driver.map(fds.pop(0), size)
            self._regions[number] = (address, size, self._wrap(address, size))
        for index, dtype, offset, shape, strides in tree["shapes"]:
            if dtype not in _DTYPES or min((offset, *shape, *strides), default=0) < 0:
                raise TransferError(f"piece {index} has dtype {dtype!r}, offset {offset}, strides {strides}")
            self._pieces[index] = _Piece(dtype, Strided(tuple(shape), tuple(strides), offset))
        if len(rows):
            key = rows.tobytes()
            if (shown := self._shown.get(key)) is None:
                shown = self._shown[key] = self._see(rows)
            self._on_shown(self, version, shown)

    def _see(self, rows: np.ndarray) -> Mapping[int, Any]:
        if len(self._views) > _MOST_VIEWS * len(self._pieces) or len(self._shown) > _MOST_VIEWS:
            self._forget_views()
        shown = {}
        for index, number, offset in rows.tolist():
            key = index, number, offset
            if key not in self._views:
                self._views[key] = self._view(*key)
            shown[index] = self._views[key]
        return shown

    def _forget_views(self) -> None:
        self._views, self._shown = {}, {}


class CudaReceiver:
    """See `weights.device.Receiver`. `wrap` makes of an address and a size what the reader's framework can view. `check` is
    called with the pieces that a trainer rank shows, before it is told that all is well."""

    seconds = 0.0

    def __init__(
        self,
        senders: Collection[int],
        wrap: Any,
        driver: Driver,
        deadline: float = DEADLINE_SECONDS,
        check: Shown | None = None,
    ) -> None:
        self._driver, self._wrap, self._deadline, self._check = driver, wrap, deadline, check
        self._door = Door(self._let_in, deadline, len(senders))
        link = pack_link("cuda", name=self._door.name, nonce=self._door.nonce)
        self.links: Mapping[int, bytes] = dict.fromkeys(senders, link)
        self._changed = threading.Condition()
        self._readers: list[_Reader] = []
        self._version, self._sources = -1, dict[int, Any]()
        """What has been shown of an update. While there is any, nothing is unmapped."""
        self._showing: list[_Reader] = []
        """Of whom."""
        self._copying = False
        """A thread waits until what has been shown is copied."""
        self._copies: queue.SimpleQueue[tuple[int, Callable[[], float]] | None] = queue.SimpleQueue()
        """That thread's: versions, and what to wait for; None when there will be no more."""
        self._lost: Exception | None = None
        """Why a trainer rank's connection ended, since the update began."""
        self._closed = False

    def start(self) -> None:
        self._door.open()
        threading.Thread(target=self._settle, name="slipstream-copied", daemon=True).start()

    def expect(self, version: int) -> None:
        """Nothing to prepare: an update has begun when a trainer rank shows it."""

    def _shown(self, reader: _Reader, version: int, views: Mapping[int, Any]) -> None:
        if self._copying:
            raise TransferError(f"version {version} is shown while version {self._version} is still being copied")
        if self._check is not None:
            self._check(version, views)
        if version != self._version:
            self._version, self._sources, self._showing, self._lost = version, {}, [], None
        self._sources |= views
        self._showing.append(reader)

    def wait(self, version: int, indices: Collection[int], patience: float = math.inf) -> int | None:
        start = time.monotonic()
        with self._changed:
            while missing := [i for i in indices if self._version != version or i not in self._sources]:
                if isinstance(self._lost, (EOFError, OSError)):
                    raise TransferError(f"the trainer went away before all of version {version} was within reach")
                if self._lost is not None:
                    raise TransferError(f"what the trainer said of version {version} cannot be used: {self._lost}")
                if time.monotonic() >= start + patience:
                    return None
                self._changed.wait(start + min(patience, self._deadline) - time.monotonic())
                if time.monotonic() > start + self._deadline:
                    raise TransferError(
                        f"{len(missing)} piece(s) of version {version} were not shown within {self._deadline:g} s; is the "
                        "trainer alive?"
                    )
            return sum(self._sources[i].nbytes for i in indices)

    def source(self, index: int) -> Any:
        return self._sources[index]

    def done(self, version: int, copied: Callable[[], float]) -> float:
        """A thread waits, and tells the trainer: who called has other things to do."""
        with self._changed:
            self._copying = True
        self._copies.put((version, copied))
        return 0.0

    def _settle(self) -> None:
        while (work := self._copies.get()) is not None:
            version, copied = work
            seconds, why = 0.0, ""
            try:
                seconds = copied()
            except Exception as error:
                why = f"copying it failed: {type(error).__name__}: {error}"
            with self._changed:
                for reader in self._showing:
                    with contextlib.suppress(OSError):  # a trainer that is gone need not know
                        reader.say(version, seconds, why)
                self._copying = False
                try:
                    self._forget()
                except TransferError:  # the driver fails; so will the next update, and say so
                    log.exception("memory of a trainer that is gone cannot be unmapped")
                    self._changed.notify_all()

    def abandon(self) -> None:
        with self._changed:
            self._wait_for_copies()
            self._forget()

    def _forget(self) -> None:
        self._version, self._sources, self._showing = -1, {}, []
        self._sweep()

    def _wait_for_copies(self) -> None:
        """As long as memory is read, it stays mapped. Copies end soon, or the device is broken."""
        self._changed.wait_for(lambda: not self._copying, self._deadline)

    def _sweep(self) -> None:
        """Of trainers that are gone nothing stays mapped: it would not be free, even though they are dead."""
        if not self._sources:
            for reader in [r for r in self._readers if r.error is not None]:
                self._lost = reader.error
                reader.close()
                self._readers.remove(reader)
            self._changed.notify_all()

    def close(self) -> None:
        self._door.close()
        with self._changed:
            self._wait_for_copies()
            self._copies.put(None)
            self._closed = True
            for reader in self._readers:
                reader.close()
            self._readers, self._sources = [], {}

    def _let_in(self, connection: socket.socket) -> None:
        with self._changed:
            if self._closed:
                connection.close()
                return
            self._readers.append(_Reader(connection, self._driver, self._wrap, self._changed, self._shown, self._sweep))


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


async def _exactly_soon(connection: socket.socket, size: int) -> bytes:
    loop, parts = asyncio.get_running_loop(), bytearray()
    while len(parts) < size:
        part = await loop.sock_recv(connection, size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
