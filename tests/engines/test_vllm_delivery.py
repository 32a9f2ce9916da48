"""Direct delivery into vLLM's workers, with ranks of torch on CPU in their place and a stand-in for the GPU's driver: what the
engine's process decides, apart from vLLM. (`tests/vllm` has the workers of a real one, `tests/gpu` all of it.)"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from slipstream.engines.vllm import delivery as delivery_module
from slipstream.engines.vllm import live as live_module
from slipstream.engines.vllm.delivery import Direct, NotHere, Reloaded
from slipstream.engines.vllm.live import Live, NothingWritten, NotYet
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
from slipstream.types import Checksums, EngineInfo, Offer
from slipstream.weights import families, source
from slipstream.weights.checksum import with_version, without_version
from slipstream.weights.device import DeviceOutbox
from slipstream.weights.families.live import vllm_parameters, written_parameters
from slipstream.weights.plan import Plan, make_plan
from slipstream.weights.transports import cuda
from slipstream.weights.verify import compare
from tests.tiny import random_params, tiny_config
from tests.weights.by_hand import HandUpdate
from tests.weights.memfd import Memfd
from tests.weights.test_cuda import TorchMemory, assert_bits, naive

CONFIG = tiny_config("qwen2")
TP = 2


class Workers:
    """Two ranks, called as vLLM calls its workers."""

    def __init__(self, failed: Sequence[str] = ()) -> None:
        self.calls: list[str] = []
        self.broken = False
        self.loaded: list[dict[str, torch.Tensor]] = [{}, {}]
        self._maps: dict[str, mmap.mmap] = {}
        self._parameters, self._reloaded = written_parameters(CONFIG, TP, failed)
        self.live, self.ranks = [], []
        for rank in range(TP):
            own = [p for p in vllm_parameters(CONFIG, TP) if p.rank == rank]
            self.live.append({p.name: torch.full(p.shape, float("nan")) for p in own})
            held = Live(self.live[-1], self.loaded[rank].update, rank, torch.device("cpu"))
            held._make = lambda *_, held=held: cuda.CudaReceiver([0], TorchMemory, Memfd(), 5.0, held.stage)  # type: ignore[method-assign]
            self.ranks.append(held)

    async def __call__(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        if self.broken and method in ("slipstream_apply", "slipstream_write"):
            raise RuntimeError("the device is gone")
        return [getattr(self, method)(rank, *args) for rank in range(TP)]

    def slipstream_open(self, rank: int, transport: str, plan: bytes, failed: Sequence[str]) -> list[bytes]:
        return self.ranks[rank].open(transport, Plan.from_bytes(plan), self._parameters, self._reloaded)

    def slipstream_apply(
        self, rank: int, version: int, indices: Any, patience: float
    ) -> tuple[dict[str, int], float, str, bool]:
        try:
            if any(indices):
                self.ranks[rank].apply(version, indices[rank], patience)
        except NothingWritten as error:
            return {}, 0.0, str(error), isinstance(error, NotYet)
        return {"s0": 3}, 0.0, "", False

    def slipstream_map(self, rank: int, files: Sequence[str]) -> None:
        for file in files:
            with open(file, "r+b") as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0)

    def slipstream_write(
        self, rank: int, places: Any, dtype: str, reloaded: Any
    ) -> tuple[dict[str, int], float, str, bool]:
        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, at in places:
                file, offset, shape = at[rank]
                count = int(torch.Size(shape).numel())
                memory = torch.frombuffer(self._maps[file], dtype=torch.float32, count=count, offset=offset)
                yield name, memory.reshape(shape)

        self.ranks[rank].write(tensors(), reloaded)
        return {"s0": 3}, 0.0, "", False

    def slipstream_checksums(self, rank: int, names: Sequence[str]) -> list[tuple[str, list[int]]]:
        own = [p for p in vllm_parameters(CONFIG, TP) if p.rank == rank and p.name in names]
        return self.ranks[rank].checksums(own)

    def slipstream_forget(self, rank: int) -> None:
        self.ranks[rank].forget()


class Trainer:
    """One process that sends over `cuda`, step by step."""

    def __init__(self, delivery: Direct) -> None:
        self.delivery, self.serving = delivery, -1
        self.tensors = source.named_tensors(jax.tree.map(jnp.asarray, random_params(CONFIG)))
        specs = families.tensors(CONFIG)
        self.plan = make_plan(source.describe(self.tensors), specs, delivery.parameters, "float32")
        self.outbox = DeviceOutbox(self.plan, delivery.parameters, 0, "engine-0")
        self.fresh = True

    async def stage(self, version: int, unchanged: set[str] | None = None) -> None:
        offer = Offer(self.plan.to_bytes(), self.plan.fingerprint, "cuda", self.fresh)
        self.outbox.berths = await self.delivery.begin(self.serving, version, offer)
        self.fresh = False
        manifests = self.send(version, unchanged)
        await self.outbox.confirmed()
        await self.delivery.stage(version, [[m] for m in manifests])

    def send(self, version: int, unchanged: set[str] | None = None) -> list[bytes]:
        return self.outbox.send(self.tensors, unchanged or set(), version)[0]

    async def commit(self, version: int) -> dict[str, int]:
        drawn, _ = await self.delivery.load(version)
        self.delivery.finish(version)
        await self.outbox.released()
        self.serving = version
        return drawn


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    monkeypatch.setattr(cuda, "Vmm", Memfd)
    return Workers()


def direct(workers: Workers, has_weights: bool = False, failed: dict[str, str] | None = None) -> Direct:
    return Direct("engine-0", CONFIG, "float32", TP, workers, failed or {}, has_weights)


async def with_a_second_version_to_come(workers: Workers) -> tuple[Direct, Trainer, Any]:
    """And the tensors of the first, which serves."""
    delivery = direct(workers)
    trainer = Trainer(delivery)
    await trainer.stage(1)
    await trainer.commit(1)
    old = trainer.tensors
    trainer.tensors = {n: jnp.asarray(t) * 2 for n, t in old.items()}
    return delivery, trainer, old


async def with_a_second_version_staged(workers: Workers) -> tuple[Direct, Trainer, Any]:
    delivery, trainer, old = await with_a_second_version_to_come(workers)
    await trainer.stage(2)
    return delivery, trainer, old


async def with_an_order_ahead_of_the_weights(workers: Workers) -> tuple[Direct, Trainer, Any]:
    """As `with_a_second_version_staged`, but the ranks have not heard of the second."""
    delivery, trainer, old = await with_a_second_version_to_come(workers)
    await delivery.begin(1, 2, Offer(b"", trainer.plan.fingerprint, "cuda", fresh=False))
    await delivery.stage(2, [[m] for m in trainer.outbox.promise(set(), 2)[0]])
    return delivery, trainer, old


def assert_serves(workers: Workers, tensors: Any, padded: bool = False) -> None:
    """`padded`: what nothing fills is zero, and not what it was."""
    for rank in range(TP):
        expected = naive(CONFIG, tensors, TP, rank, torch.float32)
        assert_bits(workers.live[rank], {n: torch.nan_to_num(t) if padded else t for n, t in expected.items()})


def test_versions_reach_every_rank_and_only_one_call_is_made_for_each(workers: Workers) -> None:
    async def scenario() -> None:
        trainer = Trainer(direct(workers))
        await trainer.stage(1)
        assert workers.calls == ["slipstream_open"]
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


def test_a_rollback_leaves_what_serves_and_the_next_update_has_new_links(workers: Workers) -> None:
    async def scenario() -> None:
        delivery, trainer, old = await with_a_second_version_staged(workers)
        await delivery.rollback(2)
        await delivery.rollback(2)
        with pytest.raises(UnknownVersion):
            await delivery.load(2)
        assert not delivery.is_updating
        assert_serves(workers, old)
        trainer.outbox.close()
        await trainer.stage(3)
        assert workers.calls.count("slipstream_open") == 2
        await trainer.commit(3)
        assert_serves(workers, trainer.tensors)
        trainer.outbox.close()

    asyncio.run(scenario())


def test_steps_that_do_not_fit_are_refused(workers: Workers) -> None:
    async def scenario() -> None:
        delivery = direct(workers)
        trainer = Trainer(delivery)
        with pytest.raises(FleetChanged, match="needs every tensor"):
            await trainer.stage(1, {"model.norm.weight"})
        await delivery.rollback(1)
        trainer.outbox.close()
        offer = Offer(trainer.plan.to_bytes(), trainer.plan.fingerprint, "cuda")
        with pytest.raises(VersionError):
            await delivery.begin(5, 5, offer)
        await delivery.begin(-1, 1, offer)
        for transport in ("cuda", "shm"):
            with pytest.raises(UpdateInProgress):
                await delivery.begin(-1, 2, Offer(offer.plan, offer.fingerprint, transport))
        with pytest.raises(ChecksumMismatch, match="manifests for 1 of 2"):
            await delivery.stage(1, [[]])
        with pytest.raises(UnknownVersion):
            await delivery.stage(7, [[], []])
        await delivery.rollback(1)

    asyncio.run(scenario())


def test_what_is_said_of_a_version_is_read_even_if_it_looks_like_the_last_one(workers: Workers) -> None:
    async def scenario() -> None:
        delivery = direct(workers)
        trainer = Trainer(delivery)
        for version in (1, 2):
            await trainer.stage(version)
            await trainer.commit(version)
        manifests, _ = trainer.outbox.promise(set(), 3)
        await delivery.begin(2, 3, Offer(b"", trainer.plan.fingerprint, "cuda", fresh=False))
        twice = with_version(3, 2 * without_version(manifests[0], 3))
        for first, why in (
            (trainer.outbox.promise(set(), 2)[0][0], "for version 2 came; expected version 3"),
            (manifests[0][:-1], "a manifest of"),
            (twice, "names pieces twice"),
            (with_version(3, without_version(manifests[0], 3)[:-12]), r"pieces of .* came"),
        ):
            with pytest.raises(ChecksumMismatch, match=why):
                await delivery.stage(3, [[first], [manifests[1]]])
        report = await delivery.stage(3, [[m] for m in manifests])
        assert report.num_bytes == trainer.plan.num_bytes
        await delivery.rollback(3)
        trainer.outbox.close()

    asyncio.run(scenario())


def test_an_order_that_overtakes_the_weights_changes_nothing_and_may_be_given_again(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_module, "PATIENCE_SECONDS", 0.01)

    async def scenario() -> None:
        delivery, trainer, old = await with_an_order_ahead_of_the_weights(workers)
        for _ in range(3):
            with pytest.raises(NotHere, match=r"has 0 piece\(s\) of version -1 within reach, not the"):
                await delivery.load(2)
            assert_serves(workers, old)
            await delivery.restore()  # there is nothing to restore
        trainer.send(2)
        await trainer.outbox.confirmed()
        assert await delivery.load(2) == ({"s0": 3}, 0.0)
        assert_serves(workers, trainer.tensors)
        delivery.finish(2)
        trainer.outbox.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["rolled back", "the trainer is gone"])
def test_an_order_whose_weights_never_come_changes_nothing(workers: Workers, how: str) -> None:
    async def scenario() -> None:
        delivery, trainer, old = await with_an_order_ahead_of_the_weights(workers)
        if how == "rolled back":
            await delivery.rollback(2)
        trainer.outbox.close()
        with pytest.raises(UnknownVersion if how == "rolled back" else TransferError, match=r"not staged|went away"):
            while True:
                with contextlib.suppress(NotHere):  # until the ranks have heard
                    await delivery.load(2)
        await delivery.restore()
        assert_serves(workers, old)

    asyncio.run(scenario())


def test_a_rank_that_does_not_have_it_writes_nothing_and_the_old_version_goes_on(workers: Workers) -> None:
    async def scenario() -> None:
        delivery, trainer, old = await with_a_second_version_staged(workers)
        for rank in workers.ranks:
            rank.forget()
        with pytest.raises(NotHere, match=r"has 0 piece\(s\) of version -1 within reach"):
            await delivery.load(2)
        await delivery.restore()  # there is nothing to restore
        assert_serves(workers, old)
        await delivery.rollback(2)
        trainer.outbox.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["one rank refuses", "the device fails"])
def test_weights_that_may_be_torn_are_not_served(workers: Workers, how: str) -> None:
    async def scenario() -> None:
        delivery = direct(workers, has_weights=True)
        trainer = Trainer(delivery)
        await trainer.stage(1)
        if how == "one rank refuses":
            workers.ranks[1].forget()
        workers.broken = how == "the device fails"
        with pytest.raises((TransferError, RuntimeError)):
            await delivery.load(1)
        with pytest.raises(EngineFailure, match="overwritten in part"):
            await delivery.restore()
        trainer.outbox.close()

    asyncio.run(scenario())


def test_the_same_through_shared_memory(workers: Workers) -> None:
    async def scenario() -> None:
        delivery = direct(workers)
        for version in (1, 2, 3):
            params = jax.tree.map(lambda a, v=version: jnp.asarray(a) * v, random_params(CONFIG))
            update = HandUpdate(params, families.tensors(CONFIG), delivery.parameters, "float32", version, "shm")
            berths = await delivery.begin(version - 1, version, update.offer)
            with pytest.raises(UpdateInProgress):
                await delivery.begin(version - 1, version, Offer(update.offer.plan, update.offer.fingerprint, "cuda"))
            await delivery.stage(version, update.send(berths))
            await delivery.load(version)
            delivery.finish(version)
            assert_serves(workers, source.named_tensors(params), padded=True)
        delivery.close()

    asyncio.run(scenario())


def test_what_failed_the_proof_goes_through_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "Vmm", Memfd)
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


def test_live_parameters_are_hashed_part_by_part_unless_vllm_arranged_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "Vmm", Memfd)
    monkeypatch.setattr(delivery_module, "HASHED_BYTES", 1 << 12)  # several calls
    monkeypatch.setattr(live_module, "COPIED_BYTES", 1 << 9)  # several runs of rows
    failed = {"model.layers.1.mlp.gate_up_proj.weight": "of the test"}
    workers = Workers(list(failed))

    async def scenario() -> None:
        delivery = direct(workers, failed=failed)
        trainer = Trainer(delivery)
        await trainer.stage(1)
        await trainer.commit(1)
        q = "model.layers.0.self_attn.q_proj.weight"
        workers.live[1]["model.layers.0.self_attn.qkv_proj.weight"][0, 0] += 1  # rank 1's first row of q
        workers.calls.clear()
        found = {"engine-0": Checksums(1, await delivery.checksums())}
        assert len(workers.calls) > 3 and set(workers.calls) == {"slipstream_checksums"}
        info = EngineInfo(
            "engine-0", "vllm", "m", "float32", TP, families.tensors(CONFIG), delivery.parameters, (), "h", 64, 8, 1
        )
        report = compare(trainer.tensors, [info], found)
        assert [(d.rank, d.parameter, d.tensor) for d in report.differences] == [
            (1, "model.layers.0.self_attn.qkv_proj.weight", q)
        ]
        names = {f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")}
        assert {u.tensor for u in report.unchecked} == names
        trainer.outbox.close()

    asyncio.run(scenario())


def test_what_vllm_packed_on_cpu_is_not_vouched_for() -> None:
    async def call(*_: Any) -> list[Any]:
        return []

    delivery = Reloaded("engine-0", CONFIG, "float32", call, True)
    with pytest.raises(Unsupported, match="packs linear weights"):
        asyncio.run(delivery.checksums())
    delivery.close()
