"""NCCL by nccl4py, as far as a trainer needs it that broadcasts to a `vllm serve`: rank 0 of a communicator.

Communicators do not block: every wait here polls, has a deadline, and aborts when it is over. Bytes go through JAX's first
GPU of this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from slipstream.errors import TransferError

JOIN_SECONDS = 120.0
BROADCAST_SECONDS = 600.0
"""Of one chunk: the first one waits until the fleet commits."""
POLL_SECONDS = 0.0005


class NcclLibrary:
    def __init__(self) -> None:
        try:
            import nccl.core
        except ImportError as error:
            raise TransferError(
                f"sending weights to a vLLM server needs NCCL in the trainer ({error}); pip install 'slipstream-rl[nccl]'"
            ) from None
        self._nccl = nccl.core

    def unique_id(self) -> bytes:
        with _explained("make a unique id"):
            return bytes(self._nccl.get_unique_id())

    def version(self) -> str:
        found = self._nccl.get_version().libnccl
        return str(found.version) if found is not None else ""

    def join(self, unique_id: bytes, world_size: int) -> NcclCommunicator:
        doing, device = "join the vLLM server's workers", _device()
        with _explained(doing):
            _current(device)
            config = self._nccl.NCCLConfig(blocking=False)
            made = self._nccl.Communicator.init(world_size, 0, self._nccl.UniqueId.from_bytes(unique_id), config)
            communicator = NcclCommunicator(self._nccl, made, device)
            communicator.settle(doing, JOIN_SECONDS, lambda: True)
            return communicator


@contextlib.contextmanager
def _explained(doing: str) -> Iterator[None]:
    try:
        yield
    except TransferError:
        raise
    except Exception as error:  # NCCL's, CUDA's, or of whoever looks for their libraries
        raise TransferError(f"nccl: could not {doing}: {type(error).__name__}: {error}") from None


class NcclCommunicator:
    def __init__(self, nccl: Any, made: Any, device: Any) -> None:
        self._nccl, self._made, self._device = nccl, made, device
        self._stream = _current(device).create_stream()

    def all_reduce_one(self) -> None:
        self._collective(
            np.zeros(1, np.float32),
            "all-reduce with the vLLM server's workers",
            JOIN_SECONDS,
            lambda data: self._made.allreduce(data, data, self._nccl.SUM, stream=self._stream),
        )

    def broadcast(self, buffer: np.ndarray) -> None:
        self._collective(
            buffer,
            "broadcast weights to the vLLM server's workers",
            BROADCAST_SECONDS,
            lambda data: self._made.broadcast(data, data, 0, stream=self._stream),
        )

    def abort(self) -> None:
        self._made.abort()

    def close(self) -> None:
        self._made.abort()  # destroying waits for all ranks of the host, of which we know nothing

    def _collective(self, host: np.ndarray, doing: str, seconds: float, call: Callable[[Any], None]) -> None:
        import jax

        with _explained(doing):
            _current(self._device)
            held = jax.device_put(host, self._device)
            held.block_until_ready()
            call(_Exposed(held))
            self.settle(doing, seconds, lambda: True)  # it is queued
            queued = self._stream.record()
            self.settle(doing, seconds, lambda: bool(queued.is_done))
            del held  # until here, NCCL reads it

    def settle(self, doing: str, seconds: float, done: Callable[[], bool]) -> None:
        """Until NCCL has nothing in progress and `done`. Raises `TransferError`, and then the communicator is of no use."""
        deadline = time.monotonic() + seconds
        while True:
            state = self._made.get_async_error().name
            if state == "Success" and done():
                return
            if state not in ("Success", "InProgress"):
                why = f"could not {doing}: {state}"
            elif time.monotonic() > deadline:
                why = f"could not {doing} within {seconds:g} s"
            else:
                time.sleep(POLL_SECONDS)
                continue
            self.abort()
            raise TransferError(f"nccl: {why}; NCCL_DEBUG=INFO in both processes says more")


class _Exposed:
    """Device memory of a JAX array under the one protocol that says nothing of streams: its owner has blocked before."""

    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(array.shape),
            "typestr": np.dtype(array.dtype).str,
            "data": (array.unsafe_buffer_pointer(), False),
            "version": 3,
        }


def _device() -> Any:
    import jax

    device = jax.local_devices()[0]
    if device.platform not in ("gpu", "cuda"):
        raise TransferError(
            f"NCCL moves weights between GPUs, and JAX's first device here is {device.platform}; to a vLLM server weights go "
            "from a trainer with a GPU only"
        )
    return device


def _current(device: Any) -> Any:
    """CUDA's own object for a device of JAX's, made current in this thread."""
    from cuda.core import Device

    found = Device(device.local_hardware_id)
    found.set_current()
    return found
