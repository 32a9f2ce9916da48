"""`tcp`: trainer and engine on any hosts. The engine listens; each trainer rank opens a connection and streams its
pieces.

    trainer   secret (32 bytes, from the link), path: the links of the engines behind this one
    engine    "+", if the secret is right and the next engine of the path has answered so too; "-" and the reason, if it has not
    trainer   frame, frame, …       frame = version, piece index, encoding, length, bytes of the piece or of its delta

Bytes go directly from the socket into the image. An engine with a path passes them on to the next engine, which it connects
to as a trainer does. So replicas form a chain, and the trainer sends to the first only. On loopback the secret is sufficient.
Beyond loopback an engine needs a certificate; its link carries the fingerprint."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import queue
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import xxhash

from slipstream.config import LOOPBACK, check_listening
from slipstream.errors import TransferError
from slipstream.runtime import tls
from slipstream.weights import delta
from slipstream.weights.checksum import CHUNK_BYTES, PieceScan, PieceScanner, ScanOptions, chunks
from slipstream.weights.delta import Encoding
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

_FRAME = struct.Struct("<qIBQ")
_LENGTH = struct.Struct("<I")
_MAX_TEXT_BYTES = 1 << 20
_SECRET_BYTES = 32
_WELCOME, _REFUSED = b"+", b"-"
_SOCKET_BUFFER = 4 << 20
CONNECT_SECONDS = 10.0
SEND_SECONDS = 60.0
HOP_SECONDS = 1.0
"""A peer waits this much longer for each engine behind the next one, so that the peer next to a fault reports it first."""
MAX_BEHIND = 64
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
    """The engine's half. Pieces arrive on any number of connections, each served by a thread, and may be passed on by another.
    `checksums` also waits until the pieces are passed on."""

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
        self._forwarders: list[Forwarder] = []
        self._appliers = ThreadPoolExecutor(delta.NUM_THREADS, "slipstream-tcp-delta")
        threading.Thread(target=self._accept, name="slipstream-tcp", daemon=True).start()

    def expect(self, version: int, pieces: Mapping[int, np.ndarray], hashed: bool) -> None:
        with self._changed:
            super().expect(version, pieces, hashed)
            self._checksums, self._error = {}, ""
            self._changed.notify_all()

    def checksums(self, expected: Mapping[int, int]) -> dict[int, int]:
        timer = StallTimer(STALL_SECONDS)
        with self._changed:
            while True:
                missing = [i for i in expected if i not in self._checksums]
                if missing and (self._error or not self._connections):  # all senders have connected by now
                    why = self._error or "nobody is connected any more"
                    raise TransferError(f"tcp: {why}; {len(missing)} piece(s) did not arrive")
                if failed := next((f for f in self._forwarders if f.error), None):
                    raise TransferError(f"tcp: passing pieces on to the engine at {failed.peer} failed: {failed.error}")
                behind = [f for f in self._forwarders if f.num_sent != f.num_queued]
                if not missing and not behind:
                    return {i: self._checksums[i] for i in expected}
                if timer.is_stalled(len(self._checksums) + sum(f.num_sent for f in self._forwarders)):
                    what = f"{len(missing)} piece(s) did not arrive; nothing came"
                    if not missing:
                        what = f"pieces could not be passed on to the engine at {behind[0].peer}; it took nothing"
                    raise TransferError(f"tcp: {what} for {STALL_SECONDS:g} s")
                self._changed.wait(0.2)

    def close(self) -> None:
        with self._changed:
            self._error = self._error or "the receiver was closed"
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # wakes the thread in `accept`; `close` alone would accept one more peer
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for connection in self._connections[:]:
            connection.close()
        for forwarder in self._forwarders[:]:
            forwarder.close()
        self._appliers.shutdown(wait=False, cancel_futures=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection, str(peer[0])), daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        """Serve a trainer rank, or the engine before this one, until it disconnects. Drop a peer without the secret
        silently."""
        forwarder: Forwarder | None = None
        try:
            connection.settimeout(CONNECT_SECONDS)
            if self._tls:
                connection = self._tls.wrap_socket(connection, server_side=True)
            if not hmac.compare_digest(read_exactly(connection, _SECRET_BYTES), self._secret):
                return connection.close()
            try:
                if path := _path(_read_text(connection)):
                    forwarder = Forwarder(path, self._notify)
            except TransferError as error:
                connection.sendall(_REFUSED + _text(str(error)))
                return connection.close()
        except (OSError, EOFError):
            return connection.close()
        self._connections.append(connection)
        if forwarder is not None:
            self._forwarders.append(forwarder)
        try:
            connection.sendall(_WELCOME)
            connection.settimeout(None)
            _set_options(connection)
            while (first := connection.recv(1)) != b"":  # disconnecting between frames is fine
                frame = _FRAME.unpack(first + read_exactly(connection, _FRAME.size - 1))
                self._receive_piece(connection, forwarder, *frame)
        except (OSError, EOFError, TransferError) as error:
            self._error = f"the connection from {peer} ended ({error})"
        connection.close()
        self._connections.remove(connection)
        if forwarder is not None:
            self._forwarders.remove(forwarder)
            forwarder.close()
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _receive_piece(
        self, connection: socket.socket, forwarder: Forwarder | None, version: int, index: int, encoding: int, size: int
    ) -> None:
        with self._changed:
            # A sender may be ahead of the control plane. Before `expect` there is no place for the bytes.
            if not self._changed.wait_for(lambda: self._version >= version, STALL_SECONDS):
                raise TransferError(f"received bytes of version {version}, whose update never began")
            piece = self._pieces.get(index) if self._version == version else None
        is_delta = encoding in (Encoding.DELTA, Encoding.DEVICE_DELTA) and self._hashed
        fits = piece is not None and (size <= piece.nbytes if is_delta else encoding == 0 and size == piece.nbytes)
        if piece is None or not fits:
            raise TransferError(
                f"received an unexpected piece {index} of version {version}, encoding {encoding}, {size} bytes"
            )
        if forwarder is not None:
            forwarder.put(_FRAME.pack(version, index, encoding, size))
        if is_delta:
            changes = bytearray(size)
            read_into(connection, memoryview(changes), CHUNK_BYTES)
            if forwarder is not None:
                forwarder.put(changes)
            self._appliers.submit(self._apply_delta, index, changes, Encoding(encoding))
            return
        digest, is_contiguous = xxhash.xxh3_64(), piece.flags.c_contiguous
        for part in chunks(piece):
            target = piece[part]
            received = target if is_contiguous else np.empty(target.shape, target.dtype)
            data = received.reshape(-1).view(np.uint8).data
            read_into(connection, data, CHUNK_BYTES)
            if not is_contiguous:
                target[...] = received
            if forwarder is not None:
                forwarder.put(target)
            if self._hashed:
                digest.update(data)
        self._arrived(index, digest.intdigest() if self._hashed else 0)

    def _apply_delta(self, index: int, changes: bytearray, encoding: Encoding) -> None:
        """Runs beside the connection's thread, which reads the next piece."""
        try:
            self._arrived(index, self._apply(index, changes, encoding))
        except Exception as error:
            self._error = f"cannot apply a delta ({type(error).__name__}: {error})"
            self._notify()

    def _arrived(self, index: int, checksum: int) -> None:
        with self._changed:
            self._checksums[index] = checksum
            self._changed.notify_all()


class TcpConnection:
    """A connection to an engine's receiver, which passes everything on to the engines of `path`, one after the other."""

    def __init__(self, link: bytes, path: Sequence[bytes] = ()) -> None:
        fields = unpack_link(link)
        host, port = link_field(fields, "host", str), link_field(fields, "port", int)
        secret = link_field(fields, "secret", str)
        self.peer = f"{host}:{port}"
        try:
            self._socket = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        except (OSError, OverflowError) as error:
            raise TransferError(f"cannot connect to the engine's tcp receiver at {self.peer}: {error}") from None
        try:
            if fields.get("certificate") or host not in LOOPBACK:
                self._socket = _pinned_tls(self._socket, link_field(fields, "certificate", str), self.peer)
            self._socket.settimeout(CONNECT_SECONDS + HOP_SECONDS * len(path))
            self._authenticate(bytes.fromhex(secret), path)
            self._socket.settimeout(SEND_SECONDS + HOP_SECONDS * len(path))
            _set_options(self._socket)
        except (OSError, ValueError, EOFError) as error:
            self._socket.close()
            raise TransferError(f"tcp: the handshake with the engine at {self.peer} failed: {error}") from None
        except TransferError:
            self._socket.close()
            raise

    def _authenticate(self, secret: bytes, path: Sequence[bytes]) -> None:
        """Send the secret and the path. A receiver with another secret disconnects without an answer."""
        try:
            self._socket.sendall(secret + _text(json.dumps([link.decode() for link in path])))
            answer = self._socket.recv(len(_WELCOME))
        except (ConnectionError, ssl.SSLEOFError):
            answer = b""
        if answer == _REFUSED:
            raise TransferError(f"the engine at {self.peer} cannot pass weights on: {_read_text(self._socket)}")
        if answer != _WELCOME:
            raise TransferError(
                f"the engine at {self.peer} rejected the connection: the link's secret is wrong, or the engine uses TLS and "
                "the link does not say so; was the engine restarted?"
            )

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        self._socket.sendall(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # ends a `sendall` in another thread
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        self._socket.close()


class TcpSender(HostSender):
    def __init__(self, link: bytes, dtype: np.dtype, options: ScanOptions, path: Sequence[bytes] = ()) -> None:
        self._dtype, self._options = dtype, options
        self._connection = TcpConnection(link, path)

    def send(self, index: int, array: np.ndarray) -> PieceScan:
        scanner = PieceScanner(self._options)
        with self._sending(index):
            self._begin_frame(index, Encoding.DENSE, array.size * self._dtype.itemsize)
            for part in chunks(array):
                values = np.ascontiguousarray(array[part], self._dtype).reshape(-1)
                scanner.update(values)
                self._connection.sendall(values.view(np.uint8).data)
        return scanner.result

    def send_delta(self, index: int, data: bytes, encoding: Encoding) -> None:
        with self._sending(index):
            self._begin_frame(index, encoding, len(data))
            self._connection.sendall(data)

    def _begin_frame(self, index: int, encoding: Encoding, size: int) -> None:
        self._connection.sendall(_FRAME.pack(self._version, index, encoding, size))

    @contextlib.contextmanager
    def _sending(self, index: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TransferError(
                f"tcp: sending piece {index} to the engine at {self._connection.peer} failed: {error}"
            ) from None

    def close(self) -> None:
        self._connection.close()


class Forwarder:
    """Passes on what one connection receives, chunk by chunk, to the next engine of its path. It reads the image, where a
    version stays until every engine has it, in a thread. It may be `MAX_BEHIND` chunks behind: then `put` waits, and so does
    the trainer, who would otherwise wait for a slow engine when the version is staged, which must not take long."""

    def __init__(self, path: Sequence[bytes], notify: Callable[[], None]) -> None:
        """`notify` is called when `num_sent` or `error` has changed."""
        self._connection, self._notify = TcpConnection(path[0], path[1:]), notify
        self._queue: queue.Queue[bytes | bytearray | np.ndarray | None] = queue.Queue(MAX_BEHIND)
        self.peer = self._connection.peer
        self.num_queued = self.num_sent = 0
        self.error = ""
        threading.Thread(target=self._run, name="slipstream-tcp-forward", daemon=True).start()

    def put(self, data: bytes | bytearray | np.ndarray) -> None:
        """Send a frame's header, a delta, or a part of the image."""
        self.num_queued += 1
        self._queue.put(data)

    def close(self) -> None:
        """Close the connection, although not everything may be sent."""
        self._connection.close()
        self._queue.put(None)

    def _run(self) -> None:
        try:
            while (data := self._queue.get()) is not None:
                if isinstance(data, bytes | bytearray):
                    self._connection.sendall(data)
                else:
                    self._connection.sendall(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
                self.num_sent += 1
                self._notify()
        except OSError as error:
            self.error = str(error)
            self._notify()
            while self._queue.get() is not None:  # `put` must not wait
                pass


def _text(text: str) -> bytes:
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def _read_text(connection: socket.socket) -> str:
    (size,) = _LENGTH.unpack(read_exactly(connection, _LENGTH.size))
    if size > _MAX_TEXT_BYTES:
        raise TransferError(f"tcp: a message of {size} bytes is too long")
    return read_exactly(connection, size).decode(errors="replace")


def _path(text: str) -> list[bytes]:
    """Parse the links that a sender gives to a receiver."""
    try:
        links = [str(link).encode() for link in json.loads(text)]
    except (ValueError, TypeError, RecursionError):
        raise TransferError(f"tcp: malformed path {text[:80]!r}") from None
    for link in links:
        if (name := unpack_link(link)["transport"]) != "tcp":
            raise TransferError(f"tcp: a path leads through links of this transport only, got one of {name!r}")
    return links


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
