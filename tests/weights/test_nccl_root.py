"""The trainer's NCCL, with the library and CUDA replaced: which calls are made, with what memory, and that every wait ends.
What NCCL itself does with them needs GPUs."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from slipstream.errors import TransferError
from slipstream.weights.transports import nccl_pair, nccl_root
from slipstream.weights.transports.nccl_root import NcclLibrary


class Fake:
    """Both levels of nccl4py, and cuda.core. States come off `states` one by one; the last one stays."""

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
    monkeypatch.setattr(nccl_pair, "modules", lambda: (made.raw, made.core, made.cuda))
    monkeypatch.setattr(nccl_root, "_device", lambda: jax.local_devices()[0])
    return made


def test_joining_waits_without_blocking_and_bytes_are_shown_as_they_are(made: Fake) -> None:
    communicator = NcclLibrary().join(b"u" * 128, 3)
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
    with pytest.raises(TransferError, match="given up on this side"):
        communicator.broadcast(np.zeros(1, np.uint8))


def test_workers_that_do_not_come_are_given_up(made: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_root, "JOIN_SECONDS", 0.01)
    made.states = [7]
    with pytest.raises(TransferError, match=r"meeting the vLLM server's workers: no sign of them within 0\.01 s"):
        NcclLibrary().join(b"u" * 128, 2)
    assert made.aborted == 1


def test_a_broadcast_that_fails_is_aborted_and_said(made: Fake) -> None:
    communicator = NcclLibrary().join(b"u" * 128, 2)
    made.states = [6]
    with pytest.raises(TransferError, match="broadcasting to the vLLM server's workers: error 6"):
        communicator.broadcast(np.zeros(3, np.uint8))
    assert made.aborted == 1


def test_what_nccl_raises_is_one_of_our_errors(made: Fake) -> None:
    communicator = NcclLibrary().join(b"u" * 128, 2)

    def broadcast(*_: Any, **__: Any) -> None:
        raise RuntimeError("unhandled cuda error")

    made.raw.broadcast = broadcast
    with pytest.raises(TransferError, match="RuntimeError: unhandled cuda error"):
        communicator.broadcast(np.zeros(3, np.uint8))


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(TransferError, match="a trainer with a GPU only"):
        nccl_root._device()
