"""Conformance suite with real vLLM, in its own environment and processes, at TP 2. `test_weights.py` runs it at TP 1. Then LoRA
adapters, for which the engine has room all the time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slipstream
from slipstream.bridge.bridge import Bridge
from slipstream.bridge.in_process import LocalFleet
from slipstream.errors import EngineFailure, NoAdapterSlot, NotReady, UnknownAdapter, Unsupported
from slipstream.model.checkpoints import hf_weights
from slipstream.model.transformer.adapters import merged
from slipstream.types import Completion, Completions, Lora, SamplingParams, VersionSpan
from slipstream.weights.sources.named_tensors import named_tensors
from slipstream.weights.sources.packed_adapters import pack
from slipstream.weights.update.publisher import Publisher
from tests.adapters import adapted, random_adapter
from tests.conformance.engines import *  # noqa: F403
from tests.conformance.engines import Subject, greedy_reference, other_params
from tests.engines.attached import attached
from tests.tiny import hf_greedy, hf_model, random_params, tiny_config
from tests.vllm.preloaded import Preloaded
from tests.vllm.real import PYTHON, needs_vllm

pytestmark = needs_vllm

CONFIG = tiny_config("qwen2", max_position_embeddings=60, num_layers=1, hidden_size=128, head_dim=32)
"""Heads of 32 dimensions, the least that vLLM's attention on CPU supports."""

BREAKS = """
import os
from slipstream.engines.vllm.worker_adapters import WorkerAdapters

use = WorkerAdapters._use

def breaking(self, models):
    from vllm.distributed import get_tensor_model_parallel_rank
    if get_tensor_model_parallel_rank() == 1 and os.path.exists(os.environ["BREAK"]):
        os.unlink(os.environ["BREAK"])
        raise MemoryError("no room for an adapter")
    use(self, models)

WorkerAdapters._use = breaking
"""
"""While the file exists, the second rank's next load of adapters fails."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def break_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("break") / "now"


@pytest.fixture(scope="module")
def subject(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded, run_dir: Path, break_file: Path
) -> Iterator[Subject]:
    params, directory = random_params(CONFIG), tmp_path_factory.mktemp("model")
    hf_weights.save(directory, params, CONFIG)
    (break_file.parent / "sitecustomize.py").write_text(BREAKS)
    path = os.pathsep.join([str(break_file.parent), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "BREAK": str(break_file)}
    options = [
        "kind=vllm",
        "max_num_seqs=4",
        "tensor_parallel_size=2",
        "adapters.slots=3",
        "adapters.rank=6",
        "vllm.block_size=32",
    ]
    with attached(PYTHON, directory, run_dir, *options, preloaded=preloaded, **variables) as engine:
        bounded = ("presence_penalty", "frequency_penalty")
        subject = Subject(engine, CONFIG, params, tolerance=1e-4, bounded=bounded)
        yield subject
        subject.runner.run(engine.close())
        subject.runner.close()


# --- adapters ---

PROMPT = tuple(range(8, 44))
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORAS = Lora("a", 6, 12.0, ALL), Lora("b", 2, 5.0, ("q_proj", "v_proj")), Lora("c", 1, 1.0, ("down_proj",))
NAMES = ("", "a", "b", "c")


def tree(lora: Lora, seed: int = 0) -> Any:
    return random_adapter(CONFIG, lora, seed)


@pytest.fixture(scope="module")
def bridge(subject: Subject, run_dir: Path) -> Iterator[Bridge]:
    with slipstream.connect(run_dir) as bridge:
        bridge.sync(subject.params)
        for lora in LORAS:
            report = bridge.sync(tree(lora), adapter=lora)
            assert report.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(tree(lora)))
        yield bridge


def generate(bridge: Bridge, *names: str, sampling: SamplingParams = GREEDY) -> Completions:
    return bridge.generate([PROMPT] * len(names), sampling, adapter=names)


def bits(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.logprobs, completion.raw_logprobs


def of_transformers(lora: Lora | None, seed: int = 0) -> tuple[int, ...]:
    module = hf_model(CONFIG)
    if lora is None:
        return hf_greedy(module, PROMPT, 6)
    with adapted(module, tree(lora, seed), lora):
        return hf_greedy(module, PROMPT, 6)


def test_adapters_of_one_batch_generate_what_transformers_generates(bridge: Bridge) -> None:
    found = generate(bridge, *NAMES)
    assert [c.token_ids for c in found] == [of_transformers(lora) for lora in (None, *LORAS)]
    assert len({c.token_ids for c in found}) == 4
    assert [(c.adapter, c.spans) for c in found] == [(n, (VersionSpan(bridge.version, 0, 6),)) for n in NAMES]
    (status,) = bridge.status().engines
    assert sorted(status.adapters) == ["a", "b", "c"]
    tokens = [*PROMPT, *found[1].token_ids]
    of_adapter, of_base = (bridge.score([tokens], adapter=name)[0].logprobs[-6:] for name in ("a", ""))
    np.testing.assert_allclose(of_adapter, found[1].raw_logprobs, atol=1e-4)
    assert not np.allclose(of_base, of_adapter, atol=1e-2)


def test_an_update_of_an_adapter_changes_no_bit_of_the_others(bridge: Bridge) -> None:
    before = generate(bridge, *NAMES)
    bridge.sync(tree(LORAS[0], seed=1), adapter=LORAS[0])
    after = generate(bridge, *NAMES)
    assert after[1].token_ids == of_transformers(LORAS[0], seed=1) != before[1].token_ids
    for index in (0, 2, 3):
        assert bits(after[index]) == bits(before[index])
    bridge.sync(tree(LORAS[0]), adapter=LORAS[0])
    assert [bits(c) for c in generate(bridge, *NAMES)] == [bits(c) for c in before]


def test_an_update_that_one_rank_fails_to_load_is_undone_on_all(bridge: Bridge, break_file: Path) -> None:
    before, version = generate(bridge, *NAMES), bridge.version
    break_file.touch()
    with pytest.raises(EngineFailure, match="rank 1 could not load adapters: MemoryError: no room for an adapter"):
        bridge.sync(tree(LORAS[1], seed=1), adapter=LORAS[1])
    assert not break_file.exists() and bridge.status().version == version
    assert [bits(c) for c in generate(bridge, *NAMES)] == [bits(c) for c in before]
    bridge.sync(tree(LORAS[1], seed=1), adapter=LORAS[1])
    assert generate(bridge, "b")[0].token_ids == of_transformers(LORAS[1], seed=1)
    bridge.sync(tree(LORAS[1]), adapter=LORAS[1])


@pytest.mark.parametrize("in_flight", ["keep", "requeue"])
def test_an_update_while_samples_are_generated(bridge: Bridge, subject: Subject, in_flight: Any) -> None:
    """Those of other adapters go on as if nothing had happened, but for the number of the version."""
    sampling, names, prompt = SamplingParams(max_tokens=50, seed=3, ignore_eos=True), ("", "a", "b"), PROMPT[:8]
    alone = bridge.generate([prompt] * 3, sampling, adapter=names)

    async def run() -> Completions:
        running = asyncio.create_task(bridge.agenerate([prompt] * 3, sampling, adapter=names))
        await asyncio.sleep(0)  # sends them
        await started()
        await subject.engine.pause()
        syncing = bridge.start_sync(tree(LORAS[0], seed=2), adapter=LORAS[0], in_flight=in_flight)
        await asyncio.wrap_future(syncing)
        await subject.engine.resume()
        return await running

    async def started() -> None:
        """Return once a short request, sent after the others, has finished."""
        await bridge.agenerate([prompt], SamplingParams(max_tokens=3), adapter="c")

    for _ in range(20):  # until the pause comes before the last tokens
        old, new = bridge.version, bridge.version + 1
        found = asyncio.run(run())
        if all(
            completion.spans[0].version == old < completion.spans[-1].version for completion in (found[0], found[2])
        ):
            break
        bridge.sync(tree(LORAS[0]), adapter=LORAS[0])
    again = bridge.generate([prompt] * 3, sampling, adapter=names)
    for index in (0, 2):
        assert bits(found[index]) == bits(alone[index]) == bits(again[index])
        assert [span.version for span in found[index].spans] == [old, new]
    if in_flight == "keep":
        first, second = found[1].spans
        assert (first.version, second.version) == (old, new) and 0 < second.start < 50
        assert found[1].token_ids[: second.start] == alone[1].token_ids[: second.start]
    else:
        assert found[1].spans == again[1].spans == (VersionSpan(new, 0, 50),) and bits(found[1]) == bits(again[1])
    assert bits(again[1]) != bits(alone[1])
    bridge.sync(tree(LORAS[0]), adapter=LORAS[0])


def test_the_base_model_changes_under_its_adapters(bridge: Bridge, subject: Subject) -> None:
    before, new = generate(bridge, *NAMES), other_params(subject)
    bridge.sync(new)
    changed = generate(bridge, *NAMES)
    assert changed[0].token_ids == greedy_reference(subject, PROMPT, 6, new)
    for completion, lora in zip(changed[1:], LORAS):
        assert completion.token_ids == greedy_reference(subject, PROMPT, 6, merged(new, tree(lora), lora))
    bridge.sync(subject.params)
    assert [bits(c) for c in generate(bridge, *NAMES)] == [bits(c) for c in before]


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_survive_sleep(bridge: Bridge, subject: Subject, level: int) -> None:
    before = generate(bridge, *NAMES)
    bridge.sleep(level)
    if level == 2:
        with pytest.raises(NotReady, match="dropped its weights"):
            bridge.sync(tree(LORAS[0], seed=1), adapter=LORAS[0])
        bridge.sync(jax.tree.map(jnp.asarray, subject.params))
    bridge.wake()
    assert [bits(c) for c in generate(bridge, *NAMES)] == [bits(c) for c in before]


def test_slots_are_given_back(bridge: Bridge, subject: Subject) -> None:
    small = Lora("small", 1, 1.0, ("v_proj",))
    with pytest.raises(NoAdapterSlot, match=r"3 slot.*there is none for small.*unload one"):
        bridge.sync(tree(small), adapter=small)
    (before,) = generate(bridge, "b")

    async def unload_during_requests() -> Completion:
        await subject.engine.pause()
        waiting, other = (asyncio.create_task(bridge.agenerate([PROMPT], GREEDY, adapter=name)) for name in ("a", "b"))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(bridge.unload_adapter, "a")
        with pytest.raises(UnknownAdapter, match="has unloaded adapter 'a'"):
            await waiting
        await subject.engine.resume()
        return (await other)[0]

    assert bits(asyncio.run(unload_during_requests())) == bits(before)
    bridge.unload_adapter("a")
    with pytest.raises(UnknownAdapter, match="no adapter 'a': it has b, c"):
        generate(bridge, "a")
    bridge.sync(tree(small), adapter=small)
    assert generate(bridge, "small")[0].token_ids == of_transformers(small)
    large = Lora("b", 7, 1.0, ("v_proj",))
    with pytest.raises(Unsupported, match=r"rank 7.*up to rank 6"):
        bridge.sync(tree(large), adapter=large)
    with pytest.raises(Unsupported, match='cannot commit an adapter with in_flight="recompute"'):
        bridge.sync(tree(LORAS[1]), adapter=LORAS[1], in_flight="recompute")


def test_one_update_of_the_base_model_and_all_adapters(bridge: Bridge, subject: Subject, run_dir: Path) -> None:
    """As an engine gets it that has lost them. Must run last: the other tests' trainer does not know of it."""
    new, info = other_params(subject), subject.engine.describe()
    adapters = {lora: tree(lora, seed=7) for lora in (LORAS[1], LORAS[2])}
    packed = {lora: pack(named_tensors(weights), info.tensors, lora) for lora, weights in adapters.items()}
    publisher = Publisher(LocalFleet(subject.engine))
    subject.runner.run(publisher.publish(new, (info,), info.version + 1, "keep", adapters=packed))
    publisher.close()
    with slipstream.connect(run_dir) as later:
        found = generate(later, "", "b", "c", "small")
        assert found[0].token_ids == greedy_reference(subject, PROMPT, 6, new)
        for completion, (lora, weights) in zip(found[1:], adapters.items()):
            assert completion.token_ids == greedy_reference(subject, PROMPT, 6, merged(new, weights, lora))
        before = later.sync(jax.tree.map(lambda leaf: leaf * 1.0, new))
        assert [bits(c) for c in generate(later, "", "b", "c", "small")] == [bits(c) for c in found], before
