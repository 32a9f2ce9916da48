"""`tcp`: trainer and engine on any hosts. The engine listens; each trainer rank opens a connection and streams its
pieces.

    trainer   secret (32 bytes, from the link)
    engine    one byte, if the secret is right
    trainer   frame, frame, …       frame = version, piece index, length, bytes of the piece

Bytes go directly from the socket into the image. On loopback the secret is sufficient. Beyond loopback the engine needs
a certificate; the link carries its fingerprint."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xxhash

from slipstream.config import LOOPBACK, check_listening
from slipstream.errors import TransferError
from slipstream.runtime import tls
from slipstream.weights.checksum import CHUNK_BYTES, PieceScan, PieceScanner, ScanOptions, chunks
from slipstream.weights.transports.contract import (
    HostReceiver,
    HostSender,
    StallTimer,
    link_field,
    pack_link,
    unpack_link,
)
from slipstream.weights.transports.host.memory import anonymous_memory
from slipstream.weights.transports.sockets import read_exactly, read_into

_FRAME = struct.Struct("<qIQ")
_SECRET_BYTES = 32
_WELCOME = b"+"
_SOCKET_BUFFER = 4 << 20
CONNECT_SECONDS = 10.0
SEND_SECONDS = 60.0
STALL_SECONDS = 30.0
"""A receiver gives up when nothing has arrived for this long."""


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """Where an engine's receivers listen. A certificate and its key (PEM files) are needed beyond loopback."""

    host: str = "127.0.0.1"
    certificate: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        check_listening("listen", self.host, certificate=self.certificate, key=self.key)


class TcpReceiver(HostReceiver):
    """The engine's half. Pieces arrive on any number of connections, each served by a thread."""

    def __init__(self, size: int, listen: ListenConfig | None = None) -> None:
        listen = listen or ListenConfig()
        super().__init__(anonymous_memory(size))
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._changed = threading.Condition()
        self._checksums: dict[int, int] = {}
        """Checksums of the pieces that have arrived."""
        self._error = ""
        self._tls = _server_tls(listen)
        tls.check_dialable("listen", listen.host)
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        self._server = socket.create_server((listen.host, 0), family=family)
        host, port = self._server.getsockname()[:2]
        fingerprint = tls.fingerprint(listen.certificate) if self._tls else ""
        self.link = pack_link("tcp", host=host, port=port, secret=self._secret.hex(), certificate=fingerprint)
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, name="slipstream-tcp", daemon=True).start()

    def expect(self, version: int, pieces: Mapping[int, np.ndarray], hashed: bool) -> None:
        with self._changed:
            super().expect(version, pieces, hashed)
            self._checksums, self._error = {}, ""
            self._changed.notify_all()

    def checksums(self, expected: Mapping[int, int]) -> dict[int, int]:
        timer = StallTimer(STALL_SECONDS)
        with self._changed:
            while missing := [i for i in expected if i not in self._checksums]:
                if self._error:
                    raise TransferError(f"tcp: {self._error}; {len(missing)} piece(s) did not arrive")
                if timer.is_stalled(len(self._checksums)):
                    raise TransferError(
                        f"tcp: {len(missing)} piece(s) did not arrive; nothing came for {STALL_SECONDS:g} s"
                    )
                self._changed.wait(0.2)
            return {i: self._checksums[i] for i in expected}

    def close(self) -> None:
        with self._changed:
            self._error = self._error or "the receiver was closed"
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # wakes the thread in `accept`; `close` alone would accept one more peer
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection, str(peer[0])), daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        """Serve one trainer rank until it disconnects. Drop a peer without the secret silently."""
        try:
            connection.settimeout(CONNECT_SECONDS)
            if self._tls:
                connection = self._tls.wrap_socket(connection, server_side=True)
            if not hmac.compare_digest(read_exactly(connection, _SECRET_BYTES), self._secret):
                return connection.close()
            connection.sendall(_WELCOME)
        except (OSError, EOFError):
            return connection.close()
        try:
            connection.settimeout(None)
            _set_options(connection)
            self._connections.append(connection)
            while (first := connection.recv(1)) != b"":  # disconnecting between frames is fine
                self._receive_piece(connection, *_FRAME.unpack(first + read_exactly(connection, _FRAME.size - 1)))
            connection.close()
        except (OSError, EOFError, TransferError) as error:
            with self._changed:
                self._error = f"the connection from {peer} ended ({error})"
                self._changed.notify_all()
            connection.close()

    def _receive_piece(self, connection: socket.socket, version: int, index: int, size: int) -> None:
        with self._changed:
            # A sender may be ahead of the control plane. Before `expect` there is no place for the bytes.
            if not self._changed.wait_for(lambda: self._version >= version, STALL_SECONDS):
                raise TransferError(f"received bytes of version {version}, whose update never began")
            piece = self._pieces.get(index) if self._version == version else None
        if piece is None or piece.nbytes != size:
            raise TransferError(f"received an unexpected piece {index} of version {version}, {size} bytes")
        digest, is_contiguous = xxhash.xxh3_64(), piece.flags.c_contiguous
        for part in chunks(piece):
            target = piece[part]
            received = target if is_contiguous else np.empty(target.shape, target.dtype)
            data = received.reshape(-1).view(np.uint8).data
            read_into(connection, data, CHUNK_BYTES)
            if self._hashed:
                digest.update(data)
            if not is_contiguous:
                target[...] = received
        with self._changed:
            self._checksums[index] = digest.intdigest() if self._hashed else 0
            self._changed.notify_all()


class TcpSender(HostSender):
    def __init__(self, link: bytes, dtype: np.dtype, options: ScanOptions) -> None:
        fields = unpack_link(link)
        host, port = link_field(fields, "host", str), link_field(fields, "port", int)
        secret = link_field(fields, "secret", str)
        self._dtype, self._options, self._peer = dtype, options, f"{host}:{port}"
        try:
            self._socket = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        except (OSError, OverflowError) as error:
            raise TransferError(f"cannot connect to the engine's tcp receiver at {self._peer}: {error}") from None
        try:
            if fields.get("certificate") or host not in LOOPBACK:
                self._socket = _pinned_tls(self._socket, link_field(fields, "certificate", str), self._peer)
            self._authenticate(bytes.fromhex(secret))
            self._socket.settimeout(SEND_SECONDS)
            _set_options(self._socket)
        except (OSError, ValueError) as error:
            self._socket.close()
            raise TransferError(f"tcp: the handshake with the engine at {self._peer} failed: {error}") from None
        except TransferError:
            self._socket.close()
            raise

    def _authenticate(self, secret: bytes) -> None:
        """Send the secret. A receiver with another secret disconnects without an answer."""
        try:
            self._socket.sendall(secret)
            answer = self._socket.recv(len(_WELCOME))
        except (ConnectionError, ssl.SSLEOFError):
            answer = b""
        if answer != _WELCOME:
            raise TransferError(
                f"the engine at {self._peer} rejected the connection: the link's secret is wrong, or the engine uses TLS and "
                "the link does not say so; was the engine restarted?"
            )

    def send(self, index: int, array: np.ndarray) -> PieceScan:
        scanner = PieceScanner(self._options)
        try:
            self._socket.sendall(_FRAME.pack(self._version, index, array.size * self._dtype.itemsize))
            for part in chunks(array):
                values = np.ascontiguousarray(array[part], self._dtype).reshape(-1)
                scanner.update(values)
                self._socket.sendall(values.view(np.uint8).data)
        except OSError as error:
            raise TransferError(f"tcp: sending piece {index} to the engine at {self._peer} failed: {error}") from None
        return scanner.result

    def close(self) -> None:
        self._socket.close()


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)


def _server_tls(listen: ListenConfig) -> ssl.SSLContext | None:
    if not listen.certificate:
        return None
    context = tls.server_context(listen.certificate, listen.key)
    # No session tickets: the sender reads only the welcome byte, and closing a socket with unread bytes resets the
    # connection, which discards data in transit.
    context.num_tickets = 0
    return context


def _pinned_tls(plain: socket.socket, expected: str, peer: str) -> ssl.SSLSocket:
    """Open TLS to a peer whose certificate must have the `expected` fingerprint."""
    if not expected:
        raise TransferError(
            f"the engine at {peer} is not on loopback and announced no certificate; refusing to send weights unencrypted"
        )
    try:
        secure = tls.client_context("").wrap_socket(plain)  # the fingerprint is the proof
    except (ssl.SSLError, ConnectionResetError) as error:
        raise TransferError(
            f"the peer at {peer} does not speak TLS, although the engine's link says so ({error}); refusing to send"
        ) from None
    fingerprint = hashlib.sha256(secure.getpeercert(binary_form=True) or b"").hexdigest()
    if not hmac.compare_digest(fingerprint, expected):
        secure.close()
        raise TransferError(
            f"the engine at {peer} has another certificate than the gateway announced; refusing to send"
        )
    return secure
