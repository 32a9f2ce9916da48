"""Wire format of the `cuda` transport, over a Unix socket between a trainer rank and an engine rank.

    announcement = header, JSON, rows; with file descriptors        trainer → engine
        header   = magic, version, bytes of JSON, bytes of rows, number of file descriptors
        JSON     = regions: [number, size] of each region whose file descriptor is attached, [number, size, handle] of
                            each that has a CUDA IPC handle, in hexadecimal digits
                   removed: numbers of the regions to unmap
                   layouts: [index, dtype, offset, shape, strides] of pieces announced for the first time, in elements
        rows     = (index, region, offset in bytes, checksum or -1) of each piece, as int64; the checksum is -2 if it
                   follows in another announcement, so that the engine may compute its own meanwhile
    reply        = version, seconds, bytes of error, class and text of the error          engine → trainer

A version has one announcement per `FDS_PER_MESSAGE` new regions; layouts and rows are in the last one. The engine
replies once when all pieces are mapped and checked, and again when the version is committed and copied, with the
seconds that copying took. An error reply that concerns no particular version has version -1."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError, TransferError, WeightsError, from_wire, to_wire
from slipstream.weights.transports.cuda.exported_regions import RegionUpdate
from slipstream.weights.transports.sockets import read_exactly, read_exactly_async

FDS_PER_MESSAGE = 100
HEADER = struct.Struct("<4sqIII")
MAGIC = b"SSC2"
NO_CHECKSUM, LATER = -1, -2
_REPLY = struct.Struct("<qdI")
_MAX_BYTES, _MAX_ERROR_BYTES = 64 << 20, 4096


@dataclass(frozen=True)
class Announcement:
    version: int
    regions: Sequence[Any]
    removed: Sequence[int]
    layouts: Sequence[Any]
    rows: np.ndarray
    """`(index, region, offset)`"""
    checksums: Mapping[int, int]
    """By index, of the pieces that have one. May be `LATER`."""


def send_announcements(
    connection: socket.socket, version: int, update: RegionUpdate, layouts: list[Any], rows: np.ndarray
) -> None:
    """Announce a version and close the file descriptors of its new regions. `rows` has the columns of the wire format. Raise
    `OSError`."""
    new = list(update.new.items())
    batches = [new[i : i + FDS_PER_MESSAGE] for i in range(0, len(new), FDS_PER_MESSAGE)] or [[]]
    try:
        for number, batch in enumerate(batches):
            is_first, is_last = number == 0, number == len(batches) - 1
            fields = {
                "regions": [
                    [key, region.size, *([shared.hex()] if isinstance(shared, bytes) else [])]
                    for key, (region, shared) in batch
                ],
                "removed": update.removed if is_first else [],
                "layouts": layouts if is_last else [],
            }
            text = json.dumps(fields, separators=(",", ":")).encode()
            data = rows.tobytes() if is_last else b""
            fds = [shared for _, (_, shared) in batch if isinstance(shared, int)]
            message = HEADER.pack(MAGIC, version, len(text), len(data), len(fds)) + text + data
            if rest := message[socket.send_fds(connection, [message], fds) :]:
                connection.sendall(rest)
    finally:
        update.close()


def receive_announcement(connection: socket.socket) -> tuple[Announcement, list[int]]:
    """Return the next announcement and its file descriptors, which the caller closes. Raise `EOFError` at the end."""
    header, fds, _, _ = socket.recv_fds(connection, HEADER.size, FDS_PER_MESSAGE)
    try:
        if not header:
            raise EOFError
        header += read_exactly(connection, HEADER.size - len(header))
        magic, version, text_size, rows_size, num_fds = HEADER.unpack(header)
        if magic != MAGIC or text_size > _MAX_BYTES or rows_size > _MAX_BYTES or num_fds != len(fds):
            raise TransferError("the trainer's announcement of mapped weights is malformed")
        fields = json.loads(read_exactly(connection, text_size))
        rows = np.frombuffer(read_exactly(connection, rows_size), np.int64).reshape(-1, 4)
        checksums = {index: value for index, _, _, value in rows.tolist() if value != NO_CHECKSUM}
        places = np.ascontiguousarray(rows[:, :3])
        return Announcement(version, fields["regions"], fields["removed"], fields["layouts"], places, checksums), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def send_reply(
    connection: socket.socket, version: int, seconds: float = 0.0, error: WeightsError | None = None
) -> None:
    text = "" if error is None else "\n".join(to_wire(error))
    data = text.encode()[:_MAX_ERROR_BYTES]
    connection.sendall(_REPLY.pack(version, seconds, len(data)) + data)


async def receive_reply(connection: socket.socket) -> tuple[int, float, SlipstreamError | None]:
    """Return version, seconds and error of the next reply, from a non-blocking socket."""
    version, seconds, size = _REPLY.unpack(await read_exactly_async(connection, _REPLY.size))
    kind, _, text = (await read_exactly_async(connection, size)).decode(errors="replace").partition("\n")
    return version, seconds, from_wire(kind, text) if size else None
