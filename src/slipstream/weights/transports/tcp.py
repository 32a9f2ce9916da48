"""`tcp`: trainer and engine anywhere. The engine listens; each trainer rank opens a connection and streams its pieces.

On the wire, after the trainer has sent the link's secret and the engine has answered with one byte: frames of
`(version, piece, length)` and the bytes. Bytes go straight from the socket into the image. On loopback the secret is enough;
beyond it the engine needs a certificate, whose fingerprint travels in the link."""

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

from slipstream import tls
from slipstream.config import LOOPBACK, check_listening
from slipstream.errors import TransferError
from slipstream.weights.checksum import CHUNK_BYTES, chunks
from slipstream.weights.transports.base import SILENCE_SECONDS, Silence, fact, pack_link, unpack_link
from slipstream.weights.transports.memory import anonymous

_FRAME = struct.Struct("<qIQ")
_SECRET_BYTES = 32
_WELCOME = b"+"
_SOCKET_BUFFER = 4 << 20
CONNECT_SECONDS = 10.0
SEND_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Listen:
    """Where an engine's landings listen. A certificate and its key (PEM files) are needed beyond loopback."""

    host: str = "127.0.0.1"
    certificate: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        check_listening("listen", self.host, certificate=self.certificate, key=self.key)


class TcpLanding:
    """Pieces arrive on any number of connections, each served by a thread of its own."""

    def __init__(self, size: int, listen: Listen | None = None) -> None:
        listen = listen or Listen()
        self.buffer = anonymous(size)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._arrived = threading.Condition()
        self._pieces: Mapping[int, np.ndarray] = {}
        self._found: dict[int, int] = {}
        self._version, self._problem, self._hashed = -1, "", True
        self._tls = _server_tls(listen)
        tls.check_dialable("listen", listen.host)
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        self._server = socket.create_server((listen.host, 0), family=family)
        host, port = self._server.getsockname()[:2]
        print_of = tls.fingerprint(listen.certificate) if self._tls else ""
        self.link = pack_link("tcp", host=host, port=port, secret=self._secret.hex(), certificate=print_of)
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, name="slipstream-tcp", daemon=True).start()

    def expect(self, version: int, pieces: Mapping[int, np.ndarray], hashed: bool) -> None:
        with self._arrived:
            self._version, self._pieces, self._hashed = version, pieces, hashed
            self._found, self._problem = {}, ""
            self._arrived.notify_all()

    def checksums(self, expected: Mapping[int, int]) -> dict[int, int]:
        silence = Silence("tcp")
        with self._arrived:
            seen = -1
            while missing := [i for i in expected if i not in self._found]:
                if self._problem:
                    raise TransferError(f"tcp: {self._problem}; {len(missing)} piece(s) did not arrive")
                if len(self._found) != seen:
                    seen = len(self._found)
                    silence.broken()
                silence.check(len(missing))
                self._arrived.wait(0.2)
            return {i: self._found[i] for i in expected}

    def settle(self) -> None: ...

    def close(self) -> None:
        with self._arrived:
            self._problem = self._problem or "the landing was closed"
            self._arrived.notify_all()
        with contextlib.suppress(OSError):  # wakes the thread in accept; closing alone would let one more peer in
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
        """One trainer rank, until it hangs up. A stranger is dropped without an answer and without a trace."""
        try:
            connection.settimeout(CONNECT_SECONDS)
            if self._tls:
                connection = self._tls.wrap_socket(connection, server_side=True)
            if not hmac.compare_digest(_read(connection, _SECRET_BYTES), self._secret):
                return connection.close()
            connection.sendall(_WELCOME)
        except (OSError, TransferError):
            return connection.close()
        try:
            connection.settimeout(None)
            _tune(connection)
            self._connections.append(connection)
            while (first := connection.recv(1)) != b"":  # hanging up between frames is fine
                self._take(connection, *_FRAME.unpack(first + _read(connection, _FRAME.size - 1)))
            connection.close()
        except (OSError, TransferError) as error:
            with self._arrived:
                self._problem = f"the connection from {peer} ended ({error})"
                self._arrived.notify_all()
            connection.close()

    def _take(self, connection: socket.socket, version: int, index: int, size: int) -> None:
        with self._arrived:
            # A sender may be ahead of the control plane. Until it is told so, the landing has no place for the bytes.
            if not self._arrived.wait_for(lambda: self._version >= version, SILENCE_SECONDS):
                raise TransferError(f"bytes of version {version} came, which was never begun")
            piece = self._pieces.get(index) if self._version == version else None
        if piece is None or piece.nbytes != size:
            raise TransferError(f"piece {index} of version {version}, {size} bytes, came, which nobody expects")
        digest, whole = xxhash.xxh3_64(), piece.flags.c_contiguous
        for part in chunks(piece):
            target = piece[part]
            landing = target if whole else np.empty(target.shape, target.dtype)
            _read_into(connection, landing)
            if self._hashed:
                digest.update(landing.reshape(-1).view(np.uint8).data)
            if not whole:
                target[...] = landing
        with self._arrived:
            self._found[index] = digest.intdigest() if self._hashed else 0
            self._arrived.notify_all()


class TcpSender:
    def __init__(self, link: bytes, dtypes: Mapping[int, np.dtype], hashed: bool) -> None:
        facts = unpack_link(link)
        host, port, secret = fact(facts, "host", str), fact(facts, "port", int), fact(facts, "secret", str)
        self._dtypes, self._hashed, self._peer = dtypes, hashed, f"{host}:{port}"
        self._version = -1
        try:
            self._socket = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        except (OSError, OverflowError) as error:
            raise TransferError(f"cannot connect to the engine's tcp landing at {self._peer}: {error}") from None
        try:
            if facts.get("certificate") or host not in LOOPBACK:
                self._socket = _pinned(self._socket, fact(facts, "certificate", str), self._peer)
            self._introduce(bytes.fromhex(secret))
            self._socket.settimeout(SEND_SECONDS)
            _tune(self._socket)
        except (OSError, ValueError) as error:
            self._socket.close()
            raise TransferError(f"tcp: the engine at {self._peer} cannot be spoken to: {error}") from None
        except TransferError:
            self._socket.close()
            raise

    def _introduce(self, secret: bytes) -> None:
        """A landing that does not know us hangs up without a word."""
        try:
            self._socket.sendall(secret)
            answer = self._socket.recv(len(_WELCOME))
        except (ConnectionError, ssl.SSLEOFError):
            answer = b""
        if answer != _WELCOME:
            raise TransferError(
                f"the engine at {self._peer} hung up on us: the secret of the link is not its own, or it speaks TLS and the "
                "link does not say so; was it started again since?"
            )

    def begin(self, version: int) -> None:
        self._version = version

    def send(self, index: int, array: np.ndarray) -> int:
        dtype = self._dtypes[index]
        digest = xxhash.xxh3_64()
        try:
            self._socket.sendall(_FRAME.pack(self._version, index, array.size * dtype.itemsize))
            for part in chunks(array):
                data = np.ascontiguousarray(array[part], dtype).reshape(-1).view(np.uint8).data
                if self._hashed:
                    digest.update(data)
                self._socket.sendall(data)
        except OSError as error:
            raise TransferError(f"tcp: the engine at {self._peer} does not take piece {index}: {error}") from None
        return digest.intdigest() if self._hashed else 0

    def flush(self) -> None: ...

    def close(self) -> None:
        self._socket.close()


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _read_into(connection, np.frombuffer(data, np.uint8))
    return bytes(data)


def _read_into(connection: socket.socket, target: np.ndarray) -> None:
    view = memoryview(target.reshape(-1).view(np.uint8).data).cast("B")
    while view:
        count = connection.recv_into(view, min(len(view), CHUNK_BYTES))
        if not count:
            raise TransferError("hung up")
        view = view[count:]


def _server_tls(listen: Listen) -> ssl.SSLContext | None:
    if not listen.certificate:
        return None
    context = tls.server_context(listen.certificate, listen.key)
    # No session tickets: the sender reads the welcome and no more, and closing a socket with unread bytes resets the
    # connection, which throws away what is still on its way.
    context.num_tickets = 0
    return context


def _pinned(plain: socket.socket, expected: str, peer: str) -> ssl.SSLSocket:
    """TLS to whoever holds the certificate with this fingerprint, and to nobody else."""
    if not expected:
        raise TransferError(
            f"the engine at {peer} is beyond loopback and announced no certificate; weights are not sent in the clear"
        )
    try:
        secure = tls.client_context("").wrap_socket(plain)  # the fingerprint is the proof
    except (ssl.SSLError, ConnectionResetError) as error:
        raise TransferError(
            f"what listens at {peer} does not speak TLS, as the engine's link says it does ({error}); refusing to send"
        ) from None
    found = hashlib.sha256(secure.getpeercert(binary_form=True) or b"").hexdigest()
    if not hmac.compare_digest(found, expected):
        secure.close()
        raise TransferError(
            f"the engine at {peer} shows another certificate than the gateway announced; refusing to send"
        )
    return secure
