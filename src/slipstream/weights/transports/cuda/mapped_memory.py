"""`cuda`: both halves of the transport between GPUs of one host. The engine reads the trainer's arrays in place;
nothing is sent.

For each region of memory the trainer passes a file descriptor over a Unix socket once, and the engine rank maps it
read-only; of PyTorch's memory it passes a CUDA IPC handle. For each piece the trainer announces its place, shape, strides and
dtype; the engine rank copies it from device to device and casts, transposes and slices on the way. The trainer keeps the
arrays unchanged until the engine reports that it has copied them.

    trainer   CudaSender           exported_regions.py    which memory the engine knows
              wire_format.py                              announcements and replies
    engine    CudaReceiver         mapped_regions.py      the mappings, and views of the pieces

If memory cannot be exported (JAX's `cuda_async` allocator, PyTorch's `expandable_segments`), arrays are first copied into a
staging buffer that can be, and the sync report says so."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import numpy as np

from slipstream.errors import ChecksumMismatch, TransferError, WeightsError
from slipstream.tensors.strided import Strided
from slipstream.weights.sources.named_tensors import dtype_name
from slipstream.weights.sources.torch_shards import is_torch
from slipstream.weights.transports.contract import link_field, pack_link, unpack_link
from slipstream.weights.transports.cuda.driver import CudaDriver
from slipstream.weights.transports.cuda.exported_regions import ExportedRegions, RegionUpdate
from slipstream.weights.transports.cuda.fd_passing import FdListener, connect_fd_socket
from slipstream.weights.transports.cuda.mapped_regions import MappedRegion, MappedRegions
from slipstream.weights.transports.cuda.wire_format import (
    LATER,
    NO_CHECKSUM,
    receive_announcement,
    receive_reply,
    send_announcements,
    send_reply,
)
from slipstream.weights.transports.device import DevicePiece, DeviceSender, pointer_of, wait_for

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 30.0

PieceCheck: TypeAlias = Callable[[int, Mapping[int, Any]], None]
"""Takes a version and its pieces by index, and raises if they are not as expected. Pieces at the places of an earlier
version are the same mapping object."""

ComputeChecksums: TypeAlias = Callable[[Mapping[int, Any]], Mapping[int, int]]
"""Takes pieces by index and returns their checksums."""


# --- the trainer's half ---


class CudaSender(DeviceSender):
    def __init__(self, link: bytes, peer: str, driver: CudaDriver | None = None) -> None:
        fields = unpack_link(link)
        self._peer, self._exports = peer, ExportedRegions(driver or CudaDriver())
        self._announced: set[int] = set()
        """Indices whose layouts the engine knows."""
        self._compiled: dict[int, Any] = {}
        """Functions that compute the pieces that are not views of an array, by index."""
        self._computed: list[Any] = []
        self._prepared: np.ndarray | None = None
        """The rows of the version that was announced without checksums."""
        self._unconfirmed = -1
        """The version whose first reply is due."""
        self._unreleased = -1
        """The version whose second reply is due."""
        name, nonce = link_field(fields, "name", str), link_field(fields, "nonce", str)
        try:
            self._socket = connect_fd_socket(name, nonce, DEADLINE_SECONDS)
        except (OSError, ValueError) as error:
            raise TransferError(f"cannot connect to engine {peer} for mapped weights: {error}; is it alive?") from None

    @property
    def note(self) -> str:
        return "staged" if self._exports.is_staged else ""

    def prepare(self, version: int, pieces: Mapping[int, DevicePiece]) -> None:
        self._prepared = None
        self._announce(version, pieces, [LATER] * len(pieces))

    def send(self, version: int, pieces: Mapping[int, DevicePiece]) -> None:
        """Announce the pieces. Their arrays must be computed: the engine's stream does not wait for JAX's."""
        checksums = [NO_CHECKSUM if piece.checksum is None else piece.checksum for piece in pieces.values()]
        self._announce(version, pieces, checksums)
        self._prepared = None

    def _announce(self, version: int, pieces: Mapping[int, DevicePiece], checksums: list[int]) -> None:
        if not pieces:
            return
        update, layouts = RegionUpdate({}), list[Any]()
        if self._prepared is None:
            update, layouts, self._prepared = self._place(pieces)
        self._prepared[:, 3] = checksums
        try:
            send_announcements(self._socket, version, update, layouts, self._prepared)
        except OSError as error:
            raise TransferError(
                f"the connection to engine {self._peer} failed while announcing version {version}: {error}"
            ) from None
        self._unconfirmed = self._unreleased = version
        self._announced.update(pieces)

    def _place(self, pieces: Mapping[int, DevicePiece]) -> tuple[RegionUpdate, list[Any], np.ndarray]:
        """Return new regions, new layouts, and the rows of the pieces in their order, without checksums."""
        arrays = {index: piece.array for index, piece in pieces.items()}
        computed = {index: self._compute(index, piece) for index, piece in pieces.items() if piece.strides is None}
        arrays |= computed
        self._computed = list(computed.values())
        for array in self._computed:
            wait_for(array)
        pointers = [pointer_of(array) for array in arrays.values()]
        found = dict(zip(pointers, arrays.values()))
        if len(found) < len(pointers) and is_torch(next(iter(found.values()))):  # one tensor may be a view of another
            found = dict(sorted(zip(pointers, arrays.values()), key=lambda item: item[1].nbytes))
        update = self._exports.update(found)
        rows = np.empty((len(arrays), 4), np.int64)
        rows[:, 0] = list(arrays)
        rows[:, 1:3] = [update.places[pointer] for pointer in pointers]
        layouts = []
        for index in pieces.keys() - self._announced:
            array = arrays[index]
            view = pieces[index].strides or Strided.row_major(tuple(array.shape))
            layouts.append([index, dtype_name(array), view.offset, view.shape, view.strides])
        return update, layouts, rows

    async def confirmed(self) -> None:
        version, self._unconfirmed = self._unconfirmed, -1
        if version >= 0:
            await self._receive_reply(version, f"confirm that it can read version {version}")

    async def released(self) -> float:
        version, self._unreleased = self._unreleased, -1
        if version < 0:
            return 0.0
        return await self._receive_reply(version, f"confirm that it has copied version {version}")

    def _compute(self, index: int, piece: DevicePiece) -> Any:
        if is_torch(piece.array):
            return piece.slice(piece.array).contiguous()
        if index not in self._compiled:
            import jax

            self._compiled[index] = jax.jit(piece.slice)
        return self._compiled[index](piece.array)

    async def _receive_reply(self, version: int, expected: str) -> float:
        """Return the seconds of the next reply, which must be about this version."""
        self._socket.setblocking(False)
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                reply_version, seconds, problem = await receive_reply(self._socket)
        except (OSError, EOFError, TimeoutError) as error:
            why = "it disconnected" if isinstance(error, EOFError) else str(error)
            why = why or f"no reply in {DEADLINE_SECONDS:g} s"
            raise TransferError(f"engine {self._peer} did not {expected}: {why}") from None
        finally:
            self._socket.settimeout(DEADLINE_SECONDS)
        if isinstance(problem, ChecksumMismatch):
            raise ChecksumMismatch(f"engine {self._peer}: {problem}; version {version} is not used")
        if problem is not None:
            raise TransferError(f"engine {self._peer} cannot read version {version}: {problem}")
        if reply_version != version:
            raise TransferError(f"engine {self._peer} replied about version {reply_version}; it should {expected}")
        return seconds

    def close(self) -> None:
        self._socket.close()
        self._exports.close()
        self._computed = []


# --- the engine's half ---


class _TrainerConnection:
    """The connection to a trainer rank, with a thread that maps what it announces. `changed` guards all state."""

    def __init__(self, connection: socket.socket, regions: MappedRegions, receiver: CudaReceiver) -> None:
        self._socket, self._regions, self._receiver, self._changed = connection, regions, receiver, receiver.changed
        self.error: Exception | None = None
        """Why the connection ended."""
        threading.Thread(target=self._run, name="slipstream-mapped", daemon=True).start()

    def reply(self, version: int, seconds: float = 0.0, error: WeightsError | None = None) -> None:
        send_reply(self._socket, version, seconds, error)

    def close(self) -> None:
        """Unmap the trainer's memory. Called with `changed` held."""
        self._regions.close()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread if it is reading
        self._socket.close()

    def _run(self) -> None:
        fds: list[int] = []
        found: Mapping[int, int] = {}
        try:
            while True:
                announcement, fds = receive_announcement(self._socket)
                with self._changed:
                    self._regions.apply(announcement, fds)
                    pieces = self._regions.pieces(announcement.rows)
                expected = announcement.checksums
                if expected and not found:
                    found = self._receiver.checksums({index: pieces[index] for index in expected})
                if LATER in expected.values():
                    continue
                self._receiver.compare(found, expected)
                found = {}
                with self._changed:
                    if pieces:
                        self._receiver.on_pieces(self, announcement.version, pieces)
                        # Under the lock: before the version can be copied and released.
                        self.reply(announcement.version)
                    self._changed.notify_all()
        except Exception as error:
            for fd in fds:  # those that were not mapped
                os.close(fd)
            why = error if isinstance(error, WeightsError) else TransferError(str(error) or type(error).__name__)
            with contextlib.suppress(OSError):
                self.reply(-1, error=why)
            with self._changed:
                self.error = error
                self._receiver.close_ended_connections()


class CudaReceiver:
    """See `DeviceReceiver`. `wrap` turns the address and size of a mapped region into memory of the reader's framework.
    `compute_checksums` and `check` are called with the pieces that a trainer rank announces, before they are confirmed;
    `name_of` names the tensor of a piece."""

    seconds = 0.0

    def __init__(
        self,
        senders: Collection[int],
        wrap: Callable[[int, int], MappedRegion],
        driver: CudaDriver,
        deadline: float = DEADLINE_SECONDS,
        check: PieceCheck | None = None,
        compute_checksums: ComputeChecksums | None = None,
        name_of: Callable[[int], str] = "piece {}".format,
    ) -> None:
        self._driver, self._wrap, self._deadline, self._check = driver, wrap, deadline, check
        self._compute_checksums, self._name_of = compute_checksums, name_of
        self._listener = FdListener(self._on_connection, deadline, len(senders))
        link = pack_link("cuda", name=self._listener.name, nonce=self._listener.nonce)
        self.links: Mapping[int, bytes] = dict.fromkeys(senders, link)
        self.changed = threading.Condition()
        self._connections: list[_TrainerConnection] = []
        self._version, self._pieces = -1, dict[int, Any]()
        """The announced version and its pieces. While there are pieces, nothing is unmapped."""
        self._announcers: list[_TrainerConnection] = []
        """The connections that announced them."""
        self._is_copying = False
        self._num_comparing = 0
        """Connections whose pieces are being read. Nothing is unmapped meanwhile."""
        self._copies: queue.SimpleQueue[tuple[int, Callable[[], float]] | None] = queue.SimpleQueue()
        """For the releasing thread: versions with functions that wait for their copies; None to stop."""
        self._connection_error: Exception | None = None
        """Why a trainer rank's connection ended since the update began."""
        self._is_closed = False

    def start(self) -> None:
        self._listener.start()
        threading.Thread(target=self._release_versions, name="slipstream-copied", daemon=True).start()

    def expect(self, version: int) -> None:
        """Do nothing: an update begins when a trainer rank announces it."""

    def checksums(self, pieces: Mapping[int, Any]) -> Mapping[int, int]:
        """Compute checksums, without the lock: this reads all pieces, and `wait` must not take as long."""
        if self._compute_checksums is None:
            return {}
        with self.changed:
            self._check_open()
            self._num_comparing += 1
        try:
            return self._compute_checksums(pieces)
        finally:
            with self.changed:
                self._num_comparing -= 1
                self.changed.notify_all()

    def compare(self, found: Mapping[int, int], expected: Mapping[int, int]) -> None:
        for index, value in found.items():
            if value != expected[index]:
                raise ChecksumMismatch(
                    f"it reads {self._name_of(index)} with checksum {value:08x}, the trainer has {expected[index]:08x}"
                )

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferError("the engine has closed the connection")

    def on_pieces(self, connection: _TrainerConnection, version: int, pieces: Mapping[int, Any]) -> None:
        self._check_open()
        if self._is_copying:
            raise TransferError(f"version {version} was announced while version {self._version} is still being copied")
        if self._check is not None:
            self._check(version, pieces)
        if version != self._version:
            self._version, self._pieces, self._announcers, self._connection_error = version, {}, [], None
        self._pieces |= pieces
        self._announcers.append(connection)

    def wait(self, version: int, indices: Collection[int], patience: float = math.inf) -> int | None:
        start = time.monotonic()
        with self.changed:
            while missing := [i for i in indices if self._version != version or i not in self._pieces]:
                if isinstance(self._connection_error, (EOFError, OSError)):
                    raise TransferError(f"the trainer disconnected before it had announced all of version {version}")
                if self._connection_error is not None:
                    raise TransferError(f"the announcement of version {version} is invalid: {self._connection_error}")
                if time.monotonic() >= start + patience:
                    return None
                self.changed.wait(start + min(patience, self._deadline) - time.monotonic())
                if time.monotonic() > start + self._deadline:
                    raise TransferError(
                        f"{len(missing)} piece(s) of version {version} were not announced within {self._deadline:g} s; is the "
                        "trainer alive?"
                    )
            return sum(self._pieces[i].nbytes for i in indices)

    def source(self, index: int) -> Any:
        return self._pieces[index]

    def done(self, version: int, copied: Callable[[], float]) -> float:
        """Return 0 at once; a thread waits for the copies and reports their seconds to the trainer."""
        with self.changed:
            self._is_copying = True
        self._copies.put((version, copied))
        return 0.0

    def _release_versions(self) -> None:
        while (work := self._copies.get()) is not None:
            version, copied = work
            seconds = 0.0
            problem: TransferError | None = None
            try:
                seconds = copied()
            except Exception as error:
                problem = TransferError(f"copying it failed: {type(error).__name__}: {error}")
            with self.changed:
                for connection in self._announcers:
                    with contextlib.suppress(OSError):  # the trainer is gone
                        connection.reply(version, seconds, problem)
                self._is_copying = False
                try:
                    self._forget_version()
                except TransferError:  # the driver fails; the next update will fail too, and report it
                    log.exception("cannot unmap the memory of a trainer that disconnected")
                    self.changed.notify_all()

    def abandon(self) -> None:
        with self.changed:
            self._wait_for_copies()
            self._forget_version()

    def _forget_version(self) -> None:
        self._version, self._pieces, self._announcers = -1, {}, []
        self.close_ended_connections()

    def _wait_for_copies(self) -> None:
        """Keep memory mapped while it is read. Reading ends soon unless the device is broken."""
        self.changed.wait_for(lambda: not self._is_copying and not self._num_comparing, self._deadline)

    def close_ended_connections(self) -> None:
        """Unmap the memory of trainers that are gone, unless it is in use: it is not freed while it is mapped."""
        if not self._pieces:
            for connection in [c for c in self._connections if c.error is not None]:
                self._connection_error = connection.error
                connection.close()
                self._connections.remove(connection)
            self.changed.notify_all()

    def close(self) -> None:
        self._listener.close()
        with self.changed:
            self._is_closed = True
            self._wait_for_copies()
            self._copies.put(None)
            for connection in self._connections:
                connection.close()
            self._connections, self._pieces = [], {}

    def _on_connection(self, connection: socket.socket) -> None:
        with self.changed:
            if self._is_closed:
                connection.close()
                return
            regions = MappedRegions(self._driver, self._wrap)
            self._connections.append(_TrainerConnection(connection, regions, self))
