"""The doors of a fleet for tests: an HTTP server on a socket, over a scripted fleet."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from slipstream.config import HttpConfig
from slipstream.gateway.tokens import TokenTable
from slipstream.http.server import serve
from slipstream.http.state import Front
from tests.http.fakes import TOKEN


@contextlib.asynccontextmanager
async def http_door(fleet: Any, **config: Any) -> AsyncIterator[tuple[str, int]]:
    """Yield where the server listens."""
    async with serve(Front.create(fleet, lambda: fleet, HttpConfig(**config)), TokenTable(TOKEN)) as url:
        where = urlsplit(url)
        yield str(where.hostname), int(where.port or 0)


def exchange(where: tuple[str, int], sent: bytes) -> bytes:
    """Send bytes as they are and return the whole answer. The peer may close the connection while it is written to."""
    answer = b""
    with socket.create_connection(where, timeout=30) as peer, contextlib.suppress(OSError):
        with contextlib.suppress(OSError):  # a closed peer is ENOTCONN too, which is no ConnectionError
            peer.sendall(sent)
            peer.shutdown(socket.SHUT_WR)
        while data := peer.recv(1 << 16):
            answer += data
    return answer
