"""NCCL between two ranks, and nothing else of it: rank 0 sends, rank 1 receives. Every call ends within a deadline.

Communicators are non-blocking: a call is begun, and then its state is looked at until it is done, failed, told to stop, or
late. Whatever goes wrong, the communicator is aborted before the error is raised, so that no kernel goes on waiting for a
peer that will not come. `abort` needs no help of the peer; it is how a pair is closed, too."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeAlias

from slipstream.errors import TransferError

How: TypeAlias = Literal["send", "broadcast"]
"""In which of NCCL's words a message travels. Between two ranks they mean the same; which is faster depends on the link."""

HOWS: tuple[How, ...] = ("send", "broadcast")
ID_BYTES = 128
ABORT_SECONDS = 10.0
_SUCCESS, _IN_PROGRESS, _UINT8 = 0, 7, 1
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 200e-6
"""Between two looks at what is under way: a whole update may take 20 ms, so a millisecond would be seen."""


class Pair(Protocol):
    """One end of a communicator. One thread at a time uses it; once a call has raised, only `close` may follow."""

    stream: int
    """The CUDA stream that messages are ordered on; 0 where there is none."""

    def group(self, what: str) -> AbstractContextManager[None]:
        """Messages posted inside are begun together at its end. Both ends post the same messages in the same groups.
        `what` is for errors: "the header"."""
        ...

    def send(self, pointer: int, num_bytes: int) -> None: ...

    def recv(self, pointer: int, num_bytes: int) -> None: ...

    def mark(self) -> Any:
        """This point of the stream: reached when everything posted so far is done."""
        ...

    def wait(self, mark: Any, what: str) -> None: ...

    def close(self) -> bool:
        """Aborts what is under way. Whether it is certain that the device touches no memory on its behalf any more: if
        not, that memory must never be used again. May be called twice; does not raise."""
        ...


class Library(Protocol):
    """Where pairs come from: NCCL, or what stands in for it in tests."""

    def version(self) -> str: ...

    def new_id(self) -> bytes:
        """Names a pair to be. Does not wait for anyone."""
        ...

    def place(self, device: int) -> str:
        """The device in torch's words."""
        ...

    def pair(
        self, unique_id: bytes, rank: int, device: int, how: How, peer: str, deadline: float, stop: threading.Event
    ) -> Pair:
        """Meets the other rank. `stop` ends any wait of the pair."""
        ...


class Nccl:
    """The real one. nccl4py binds whichever libnccl the process has loaded, or can find: torch's, JAX's, or a preloaded one."""

    def version(self) -> str:
        raw, _, _ = modules()
        with explained("asking NCCL for its version"):
            number = raw.get_version()
        return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"

    def new_id(self) -> bytes:
        raw, _, _ = modules()
        with explained("asking NCCL for a unique id"):
            return bytes(raw.get_unique_id())

    def place(self, device: int) -> str:
        return f"cuda:{device}"

    def pair(
        self, unique_id: bytes, rank: int, device: int, how: How, peer: str, deadline: float, stop: threading.Event
    ) -> Pair:
        return NcclPair(unique_id, rank, device, how, peer, deadline, stop)


NCCL: Library = Nccl()


class NcclPair:
    def __init__(
        self, unique_id: bytes, rank: int, device: int, how: How, peer: str, deadline: float, stop: threading.Event
    ) -> None:
        self._raw, core, cuda = modules()
        self._how, self._peer, self._deadline, self._stop = how, peer, deadline, stop
        self._quiet = True
        self._comm: Any = None
        with explained(f"preparing GPU {device} for NCCL"):
            self._device = cuda.Device(device)
            self._device.set_current()
            self._stream = self._device.create_stream()
            self.stream = int(self._stream.handle)
        with self._guarded("meeting"):
            self._comm = core.Communicator.init(
                2, rank, core.UniqueId.from_bytes(unique_id), core.NCCLConfig(blocking=False)
            )
            self._handle = self._raw.Comm(self._comm.ptr)
            self._until(lambda: True, "meeting")

    @contextlib.contextmanager
    def group(self, what: str) -> Iterator[None]:
        with self._guarded(what):
            self._raw.group_start()
            try:
                yield
            except BaseException:
                with contextlib.suppress(Exception):  # an open group would swallow this thread's next calls
                    self._raw.group_end()
                raise
            self._raw.group_end()
            self._until(lambda: True, what)  # until it is launched: before that, nothing else may enter the stream

    def send(self, pointer: int, num_bytes: int) -> None:
        if self._how == "send":
            self._raw.send(pointer, num_bytes, _UINT8, 1, self._handle, self.stream)
        else:
            self._raw.broadcast(pointer, pointer, num_bytes, _UINT8, 0, self._handle, self.stream)

    def recv(self, pointer: int, num_bytes: int) -> None:
        if self._how == "send":
            self._raw.recv(pointer, num_bytes, _UINT8, 0, self._handle, self.stream)
        else:
            self._raw.broadcast(pointer, pointer, num_bytes, _UINT8, 0, self._handle, self.stream)

    def mark(self) -> Any:
        with self._guarded("marking the stream"):
            self._device.set_current()  # another thread may have made the pair, or another library moved on
            return self._stream.record()

    def wait(self, mark: Any, what: str) -> None:
        with self._guarded(what):
            self._until(lambda: bool(mark.is_done), what)

    def close(self) -> bool:
        comm, self._comm = self._comm, None
        if comm is not None:
            self._quiet = in_time(comm.abort) and in_time(self._drain)
        if self._quiet and self._stream is not None:
            with contextlib.suppress(Exception):
                self._stream.close()
            self._stream = None
        return self._quiet

    def _drain(self) -> None:
        """Aborted kernels see the flag and end; until they have, they may still write."""
        self._device.set_current()
        self._stream.record().sync()

    def _until(self, done: Callable[[], bool], what: str) -> None:
        end, pause = time.monotonic() + self._deadline, _FIRST_PAUSE
        while True:
            state = int(self._comm.get_async_error())
            if state == _SUCCESS and done():
                return
            if state not in (_SUCCESS, _IN_PROGRESS):
                raise TransferError(
                    f"nccl, {what} with {self._peer}: {self._raw.get_error_string(state)}; did it die? "
                    "NCCL_DEBUG=WARN, set on both sides, says more"
                )
            if self._stop.is_set():
                raise TransferError(f"nccl, {what} with {self._peer}: given up on this side")
            if time.monotonic() > end:
                raise TransferError(late(self._peer, what, self._deadline))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        if self._stream is None:
            raise TransferError(f"nccl, {what} with {self._peer}: this communicator is closed")
        try:
            with explained(f"{what} with {self._peer}"):
                yield
        except BaseException:
            self.close()
            raise


def late(peer: str, what: str, deadline: float) -> str:
    hint = (
        "can the two reach each other (NCCL_SOCKET_IFNAME, firewall)? Two ranks on one GPU need "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 in both processes"
        if what == "meeting"
        else "is it alive, and is it at the same update?"
    )
    return f"nccl, {what} with {peer}: no sign of it within {deadline:g} s; {hint}"


def modules() -> tuple[Any, Any, Any]:
    """nccl4py's low and high level, and cuda.core."""
    try:
        import cuda.core as cuda
        import nccl.core as core
        from nccl.bindings import nccl as raw
    except ImportError as error:
        raise TransferError(
            f"weights over nccl need nccl4py and cuda-core ({error}); pip install 'slipstream-rl[nccl]'"
        ) from None
    return raw, core, cuda


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Errors of NCCL, CUDA and their bindings, which have no common base class, as ours."""
    try:
        yield
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"nccl, {what}: {type(error).__name__}: {error}") from error


def in_time(work: Callable[[], None]) -> bool:
    """Runs `work` in a thread of its own, since what is broken may also hang. Whether it ended well, and in time."""
    well = threading.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            work()
            well.set()

    thread = threading.Thread(target=run, name="slipstream-nccl-abort", daemon=True)
    thread.start()
    thread.join(ABORT_SECONDS)
    return well.is_set()
