"""`NcclBroadcastRoot` with fakes for NCCL and CUDA: which calls are made, with which memory, and that every wait ends."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from slipstream.errors import TransferError
from slipstream.weights.transports.nccl import broadcast_root, communicator
from slipstream.weights.transports.nccl.broadcast_root import BroadcastRootLibrary


class Fake:
    """Both levels of nccl4py, and cuda.core. `states` are NCCL's successive states; the last one repeats."""

    def __init__(self) -> None:
        self.states: list[int] = [7, 7, 0]
        self.calls: list[Any] = []
        self.aborted = 0
        self.ptr = 1234
        stream = SimpleNamespace(record=lambda: SimpleNamespace(is_done=True), handle=5)
        device = SimpleNamespace(set_current=lambda: None, create_stream=lambda: stream)
        self.raw = SimpleNamespace(
            Comm=lambda pointer: ("comm", pointer),
            all_reduce=self._called("all_reduce", np.float32),
            broadcast=self._called("broadcast", np.uint8),
            get_error_string=lambda state: f"error {state}",
        )
        self.core = SimpleNamespace(
            NCCLConfig=dict, UniqueId=SimpleNamespace(from_bytes=bytes), Communicator=SimpleNamespace(init=self._init)
        )
        self.cuda = SimpleNamespace(Device=lambda number: device)

    def _init(self, world_size: int, rank: int, unique_id: bytes, config: Any) -> Fake:
        self.calls.append(("init", world_size, rank, unique_id, config["blocking"]))
        return self

    def _called(self, name: str, dtype: Any) -> Any:
        def call(send: int, receive: int, count: int, kind: int, what: int, handle: Any, stream: int) -> None:
            assert send == receive and handle == ("comm", 1234) and stream == 5
            data = np.frombuffer(ctypes.string_at(send, count * np.dtype(dtype).itemsize), dtype)
            self.calls.append((name, data.tolist(), kind, what))

        return call

    def get_async_error(self) -> int:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(communicator, "modules", lambda: (made.raw, made.core, made.cuda))
    monkeypatch.setattr(broadcast_root, "_device", lambda: jax.local_devices()[0])
    return made


def test_joining_polls_and_collectives_get_the_bytes(made: Fake) -> None:
    communicator = BroadcastRootLibrary().join(b"u" * 128, 3)
    communicator.all_reduce_one()
    communicator.broadcast(np.arange(5, dtype=np.uint8))
    assert made.calls == [
        ("init", 3, 0, b"u" * 128, False),
        ("all_reduce", [0.0], 7, 0),
        ("broadcast", [0, 1, 2, 3, 4], 1, 0),
    ]
    communicator.close()
    communicator.abort()
    assert made.aborted == 1
    with pytest.raises(TransferError, match="aborted on this side"):
        communicator.broadcast(np.zeros(1, np.uint8))


def test_joining_times_out(made: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_root, "JOIN_SECONDS", 0.01)
    made.states = [7]
    with pytest.raises(TransferError, match=r"connecting with the vLLM server's workers: no response within 0\.01 s"):
        BroadcastRootLibrary().join(b"u" * 128, 2)
    assert made.aborted == 1


def test_a_failed_broadcast_is_aborted_and_reported(made: Fake) -> None:
    communicator = BroadcastRootLibrary().join(b"u" * 128, 2)
    made.states = [6]
    with pytest.raises(TransferError, match="broadcasting with the vLLM server's workers: error 6"):
        communicator.broadcast(np.zeros(3, np.uint8))
    assert made.aborted == 1


def test_nccl_exceptions_become_transfer_errors(made: Fake) -> None:
    communicator = BroadcastRootLibrary().join(b"u" * 128, 2)

    def broadcast(*_: Any, **__: Any) -> None:
        raise RuntimeError("unhandled cuda error")

    made.raw.broadcast = broadcast
    with pytest.raises(TransferError, match="RuntimeError: unhandled cuda error"):
        communicator.broadcast(np.zeros(3, np.uint8))


def test_a_trainer_without_a_gpu_is_refused() -> None:
    with pytest.raises(TransferError, match="needs a trainer with a GPU"):
        broadcast_root._device()
