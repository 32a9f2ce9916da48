"""A fake NCCL over Unix sockets, for CPU tests of the `nccl` transport. Pointers are real addresses in the CPU arrays of JAX and
torch. It works between threads and between processes. It is stricter than NCCL: all ends must post messages of the same sizes in
the same groups. A broadcast to several ranks goes from rank to rank, as in NCCL's ring."""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import socket
import struct
import time
from pathlib import Path

from slipstream.errors import TransferError
from slipstream.weights.transports.nccl.communicator import CONNECTING, UNIQUE_ID_BYTES, timeout_message

_FRAME = struct.Struct("<IIQ")
_POLL_SECONDS = 0.01


class FakeNccl:
    """`directory` holds the sockets; a link works in every process that can see it."""

    def __init__(self, directory, version="2.30.7"):
        self._directory, self._version = Path(directory), version
        self._servers = {}
        self.pairs = []
        self.before_group = lambda pair, what: None
        """A hook for tests, called before each group: it can inject faults and observe progress."""
        self.quiet = True

    def version(self):
        return self._version

    def device_id(self, device):
        return f"{device} {secrets.token_hex(4)}"  # each rank has its own

    def torch_device(self, device):
        return "cpu"

    def new_id(self):
        unique_id = secrets.token_bytes(UNIQUE_ID_BYTES)
        self._servers[unique_id] = self._listen(self._path(unique_id))
        return unique_id

    def pair(self, unique_id, rank, device, primitive, peer, deadline, stop, size=2):
        assert size == 2 or primitive == "broadcast"
        pair = FakePair(self, rank, primitive, peer, deadline, stop)
        self.pairs.append(pair)
        server = self._servers.pop(unique_id, None)
        if size > 2:
            server = self._listen(self._path(unique_id, rank, size))
        below = self._path(unique_id, rank + 1, size) if rank + 1 < size else None
        pair.connect(server if rank else None, below)
        return pair

    def _path(self, unique_id, rank=1, size=2):
        return str(self._directory / f"{unique_id[:8].hex()}-{rank}-{size}")

    def _listen(self, path):
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        return server


class FakePair:
    stream = 0

    def __init__(self, library, rank, primitive, peer, deadline, stop):
        self._library, self.rank, self.primitive, self.peer = library, rank, primitive, peer
        self._deadline, self._stop = deadline, stop
        self._above = self._below = None
        """Sockets to the rank before this one and to the next."""
        self._messages, self.closed = [], False
        self.sent = 0
        """Bytes that have gone into the socket to the next rank."""
        self.log = []
        """The calls so far: ("group", sizes), ("mark", n), ("wait", n)."""
        self._marks = 0

    def connect(self, server, below):
        """Accept the rank before this one, if it has a server, and connect to the next, if it has a path."""

        def attempt(connect):
            try:
                found = connect()
                found.settimeout(_POLL_SECONDS)
                return found
            except (FileNotFoundError, ConnectionRefusedError, TimeoutError):
                return None

        def dial():
            found = socket.socket(socket.AF_UNIX)
            found.settimeout(self._deadline)
            found.connect(below)
            return found

        try:
            if below is not None:
                self._below = self._until(lambda: attempt(dial), CONNECTING)
            if server is not None:
                server.settimeout(_POLL_SECONDS)
                self._above = self._until(lambda: attempt(lambda: server.accept()[0]), CONNECTING)
        except TransferError:
            self.close()
            raise
        finally:
            if server is not None:
                server.close()

    @contextlib.contextmanager
    def group(self, what):
        assert not self.closed and not self._messages
        yield
        messages, self._messages = self._messages, []
        try:
            self._library.before_group(self, what)
            self.log.append(("group", [size for _, size in messages]))
            for number, (pointer, size) in enumerate(messages):
                memory = memoryview((ctypes.c_char * size).from_address(pointer)).cast("B")
                frame = _FRAME.pack(number, len(messages), size)
                if self._above is not None:
                    found = bytearray(_FRAME.size)
                    self._move(memoryview(found), what, sending=False)
                    assert bytes(found) == frame, (_FRAME.unpack(found), _FRAME.unpack(frame))
                    self._move(memory, what, sending=False)
                if self._below is not None:
                    self._move(memoryview(frame), what, sending=True)
                    self._move(memory, what, sending=True)
        except BaseException:
            self.close()
            raise

    def send(self, pointer, num_bytes):
        assert self.rank == 0
        self._messages.append((pointer, num_bytes))

    def recv(self, pointer, num_bytes):
        assert self.rank > 0
        self._messages.append((pointer, num_bytes))

    def mark(self):
        self._marks += 1
        self.log.append(("mark", self._marks))
        return self._marks

    def wait(self, mark, what):
        self.log.append(("wait", mark))

    def close(self):
        self.closed = True
        self.hang_up()
        return self._library.quiet

    def hang_up(self):
        for connection in (self._above, self._below):
            if connection is not None:
                connection.close()

    def _move(self, data, what, sending):
        while data:

            def attempt(data=data):
                with contextlib.suppress(TimeoutError):
                    count = self._below.send(data) if sending else self._above.recv_into(data)
                    if not count:
                        raise ConnectionResetError("the peer is closed")
                    self.sent += count if sending else 0
                    return count

            data = data[self._until(attempt, what) :]

    def _until(self, attempt, what):
        end = time.monotonic() + self._deadline
        while True:
            try:
                if (found := attempt()) is not None:
                    return found
            except OSError as error:
                raise TransferError(f"nccl, {what} with {self.peer}: remote error ({error}); did it die?") from None
            if self._stop.is_set():
                raise TransferError(f"nccl, {what} with {self.peer}: aborted on this side")
            if time.monotonic() > end:
                raise TransferError(timeout_message(self.peer, what, self._deadline))
            time.sleep(0.001)
