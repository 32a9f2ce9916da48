"""Limits on connections: how many are open, and how long a client may take to send the headers of a request."""

from __future__ import annotations

import asyncio
import resource
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from slipstream.http.errors import JSON, HttpError, error_response

OTHER_FILES = 256
"""Open files of the gateway that are not HTTP connections."""
RETRY_SECONDS = 5


class LimitedConnection(H11Protocol):
    """uvicorn closes a connection that is idle between two requests. It waits without limit for the first byte of a
    connection, and for the end of headers once they have begun."""

    max_connections: ClassVar[int]
    header_seconds: ClassVar[float]
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.write(_refusal(self.max_connections))
            transport.close()
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _watch_headers(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def limited_connection(max_connections: int, header_seconds: float) -> type[LimitedConnection]:
    """Return a protocol for uvicorn. Raises the process's limit of open files for it, as far as that is permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = max_connections + OTHER_FILES
        if soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        max_connections = max(1, min(max_connections, soft - OTHER_FILES))
    limits = {"max_connections": max_connections, "header_seconds": header_seconds}
    return type("Connection", (LimitedConnection,), limits)


def _refusal(max_connections: int) -> bytes:
    error = HttpError(503, f"{max_connections} connections are open (max_connections); retry later", "too_many")
    response = error_response(error, RETRY_SECONDS)
    head = [f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: {JSON}\r\nConnection: close\r\n"]
    head += [f"{name}: {response.headers[name]}\r\n" for name in ("Content-Length", "Retry-After")]
    return "".join([*head, "\r\n"]).encode() + bytes(response.body)
