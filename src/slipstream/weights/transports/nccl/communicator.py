"""Non-blocking NCCL communicators, and those of the `nccl` transport: rank 0 sends, and the other rank, or several others,
receive.

A call is started, then its state is polled until it is done, has failed, was stopped or exceeds its deadline. On any
error the communicator is aborted before the error is raised, so no kernel keeps waiting for a peer that will not come.
Closing also aborts: unlike destroying a communicator, it does not need the peer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

from slipstream.errors import TransferError

Primitive: TypeAlias = Literal["send", "broadcast"]
"""The NCCL primitive that carries messages. Between two ranks both do the same; which is faster depends on the link."""

PRIMITIVES: tuple[Primitive, ...] = ("send", "broadcast")
UNIQUE_ID_BYTES = 128
ABORT_SECONDS = 10.0
CONNECTING = "connecting"
_SUCCESS, _IN_PROGRESS = 0, 7
UINT8, FLOAT32, SUM = 1, 7, 0
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 200e-6
"""Pauses between polls. They are short because a whole update may take only 20 ms."""


class NcclPair:
    """One end of a communicator, usually of two ranks, for one thread at a time. With more, the `primitive` is a broadcast.
    After an error only `close` may follow. Setting `stop` ends any wait."""

    def __init__(
        self,
        unique_id: bytes,
        rank: int,
        device: int,
        primitive: Primitive,
        peer: str,
        deadline: float,
        stop: threading.Event,
        size: int = 2,
    ) -> None:
        self._raw, core, cuda = modules()
        self._primitive, self._peer, self._deadline, self._stop = primitive, peer, deadline, stop
        self._is_quiet = True
        self._comm: Any = None
        with nccl_errors(f"preparing GPU {device}"):
            self._device = cuda.Device(device)
            self._device.set_current()
            self._stream = self._device.create_stream()
            self.stream = int(self._stream.handle)  # orders the messages
        with self._aborting_on_error(CONNECTING):
            self._comm = core.Communicator.init(
                size, rank, core.UniqueId.from_bytes(unique_id), core.NCCLConfig(blocking=False)
            )
            self._handle = self._raw.Comm(self._comm.ptr)
            self._poll(lambda: True, CONNECTING)

    @contextlib.contextmanager
    def group(self, what: str) -> Iterator[None]:
        """Launch the messages posted inside together, on exit. Both ends must post the same messages in the same groups.
        `what` describes the group in errors, for example "receiving the header"."""
        with self._aborting_on_error(what):
            self._raw.group_start()
            try:
                yield
            except BaseException:
                with contextlib.suppress(Exception):  # an open group would swallow this thread's next calls
                    self._raw.group_end()
                raise
            self._raw.group_end()
            self._poll(lambda: True, what)  # until launched: before that, nothing else may enter the stream

    def send(self, pointer: int, num_bytes: int) -> None:
        self._post(self._raw.send, 1, pointer, num_bytes)

    def recv(self, pointer: int, num_bytes: int) -> None:
        self._post(self._raw.recv, 0, pointer, num_bytes)

    def _post(self, call: Callable[..., None], other: int, pointer: int, num_bytes: int) -> None:
        if self._primitive == "send":
            call(pointer, num_bytes, UINT8, other, self._handle, self.stream)
        else:
            self._raw.broadcast(pointer, pointer, num_bytes, UINT8, 0, self._handle, self.stream)

    def mark(self) -> Any:
        """Return an event that completes once everything posted so far is done."""
        with self._aborting_on_error("recording an event"):
            self._device.set_current()  # another thread may have connected, or another library changed the device
            return self._stream.record()

    def wait(self, mark: Any, what: str) -> None:
        with self._aborting_on_error(what):
            self._poll(lambda: bool(mark.is_done), what)

    def close(self) -> bool:
        """Abort. Return whether the device is certain not to touch memory on behalf of this communicator any more; if False,
        that memory must never be reused. May be called twice; does not raise."""
        comm, self._comm = self._comm, None
        if comm is not None:
            self._is_quiet = finishes_in_time(comm.abort) and finishes_in_time(self._drain)
        if self._is_quiet and self._stream is not None:
            with contextlib.suppress(Exception):
                self._stream.close()
            self._stream = None
        return self._is_quiet

    def _drain(self) -> None:
        """Wait for aborted kernels, which may write until they see the abort flag."""
        self._device.set_current()
        self._stream.record().sync()

    def _poll(self, is_done: Callable[[], bool], what: str) -> None:
        poll(self._raw, self._comm, is_done, what, self._peer, self._deadline, self._stop.is_set)

    @contextlib.contextmanager
    def _aborting_on_error(self, what: str) -> Iterator[None]:
        if self._stream is None:
            raise TransferError(f"nccl, {what} with {self._peer}: this communicator is closed")
        try:
            with nccl_errors(f"{what} with {self._peer}"):
                yield
        except BaseException:
            self.close()
            raise


class Nccl4py:
    """NCCL through nccl4py, which binds the libnccl that the process has loaded or can find: torch's, JAX's or a preloaded
    one. Tests replace it by sockets."""

    pair = NcclPair

    def version(self) -> str:
        raw, _, _ = modules()
        with nccl_errors("querying the NCCL version"):
            number = raw.get_version()
        return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"

    def new_id(self) -> bytes:
        """Return the unique id of a future communicator, without waiting for a peer."""
        raw, _, _ = modules()
        with nccl_errors("creating a unique id"):
            return bytes(raw.get_unique_id())

    def device_id(self, device: int) -> str:
        """Return a string that no other GPU has, on any host."""
        from slipstream.weights.transports.cuda.driver import CudaDriver

        with nccl_errors(f"identifying GPU {device}"):
            return CudaDriver(device).device_uuid(device)

    def torch_device(self, device: int) -> str:
        return f"cuda:{device}"


NCCL = Nccl4py()


def poll(
    raw: Any,
    comm: Any,
    is_done: Callable[[], bool],
    what: str,
    peer: str,
    deadline: float,
    is_stopped: Callable[[], bool],
) -> None:
    """Poll a communicator until its last call has succeeded and `is_done`. Raise `TransferError` if NCCL reports an
    error, if stopped, or after `deadline` seconds. `raw` is nccl4py's low level, `what` and `peer` are for errors."""
    end, pause = time.monotonic() + deadline, _FIRST_PAUSE
    while not is_stopped():
        state = int(comm.get_async_error())
        if state == _SUCCESS and is_done():
            return
        if state not in (_SUCCESS, _IN_PROGRESS):
            raise TransferError(
                f"nccl, {what} with {peer}: {raw.get_error_string(state)}; did it die? Set NCCL_DEBUG=WARN on both sides for "
                "details"
            )
        if time.monotonic() > end:
            raise TransferError(timeout_message(peer, what, deadline))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    raise TransferError(f"nccl, {what} with {peer}: aborted on this side")


def timeout_message(peer: str, what: str, deadline: float) -> str:
    hint = (
        "can the two hosts reach each other (NCCL_SOCKET_IFNAME, firewall)? Two ranks on one GPU need "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 in both processes"
        if what == CONNECTING
        else "is it alive, and is it at the same update?"
    )
    return f"nccl, {what} with {peer}: no response within {deadline:g} s; {hint}"


def modules() -> tuple[Any, Any, Any]:
    """Import nccl4py's low and high level, and cuda.core."""
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
def nccl_errors(what: str) -> Iterator[None]:
    """Convert the errors of NCCL, CUDA and their bindings, which share no base class, to `TransferError`."""
    try:
        yield
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"nccl, {what}: {type(error).__name__}: {error}") from error


def finishes_in_time(work: Callable[[], None]) -> bool:
    """Run `work` in a thread, since it may hang. Return whether it succeeded within `ABORT_SECONDS`."""
    succeeded = threading.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            work()
            succeeded.set()

    thread = threading.Thread(target=run, name="slipstream-nccl-abort", daemon=True)
    thread.start()
    thread.join(ABORT_SECONDS)
    return succeeded.is_set()


def check_versions(own: str, peer_version: str, peer: str) -> None:
    """Raise `TransferError` unless both sides have the same NCCL."""
    if own != peer_version:
        newer = max(own, peer_version, key=_version_numbers)
        raise TransferError(
            f"NCCL {own} here, NCCL {peer_version} at {peer}: NCCL refuses to connect different versions. Install the same one "
            f"in both environments (for CUDA 13: pip install nvidia-nccl-cu13=={newer}), or preload one library into both "
            "(LD_PRELOAD=…/libnccl.so.2)"
        )


def _version_numbers(version: str) -> list[int]:
    return [int(part) if part.isdecimal() else 0 for part in version.split(".")]
