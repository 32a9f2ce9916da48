"""The trainer's NCCL, with the library and CUDA replaced: which calls are made, with what memory, and that every wait ends.
What NCCL itself does with them needs GPUs."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from slipstream.errors import TransferError
from slipstream.weights.transports import nccl_root
from slipstream.weights.transports.nccl_root import NcclLibrary


class FakeCommunicator:
    """States come off `states` one by one; the last one stays."""

    def __init__(self, states: list[str]) -> None:
        self.states, self.calls, self.aborted = states, [], 0

    def get_async_error(self) -> Any:
        return SimpleNamespace(name=self.states.pop(0) if len(self.states) > 1 else self.states[0])

    def allreduce(self, send: Any, receive: Any, op: str, *, stream: Any) -> None:
        self.calls.append(("allreduce", read(send), op))

    def broadcast(self, send: Any, receive: Any, root: int, *, stream: Any) -> None:
        assert send is receive
        self.calls.append(("broadcast", read(send), root))

    def abort(self) -> None:
        self.aborted += 1


def read(exposed: Any) -> list[float]:
    """What lies in the memory that NCCL is shown."""
    facts = exposed.__cuda_array_interface__
    dtype, (size,), (pointer, read_only) = np.dtype(facts["typestr"]), facts["shape"], facts["data"]
    assert not read_only and facts["version"] == 3
    return np.frombuffer(ctypes.string_at(pointer, size * dtype.itemsize), dtype).tolist()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> FakeCommunicator:
    made = FakeCommunicator(["InProgress", "InProgress", "Success"])
    core = ModuleType("nccl.core")

    def init(world_size: int, rank: int, unique_id: bytes, config: Any) -> FakeCommunicator:
        made.calls.append(("init", world_size, rank, unique_id, config["blocking"]))
        return made

    core.get_unique_id = lambda: b"u" * 128  # type: ignore[attr-defined]
    core.get_version = lambda: SimpleNamespace(libnccl=SimpleNamespace(version="2.29.7"))  # type: ignore[attr-defined]
    core.NCCLConfig = dict  # type: ignore[attr-defined]
    core.UniqueId = SimpleNamespace(from_bytes=bytes)  # type: ignore[attr-defined]
    core.Communicator = SimpleNamespace(init=init)  # type: ignore[attr-defined]
    core.SUM = "sum"  # type: ignore[attr-defined]
    package = ModuleType("nccl")
    package.core = core  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nccl", package)
    monkeypatch.setitem(sys.modules, "nccl.core", core)
    stream = SimpleNamespace(record=lambda: SimpleNamespace(is_done=True))
    monkeypatch.setattr(nccl_root, "_current", lambda device: SimpleNamespace(create_stream=lambda: stream))
    monkeypatch.setattr(nccl_root, "_device", lambda: jax.local_devices()[0])
    return made


def test_joining_waits_without_blocking_and_bytes_are_shown_as_they_are(made: FakeCommunicator) -> None:
    library = NcclLibrary()
    assert library.unique_id() == b"u" * 128 and library.version() == "2.29.7"
    communicator = library.join(b"u" * 128, 3)
    communicator.all_reduce_one()
    communicator.broadcast(np.arange(5, dtype=np.uint8))
    assert made.calls == [
        ("init", 3, 0, b"u" * 128, False),
        ("allreduce", [0.0], "sum"),
        ("broadcast", [0, 1, 2, 3, 4], 0),
    ]
    communicator.close()
    assert made.aborted == 1


def test_workers_that_do_not_come_are_given_up(made: FakeCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_root, "JOIN_SECONDS", 0.01)
    made.states = ["InProgress"]
    with pytest.raises(TransferError, match=r"could not join the vLLM server's workers within 0\.01 s"):
        NcclLibrary().join(b"u" * 128, 2)
    assert made.aborted == 1


def test_a_broadcast_that_fails_is_aborted_and_said(made: FakeCommunicator) -> None:
    communicator = NcclLibrary().join(b"u" * 128, 2)
    made.states = ["RemoteError"]
    with pytest.raises(TransferError, match=r"could not broadcast weights .* RemoteError"):
        communicator.broadcast(np.zeros(3, np.uint8))
    assert made.aborted == 1


def test_what_nccl_raises_is_one_of_our_errors(made: FakeCommunicator) -> None:
    communicator = NcclLibrary().join(b"u" * 128, 2)

    def broadcast(*_: Any, **__: Any) -> None:
        raise RuntimeError("unhandled cuda error")

    made.broadcast = broadcast  # type: ignore[method-assign]
    with pytest.raises(TransferError, match="RuntimeError: unhandled cuda error"):
        communicator.broadcast(np.zeros(3, np.uint8))


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(TransferError, match="a trainer with a GPU only"):
        nccl_root._device()
