"""Weights written directly into vLLM's workers: the engine's side, with torch ranks on CPU as workers and a stand-in for the
GPU driver. `tests/vllm` has real workers, `tests/gpu` the real driver."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from slipstream.engines.vllm import direct_loader, live_parameters
from slipstream.engines.vllm.adapters import VllmAdapters
from slipstream.engines.vllm.direct_loader import DirectLoader
from slipstream.engines.vllm.live_parameters import LiveParameters, NotYetReceived
from slipstream.engines.vllm.reload_loader import ReloadLoader
from slipstream.engines.vllm.undoable_reload import NothingWritten, UndoableReload, Weights, reset_scales
from slipstream.engines.vllm.weight_loading import WeightsPending
from slipstream.errors import (
    ChecksumMismatch,
    EngineFailure,
    FleetChanged,
    TransferError,
    UnknownVersion,
    Unsupported,
    UpdateInProgress,
    VersionError,
)
from slipstream.model import families
from slipstream.model.families.vllm_parameters import vllm_parameters, written_parameters
from slipstream.types import AdapterSupport, Checksums, EngineInfo, Lora, Offer
from slipstream.weights import adapters as layouts
from slipstream.weights.checksum import ScanOptions, add_manifest_header, strip_manifest_header
from slipstream.weights.plan import Plan, make_plan
from slipstream.weights.sources import named_tensors
from slipstream.weights.sources.packed_adapters import pack
from slipstream.weights.transports.cuda import mapped_memory
from slipstream.weights.update.device_outbox import DeviceOutbox
from slipstream.weights.update.verify import compare
from tests.adapters import random_adapter
from tests.tiny import random_params, tiny_config
from tests.weights.by_hand import HandUpdate
from tests.weights.memfd import Memfd
from tests.weights.test_cuda import TorchMemory, assert_bits, naive

CONFIG = tiny_config("qwen2")
TP = 2


class Workers:
    """Two ranks, called like vLLM's workers."""

    def __init__(self, failed: Sequence[str] = ()) -> None:
        self.calls: list[str] = []
        self.broken = False
        self.loaded: list[dict[str, torch.Tensor]] = [{}, {}]
        self.without_room = -1
        """The rank whose loader fails at its second tensor."""
        self.adapters: list[dict[int, Any]] = [{}, {}]
        """Adapters of each rank, by slot."""
        self.staged_adapters: list[dict[int, Any]] = [{}, {}]
        self.replaced_adapters: list[dict[int, Any]] = [{}, {}]
        self.without_adapters = -1
        """The rank that cannot load adapters."""
        self._maps: dict[str, mmap.mmap] = {}
        self._parameters, self._reloaded = written_parameters(CONFIG, TP, failed)
        self.live, self.ranks, self.reloads = [], [], []
        for rank in range(TP):
            own = [p for p in vllm_parameters(CONFIG, TP) if p.rank == rank]
            self.live.append({p.name: torch.full(p.shape, float("nan")) for p in own})
            model: Any = SimpleNamespace(parameters=self.live[-1].values, buffers=lambda: [])
            self.reloads.append(UndoableReload(model, partial(self._load, rank), torch.device("cpu")))
            held = LiveParameters(self.live[-1], self.reloads[-1], rank, torch.device("cpu"))
            held._make_receiver = lambda *_, held=held: mapped_memory.CudaReceiver(
                [0], TorchMemory, Memfd(), 5.0, held.stage, held.checksums_of
            )  # type: ignore[method-assign]
            self.ranks.append(held)

    def _load(self, rank: int, weights: Weights) -> None:
        for index, (name, tensor) in enumerate(weights):
            if index == 1 and rank == self.without_room:
                raise MemoryError(f"no room for {name}")
            self.loaded[rank][name] = tensor

    async def __call__(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        if self.broken and method in ("slipstream_apply", "slipstream_write"):
            raise RuntimeError("the device is gone")
        return [getattr(self, method)(rank, *args) for rank in range(TP)]

    def slipstream_connect(self, rank: int, transport: str, plan: bytes, failed: Sequence[str]) -> list[bytes]:
        return self.ranks[rank].connect(transport, Plan.from_bytes(plan), self._parameters, self._reloaded)

    def slipstream_apply(
        self, rank: int, version: int, indices: Any, timeout: float
    ) -> tuple[dict[str, int], float, str, bool]:
        try:
            if any(indices):
                self.ranks[rank].apply(version, indices[rank], timeout)
        except NothingWritten as error:
            return {}, 0.0, str(error), isinstance(error, NotYetReceived)
        return {"s0": 3}, 0.0, "", False

    def slipstream_map_files(self, rank: int, files: Sequence[str]) -> None:
        maps, self._maps = self._maps, {}
        for file in files:
            if file not in maps:
                with open(file, "r+b") as opened:
                    maps[file] = mmap.mmap(opened.fileno(), 0)
            self._maps[file] = maps[file]

    def _mapped(self, file: str, offset: int, shape: Sequence[int]) -> torch.Tensor:
        count = int(torch.Size(shape).numel())
        return torch.frombuffer(self._maps[file], dtype=torch.float32, count=count, offset=offset).reshape(shape)

    def slipstream_stage_adapters(self, rank: int, adapters: Any, dtype: str) -> str:
        self.staged_adapters[rank] = {
            slot: {name: self._mapped(*place).clone() for name, *place in tensors} for slot, *_, tensors in adapters
        }
        return ""

    def slipstream_swap_adapters(self, rank: int) -> tuple[float, str]:
        staged, own = self.staged_adapters[rank], self.adapters[rank]
        self.replaced_adapters[rank] = {slot: own.get(slot) for slot in staged}
        if rank == self.without_adapters:
            return 0.0, "MemoryError: no room"
        own.update(staged)
        return 0.5, ""

    def slipstream_undo_adapters(self, rank: int) -> None:
        self.adapters[rank].update(self.replaced_adapters[rank])

    def slipstream_write(
        self, rank: int, places: Any, dtype: str, reloaded: Any
    ) -> tuple[dict[str, int], float, str, bool]:
        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, at in places:
                yield name, self._mapped(*at[rank])

        try:
            self.ranks[rank].write(tensors(), reloaded)
        except NothingWritten as error:
            return {}, 0.0, str(error), False
        return {"s0": 3}, 0.0, "", False

    def slipstream_checksums(self, rank: int, names: Sequence[str]) -> list[tuple[str, list[int]]]:
        own = [p for p in vllm_parameters(CONFIG, TP) if p.rank == rank and p.name in names]
        return self.ranks[rank].checksums(own)

    def slipstream_discard(self, rank: int) -> None:
        self.ranks[rank].discard()

    def slipstream_settle(self, rank: int) -> None:
        self.reloads[rank].settle()

    def slipstream_undo(self, rank: int) -> None:
        self.reloads[rank].undo()


class Trainer:
    """One process that sends over `cuda`, step by step."""

    def __init__(self, loader: DirectLoader) -> None:
        self.loader, self.serving = loader, -1
        self.tensors = named_tensors.named_tensors(jax.tree.map(jnp.asarray, random_params(CONFIG)))
        specs = families.tensors(CONFIG)
        self.plan = make_plan(named_tensors.describe(self.tensors), specs, loader.parameters, "float32")
        self.outbox = DeviceOutbox(self.plan, loader.parameters, 0, "engine-0", "cuda", ScanOptions())
        self.fresh = True

    async def stage(self, version: int, unchanged: set[str] | None = None) -> None:
        offer = Offer(self.plan.to_bytes(), self.plan.fingerprint, "cuda", self.fresh)
        self.outbox.destinations = await self.loader.begin(self.serving, version, offer)
        self.fresh = False
        manifests = self.send(version, unchanged)
        await self.outbox.confirmed()
        await self.loader.stage(version, [[m] for m in manifests])

    def send(self, version: int, unchanged: set[str] | None = None) -> list[bytes]:
        return self.outbox.send(self.tensors, unchanged or set(), version)[0]

    async def commit(self, version: int) -> dict[str, int]:
        drawn, _ = await self.loader.load(version)
        self.loader.finish(version)
        await self.outbox.released()
        self.serving = version
        return drawn


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    monkeypatch.setattr(mapped_memory, "CudaDriver", Memfd)
    return Workers()


def direct(workers: Workers, has_weights: bool = False, failed: dict[str, str] | None = None) -> DirectLoader:
    parameters, reloaded = written_parameters(CONFIG, TP, failed or {})
    rest = (parameters, reloaded, failed or {}, "float32", TP, workers, has_weights)
    return DirectLoader("engine-0", families.tensors(CONFIG), *rest, slots(workers))


def slots(workers: Any) -> VllmAdapters:
    return VllmAdapters("engine-0", AdapterSupport(2, 4, ("o_proj", "q_proj")), "float32", workers)


async def with_one_version_committed(workers: Workers) -> tuple[DirectLoader, Trainer, Any]:
    """Also returns the tensors of the first version, which serves."""
    loader = direct(workers)
    trainer = Trainer(loader)
    await trainer.stage(1)
    await trainer.commit(1)
    old = trainer.tensors
    trainer.tensors = {n: jnp.asarray(t) * 2 for n, t in old.items()}
    return loader, trainer, old


async def with_a_second_version_staged(workers: Workers) -> tuple[DirectLoader, Trainer, Any]:
    loader, trainer, old = await with_one_version_committed(workers)
    await trainer.stage(2)
    return loader, trainer, old


async def with_weights_in_transit(workers: Workers) -> tuple[DirectLoader, Trainer, Any]:
    """Like `with_a_second_version_staged`, but the second version has not reached the ranks."""
    loader, trainer, old = await with_one_version_committed(workers)
    await loader.begin(1, 2, Offer(b"", trainer.plan.fingerprint, "cuda", fresh=False))
    await loader.stage(2, [[m] for m in trainer.outbox.promise(set(), 2)[0]])
    return loader, trainer, old


def assert_serves(workers: Workers, tensors: Any, padded: bool = False) -> None:
    """`padded`: padding is zero instead of unchanged."""
    for rank in range(TP):
        expected = naive(CONFIG, tensors, TP, rank, torch.float32)
        assert_bits(workers.live[rank], {n: torch.nan_to_num(t) if padded else t for n, t in expected.items()})


def test_versions_reach_every_rank_with_one_call_each(workers: Workers) -> None:
    async def scenario() -> None:
        trainer = Trainer(direct(workers))
        await trainer.stage(1)
        assert workers.calls == ["slipstream_connect"]
        assert all(torch.isnan(t).all() for live in workers.live for t in live.values())  # nothing before the commit
        assert await trainer.commit(1) == {"s0": 3}
        assert_serves(workers, trainer.tensors)
        for version in (2, 3):
            trainer.tensors = {n: jnp.asarray(t) * -version for n, t in trainer.tensors.items()}
            workers.calls.clear()
            await trainer.stage(version)
            await trainer.commit(version)
            assert workers.calls == ["slipstream_apply"]
            assert_serves(workers, trainer.tensors)
        everything = {t.name for t in families.tensors(CONFIG)}
        await trainer.stage(4, everything)
        await trainer.commit(4)
        assert_serves(workers, trainer.tensors)
        trainer.outbox.close()

    asyncio.run(scenario())


def test_a_rollback_keeps_the_serving_weights_and_renews_the_links(workers: Workers) -> None:
    async def scenario() -> None:
        loader, trainer, old = await with_a_second_version_staged(workers)
        await loader.rollback(2)
        await loader.rollback(2)
        with pytest.raises(UnknownVersion):
            await loader.load(2)
        assert not loader.is_updating
        assert_serves(workers, old)
        trainer.outbox.close()
        await trainer.stage(3)
        assert workers.calls.count("slipstream_connect") == 2
        await trainer.commit(3)
        assert_serves(workers, trainer.tensors)
        trainer.outbox.close()

    asyncio.run(scenario())


def test_invalid_updates_are_refused(workers: Workers) -> None:
    async def scenario() -> None:
        loader = direct(workers)
        trainer = Trainer(loader)
        with pytest.raises(FleetChanged, match="needs every tensor"):
            await trainer.stage(1, {"model.norm.weight"})
        await loader.rollback(1)
        trainer.outbox.close()
        offer = Offer(trainer.plan.to_bytes(), trainer.plan.fingerprint, "cuda")
        with pytest.raises(VersionError):
            await loader.begin(5, 5, offer)
        await loader.begin(-1, 1, offer)
        for transport in ("cuda", "shm"):
            with pytest.raises(UpdateInProgress):
                await loader.begin(-1, 2, Offer(offer.plan, offer.fingerprint, transport))
        with pytest.raises(ChecksumMismatch, match="manifests for 1 of 2"):
            await loader.stage(1, [[]])
        with pytest.raises(UnknownVersion):
            await loader.stage(7, [[], []])
        await loader.rollback(1)

    asyncio.run(scenario())


def test_manifests_are_checked_even_if_they_look_like_the_last_ones(workers: Workers) -> None:
    async def scenario() -> None:
        loader = direct(workers)
        trainer = Trainer(loader)
        for version in (1, 2):
            await trainer.stage(version)
            await trainer.commit(version)
        manifests = trainer.outbox.promise(set(), 3).manifests
        await loader.begin(2, 3, Offer(b"", trainer.plan.fingerprint, "cuda", fresh=False))
        twice = add_manifest_header(3, 2 * strip_manifest_header(manifests[0], 3))
        for first, why in (
            (trainer.outbox.promise(set(), 2)[0][0], "a manifest of version 3, got one of version 2"),
            (manifests[0][:-1], "malformed|expected a manifest of"),
            (twice, "repeats a piece"),
            (add_manifest_header(3, strip_manifest_header(manifests[0], 3)[:-12]), r"got .* pieces of"),
        ):
            with pytest.raises(ChecksumMismatch, match=why):
                await loader.stage(3, [[first], [manifests[1]]])
        report = await loader.stage(3, [[m] for m in manifests])
        assert report.num_bytes == trainer.plan.num_bytes
        await loader.rollback(3)
        trainer.outbox.close()

    asyncio.run(scenario())


def test_a_checksum_that_a_rank_finds_wrong_keeps_its_class() -> None:
    """vLLM turns an exception of a worker into text."""
    receipts: list[list[Any]] = [[None, 0.1], [0.1, "nccl: model.norm.weight arrived with checksum 01"]]

    async def call(method: str, *args: Any) -> list[Any]:
        return {"slipstream_connect": [[b"{}"]] * TP}.get(method) or (
            receipts.pop(0) if method == "slipstream_receive" else [None] * TP
        )

    async def scenario() -> None:
        loader = direct(call)  # type: ignore[arg-type]
        trainer = Trainer(loader)
        await loader.begin(-1, 1, Offer(trainer.plan.to_bytes(), trainer.plan.fingerprint, "nccl"))
        manifests = trainer.outbox.promise(set(), 1)[0]
        with pytest.raises(
            ChecksumMismatch, match=r"engine 'engine-0': nccl: model.norm.weight.*version 1 is not used"
        ):
            await loader.stage(1, [[m] for m in manifests])

    asyncio.run(scenario())


def test_loading_before_the_weights_arrive_changes_nothing_and_can_be_retried(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_loader, "WORKER_WAIT_SECONDS", 0.01)

    async def scenario() -> None:
        loader, trainer, old = await with_weights_in_transit(workers)
        for _ in range(3):
            with pytest.raises(WeightsPending, match=r"piece\(s\) of version 2, but has 0 of version -1"):
                await loader.load(2)
            assert_serves(workers, old)
            await loader.restore()  # there is nothing to restore
        trainer.send(2)
        await trainer.outbox.confirmed()
        assert await loader.load(2) == ({"s0": 3}, 0.0)
        assert_serves(workers, trainer.tensors)
        loader.finish(2)
        trainer.outbox.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["rolled back", "the trainer is gone"])
def test_loading_weights_that_never_arrive_changes_nothing(workers: Workers, how: str) -> None:
    async def scenario() -> None:
        loader, trainer, old = await with_weights_in_transit(workers)
        if how == "rolled back":
            await loader.rollback(2)
        trainer.outbox.close()
        with pytest.raises(UnknownVersion if how == "rolled back" else TransferError, match=r"not staged|disconnected"):
            while True:
                with contextlib.suppress(WeightsPending):  # until the ranks know
                    await loader.load(2)
        await loader.restore()
        assert_serves(workers, old)

    asyncio.run(scenario())


def test_a_rank_without_the_version_writes_nothing(workers: Workers) -> None:
    async def scenario() -> None:
        loader, trainer, old = await with_a_second_version_staged(workers)
        for rank in workers.ranks:
            rank.discard()
        with pytest.raises(WeightsPending, match=r"but has 0 of version -1"):
            await loader.load(2)
        await loader.restore()  # there is nothing to restore
        assert_serves(workers, old)
        await loader.rollback(2)
        trainer.outbox.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["one rank refuses", "the device fails"])
def test_weights_that_may_be_torn_are_not_served(workers: Workers, how: str) -> None:
    async def scenario() -> None:
        loader = direct(workers, has_weights=True)
        trainer = Trainer(loader)
        await trainer.stage(1)
        if how == "one rank refuses":
            workers.ranks[1].discard()
        workers.broken = how == "the device fails"
        with pytest.raises((TransferError, RuntimeError)):
            await loader.load(1)
        with pytest.raises(EngineFailure, match="overwritten in part"):
            await loader.restore()
        trainer.outbox.close()

    asyncio.run(scenario())


def test_versions_reach_every_rank_through_shared_memory(workers: Workers) -> None:
    async def scenario() -> None:
        loader = direct(workers)
        for version in (1, 2, 3):
            params = jax.tree.map(lambda a, v=version: jnp.asarray(a) * v, random_params(CONFIG))
            update = HandUpdate(params, families.tensors(CONFIG), loader.parameters, "float32", version, "shm")
            destinations = await loader.begin(version - 1, version, update.offer)
            with pytest.raises(UpdateInProgress):
                await loader.begin(version - 1, version, Offer(update.offer.plan, update.offer.fingerprint, "cuda"))
            await loader.stage(version, update.send(destinations))
            await loader.load(version)
            loader.finish(version)
            assert_serves(workers, named_tensors.named_tensors(params), padded=True)
        loader.close()

    asyncio.run(scenario())


def test_parameters_that_failed_the_mapping_check_go_through_vllms_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_memory, "CudaDriver", Memfd)
    failed = {f"model.layers.0.self_attn.qkv_proj.{x}": "it is elsewhere" for x in ("weight", "bias")}
    workers = Workers(list(failed))

    async def scenario() -> None:
        trainer = Trainer(direct(workers, failed=failed))
        await trainer.stage(1)
        await trainer.commit(1)
        for rank in range(TP):
            assert len(workers.loaded[rank]) == 6
            for name, tensor in workers.loaded[rank].items():
                assert torch.equal(tensor, torch.tensor(trainer.tensors[name].tolist())), name
            expected = naive(CONFIG, trainer.tensors, TP, rank, torch.float32)
            assert_bits(workers.live[rank], {n: t for n, t in expected.items() if n not in failed})
        trainer.outbox.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["cuda", "shm"])
def test_what_one_ranks_loader_cannot_load_is_undone_on_all(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    monkeypatch.setattr(mapped_memory, "CudaDriver", Memfd)
    failed = {"model.layers.1.mlp.gate_up_proj.weight": "of the test"}
    workers = Workers(list(failed))

    async def stage(loader: DirectLoader, trainer: Trainer, version: int) -> None:
        if transport == "cuda":
            return await trainer.stage(version)
        update = HandUpdate(trainer.tensors, families.tensors(CONFIG), loader.parameters, "float32", version, "shm")
        await loader.stage(version, update.send(await loader.begin(trainer.serving, version, update.offer)))

    async def scenario() -> None:
        loader = direct(workers, failed=failed)
        trainer = Trainer(loader)
        assert loader.takes_all and not loader.is_single_call  # no step may run before all ranks have loaded or undone
        await stage(loader, trainer, 1)
        await loader.load(1)
        loader.finish(1)
        if transport == "cuda":
            await trainer.outbox.released()
        trainer.serving = 1
        before = [{name: tensor.clone() for name, tensor in live.items()} for live in workers.live]
        trainer.tensors = {name: jnp.asarray(tensor) * 2 for name, tensor in trainer.tensors.items()}
        await stage(loader, trainer, 2)
        workers.without_room = 1
        with pytest.raises(TransferError, match=r"vLLM's loader failed: MemoryError: no room for model.layers.1.mlp"):
            await loader.load(2)
        await loader.restore()
        for live, old in zip(workers.live, before):
            assert_bits(live, old)
        await loader.rollback(2)
        workers.without_room = -1
        trainer.outbox.close()
        loader.close()

    asyncio.run(scenario())


def test_vllms_loader_gets_all_tensors_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills whole layers: those of a layer that did not come would be garbage."""
    monkeypatch.setattr(mapped_memory, "CudaDriver", Memfd)
    failed = {"model.layers.1.mlp.gate_up_proj.weight": "of the test"}
    workers = Workers(list(failed))

    async def scenario() -> None:
        loader = direct(workers, failed=failed)
        trainer = Trainer(loader)
        await trainer.stage(1)
        await trainer.commit(1)
        with pytest.raises(TransferError, match=r"takes all tensors or none; .* are missing"):
            await trainer.stage(2, {"model.layers.1.mlp.up_proj.weight"})
        await loader.rollback(2)
        trainer.outbox.close()

    asyncio.run(scenario())


def test_adapters_alone_and_with_the_base_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks get the same adapters; if one cannot load them, or the base model does not follow, neither has them."""
    monkeypatch.setattr(mapped_memory, "CudaDriver", Memfd)
    failed = {"model.layers.1.mlp.gate_up_proj.weight": "of the test"}  # may fail to load
    workers = Workers(list(failed))
    specs, base = families.tensors(CONFIG), random_params(CONFIG)
    a, b = Lora("a", 3, 6.0, ("q_proj",)), Lora("b", 4, 4.0, ("o_proj",))

    async def stage(loader: DirectLoader, version: int, params: Any, *adapters: tuple[Lora, int]) -> None:
        loras = tuple(lora for lora, _ in adapters)
        tensors, parameters = layouts.layout(specs, loader.parameters, loras, params is None)
        brought = {} if params is None else dict(named_tensors.named_tensors(params))
        for index, (lora, seed) in enumerate(adapters):
            named = named_tensors.named_tensors(random_adapter(CONFIG, lora, seed))
            brought[f"adapters.{index}"] = pack(named, specs, lora)
        update = HandUpdate(brought, tensors, parameters, "float32", version, "shm")
        offer = replace(update.offer, adapters=loras, only_adapters=params is None)
        await loader.stage(version, update.send(await loader.begin(version - 1, version, offer)))

    def assert_has(slot: int, lora: Lora, seed: int) -> None:
        for rank in range(TP):
            assert_bits(workers.adapters[rank][slot], named(lora, seed))

    def named(lora: Lora, seed: int) -> dict[str, torch.Tensor]:
        tensors = named_tensors.named_tensors(random_adapter(CONFIG, lora, seed))
        return {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}

    async def scenario() -> None:
        loader = direct(workers, failed=failed)
        held = loader._adapters
        await stage(loader, 1, base)
        await loader.load(1)
        loader.finish(1)
        before = [{name: tensor.clone() for name, tensor in live.items()} for live in workers.live]
        await stage(loader, 2, None, (a, 0))
        assert held.names == () and not loader.is_single_call
        assert await loader.load(2) == ({"s0": 3}, 0.5)
        loader.finish(2)
        assert held.names == ("a",)
        assert_has(1, a, 0)
        for live, old in zip(workers.live, before):
            assert_bits(live, old)
        new = jax.tree.map(lambda leaf: leaf * 2, base)
        for rank_without_adapters, rank_without_room, said in (
            (1, -1, "rank 1 could not"),
            (-1, 1, "no room for model"),
        ):
            workers.without_adapters, workers.without_room = rank_without_adapters, rank_without_room
            await stage(loader, 3, new, (a, 1), (b, 0))
            with pytest.raises((EngineFailure, TransferError), match=said):
                await loader.load(3)
            await loader.restore()
            await loader.rollback(3)
            assert held.names == ("a",)
            assert_has(1, a, 0)
            for live, old in zip(workers.live, before):
                assert_bits(live, old)
        workers.without_room = -1
        await stage(loader, 3, new, (a, 1), (b, 0))
        await loader.load(3)
        loader.finish(3)
        assert held.names == ("a", "b")
        assert_has(1, a, 1)
        assert_has(2, b, 0)
        await stage(loader, 4, base)
        await loader.load(4)
        loader.finish(4)
        for live, old in zip(workers.live, before):
            assert_bits(live, old)
        held.unload("a")
        await stage(loader, 5, None, (Lora("c", 3, 6.0, ("q_proj",)), 5))
        await loader.load(5)
        loader.finish(5)
        assert_has(1, a, 5)
        loader.close()

    asyncio.run(scenario())


def test_parameters_of_an_unknown_layout_are_not_written_in_place(workers: Workers) -> None:
    specs = families.tensors(CONFIG)
    names = {spec.name for spec in specs}
    rest = (families.whole_parameters(specs), names, None, "float32", 1, workers, True)
    loader = DirectLoader("engine-0", specs, *rest, slots(workers))
    assert loader.takes_all and not loader.writes_all
    loader.close()


def test_checksums_cover_every_part_that_is_written_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_memory, "CudaDriver", Memfd)
    monkeypatch.setattr(direct_loader, "HASHED_BYTES", 1 << 12)  # several calls
    monkeypatch.setattr(live_parameters, "HASH_CHUNK_BYTES", 1 << 9)  # several chunks of rows
    failed = {"model.layers.1.mlp.gate_up_proj.weight": "of the test"}
    workers = Workers(list(failed))

    async def scenario() -> None:
        loader = direct(workers, failed=failed)
        trainer = Trainer(loader)
        await trainer.stage(1)
        await trainer.commit(1)
        q = "model.layers.0.self_attn.q_proj.weight"
        workers.live[1]["model.layers.0.self_attn.qkv_proj.weight"][0, 0] += 1  # rank 1's first row of q
        workers.calls.clear()
        found = {"engine-0": Checksums(1, await loader.checksums())}
        assert len(workers.calls) > 3 and set(workers.calls) == {"slipstream_checksums"}
        info = EngineInfo(
            "engine-0", "vllm", "m", "float32", TP, families.tensors(CONFIG), loader.parameters, (), "h", 64, 8, 1
        )
        report = compare(trainer.tensors, [info], found)
        assert [(d.rank, d.parameter, d.tensor) for d in report.differences] == [
            (1, "model.layers.0.self_attn.qkv_proj.weight", q)
        ]
        names = {f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")}
        assert {u.tensor for u in report.unchecked} == names
        trainer.outbox.close()

    asyncio.run(scenario())


def test_weights_packed_on_cpu_have_no_checksums() -> None:
    async def call(*_: Any) -> list[Any]:
        return []

    loader = ReloadLoader("engine-0", families.tensors(CONFIG), "float32", call, True, slots(call))
    with pytest.raises(Unsupported, match="packs linear weights"):
        asyncio.run(loader.checksums())
    loader.close()


def test_noise_in_the_scales_of_attention_layers_is_removed() -> None:
    """As vLLM's dummy loader leaves it."""
    model = torch.nn.ModuleDict({"attn": torch.nn.Linear(2, 2)})
    model["attn"].register_buffer("_k_scale", torch.tensor(3e-4))
    weight = model["attn"].weight.detach().clone()
    reset_scales(model)
    assert model["attn"]._k_scale == 1.0 and torch.equal(model["attn"].weight, weight)
