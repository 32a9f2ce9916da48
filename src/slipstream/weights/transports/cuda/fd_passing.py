"""An authenticated Unix socket over which processes of one user on one host pass file descriptors.

It is an abstract socket (Linux), so a crash leaves nothing behind. Clients know its name and a nonce from the
transport's link."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable

from slipstream.errors import TransferError

_NONCE_BYTES = 32


class FdListener:
    """Accepts clients in a thread, which passes each authenticated connection to `on_connection`."""

    def __init__(self, on_connection: Callable[[socket.socket], None], deadline: float, backlog: int = 8) -> None:
        self._on_connection, self._deadline = on_connection, deadline
        self.name, self._nonce = f"slipstream-{secrets.token_hex(16)}", secrets.token_bytes(_NONCE_BYTES)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind("\0" + self.name)
        self._server.listen(backlog)

    @property
    def nonce(self) -> str:
        return self._nonce.hex()

    def start(self) -> None:
        threading.Thread(target=self._accept, name="slipstream-fd-listener", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            try:
                _check_user(connection)
                connection.settimeout(self._deadline)
                if not secrets.compare_digest(connection.recv(_NONCE_BYTES, socket.MSG_WAITALL), self._nonce):
                    raise TransferError("wrong nonce")
                connection.settimeout(None)
            except (OSError, TransferError):
                connection.close()
                continue
            self._on_connection(connection)


def connect_fd_socket(name: str, nonce: str, deadline: float) -> socket.socket:
    """Connect to another process's `FdListener`. Raise `OSError` or `ValueError`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(deadline)
    try:
        connection.connect("\0" + name)
        connection.sendall(bytes.fromhex(nonce))
    except BaseException:
        connection.close()
        raise
    return connection


def _check_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        raise TransferError(f"a process of user {user} tried to read the weights of user {os.getuid()}")
