"""Rank 0 of an NCCL communicator with the workers of a `vllm serve`, to which the trainer broadcasts.

As in `communicator.py`, the communicator does not block: every wait polls, has a deadline, and aborts the communicator
when it fails. Bytes go through this process's first JAX GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from slipstream.errors import TransferError
from slipstream.weights.transports.nccl import communicator
from slipstream.weights.transports.nccl.communicator import (
    CONNECTING,
    FLOAT32,
    SUM,
    UINT8,
    Nccl4py,
    finishes_in_time,
    nccl_errors,
    poll,
)

JOIN_SECONDS = 120.0
BROADCAST_SECONDS = 600.0
"""Time limit for one broadcast. The first one waits until the fleet commits."""
_PEER = "the vLLM server's workers"


class BroadcastRootLibrary(Nccl4py):
    def join(self, unique_id: bytes, world_size: int) -> NcclBroadcastRoot:
        """Join as rank 0. Return once all other ranks have joined."""
        return NcclBroadcastRoot(unique_id, world_size)


class NcclBroadcastRoot:
    """A `servers.gather.ServerCommunicator`."""

    def __init__(self, unique_id: bytes, world_size: int) -> None:
        self._raw, core, cuda = communicator.modules()
        self._device, self._comm = _device(), None
        with nccl_errors(f"{CONNECTING} with {_PEER}"):
            self._gpu = cuda.Device(self._device.local_hardware_id)
            self._gpu.set_current()
            self._stream = self._gpu.create_stream()
            config = core.NCCLConfig(blocking=False)
            self._comm = core.Communicator.init(world_size, 0, core.UniqueId.from_bytes(unique_id), config)
            self._handle = self._raw.Comm(self._comm.ptr)
            self._poll(lambda: True, CONNECTING, JOIN_SECONDS)

    def all_reduce_one(self) -> None:
        """All-reduce one float32, which vLLM's workers do right after joining."""

        def launch(pointer: int) -> None:
            self._raw.all_reduce(pointer, pointer, 1, FLOAT32, SUM, self._handle, int(self._stream.handle))

        self._collective(np.zeros(1, np.float32), launch, "all-reducing", JOIN_SECONDS)

    def broadcast(self, buffer: np.ndarray) -> None:
        def launch(pointer: int) -> None:
            self._raw.broadcast(pointer, pointer, buffer.size, UINT8, 0, self._handle, int(self._stream.handle))

        self._collective(buffer, launch, "broadcasting", BROADCAST_SECONDS)

    def abort(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            finishes_in_time(comm.abort)

    close = abort  # destroying the communicator would wait for ranks that we do not control

    def _collective(self, host: np.ndarray, launch: Callable[[int], None], what: str, seconds: float) -> None:
        import jax

        with nccl_errors(f"{what} with {_PEER}"):
            self._gpu.set_current()  # another thread has joined
            on_device = jax.device_put(host, self._device)
            on_device.block_until_ready()
            launch(on_device.unsafe_buffer_pointer())
            self._poll(lambda: True, what, seconds)  # until launched: before that, nothing else may enter the stream
            mark = self._stream.record()
            self._poll(lambda: bool(mark.is_done), what, seconds)
            del on_device  # NCCL reads it up to here

    def _poll(self, is_done: Callable[[], bool], what: str, seconds: float) -> None:
        try:
            poll(self._raw, self._comm, is_done, what, _PEER, seconds, lambda: self._comm is None)
        except TransferError:
            self.abort()
            raise


def _device() -> Any:
    import jax

    device = jax.local_devices()[0]
    if device.platform not in ("gpu", "cuda"):
        raise TransferError(
            f"sending weights to a vLLM server needs a trainer with a GPU, and JAX's first device here is {device.platform}"
        )
    return device
