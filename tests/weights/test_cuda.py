"""The `cuda` transport with a fake driver: messages, mappings, and their cleanup when either side disconnects. (`tests/gpu` uses the
real driver.)"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engines.vllm import staged_copies
from slipstream.engines.vllm.live_parameters import LiveParameters
from slipstream.engines.vllm.mapping_check import check_mapping, module_siblings, random_tensors
from slipstream.errors import ChecksumMismatch, MappingError, NonFiniteWeights, TransferError
from slipstream.model import families
from slipstream.model.families.vllm_parameters import vllm_parameters, written_parameters
from slipstream.tensors.strided import Strided
from slipstream.types import Destinations
from slipstream.weights.checksum import ScanOptions, unpack_manifest
from slipstream.weights.plan import make_plan
from slipstream.weights.sources import named_tensors
from slipstream.weights.sources.known_trees import maxtext, tunix
from slipstream.weights.sources.transforms import View
from slipstream.weights.transports.cuda import mapped_memory, wire_format
from slipstream.weights.transports.cuda.copying_receiver import CopyingReceiver
from slipstream.weights.transports.cuda.exported_regions import IDLE_SYNCS, RegionUpdate
from slipstream.weights.transports.device import DevicePiece, DeviceSlice, locate, on_accelerator
from slipstream.weights.transports.device_copy import CopyProgram
from slipstream.weights.update.device_outbox import DeviceOutbox
from slipstream.weights.update.transport_choice import choose
from tests.tiny import random_params, tiny_config
from tests.weights.memfd import FakeArray, HostMemory, Memfd


@pytest.fixture(params=["vLLM", "JAX"])
def reader(request: pytest.FixtureRequest) -> Iterator[mapped_memory.CudaReceiver]:
    """That of a vLLM rank, which returns views of mapped memory, and that of an embedded engine's, which returns copies."""
    driver: Any = Memfd()
    if request.param == "vLLM":
        receiver = mapped_memory.CudaReceiver([0], HostMemory, driver, deadline=5.0)
    else:
        receiver = CopyingReceiver([0], CopyProgram("float32", jax.devices()[0]), driver, 0, deadline=5.0)
    receiver.start()
    yield receiver
    receiver.close()


def sender_to(receiver: mapped_memory.CudaReceiver, driver: Memfd) -> mapped_memory.CudaSender:
    return mapped_memory.CudaSender(receiver.links[0], "engine-0, rank 0", driver)


def piece(array: FakeArray, strides: Strided | None = None) -> DevicePiece:
    return DevicePiece(array, DeviceSlice(View(), ()), strides or Strided.row_major(array.shape))


def heard(sender: mapped_memory.CudaSender | DeviceOutbox) -> None:
    asyncio.run(sender.confirmed())


def finish(reader: mapped_memory.CudaReceiver, version: int, sender: mapped_memory.CudaSender | None = None) -> None:
    """Commit the version with a copy time of 0.25 s, and check that the sender, if any, learns of it."""
    assert reader.done(version, lambda: 0.25) == 0.0
    if sender is not None:
        heard(sender)
        assert asyncio.run(sender.released()) == 0.25


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_pieces_are_viewed_in_place_sliced_and_transposed(reader: mapped_memory.CudaReceiver) -> None:
    driver = Memfd()
    region = driver.allocate(1 << 20)
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    b = np.arange(6).astype(ml_dtypes.bfloat16)
    arrays = FakeArray(region, 256, a), FakeArray(region, 1024, b)
    sender = sender_to(reader, driver)
    reader.expect(1)
    sender.send(
        1,
        {
            0: piece(arrays[0]),
            2: piece(arrays[0], Strided.row_major((3, 4)).transpose((1, 0))[(slice(1, 3),)]),
            5: piece(arrays[1]),
        },
    )
    assert reader.wait(1, [0, 2, 5]) == 48 + 24 + 12
    np.testing.assert_array_equal(reader.source(0), a)
    np.testing.assert_array_equal(reader.source(2), a.T[1:3])
    np.testing.assert_array_equal(reader.source(5), b)
    sender.close()


def test_a_region_is_mapped_once_and_moved_arrays_are_found(reader: mapped_memory.CudaReceiver) -> None:
    driver, far = Memfd(), reader._driver
    region = driver.allocate(1 << 16)
    sender = sender_to(reader, driver)
    for version in range(1, 12):
        values = np.full((4,), version, np.float32)
        reader.expect(version)
        sender.send(version, {0: piece(FakeArray(region, 64 * version, values))})
        reader.wait(version, [0])
        np.testing.assert_array_equal(reader.source(0), values)
        finish(reader, version, sender)
    assert far.num_maps == 1  # type: ignore[attr-defined]
    sender.close()


def test_new_memory_at_the_same_address_is_mapped_again(reader: mapped_memory.CudaReceiver) -> None:
    driver, far = Memfd(), reader._driver
    old = driver.allocate(1 << 16)
    sender = sender_to(reader, driver)
    sender.send(1, {0: piece(FakeArray(old, 0, np.ones(4, np.float32)))})
    reader.wait(1, [0])
    finish(reader, 1, sender)
    fd, memory = driver.owned.pop(old)
    fresh = os.memfd_create("other")
    os.ftruncate(fresh, old.size)
    os.pwrite(fresh, np.full(4, 7, np.float32).tobytes(), 0)
    again = old._replace(buffer_id=old.buffer_id + 1000)
    driver.owned[again] = (fresh, memory)
    sender.send(2, {0: piece(FakeArray(again, 0, np.zeros(4, np.float32)))})
    reader.wait(2, [0])
    np.testing.assert_array_equal(reader.source(0), np.full(4, 7, np.float32))
    assert far.num_maps == 2 and len(far.mapped) == 1  # type: ignore[attr-defined]
    os.close(fd)
    sender.close()


def test_pieces_at_a_previous_place_are_the_same_mapping() -> None:
    shown: list[Any] = []
    receiver = mapped_memory.CudaReceiver(
        [0], HostMemory, Memfd(), 5.0, check=lambda version, pieces: shown.append(pieces)
    )
    receiver.start()
    driver = Memfd()
    region = driver.allocate(1 << 16)
    sender = sender_to(receiver, driver)
    for version, offset in enumerate([0, 512, 0, 512, *range(1024, 1024 + 64 * 20, 64), 0], 1):
        sender.send(version, {0: piece(FakeArray(region, offset, np.full(4, version, np.float32)))})
        receiver.wait(version, [0])
        assert float(receiver.source(0)[0]) == version
        finish(receiver, version, sender)
    assert shown[2] is shown[0] and shown[3] is shown[1] and shown[1] is not shown[0]
    assert shown[-1] is not shown[0], "not everything is kept"
    last, region = shown[-1], driver.allocate(1 << 16)  # the old one becomes idle and is then withdrawn
    for version in range(100, 101 + IDLE_SYNCS):
        sender.send(version, {0: piece(FakeArray(region, 0, np.full(4, version, np.float32)))})
        receiver.wait(version, [0])
        assert float(receiver.source(0)[0]) == version and shown[-1] is not last
        finish(receiver, version, sender)
    sender.close()
    receiver.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_version_is_released_even_if_old_memory_cannot_be_unmapped(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = Memfd()
    receiver = mapped_memory.CudaReceiver([0, 1], HostMemory, far, deadline=5.0)
    receiver.start()
    unmap, driver = far.unmap, Memfd()
    region = driver.allocate(1 << 12)
    gone, stays = sender_to(receiver, driver), sender_to(receiver, driver)
    for index, sender in enumerate((gone, stays)):
        sender.send(1, {index: piece(FakeArray(region, 0, np.ones(4, np.float32)))})
        heard(sender)
    gone.close()
    until(lambda: any(connection.error is not None for connection in receiver._connections))

    def broken(address: int, size: int) -> None:
        if fails:
            raise TransferError("the driver says no")
        unmap(address, size)

    monkeypatch.setattr(far, "unmap", broken)
    receiver.done(1, lambda: 0.5)
    assert asyncio.run(stays.released()) == 0.5
    fails = False
    stays.send(2, {1: piece(FakeArray(region, 0, np.full(4, 2, np.float32)))})
    heard(stays)
    receiver.done(2, lambda: 0.25)
    assert asyncio.run(stays.released()) == 0.25
    stays.close()
    receiver.close()


def test_unused_memory_is_unmapped(reader: mapped_memory.CudaReceiver) -> None:
    """Allocators may free memory with each array, but it stays allocated while it is mapped."""
    driver, far = Memfd(), reader._driver
    sender = sender_to(reader, driver)
    for version in range(1, 9):
        region = driver.allocate(4096)
        sender.send(version, {0: piece(FakeArray(region, 0, np.full(4, version, np.float32)))})
        reader.wait(version, [0])
        assert float(reader.source(0)[0]) == version
        finish(reader, version, sender)
        assert len(far.mapped) <= IDLE_SYNCS  # type: ignore[attr-defined]
    sender.close()


def test_more_regions_than_a_message_carries(reader: mapped_memory.CudaReceiver) -> None:
    driver = Memfd()
    arrays = {i: FakeArray(driver.allocate(4096), 0, np.full(3, i, np.float32)) for i in range(250)}
    sender = sender_to(reader, driver)
    sender.send(3, {i: piece(array) for i, array in arrays.items()})
    reader.wait(3, range(250))
    assert [float(reader.source(i)[0]) for i in range(250)] == [float(i) for i in range(250)]
    sender.close()


def test_memory_that_cannot_be_exported_is_staged_and_reported(reader: mapped_memory.CudaReceiver) -> None:
    driver = Memfd()
    sender = sender_to(reader, driver)
    for version, size in ((1, 5), (2, 5), (3, 50_000)):  # the last needs a larger buffer
        values = [np.random.default_rng(version + k).normal(size=size).astype(np.float32) for k in range(3)]
        arrays = [jax.block_until_ready(jnp.asarray(v)) for v in values]  # a sender does not wait for them
        first = 3 * (version == 3)  # a piece has the same shape each time
        sender.send(version, {first + i: piece(a) for i, a in enumerate(arrays)})  # type: ignore[arg-type]
        reader.wait(version, range(first, first + 3))
        for i, v in enumerate(values):
            np.testing.assert_array_equal(reader.source(first + i), v)
        finish(reader, version, sender)
    assert sender.note == "staged" and len(driver.owned) == 1
    assert len(reader._driver.mapped) == 1  # type: ignore[attr-defined]
    sender.close()
    assert not driver.owned


# --- failures ---


def test_a_disconnected_trainers_memory_is_unmapped(reader: mapped_memory.CudaReceiver) -> None:
    driver, far = Memfd(), reader._driver
    sender = sender_to(reader, driver)
    sender.send(1, {0: piece(FakeArray(driver.allocate(4096), 0, np.ones(4, np.float32)))})
    reader.wait(1, [0])
    assert float(reader.source(0)[0]) == 1.0
    sender.close()
    time.sleep(0.05)
    assert far.mapped  # type: ignore[attr-defined]  # it is being read
    finish(reader, 1)
    until(lambda: not far.mapped)  # type: ignore[attr-defined]


def test_a_trainer_that_disconnects_early_is_an_error_at_once(reader: mapped_memory.CudaReceiver) -> None:
    driver = Memfd()
    sender = sender_to(reader, driver)
    reader.expect(1)
    sender.send(1, {0: piece(FakeArray(driver.allocate(4096), 0, np.ones(4, np.float32)))})
    reader.wait(1, [0])
    finish(reader, 1, sender)
    reader.expect(2)
    sender.close()
    with pytest.raises(TransferError, match="disconnected before it had announced all of version 2"):
        reader.wait(2, [0])


def test_memory_stays_mapped_while_it_is_copied(reader: mapped_memory.CudaReceiver) -> None:
    """Copies may still run after a commit. Neither a disconnect nor a new version may unmap their memory."""
    driver, far, go_on = Memfd(), reader._driver, threading.Event()
    sender = sender_to(reader, driver)
    pieces = {0: piece(FakeArray(driver.allocate(4096), 0, np.ones(4, np.float32)))}
    sender.send(1, pieces)
    heard(sender)
    reader.done(1, lambda: float(go_on.wait(10)))
    sender.send(2, pieces)  # before version 1 is released
    with pytest.raises(TransferError, match="version 2 was announced while version 1 is still being copied"):
        heard(sender)
    sender.close()
    leaving = threading.Thread(target=reader.abandon)
    leaving.start()
    time.sleep(0.05)
    assert leaving.is_alive() and far.mapped  # type: ignore[attr-defined]
    go_on.set()
    leaving.join(10)
    until(lambda: not far.mapped)  # type: ignore[attr-defined]


def test_a_failed_copy_is_reported_to_the_trainer(reader: mapped_memory.CudaReceiver) -> None:
    def broken() -> float:
        raise RuntimeError("an illegal memory access was encountered")

    driver = Memfd()
    sender = sender_to(reader, driver)
    sender.send(1, {0: piece(FakeArray(driver.allocate(4096), 0, np.ones(4, np.float32)))})
    heard(sender)
    reader.done(1, broken)
    with pytest.raises(
        TransferError, match=r"rank 0 cannot read version 1: copying it failed: RuntimeError: an illegal"
    ):
        asyncio.run(sender.released())
    sender.close()


def test_an_engine_that_dies_before_copying_is_named(reader: mapped_memory.CudaReceiver) -> None:
    driver = Memfd()
    sender = sender_to(reader, driver)
    sender.send(1, {0: piece(FakeArray(driver.allocate(4096), 0, np.ones(4, np.float32)))})
    heard(sender)
    reader.close()
    with pytest.raises(
        TransferError, match="engine-0, rank 0 did not confirm that it has copied version 1: it disconnected"
    ):
        asyncio.run(sender.released())


def test_a_silent_trainer_is_an_error_after_the_deadline() -> None:
    receiver = mapped_memory.CudaReceiver([0], HostMemory, Memfd(), deadline=0.05)
    receiver.start()
    with pytest.raises(TransferError, match=r"2 piece\(s\) of version 4 were not announced within 0.05 s"):
        receiver.wait(4, [0, 1])
    receiver.close()


def test_an_engine_that_is_gone_is_named(reader: mapped_memory.CudaReceiver) -> None:
    driver = Memfd()
    sender, array = sender_to(reader, driver), FakeArray(driver.allocate(4096), 0, np.ones(4, np.float32))
    reader.close()
    with pytest.raises(TransferError, match="engine engine-0, rank 0"):
        sender.send(1, {0: piece(array)})
        heard(sender)
    with pytest.raises(TransferError, match="cannot connect to engine engine-0, rank 0 for mapped weights"):
        sender_to(reader, driver)


def test_a_client_without_the_nonce_is_refused(reader: mapped_memory.CudaReceiver) -> None:
    name = json.loads(reader.links[0])["name"]
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + name)
        stranger.sendall(bytes(32))
        assert stranger.recv(1) == b""
    assert not reader._connections


@pytest.mark.parametrize(
    ("rows", "layouts"),
    [
        ([(0, 0, 4096 - 8)], [[0, "float32", 0, [4], [1]]]),  # beyond the end
        ([(0, 0, 0)], [[0, "float32", 1000, [4, 8], [8, 1]]]),
        ([(0, 7, 0)], [[0, "float32", 0, [4], [1]]]),  # a region that was not announced
        ([(0, 0, 2)], [[0, "float32", 0, [4], [1]]]),  # not aligned
        ([(0, 0, -8)], [[0, "float32", 0, [4], [1]]]),
    ],
)
def test_places_outside_the_region_are_refused(reader: mapped_memory.CudaReceiver, rows: Any, layouts: Any) -> None:
    driver = Memfd()
    region, sender = driver.allocate(4096), sender_to(reader, driver)
    update = RegionUpdate({}, {0: (region, driver.export(region))})
    rows = np.array([(*row, wire_format.NO_CHECKSUM) for row in rows], np.int64)
    wire_format.send_announcements(sender._socket, 1, update, layouts, rows)
    with pytest.raises(TransferError, match=r"cannot read version 1: .*(not inside its region|was not announced)"):
        sender._unconfirmed = 1
        heard(sender)
    with pytest.raises(TransferError, match=r"is invalid: .*(not inside its region|was not announced)"):
        reader.wait(1, [0])
    sender.close()


@given(st.binary(min_size=1, max_size=200), st.booleans())
def test_garbage_on_the_socket_is_an_error_and_never_a_hang(noise: bytes, with_header: bool) -> None:
    receiver = mapped_memory.CudaReceiver([0], HostMemory, Memfd(), deadline=60.0)
    receiver.start()
    sender = sender_to(receiver, Memfd())
    sizes = max(0, len(noise) - 32), 32 * (len(noise) >= 32)
    header = wire_format.HEADER.pack(wire_format.MAGIC, 1, *sizes, 0) if with_header else b""
    sender._socket.sendall(header + noise)
    sender.close()
    with pytest.raises(TransferError, match=r"disconnected|is invalid"):
        receiver.wait(1, [10**6])
    receiver.close()


TRAINER = """
import asyncio, sys, time
import numpy as np
from slipstream.tensors.strided import Strided
from slipstream.weights.sources.transforms import View
from slipstream.weights.transports.cuda import mapped_memory as cuda
from slipstream.weights.transports.device import DevicePiece, DeviceSlice
from tests.weights.memfd import FakeArray, Memfd
driver = Memfd()
sender = cuda.CudaSender(sys.argv[1].encode(), "engine", driver)
array = FakeArray(driver.allocate(4096), 0, np.full(4, 3, np.float32))
sender.send(1, {0: DevicePiece(array, DeviceSlice(View(), ()), Strided.row_major((4,)))})
asyncio.run(sender.confirmed())
print("sent", flush=True)
time.sleep(60)
"""


def test_a_killed_trainers_memory_stays_readable_and_is_then_unmapped(
    reader: mapped_memory.CudaReceiver,
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TRAINER, reader.links[0].decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None and process.stdout.readline() == b"sent\n"
        reader.wait(1, [0])
        process.send_signal(signal.SIGKILL)
    np.testing.assert_array_equal(reader.source(0), np.full(4, 3, np.float32))
    finish(reader, 1)
    until(lambda: not reader._driver.mapped)  # type: ignore[attr-defined]


# --- complete updates: JAX arrays into torch parameters ---


class TorchMemory(HostMemory):
    def view(self, dtype: str, geometry: Strided, offset: int) -> Any:
        array = super().view(dtype, geometry, offset)
        if dtype == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def planned(config: Any) -> tuple[Any, dict[str, Any], Any]:
    """Return one rank's parameters, a tree of JAX arrays, and the float32 plan between them."""
    info = written_parameters(config, 1, ())[0]
    tensors = named_tensors.named_tensors(jax.tree.map(jnp.asarray, random_params(config)))
    return info, tensors, make_plan(named_tensors.describe(tensors), families.tensors(config), info, "float32")


def rank_of(config: Any, tp: int, rank: int, plan: Any, monkeypatch: Any, dtype: torch.dtype, failed: Any = ()) -> Any:
    """Return a rank's live parameters filled with NaN, its links, and the tensors passed to the loader."""
    parameters = vllm_parameters(config, tp)
    live = {p.name: torch.full(p.shape, float("nan"), dtype=dtype) for p in parameters if p.rank == rank}
    loaded: dict[str, Any] = {}
    held = LiveParameters(live, lambda weights: loaded.update(weights), rank, torch.device("cpu"))

    def make(*_: Any) -> Any:
        held._driver = driver = Memfd()
        return mapped_memory.CudaReceiver(
            [0],
            TorchMemory,
            driver,
            deadline=5.0,
            check=held.stage,
            compute_checksums=held.checksums_of,
            name_of=held.tensor_of,
        )

    monkeypatch.setattr(held, "_make_receiver", make)
    monkeypatch.setattr(staged_copies, "LARGE_BYTES", 1 << 10)  # so that some tensors are large and some are not
    written, reloaded = written_parameters(config, tp, failed)
    return live, held, held.connect("cuda", plan, written, reloaded), loaded


def one_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return one rank of a tiny float32 Llama, and an outbox connected to it."""
    monkeypatch.setattr(mapped_memory, "CudaDriver", Memfd)
    config = tiny_config("llama")
    info, tensors, plan = planned(config)
    live, held, links, _ = rank_of(config, 1, 0, plan, monkeypatch, torch.float32)
    outbox = DeviceOutbox(plan, info, 0, "engine-0", "cuda", ScanOptions())
    outbox.destinations = Destinations((tuple(links),), b"")
    return config, tensors, plan, live, held, outbox


def naive(config: Any, tensors: Any, tp: int, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = {}
    for p in vllm_parameters(config, tp):
        if p.rank == rank:
            whole = torch.full(p.shape, float("nan"), dtype=dtype)
            for part in p.parts:
                box = tuple(slice(*r) for r in part.tensor_box)
                values = torch.from_numpy(np.asarray(tensors[part.tensor], np.float32)[box].copy()).to(dtype)
                at = whole[tuple(slice(*r) for r in part.local_box)]
                at.copy_(values.reshape(at.shape))
            found[p.name] = whole
    return found


def assert_bits(live: Any, expected: Any) -> None:
    for name, wanted in expected.items():
        kind = torch.int16 if wanted.element_size() == 2 else torch.int32
        nan = torch.isnan(wanted)
        assert torch.equal(torch.isnan(live[name]), nan), name  # padding is not written
        assert torch.equal(live[name][~nan].view(kind), wanted[~nan].view(kind)), name


@pytest.mark.parametrize(
    ("family", "tp", "dtype"),
    [
        ("llama", 1, "float32"),
        ("llama", 2, "bfloat16"),
        ("mistral", 2, "float32"),
        ("qwen2", 2, "float32"),
        ("qwen3", 2, "bfloat16"),
        ("gemma2", 2, "float32"),
        ("gemma3_text", 2, "bfloat16"),
        ("mixtral", 1, "bfloat16"),
        ("mixtral", 2, "float32"),
        ("qwen3_moe", 2, "float32"),
        ("qwen3_moe", 2, "bfloat16"),
    ],
)
def test_an_update_reaches_the_fused_parameters_of_every_rank(
    family: str, tp: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_memory, "CudaDriver", Memfd)
    layers = {} if family == "llama" else {"num_layers": 1, "layer_types": ()}
    config = tiny_config(family, **layers)
    kind = getattr(torch, dtype)
    info = written_parameters(config, tp, ())[0]
    params = random_params(config)
    tensors = named_tensors.named_tensors(jax.tree.map(jnp.asarray, params))
    plan = make_plan(named_tensors.describe(tensors), families.tensors(config), info, dtype)
    ranks = [rank_of(config, tp, rank, plan, monkeypatch, kind) for rank in range(tp)]
    outbox = DeviceOutbox(plan, info, 0, "engine-0", "cuda", ScanOptions())
    outbox.destinations = Destinations(tuple(tuple(links) for _, _, links, _ in ranks), b"")
    for version, scale in ((1, 1.0), (2, -0.5)):
        tensors = {name: jnp.asarray(np.asarray(t) * scale) for name, t in tensors.items()}
        manifests, num_bytes, _ = outbox.send(tensors, set(), version)
        assert num_bytes == plan.num_bytes
        heard(outbox)
        for rank, (live, held, _, _) in enumerate(ranks):
            indices = unpack_manifest(manifests[rank], version, len(plan.incoming[rank]))
            held.apply(version, indices, 0.0)
            assert_bits(live, naive(config, tensors, tp, rank, kind))
            assert (held._driver.num_copies > 0) == (dtype == "float32"), "the driver copies, and does not cast"
        assert asyncio.run(outbox.released()) > 0
        outbox.committed(set())
    outbox.close()


def torch_tensors(config: Any, driver: Memfd, base: Any, seed: int) -> dict[str, torch.Tensor]:
    """Return a model's tensors in device memory; one is a transposed view."""
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for name, values in named_tensors.named_tensors(random_params(config, seed)).items():
        array = np.asarray(values)
        array = array.T if name.endswith("o_proj.weight") else array
        memory = HostMemory(base.base, base.size).view("float32", Strided.row_major(array.shape), start)
        memory[...] = array
        tensor = torch.from_numpy(memory)
        tensors[name] = tensor.T if name.endswith("o_proj.weight") else tensor
        start += -(-array.nbytes // 256) * 256
    return tensors


@pytest.mark.parametrize("tp", [1, 2])
def test_torch_tensors_are_read_where_they_lie(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory has handles instead of file descriptors. A tensor that is not row-major is computed, and then staged."""
    driver = Memfd(handles=True)
    monkeypatch.setattr(mapped_memory, "CudaDriver", lambda *_: driver)
    config = tiny_config("llama")
    info = written_parameters(config, tp, ())[0]
    region = driver.allocate(1 << 20)
    tensors = torch_tensors(config, driver, region, 0)
    plan = make_plan(named_tensors.describe(tensors), families.tensors(config), info, "float32")
    ranks = [rank_of(config, tp, rank, plan, monkeypatch, torch.float32) for rank in range(tp)]
    outbox = DeviceOutbox(plan, info, 0, "engine-0", "cuda", ScanOptions())
    outbox.destinations = Destinations(tuple(tuple(links) for _, _, links, _ in ranks), b"")
    for version in (1, 2):
        tensors = torch_tensors(config, driver, region, version)
        if version == 2:
            tensors = {name: t.contiguous() if not t.is_contiguous() else t for name, t in tensors.items()}
        manifests, num_bytes, _ = outbox.send(tensors, set(), version)
        assert num_bytes == plan.num_bytes
        heard(outbox)
        for rank, (live, held, _, _) in enumerate(ranks):
            held.apply(version, unpack_manifest(manifests[rank], version, len(plan.incoming[rank])), 0.0)
            assert_bits(live, naive(config, tensors, tp, rank, torch.float32))
        assert asyncio.run(outbox.released()) > 0
        outbox.committed(set())
    with torch.no_grad():
        tensors["model.norm.weight"][3] = float("nan")
    with pytest.raises(NonFiniteWeights, match=r"model.norm.weight"):
        outbox.send(tensors, set(), 3)
    outbox.close()


def test_pieces_outside_the_plan_are_refused_and_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_memory, "CudaDriver", Memfd)
    config = tiny_config("llama")
    _, _, plan = planned(config)
    live, held, links, _ = rank_of(config, 1, 0, plan, monkeypatch, torch.float32)
    driver = Memfd()
    region = driver.allocate(1 << 16)
    for index, shape, why in ((10_000, (3,), "is not in the plan"), (0, (3, 5), "arrived with shape")):
        sender = mapped_memory.CudaSender(links[0], "engine-0, rank 0", driver)
        with pytest.raises(TransferError, match=f"engine-0, rank 0 cannot read version 1: .*{why}"):
            sender.send(1, {index: piece(FakeArray(region, 0, np.zeros(shape, np.float32)))})
            heard(sender)
        sender.close()
    with pytest.raises(TransferError, match=r"1 piece\(s\) of version 1, but has 0 of version -1"):
        held.apply(1, [0], 0.1)
    assert all(torch.isnan(tensor).all() for tensor in live.values())
    held.close()


def test_applying_a_version_waits_for_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors, plan, live, held, outbox = one_rank(monkeypatch)
    late = threading.Timer(0.2, outbox.send, (tensors, set(), 1))
    late.start()
    held.apply(1, range(len(plan.incoming[0])), 30.0)
    late.join()
    assert_bits(live, naive(config, tensors, 1, 0, torch.float32))
    outbox.close()


def test_bytes_that_are_not_the_trainers_are_found_and_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that cannot be exported is copied; one copy goes wrong. Also where the pieces lie at the places of an earlier
    version, and their copies are prepared already."""
    _, tensors, plan, live, held, outbox = one_rank(monkeypatch)
    indices, copy = range(len(plan.incoming[0])), Memfd.copy
    victim = tensors["model.layers.0.mlp.up_proj.weight"]
    for version in (1, 2):
        outbox.send(tensors, set(), version)
        heard(outbox)
        held.apply(version, indices, 0.0)
        asyncio.run(outbox.released())

    def damaged(driver: Memfd, target: int, source: int, size: int) -> None:
        copy(driver, target, source, size)
        if source == victim.unsafe_buffer_pointer():  # type: ignore[attr-defined]
            ctypes.memset(target + size - 1, 0x55, 1)

    monkeypatch.setattr(Memfd, "copy", damaged)
    before = {name: tensor.clone() for name, tensor in live.items()}
    outbox.send(tensors, set(), 3)
    with pytest.raises(
        ChecksumMismatch,
        match=r"engine-0, rank 0: it reads model.layers.0.mlp.up_proj.weight with checksum .*version 3",
    ):
        heard(outbox)
    with pytest.raises(TransferError, match=r"of version 3, but has .* is invalid: it reads"):
        held.apply(3, indices, 1.0)
    assert_bits(live, before)
    outbox.close()


def test_the_memory_that_is_compared_stays_mapped() -> None:
    """Reading unmapped memory would end the process. Meanwhile the order to apply a version is answered in time."""
    comparing, go_on = threading.Event(), threading.Event()

    def compute(pieces: Any) -> dict[int, int]:
        comparing.set()
        assert go_on.wait(10) and float(pieces[0][0]) == 1.0
        return {0: 7}

    far, driver = Memfd(), Memfd()
    receiver = mapped_memory.CudaReceiver([0], HostMemory, far, 5.0, compute_checksums=compute)
    receiver.start()
    sender = sender_to(receiver, driver)
    array = FakeArray(driver.allocate(4096), 0, np.ones(4, np.float32))
    sender.send(1, {0: DevicePiece(array, DeviceSlice(View(), ()), Strided.row_major((4,)), 7)})
    assert comparing.wait(10) and receiver.wait(1, [0], 0.0) is None
    closing = threading.Thread(target=receiver.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive() and far.mapped
    go_on.set()
    closing.join(10)
    assert not far.mapped and receiver._version == -1
    sender.close()


def test_values_that_are_not_finite_are_refused_before_they_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tensors, _, _, held, outbox = one_rank(monkeypatch)
    name = "model.layers.1.self_attn.q_proj.weight"
    bad = tensors | {name: tensors[name].at[0, :3].set(jnp.nan)}
    with pytest.raises(NonFiniteWeights, match=rf"in float32.*: {name} \(3 of {tensors[name].size:,} values\)"):
        outbox.send(bad, set(), 1)
    assert held._receiver._version == -1
    outbox.close()


def test_cached_copies_write_the_current_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Staged copies are cached per place, also across partial syncs, and used only for that place."""
    config, tensors, plan, live, held, outbox = one_rank(monkeypatch)
    changed = {f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"} | {"model.norm.weight"}
    serves = tensors
    for version in range(1, 8):
        new = {name: jnp.asarray(np.asarray(t) * version) for name, t in tensors.items()}
        unchanged = set() if version != 4 else {t.name for t in families.tensors(config)} - changed
        manifests, *_ = outbox.send(new, unchanged, version)
        heard(outbox)
        held.apply(version, unpack_manifest(manifests[0], version, len(plan.incoming[0])), 30.0)
        serves = serves | {name: tensor for name, tensor in new.items() if name not in unchanged}
        assert_bits(live, naive(config, serves, 1, 0, torch.float32))
        asyncio.run(outbox.released())
    assert len(held._cache) == 2, "a whole tree and a part, each in one place"
    outbox.close()


def test_only_changed_parameters_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors, plan, live, held, outbox = one_rank(monkeypatch)
    unchanged = {t.name for t in families.tensors(config)} - {"model.layers.0.self_attn.k_proj.weight"}
    manifests, num_bytes, _ = outbox.send(tensors, unchanged, 1)
    indices = unpack_manifest(manifests[0], 1, len(plan.incoming[0]))
    held.apply(1, indices, 30.0)
    written = {name for name, tensor in live.items() if not torch.isnan(tensor).all()}
    assert written == {"model.layers.0.self_attn.qkv_proj.weight"}
    assert num_bytes == live["model.layers.0.self_attn.qkv_proj.weight"].nbytes
    outbox.close()


def test_parameters_that_failed_the_proof_go_through_the_loader_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_memory, "CudaDriver", Memfd)
    config = tiny_config("qwen2")
    failed = {"model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.qkv_proj.bias"}
    info, reloaded = written_parameters(config, 2, failed)
    assert reloaded == {f"model.layers.0.self_attn.{x}_proj.{y}" for x in "qkv" for y in ("weight", "bias")}
    tensors = named_tensors.named_tensors(jax.tree.map(jnp.asarray, random_params(config)))
    plan = make_plan(named_tensors.describe(tensors), families.tensors(config), info, "float32", bucket_bytes=1 << 9)
    live, held, links, loaded = rank_of(config, 2, 1, plan, monkeypatch, torch.float32, failed)
    outbox = DeviceOutbox(plan, info, 0, "engine-0", "cuda", ScanOptions())
    outbox.destinations = Destinations(((), tuple(links)), b"")
    outbox._streams[0] = {}
    manifests, *_ = outbox.send(tensors, set(), 1)
    held.apply(1, unpack_manifest(manifests[1], 1, len(plan.incoming[1])), 30.0)
    assert loaded.keys() == reloaded
    for name, tensor in loaded.items():
        np.testing.assert_array_equal(tensor.numpy(), np.asarray(tensors[name]))
    expected = naive(config, tensors, 2, 1, torch.float32)
    assert_bits(live, {n: t for n, t in expected.items() if n not in failed})
    assert all(torch.isnan(live[n]).all() for n in failed)
    outbox.close()


@pytest.mark.parametrize("mapping", [tunix, maxtext])
def test_trees_of_other_libraries_are_read_in_place(mapping: Any) -> None:
    """Transposed and sliced by strides; rotated or scaled tensors are computed on the device first."""
    from tests.weights.test_tree_mapping import hf_tensors, maxtext_tree, tunix_tree

    config = tiny_config("llama")
    hf = hf_tensors(config)
    tree = tunix_tree(config, hf) if mapping is tunix else maxtext_tree(config, hf, scanned=True)
    tensors = mapping(config).tensors(jax.tree.map(jnp.asarray, tree))
    for name, tensor in tensors.items():
        for box in tensor.boxes():  # type: ignore[attr-defined]
            find, cut = locate(tensor, box)
            np.testing.assert_array_equal(np.asarray(cut(find(tensor))), named_tensors.read(tensor, box), err_msg=name)


def test_a_sharded_array_is_found_shard_by_shard() -> None:
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("one device only")
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("x",))
    array = jax.device_put(jnp.arange(32.0).reshape(8, 4), jax.sharding.NamedSharding(mesh, jax.P("x")))
    find, cut = locate(array, ((5, 7), (1, 3)))
    assert find(array).devices() == {devices[1]}
    np.testing.assert_array_equal(np.asarray(cut(find(array))), np.asarray(array)[5:7, 1:3])
    with pytest.raises(MappingError, match="no device of this process holds the complete box"):
        locate(array, ((2, 6), (0, 4)))


def test_a_donated_array_is_named() -> None:
    config = tiny_config("llama")
    info = written_parameters(config, 1, ())[0]
    tensors = named_tensors.named_tensors(jax.tree.map(jnp.array, random_params(config)))
    plan = make_plan(named_tensors.describe(tensors), families.tensors(config), info, "float32")
    outbox = DeviceOutbox(plan, info, 0, "engine-0", "cuda", ScanOptions())
    outbox.destinations = Destinations(((b"{}",),), b"")
    tensors["model.norm.weight"].delete()  # type: ignore[attr-defined]
    with pytest.raises(MappingError, match=r"model.norm.weight was donated or deleted before the sync"):
        outbox.send(tensors, set(), 1)


def test_mapped_memory_is_chosen_for_arrays_on_a_gpu_of_the_same_host() -> None:
    from slipstream.weights.update.transport_choice import host_identity

    offered = ("cuda", "nccl", "shm")
    assert choose("e", offered, host_identity(), 1, None, on_gpu=True) == "cuda"
    assert choose("e", offered, host_identity(), 1, None, on_gpu=False) == "shm"
    assert choose("e", offered, "elsewhere", 1, None, on_gpu=True) == "nccl"
    with pytest.raises(TransferError, match="the trainer's weights are not all on a GPU"):
        choose("e", offered, host_identity(), 1, "cuda", on_gpu=False)
    assert not on_accelerator({"w": jnp.ones(3)})


# --- the mapping check ---


def loaded_model(config: Any, tp: int, rank: int) -> dict[str, torch.Tensor]:
    specs = [(t.name, t.shape) for t in families.tensors(config)]
    tensors = {name: t.numpy() for name, t in random_tensors(specs, torch.float32, torch.device("cpu"))}
    return {n: torch.nan_to_num(t) for n, t in naive(config, tensors, tp, rank, torch.float32).items()}


def failed_mapping(config: Any, live: Any, tp: int = 1, rank: int = 0) -> dict[str, str]:
    specs = [(t.name, t.shape) for t in families.tensors(config)]
    own = [p for p in vllm_parameters(config, tp) if p.rank == rank]
    return check_mapping(live, own, random_tensors(specs, torch.float32, torch.device("cpu")))


def test_the_mapping_check_accepts_correct_parameters_and_names_wrong_ones() -> None:
    config = tiny_config("qwen2")
    for tp, rank in ((1, 0), (2, 0), (2, 1)):
        assert failed_mapping(config, loaded_model(config, tp, rank), tp, rank) == {}
    live = loaded_model(config, 1, 0)
    qkv, norm = "model.layers.1.self_attn.qkv_proj.weight", "model.norm.weight"
    live[qkv][[0, 1]] = live[qkv][[1, 0]]  # two rows swapped
    live[norm] = live[norm][:-1]
    live["model.extra"] = torch.ones(3)
    del live["model.layers.0.input_layernorm.weight"]
    found = failed_mapping(config, live)
    assert found.keys() == {qkv, norm, "model.extra", "model.layers.0.input_layernorm.weight"}
    assert "does not hold model.layers.1.self_attn.q_proj.weight" in found[qkv]
    assert "it has shape" in found[norm] and "no tensor" in found["model.extra"]
    assert module_siblings({qkv}, live) == {qkv, qkv.replace("weight", "bias")}
