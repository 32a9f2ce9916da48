"""NCCL, as far as a trainer needs it that broadcasts to a `vllm serve`: rank 0 of a communicator with the server's workers.

As in `nccl_pair.py`, communicators do not block: every wait looks again and again, has a deadline, and aborts when it is over.
Bytes go through JAX's first GPU of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from slipstream.errors import TransferError
from slipstream.weights.transports import nccl_pair
from slipstream.weights.transports.nccl_pair import explained, in_time

JOIN_SECONDS = 120.0
BROADCAST_SECONDS = 600.0
"""Of one chunk: the first one waits until the fleet commits."""
POLL_SECONDS = 200e-6
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8, _FLOAT32, _SUM = 1, 7, 0


class NcclLibrary:
    def unique_id(self) -> bytes:
        return nccl_pair.NCCL.new_id()

    def version(self) -> str:
        return nccl_pair.NCCL.version()

    def join(self, unique_id: bytes, world_size: int) -> NcclCommunicator:
        return NcclCommunicator(unique_id, world_size)


class NcclCommunicator:
    def __init__(self, unique_id: bytes, world_size: int) -> None:
        self._raw, core, cuda = nccl_pair.modules()
        self._device, self._made, what = _device(), None, "meeting the vLLM server's workers"
        with explained(what):
            self._gpu = cuda.Device(self._device.local_hardware_id)
            self._gpu.set_current()
            self._stream = self._gpu.create_stream()
            config = core.NCCLConfig(blocking=False)
            self._made = core.Communicator.init(world_size, 0, core.UniqueId.from_bytes(unique_id), config)
            self._handle = self._raw.Comm(self._made.ptr)
            self._until(lambda: True, what, JOIN_SECONDS)

    def all_reduce_one(self) -> None:
        def call(pointer: int) -> None:
            self._raw.all_reduce(pointer, pointer, 1, _FLOAT32, _SUM, self._handle, int(self._stream.handle))

        self._collective(np.zeros(1, np.float32), call, "summing with the vLLM server's workers", JOIN_SECONDS)

    def broadcast(self, buffer: np.ndarray) -> None:
        def call(pointer: int) -> None:
            self._raw.broadcast(pointer, pointer, buffer.size, _UINT8, 0, self._handle, int(self._stream.handle))

        self._collective(buffer, call, "broadcasting to the vLLM server's workers", BROADCAST_SECONDS)

    def abort(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            in_time(made.abort)

    close = abort  # to destroy it would wait for all ranks of a host, of which we know nothing

    def _collective(self, host: np.ndarray, call: Callable[[int], None], what: str, seconds: float) -> None:
        import jax

        with explained(what):
            self._gpu.set_current()  # another thread has joined
            held = jax.device_put(host, self._device)
            held.block_until_ready()
            call(held.unsafe_buffer_pointer())
            self._until(lambda: True, what, seconds)  # it is launched: before that, nothing else may enter the stream
            mark = self._stream.record()
            self._until(lambda: bool(mark.is_done), what, seconds)
            del held  # until here, NCCL reads it

    def _until(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        """Raises `TransferError`, and then the communicator is of no use."""
        deadline = time.monotonic() + seconds
        while (made := self._made) is not None:
            state = int(made.get_async_error())
            if state == _SUCCESS and done():
                return
            if state not in (_SUCCESS, _IN_PROGRESS):
                why = f"{self._raw.get_error_string(state)}; NCCL_DEBUG=WARN, set on both sides, says more"
            elif time.monotonic() > deadline:
                why = f"no sign of them within {seconds:g} s; can the two reach each other (NCCL_SOCKET_IFNAME, firewall)?"
            else:
                time.sleep(POLL_SECONDS)
                continue
            self.abort()
            raise TransferError(f"nccl, {what}: {why}")
        raise TransferError(f"nccl, {what}: given up on this side")


def _device() -> Any:
    import jax

    device = jax.local_devices()[0]
    if device.platform not in ("gpu", "cuda"):
        raise TransferError(
            f"NCCL moves weights between GPUs, and JAX's first device here is {device.platform}; to a vLLM server weights go "
            "from a trainer with a GPU only"
        )
    return device
