"""Reading exact amounts from a socket. All functions raise `EOFError` if the peer closes the connection first."""

from __future__ import annotations

import asyncio
import socket


def read_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    read_into(connection, memoryview(data))
    return bytes(data)


def read_into(connection: socket.socket, target: memoryview, chunk_bytes: int = 1 << 20) -> None:
    """Fill `target`, a writable view of bytes, with at most `chunk_bytes` per system call."""
    while target:
        count = connection.recv_into(target, min(len(target), chunk_bytes))
        if not count:
            raise EOFError("connection closed by the peer")
        target = target[count:]


async def read_exactly_async(connection: socket.socket, size: int) -> bytes:
    """`read_exactly` for a non-blocking socket, in the running event loop."""
    loop, data = asyncio.get_running_loop(), bytearray(size)
    view = memoryview(data)
    while view:
        count = await loop.sock_recv_into(connection, view)
        if not count:
            raise EOFError("connection closed by the peer")
        view = view[count:]
    return bytes(data)
