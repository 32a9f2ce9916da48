"""A stand-in for NCCL over loopback sockets: the trainer's half of a communicator. The other halves are scripted, or live in a
real vLLM worker (`tests/vllm/worker_sockets.py`). The unique id is the address to dial, padded to NCCL's length."""

from __future__ import annotations

import socket
import struct
from typing import Any

import numpy as np

from slipstream.errors import TransferError
from slipstream.weights.transports.nccl.communicator import UNIQUE_ID_BYTES

SECONDS = 60.0


class SocketLibrary:
    """Listens where its ids say. `fail_at` is the broadcast at which the trainer's half breaks, counted from 0."""

    def __init__(self) -> None:
        self._listening: dict[bytes, socket.socket] = {}
        self.fail_at: int | None = None
        self.joined: list[SocketCommunicator] = []
        self.own_version = ""

    def new_id(self) -> bytes:
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(SECONDS)
        unique_id = f"{server.getsockname()[1]}".encode().ljust(UNIQUE_ID_BYTES, b"\0")
        self._listening[unique_id] = server
        return unique_id

    def version(self) -> str:
        return self.own_version

    def join(self, unique_id: bytes, world_size: int) -> SocketCommunicator:
        server = self._listening.pop(unique_id)
        try:
            peers = [server.accept()[0] for _ in range(world_size - 1)]
        except TimeoutError:
            raise TransferError(
                f"sockets: {world_size - 1} worker(s) did not come within {server.gettimeout():g} s"
            ) from None
        finally:
            server.close()
        self.joined.append(SocketCommunicator(peers, self))
        return self.joined[-1]

    def close(self) -> None:
        for server in self._listening.values():
            server.close()


class SocketCommunicator:
    def __init__(self, peers: list[socket.socket], library: SocketLibrary) -> None:
        self._peers, self._library = peers, library
        self.broadcasts: list[int] = []
        """Bytes of each."""
        self.aborted = self.closed = False

    def all_reduce_one(self) -> None:
        for peer in self._peers:
            peer.sendall(b"1")
        for peer in self._peers:
            if peer.recv(1) != b"1":
                raise TransferError("sockets: a worker hung up")

    def broadcast(self, buffer: np.ndarray) -> None:
        assert buffer.dtype == np.uint8 and buffer.ndim == 1
        for peer in self._peers:
            wait_for(peer)
        if self._library.fail_at == len(self.broadcasts):
            raise TransferError("sockets: told to fail")
        for peer in self._peers:
            peer.sendall(struct.pack("<Q", buffer.size) + buffer.tobytes())
        self.broadcasts.append(buffer.size)

    def abort(self) -> None:
        self.aborted = True
        self._hang_up()

    def close(self) -> None:
        self.closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        for peer in self._peers:
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            peer.close()


def wait_for(peer: socket.socket) -> None:
    """A worker says that it waits for a broadcast, as NCCL's would by being there."""
    if peer.recv(1) != b"?":
        raise TransferError("sockets: a worker hung up")


def dial(unique_id: bytes) -> socket.socket:
    """A worker's half joins."""
    peer = socket.create_connection(("127.0.0.1", int(unique_id.rstrip(b"\0"))), timeout=SECONDS)
    peer.sendall(b"1")
    assert peer.recv(1) == b"1"
    return peer


def receive(peer: Any, size: int) -> bytes:
    """The next broadcast, which has to have this size."""
    peer.sendall(b"?")
    head = _read(peer, 8)
    (found,) = struct.unpack("<Q", head)
    if found != size:
        raise RuntimeError(f"a broadcast of {found} bytes came, expected {size}")
    return _read(peer, size)


def _read(peer: Any, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = peer.recv(min(1 << 20, size - len(data)))
        if not part:
            raise RuntimeError("the trainer hung up")
        data += part
    return bytes(data)
