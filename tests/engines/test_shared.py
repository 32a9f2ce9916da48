"""Weights in memory that a trainer shares: nothing reads them while they are written to, and a version counts or is none."""

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

from slipstream.engines.local import LocalFleet
from slipstream.errors import (
    ChecksumMismatch,
    FleetChanged,
    MappingError,
    NotReady,
    TransferError,
    UnknownVersion,
    Unsupported,
    UpdateInProgress,
)
from slipstream.model.tree import flatten, unflatten
from slipstream.types import Completion, Failure, Offer, VersionSpan
from slipstream.weights.publisher import Publisher
from slipstream.weights.sharing import Sharing
from slipstream.weights.transports import shared_cuda
from slipstream.weights.transports.shared import SharedMemory
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
    """Whose memory is shared: the host's, or what stands in for a GPU's."""
    driver = stand_in(monkeypatch) if request.param == "device" else None
    yield
    gc.collect()
    assert driver is None or not (driver.mapped or driver.owned), "what nobody needs any longer is given back"


class Trainer:
    """What a trainer does, step by step."""

    def __init__(self, subject: Subject, **tensors: np.ndarray) -> None:
        self._engine = subject.engine
        self.sharing = Sharing(LocalFleet(subject.engine), numpy_params() | tensors, (subject.engine.describe(),), True)

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
    """By the reference."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(subject.logits(tokens, unflatten(weights))[-1].argmax()))
    return tuple(tokens[len(prompt) :])


def test_what_is_written_is_what_serves_and_what_was_cached_is_forgotten(memory):
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
def test_a_running_request_meets_the_new_version_between_two_steps(in_flight):
    async def run(subject: Subject, trainer: Trainer) -> None:
        await trainer.update()
        hold = Hold(subject, tick=10)
        generating = asyncio.create_task(collect(subject, GREEDY))
        await hold.reached()  # in the midst of a step
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


def test_no_step_runs_while_the_trainer_writes_whoever_resumes_the_engine():
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
                subject.engine.forget_prefixes()
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


def test_half_a_version_is_none_and_the_next_update_brings_the_engine_back(memory):
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
        assert "version 2 was being written" in str(failed.error)
        (refused,) = await collect(subject, GREEDY)
        assert isinstance(refused.error, NotReady) and "version 2 was being written" in str(refused.error)
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


def test_a_sync_ends_the_sharing_and_must_bring_everything(memory):
    with opened() as subject:
        trainer = Trainer(subject)
        subject.runner.run(trainer.update())
        part = {"model.norm.weight": random_params(CONFIG, 3)["model"]["norm"]["weight"]}
        with pytest.raises(FleetChanged, match="serves from memory that a trainer shares and needs every tensor"):
            subject.runner.run(publish(subject, part, partial=True))
        assert subject.complete(PROMPT, max_tokens=24, temperature=0.0).version == 1
        subject.publish(unflatten(OTHER))
        trainer.write(numpy_params(5))  # nobody serves from here any more, so this is nobody's business
        found = subject.complete(PROMPT, max_tokens=24, temperature=0.0)
        assert found.token_ids == greedy(subject, PROMPT, OTHER, 24) and found.version == 2
        with pytest.raises(FleetChanged):
            subject.runner.run(trainer.update())
        assert subject.runner.run(trainer.update()) == 3
        assert subject.complete(PROMPT, max_tokens=24, temperature=0.0).token_ids == greedy(
            subject, PROMPT, numpy_params(5), 24
        )


def test_an_engine_whose_trainer_is_gone_keeps_a_copy_of_what_it_served(memory):
    with opened() as subject:
        trainer = Trainer(subject)
        subject.runner.run(trainer.update(OTHER))
        old = subject.complete(PROMPT, max_tokens=24, temperature=0.0)
        subject.runner.run(subject.engine.release())
        trainer.write(numpy_params(5))  # as one that has closed its bridge, and trains on
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


def test_what_a_new_engine_finds_in_the_memory_is_compared_with_what_the_trainer_has(memory, monkeypatch):
    with opened() as subject:
        trainer = Trainer(subject)
        hashes = Sharing._checksums
        monkeypatch.setattr(Sharing, "_checksums", lambda self: hashes(self) | {3: 1})
        with pytest.raises(ChecksumMismatch):
            subject.runner.run(trainer.update())
        assert subject.complete(PROMPT).version == 0, "nothing was overwritten, so the old version goes on"


def test_engines_that_cannot_share_say_why():
    with opened(tp=2) as subject, pytest.raises(Unsupported, match=r"'engine' .*2 rank\(s\).* ranks hold parts"):
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
            ({"transports": ("shm",)}, "on a GPU, with tp=1"),
        ):
            with pytest.raises(Unsupported, match=words):
                subject.runner.run(trainer.sharing.begin((replace(subject.engine.describe(), **change),), 1))
        publisher = Publisher(LocalFleet(subject.engine), "shared")
        with pytest.raises(TransferError, match="'shared' cannot reach engine"):  # it is no way to send
            subject.runner.run(publisher.publish(unflatten(OTHER), (subject.engine.describe(),), 1))


def test_an_engine_maps_nothing_but_the_memory_that_is_offered(tmp_path):
    memory = SharedMemory(1000)
    pid, fd, nonce = memory.transport.removeprefix("shared:").split("/")
    (tmp_path / "file").write_bytes(bytes(1 << 16))
    file = os.open(tmp_path / "file", os.O_RDONLY)
    reading, writing = os.pipe()
    offers = {
        "nonsense": "cannot be read",
        f"{pid}/{fd}/../{nonce}": "cannot be read",
        f"{pid}/{fd}/{nonce[::-1]}": "not the memory that the offer describes|holds 1,000 bytes",
        f"{pid}/{fd}/{nonce}": "holds 1,000 bytes, the engine's parameters",
        f"{pid}/{file}/{nonce}": "is not memory that a trainer shares",
        f"{pid}/{reading}/{nonce}": "is not memory that a trainer shares",
        f"{pid}/9999/{nonce}": "cannot open the memory that trainer process",
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
        with pytest.raises(TransferError, match="cannot open the memory"):
            subject.runner.run(trainer.update())
        assert subject.complete(PROMPT).version == 0
    for number in (file, reading, writing):
        os.close(number)


def test_an_engine_maps_no_memory_of_a_device_but_what_is_offered(monkeypatch):
    driver = Memfd()
    monkeypatch.setattr(shared_cuda, "Vmm", lambda device=0: driver)
    small = shared_cuda.DeviceMemory(1000, 0)
    door, nonce, device = small.transport.removeprefix("shared-cuda:").split("/")
    offers = {
        "nonsense": "cannot be read",
        f"{door}/../{device}": "cannot be read",
        f"{door}/{nonce}/{1:032x}": "not among those that this process sees",
        f"{door}/{nonce[::-1]}/{device}": "no longer shares|cannot be reached",
        f"slipstream-{0:032x}/{nonce}/{device}": "cannot be reached.*is it alive",
        f"{door}/{nonce}/{device}": "holds 1,000 bytes, the engine's parameters 5,000",
    }
    for where, words in offers.items():
        with pytest.raises(TransferError, match=words):
            shared_cuda.device_landing(where, 5000)
    assert shared_cuda.device_landing(f"{door}/{nonce}/{device}", 1000).buffer.size == 1000
    small.close()
    small.close()
    with pytest.raises(TransferError, match=r"no longer shares|cannot be reached"):
        shared_cuda.device_landing(f"{door}/{nonce}/{device}", 1000)
    with opened() as subject:  # on this CPU: a GPU's memory is not for it
        trainer = Trainer(subject)
        plan = trainer.sharing._plan
        with pytest.raises(Unsupported, match="memory of this kind: it takes the host's on CPU"):
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


def test_nobody_else_can_write_to_the_memory():
    memory = SharedMemory(1000)
    pid, fd, _ = memory.transport.removeprefix("shared:").split("/")
    again = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    with pytest.raises(OSError):
        mmap.mmap(again, 0)
    with pytest.raises(OSError):
        os.ftruncate(again, 0)
    os.close(again)
