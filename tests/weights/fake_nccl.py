"""A fake NCCL over Unix sockets, for CPU tests of the `nccl` transport. Pointers are real addresses in the CPU arrays of JAX and
torch. It works between threads and between processes. It is stricter than NCCL: both ends must post messages of the same sizes in
the same groups."""

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

    def torch_device(self, device):
        return "cpu"

    def new_id(self):
        unique_id = secrets.token_bytes(UNIQUE_ID_BYTES)
        server = socket.socket(socket.AF_UNIX)
        server.bind(self._path(unique_id))
        server.listen()
        self._servers[unique_id] = server
        return unique_id

    def pair(self, unique_id, rank, device, primitive, peer, deadline, stop):
        pair = FakePair(self, rank, primitive, peer, deadline, stop)
        self.pairs.append(pair)
        pair.connect(self._servers.pop(unique_id) if rank == 1 else None, self._path(unique_id))
        return pair

    def _path(self, unique_id):
        return str(self._directory / unique_id[:8].hex())


class FakePair:
    stream = 0

    def __init__(self, library, rank, primitive, peer, deadline, stop):
        self._library, self.rank, self.primitive, self.peer = library, rank, primitive, peer
        self._deadline, self._stop = deadline, stop
        self._socket, self._messages, self.closed = None, [], False
        self.log = []
        """The calls so far: ("group", sizes), ("mark", n), ("wait", n)."""
        self._marks = 0

    def connect(self, server, path):
        def attempt():
            try:
                if server is None:
                    found = socket.socket(socket.AF_UNIX)
                    found.settimeout(self._deadline)
                    found.connect(path)
                else:
                    found, _ = server.accept()
                return found
            except (FileNotFoundError, ConnectionRefusedError, TimeoutError):
                return None

        try:
            if server is not None:
                server.settimeout(_POLL_SECONDS)
            self._socket = self._until(attempt, CONNECTING)
            self._socket.settimeout(_POLL_SECONDS)
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
                if self.rank == 0:
                    self._move(memoryview(frame), what, sending=True)
                    self._move(memory, what, sending=True)
                else:
                    found = bytearray(_FRAME.size)
                    self._move(memoryview(found), what, sending=False)
                    assert bytes(found) == frame, (_FRAME.unpack(found), _FRAME.unpack(frame))
                    self._move(memory, what, sending=False)
        except BaseException:
            self.close()
            raise

    def send(self, pointer, num_bytes):
        assert self.rank == 0
        self._messages.append((pointer, num_bytes))

    def recv(self, pointer, num_bytes):
        assert self.rank == 1
        self._messages.append((pointer, num_bytes))

    def mark(self):
        self._marks += 1
        self.log.append(("mark", self._marks))
        return self._marks

    def wait(self, mark, what):
        self.log.append(("wait", mark))

    def close(self):
        self.closed = True
        if self._socket is not None:
            self._socket.close()
        return self._library.quiet

    def _move(self, data, what, sending):
        while data:

            def attempt(data=data):
                with contextlib.suppress(TimeoutError):
                    count = self._socket.send(data) if sending else self._socket.recv_into(data)
                    if not count:
                        raise ConnectionResetError("the peer is closed")
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
