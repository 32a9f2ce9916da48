"""Weights in a trainer's shared memory: no step reads them while they are written, and no half-written version serves."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.bridge.in_process import LocalFleet
from slipstream.config import SyncOptions
from slipstream.errors import (
    ChecksumMismatch,
    ConfigError,
    FleetChanged,
    MappingError,
    NonFiniteWeights,
    NotReady,
    TransferError,
    UnknownVersion,
    Unsupported,
    UpdateInProgress,
)
from slipstream.model.tree import flatten, unflatten
from slipstream.types import Completion, Failure, Offer, VersionSpan
from slipstream.weights.checksum import ScanOptions
from slipstream.weights.transports.shared import cuda_memory
from slipstream.weights.transports.shared.host_memory import SharedHostMemory
from slipstream.weights.update.shared import Sharing
from tests.conformance.engines import Subject, request
from tests.engines.subjects import CONFIG, Hold, collect, opened, publish, stats
from tests.tiny import random_params
from tests.weights.memfd import Memfd, stand_in

PROMPT = [7, 8, 9, 10]
GREEDY = request("greedy", PROMPT, max_tokens=24, temperature=0.0)


def numpy_params(seed: int = 0) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in flatten(random_params(CONFIG, seed)).items()}


OTHER = numpy_params(seed=1)


@pytest.fixture(params=["host", "device"])
def memory(request, monkeypatch):
    """The kind of shared memory: host memory, or a stand-in for GPU memory."""
    driver = stand_in(monkeypatch) if request.param == "device" else None
    yield
    if driver is not None and (driver.mapped or driver.owned):
        gc.collect()  # which takes a second
        assert not (driver.mapped or driver.owned), "what nobody needs any longer is given back"


class Trainer:
    """A trainer, step by step."""

    def __init__(self, subject: Subject, **tensors: np.ndarray) -> None:
        self._engine = subject.engine
        self.sharing = Sharing(
            LocalFleet(subject.engine), numpy_params() | tensors, (subject.engine.describe(),), ScanOptions()
        )

    async def begin(self, version: int | None = None) -> None:
        info = self._engine.describe()
        await self.sharing.begin((info,), info.version + 1 if version is None else version)

    async def update(self, weights: dict[str, np.ndarray] | None = None, version: int | None = None) -> int:
        await self.begin(version)
        self.write(weights or {})
        return (await self.sharing.commit("keep")).version

    def write(self, weights: dict[str, np.ndarray]) -> None:
        for name, array in weights.items():
            torch.from_dlpack(self.sharing.arrays[name])[...] = torch.from_numpy(array.copy())


def greedy(subject: Subject, prompt: list[int], weights: dict[str, np.ndarray], count: int) -> tuple[int, ...]:
    """Greedy completion of the reference."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(subject.logits(tokens, unflatten(weights))[-1].argmax()))
    return tuple(tokens[len(prompt) :])


def test_written_weights_serve_and_the_prefix_cache_is_cleared(memory):
    with opened() as subject:
        trainer = Trainer(subject)
        assert subject.runner.run(trainer.update()) == 1
        old = subject.complete(PROMPT, max_tokens=24, temperature=0.0)
        again = subject.complete(PROMPT, max_tokens=24, temperature=0.0)
        hits = stats(subject)["hit_tokens"]
        assert old.token_ids == again.token_ids == greedy(subject, PROMPT, numpy_params(), 24)
        assert hits > 0, "the second time, the prompt was in the prefix cache"
        assert subject.runner.run(trainer.update(OTHER)) == 2
        new = subject.complete(PROMPT, max_tokens=24, temperature=0.0)
        assert new.spans == (VersionSpan(2, 0, 24),)
        assert new.token_ids == greedy(subject, PROMPT, OTHER, 24) != old.token_ids
        assert stats(subject)["hit_tokens"] == hits


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "requeue"])
def test_a_running_request_switches_versions_between_two_steps(in_flight):
    async def run(subject: Subject, trainer: Trainer) -> None:
        await trainer.update()
        hold = Hold(subject, tick=10)
        generating = asyncio.create_task(collect(subject, GREEDY))
        await hold.reached()  # during a step
        beginning = asyncio.create_task(trainer.begin())
        await asyncio.sleep(0)
        assert not beginning.done(), "the step under way reads the weights"
        await hold.release()
        await beginning
        trainer.write(OTHER)
        await trainer.sharing.commit(in_flight)
        (found,) = await generating
        assert isinstance(found, Completion)
        if in_flight == "requeue":
            assert found.spans == (VersionSpan(2, 0, 24),)
            assert found.token_ids == greedy(subject, PROMPT, OTHER, 24)
            return
        (first, second) = found.spans
        assert (first.version, second.version, second.stop) == (1, 2, 24)
        kept = found.token_ids[: first.stop]
        assert kept == greedy(subject, PROMPT, numpy_params(), first.stop)
        if in_flight == "recompute":
            rest = greedy(subject, [*PROMPT, *kept], OTHER, 24 - first.stop)
            assert found.token_ids[first.stop :] == rest

    with opened() as subject:
        subject.runner.run(run(subject, Trainer(subject)))


def test_no_step_runs_while_the_trainer_writes_even_after_resume():
    async def run(subject: Subject, trainer: Trainer) -> None:
        await trainer.update()
        await trainer.begin()
        generating = asyncio.create_task(collect(subject, GREEDY))
        before = stats(subject)["ticks"]
        await subject.engine.pause()
        await subject.engine.resume()
        await subject.engine.wake()
        for _ in range(5):
            await (
                subject.engine.reset_prefix_cache()
            )  # goes through the compute thread, between two steps if there are any
        assert stats(subject)["ticks"] == before
        with pytest.raises(UpdateInProgress):
            await subject.engine.sleep()
        with pytest.raises(UpdateInProgress):
            await subject.engine.checksums()
        trainer.write(OTHER)
        report = await trainer.sharing.commit("keep")
        assert report.pause_seconds > 0
        (found,) = await generating
        assert found.token_ids == greedy(subject, PROMPT, OTHER, 24)
        assert (await subject.engine.checksums()).version == 2

    with opened() as subject:
        subject.runner.run(run(subject, Trainer(subject)))


def test_a_half_written_version_never_serves(memory):
    async def run(subject: Subject, trainer: Trainer) -> None:
        await trainer.update()
        hold = Hold(subject, tick=5)
        generating = asyncio.create_task(collect(subject, GREEDY))
        await hold.reached()
        beginning = asyncio.create_task(trainer.begin())
        await hold.release()
        await beginning
        trainer.write({"model.norm.weight": OTHER["model.norm.weight"]})
        await trainer.sharing.rollback()
        (failed,) = await generating
        assert isinstance(failed, Failure) and isinstance(failed.error, NotReady)
        assert "update to version 2 was aborted" in str(failed.error)
        (refused,) = await collect(subject, GREEDY)
        assert isinstance(refused.error, NotReady) and "update to version 2 was aborted" in str(refused.error)
        assert subject.engine.describe().version == -1
        with pytest.raises(UnknownVersion, match="begin one before writing"):
            await trainer.sharing.commit("keep")
        assert await trainer.update(OTHER, version=2) == 2
        (found,) = await collect(subject, GREEDY)
        assert found.token_ids == greedy(subject, PROMPT, OTHER, 24) and found.version == 2

    with opened() as subject:
        subject.runner.run(run(subject, Trainer(subject)))


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_shares_again(memory, level):
    async def run(subject: Subject, trainer: Trainer) -> None:
        await trainer.update()
        await subject.engine.sleep(level)
        with pytest.raises(FleetChanged, match="does not serve from the memory"):
            await trainer.begin()
        await trainer.update(OTHER)
        await subject.engine.wake()
        (found,) = await collect(subject, GREEDY)
        assert found.token_ids == greedy(subject, PROMPT, OTHER, 24)
        await trainer.update(numpy_params())  # in place
        (found,) = await collect(subject, GREEDY)
        assert found.token_ids == greedy(subject, PROMPT, numpy_params(), 24)

    with opened() as subject:
        subject.runner.run(run(subject, Trainer(subject)))


def test_a_sync_ends_sharing_and_must_send_every_tensor(memory):
    with opened() as subject:
        trainer = Trainer(subject)
        subject.runner.run(trainer.update())
        part = {"model.norm.weight": random_params(CONFIG, 3)["model"]["norm"]["weight"]}
        with pytest.raises(FleetChanged, match="serves from memory that a trainer shares and needs every tensor"):
            subject.runner.run(publish(subject, part, partial=True))
        assert subject.complete(PROMPT, max_tokens=24, temperature=0.0).version == 1
        subject.publish(unflatten(OTHER))
        trainer.write(numpy_params(5))  # no engine serves from this memory any more
        found = subject.complete(PROMPT, max_tokens=24, temperature=0.0)
        assert found.token_ids == greedy(subject, PROMPT, OTHER, 24) and found.version == 2
        with pytest.raises(FleetChanged):
            subject.runner.run(trainer.update())
        assert subject.runner.run(trainer.update()) == 3
        assert subject.complete(PROMPT, max_tokens=24, temperature=0.0).token_ids == greedy(
            subject, PROMPT, numpy_params(5), 24
        )


def test_an_engine_keeps_a_copy_of_its_weights_when_the_trainer_leaves(memory):
    with opened() as subject:
        trainer = Trainer(subject)
        subject.runner.run(trainer.update(OTHER))
        old = subject.complete(PROMPT, max_tokens=24, temperature=0.0)
        subject.runner.run(subject.engine.release())
        trainer.write(numpy_params(5))  # as a trainer that closed its bridge and keeps training
        found = subject.complete(PROMPT, max_tokens=24, temperature=0.0)
        assert (found.token_ids, found.version) == (old.token_ids, 1)
        with pytest.raises(FleetChanged):
            subject.runner.run(trainer.update())
        assert subject.runner.run(trainer.update()) == 2  # or comes back
        subject.runner.run(trainer.begin())
        subject.runner.run(subject.engine.release())  # of a connection that broke before this update began
        trainer.write(OTHER)
        subject.runner.run(trainer.sharing.commit("keep"))
        assert subject.complete(PROMPT, max_tokens=24, temperature=0.0).token_ids == old.token_ids


def test_the_memory_of_a_new_engine_is_verified_against_the_trainers(memory, monkeypatch):
    with opened() as subject:
        trainer = Trainer(subject)
        hashes = Sharing._scan
        monkeypatch.setattr(Sharing, "_scan", lambda *arguments: hashes(*arguments) | {3: 1})
        with pytest.raises(ChecksumMismatch):
            subject.runner.run(trainer.update())
        assert subject.complete(PROMPT).version == 0, "nothing was overwritten, so the old version goes on"


def test_values_that_are_not_finite_are_not_served():
    with opened() as subject:
        trainer = Trainer(subject)
        subject.runner.run(trainer.update())
        bad = {"model.norm.weight": np.full(CONFIG.hidden_size, np.nan, np.float32)}
        with pytest.raises(
            NonFiniteWeights, match=rf"model.norm.weight \({CONFIG.hidden_size} of {CONFIG.hidden_size}"
        ):
            subject.runner.run(trainer.update(bad))
        assert isinstance(subject.generate(GREEDY)[0].error, NotReady)
        subject.runner.run(trainer.update({"model.norm.weight": numpy_params()["model.norm.weight"]}))
        assert subject.complete(PROMPT).version == subject.engine.describe().version


def test_engines_that_cannot_share_name_the_reason():
    with (
        opened(tensor_parallel_size=2) as subject,
        pytest.raises(Unsupported, match=r"'engine' .*2 rank\(s\).* ranks hold parts"),
    ):
        Trainer(subject)
    with (
        opened(dtype="bfloat16") as subject,
        pytest.raises(MappingError, match="is float32, and engine 'engine' comput"),
    ):
        Trainer(subject)
    with opened() as subject:
        with pytest.raises(MappingError, match=r"not in the model: value_head.weight"):
            Trainer(subject, **{"value_head.weight": np.ones((1, 32), np.float32)})
        trainer = Trainer(subject)
        for change, words in (
            ({"host": "elsewhere"}, "another host"),
            ({"transports": ("shm",)}, "GPU, with tensor_parallel_size=1"),
        ):
            with pytest.raises(Unsupported, match=words):
                subject.runner.run(trainer.sharing.begin((replace(subject.engine.describe(), **change),), 1))
        with pytest.raises(ConfigError, match="transport must be one of"):  # it is not a transport for sending
            SyncOptions("shared")


def test_an_engine_maps_only_the_offered_memory(tmp_path):
    memory = SharedHostMemory(1000)
    pid, fd, nonce = memory.transport.removeprefix("shared:").split("/")
    (tmp_path / "file").write_bytes(bytes(1 << 16))
    file = os.open(tmp_path / "file", os.O_RDONLY)
    reading, writing = os.pipe()
    offers = {
        "nonsense": "malformed address",
        f"{pid}/{fd}/../{nonce}": "malformed address",
        f"{pid}/{fd}/{nonce[::-1]}": "not the memory that the offer describes|holds 1,000 bytes",
        f"{pid}/{fd}/{nonce}": "holds 1,000 bytes, the engine's parameters",
        f"{pid}/{file}/{nonce}": "is not the shared memory of a trainer",
        f"{pid}/{reading}/{nonce}": "is not the shared memory of a trainer",
        f"{pid}/9999/{nonce}": "cannot open the shared memory of trainer process",
    }
    with opened() as subject:
        trainer = Trainer(subject)
        plan = trainer.sharing._plan
        for where, words in offers.items():
            with pytest.raises(TransferError, match=words):
                subject.runner.run(subject.engine.begin(1, Offer(plan.to_bytes(), plan.fingerprint, f"shared:{where}")))
        transport = trainer.sharing._memory.transport
        wrong = re.sub(".$", lambda last: "0" if last[0] != "0" else "1", transport)
        with pytest.raises(TransferError, match="not the memory that the offer describes"):
            subject.runner.run(subject.engine.begin(1, Offer(plan.to_bytes(), plan.fingerprint, wrong)))
        trainer.sharing.close()
        with pytest.raises(TransferError, match="cannot open the shared memory"):
            subject.runner.run(trainer.update())
        assert subject.complete(PROMPT).version == 0
    for number in (file, reading, writing):
        os.close(number)


def test_an_engine_maps_only_the_offered_device_memory(monkeypatch):
    driver = Memfd()
    monkeypatch.setattr(cuda_memory, "CudaDriver", lambda device=0: driver)
    small = cuda_memory.SharedCudaMemory(1000, 0)
    door, nonce, device = small.transport.removeprefix("shared-cuda:").split("/")
    offers = {
        "nonsense": "malformed address",
        f"{door}/../{device}": "malformed address",
        f"{door}/{nonce}/{1:032x}": "is not visible to this process",
        f"{door}/{nonce[::-1]}/{device}": "no longer shares|cannot connect to the trainer",
        f"slipstream-{0:032x}/{nonce}/{device}": "cannot connect to the trainer.*is it alive",
        f"{door}/{nonce}/{device}": "holds 1,000 bytes, the engine's parameters need 5,000",
    }
    for where, words in offers.items():
        with pytest.raises(TransferError, match=words):
            cuda_memory.shared_cuda_receiver(where, 5000)
    assert cuda_memory.shared_cuda_receiver(f"{door}/{nonce}/{device}", 1000).buffer.size == 1000
    small.close()
    small.close()
    with pytest.raises(TransferError, match=r"no longer shares|cannot connect to the trainer"):
        cuda_memory.shared_cuda_receiver(f"{door}/{nonce}/{device}", 1000)
    with opened() as subject:  # on CPU, so it cannot use GPU memory
        trainer = Trainer(subject)
        plan = trainer.sharing._plan
        with pytest.raises(Unsupported, match="memory of this kind: an engine on CPU serves from host memory"):
            offer = Offer(plan.to_bytes(), plan.fingerprint, small.transport)
            subject.runner.run(subject.engine.begin(1, offer))


def test_engines_of_one_fleet_share_one_kind_of_memory():
    with opened() as subject:
        trainer = Trainer(subject)
        other = replace(subject.engine.describe(), transports=("shared-cuda",))
        with pytest.raises(
            Unsupported, match=r"memory of another kind \(shared-cuda\) than the first engine \(shared\)"
        ):
            subject.runner.run(trainer.sharing.begin((other,), 1))


def test_the_memory_is_private_to_its_user():
    memory = SharedHostMemory(1000)
    pid, fd, _ = memory.transport.removeprefix("shared:").split("/")
    again = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    with pytest.raises(OSError):
        mmap.mmap(again, 0)
    with pytest.raises(OSError):
        os.ftruncate(again, 0)
    os.close(again)
