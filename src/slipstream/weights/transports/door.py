"""A door for processes of the same user on this host, through which file descriptors can be passed.

It is an abstract Unix socket, of Linux: a crash leaves nothing behind. Guests know its name and a nonce, from whatever link
the transport has sent them."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable

from slipstream.errors import TransferError


class Door:
    """`on_guest` is called with the connection of each guest, in the door's thread, and owns it."""

    def __init__(self, on_guest: Callable[[socket.socket], None], deadline: float, backlog: int = 8) -> None:
        self._on_guest, self._deadline = on_guest, deadline
        self.name, self._nonce = f"slipstream-{secrets.token_hex(16)}", secrets.token_bytes(32)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind("\0" + self.name)
        self._server.listen(backlog)

    @property
    def nonce(self) -> str:
        return self._nonce.hex()

    def open(self) -> None:
        threading.Thread(target=self._accept, name="slipstream-door", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes whoever waits at the door
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                guest, _ = self._server.accept()
            except OSError:
                return
            try:
                _check_user(guest)
                guest.settimeout(self._deadline)
                if not secrets.compare_digest(guest.recv(32, socket.MSG_WAITALL), self._nonce):
                    raise TransferError("wrong nonce")
                guest.settimeout(None)
            except (OSError, TransferError):
                guest.close()
                continue
            self._on_guest(guest)


def knock(name: str, nonce: str, deadline: float) -> socket.socket:
    """A connection to the door of another process. Raises `OSError` or `ValueError`."""
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    guest.settimeout(deadline)
    try:
        guest.connect("\0" + name)
        guest.sendall(bytes.fromhex(nonce))
    except BaseException:
        guest.close()
        raise
    return guest


def _check_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        raise TransferError(f"a process of user {user} asked for the weights of user {os.getuid()}")
