"""LoRA adapters in the embedded engine: 64 beside each other, updates of one, faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.bridge.bridge import Bridge
from slipstream.bridge.in_process import LocalFleet
from slipstream.config import AdapterConfig, EmbeddedConfig
from slipstream.engines.embedded.compute.adapter_slots import AdapterSlots
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.errors import (
    ConfigError,
    EngineFailure,
    MappingError,
    NoAdapterSlot,
    NonFiniteWeights,
    NotReady,
    UnknownAdapter,
    Unsupported,
)
from slipstream.runtime import event_loop
from slipstream.types import Completion, Completions, Lora, SamplingParams, VersionSpan
from tests.adapters import adapted, random_adapter
from tests.engines.subjects import OPTIONS, Hold
from tests.tiny import hf_greedy, hf_model, random_params, tiny_config

CONFIG = tiny_config()
PARAMS = random_params(CONFIG)
PROMPT = (5, 9, 30, 31, 32, 33, 34, 35, 36)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
NUM_SLOTS = 64
KINDS = (
    (8, 16.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    (4, 6.0, ("q_proj", "v_proj")),
    (1, 0.5, ("o_proj",)),
    (8, 4.0, ("down_proj", "gate_proj")),
)
"""Rank, alpha and targets."""


def adapter(index: int, name: str = "") -> tuple[Lora, Any]:
    lora = Lora(name or f"a{index}", *KINDS[index % len(KINDS)])
    return lora, random_adapter(CONFIG, lora, seed=index)


ADAPTERS = [adapter(index) for index in range(NUM_SLOTS)]


@contextlib.contextmanager
def opened(params: Any = PARAMS, slots: int = 2, **options: Any) -> Iterator[Bridge]:
    async def start() -> LocalFleet:
        settings = {"adapters": AdapterConfig(slots=slots, rank=8)} | options
        return LocalFleet(EmbeddedEngine(CONFIG, params, options=EmbeddedConfig(**OPTIONS, **settings)))

    with Bridge(event_loop.run(start())) as bridge:
        yield bridge


@pytest.fixture(scope="module")
def bridge() -> Iterator[Bridge]:
    with opened(slots=NUM_SLOTS) as bridge:
        for lora, tree in ADAPTERS:
            report = bridge.sync(tree, adapter=lora)
            assert (report.adapter, report.version) == (lora.name, bridge.version)
            assert report.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(tree)), (
                "the adapter's bytes, no more"
            )
        yield bridge


@pytest.fixture(scope="module")
def module() -> Any:
    return hf_model(CONFIG)


def generate(bridge: Bridge, *names: str) -> Completions:
    return bridge.generate([PROMPT] * len(names), GREEDY, adapter=names)


def likeliest(module: Any, completion: Completion) -> tuple[int, ...]:
    """The token that transformers finds likeliest in place of each: the same ones if the completion is greedy."""
    import torch

    with torch.no_grad():
        logits = module(torch.tensor([completion.prompt_token_ids + completion.token_ids])).logits[0]
    return tuple(logits.argmax(-1)[len(completion.prompt_token_ids) - 1 : -1].tolist())


def bits(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.logprobs, completion.raw_logprobs


def hits(bridge: Bridge) -> int:
    return bridge._fleet._engine.stats()["hit_tokens"]  # type: ignore[attr-defined]


def test_64_adapters_generate_what_transformers_generates(bridge: Bridge, module: Any) -> None:
    found = generate(bridge, "", *(lora.name for lora, _ in ADAPTERS))
    assert found[0].token_ids == hf_greedy(module, PROMPT, 6)
    for completion, (lora, tree) in zip(found[1:], ADAPTERS):
        with adapted(module, tree, lora):
            assert completion.token_ids == likeliest(module, completion), lora
        assert completion.adapter == lora.name
        assert completion.spans == (VersionSpan(bridge.version, 0, 6),)
    assert len({completion.token_ids for completion in found}) > NUM_SLOTS / 2, "they differ from each other"
    (status,) = bridge.status().engines
    assert sorted(status.adapters) == sorted(lora.name for lora, _ in ADAPTERS)


def test_an_update_changes_no_bit_of_the_others_and_keeps_their_prefix_cache(bridge: Bridge, module: Any) -> None:
    names = ("", "a0", "a1", "a2")
    before, cached = generate(bridge, *names), hits(bridge)
    lora, tree = adapter(200, "a0")
    bridge.sync(tree, adapter=lora)
    after = generate(bridge, *names)
    found = hits(bridge) - cached
    assert found == 3 * (len(PROMPT) - 1), "all of the prompt but its last token, for all but the changed one"
    for index in (0, 2, 3):
        assert bits(after[index]) == bits(before[index])
    with adapted(module, tree, lora):
        assert after[1].token_ids == hf_greedy(module, PROMPT, 6) != before[1].token_ids
    sequence = [*PROMPT, *after[1].token_ids]
    scores = [bridge.score([sequence], adapter=name)[0] for name in ("a0", "a1")]
    assert np.allclose(scores[0].logprobs[-6:], after[1].raw_logprobs, atol=1e-5) and scores[1] != scores[0]

    bridge.sync(PARAMS)
    cached = hits(bridge)
    assert [bits(c) for c in generate(bridge, *names)] == [bits(c) for c in after], "the same base model"
    assert hits(bridge) == cached, "of which nothing is taken for granted"


def test_a_slot_that_is_used_again_keeps_nothing(bridge: Bridge, module: Any) -> None:
    lora, tree = adapter(302, "small")  # of rank 1 and one target
    with pytest.raises(NoAdapterSlot, match=r"64 slot.*there is none for small.*unload one"):
        bridge.sync(tree, adapter=lora)
    bridge.unload_adapter("a60")  # of rank 8 and all targets
    bridge.unload_adapter("a60")
    with pytest.raises(UnknownAdapter, match=r"'a60'"):
        generate(bridge, "a60")
    bridge.sync(tree, adapter=lora)
    with adapted(module, tree, lora):
        assert generate(bridge, "small")[0].token_ids == hf_greedy(module, PROMPT, 6)
    bridge.unload_adapter("small")
    bridge.sync(ADAPTERS[60][1], adapter=ADAPTERS[60][0])


@pytest.mark.parametrize("in_flight", ["keep", "requeue"])
def test_an_update_while_samples_are_generated(bridge: Bridge, in_flight: Any) -> None:
    """Those of other adapters go on as if nothing had happened, but for the number of the version."""
    names, old = ("", "a0", "a5"), bridge.version
    alone, lora = generate(bridge, *names), adapter(0)[0]
    engine = bridge._fleet._engine  # type: ignore[attr-defined]
    hold = Hold(type("Subject", (), {"engine": engine}), tick=3)  # type: ignore[arg-type]

    async def run() -> Completions:
        running = asyncio.create_task(bridge.agenerate([PROMPT] * 3, GREEDY, adapter=names))
        await hold.reached()
        syncing = bridge.start_sync(
            random_adapter(CONFIG, lora, seed=len(in_flight)), adapter=lora, in_flight=in_flight
        )
        await asyncio.sleep(0.2)
        await hold.release()
        await asyncio.wrap_future(syncing)
        return await running

    found = asyncio.run(run())
    for index in (0, 2):
        assert bits(found[index]) == bits(alone[index])
        assert [span.version for span in found[index].spans] == [old, old + 1]
    (again,) = generate(bridge, "a0")
    changed = [span.version for span in found[1].spans]
    if in_flight == "keep":
        assert changed == [old, old + 1] and found[1].token_ids[:2] == alone[1].token_ids[:2]
    else:
        assert changed == [old + 1] and bits(found[1]) == bits(again)
    assert bits(again) != bits(alone[1])


def test_a_sync_that_fails_changes_nothing(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    names, version = ("", "a0", "a1"), bridge.version
    before, (lora, tree) = generate(bridge, *names), adapter(500, "a0")
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), tree)
    with pytest.raises(NonFiniteWeights, match=r"lora_A"):
        bridge.sync(broken, adapter=lora)
    with monkeypatch.context() as patch:
        patch.setattr(AdapterSlots, "prepare", lambda *_: 1 / 0)
        with pytest.raises((EngineFailure, ZeroDivisionError)):
            bridge.sync(tree, adapter=lora)
    assert bridge.version == version and bridge.status().version == version
    assert [bits(c) for c in generate(bridge, *names)] == [bits(c) for c in before]
    bridge.sync(tree, adapter=lora)
    assert bits(generate(bridge, "a0")[0]) != bits(before[1])


def test_adapters_that_an_engine_cannot_serve(bridge: Bridge) -> None:
    lora, tree = adapter(0)
    with pytest.raises(UnknownAdapter, match=r"no adapter 'maths'.*bridge.sync"):
        generate(bridge, "maths")
    with pytest.raises(UnknownAdapter, match=r"maths"):
        bridge.score([PROMPT], adapter="maths")
    large = Lora("large", 9, 16, ("q_proj",))
    with pytest.raises(Unsupported, match=r"rank 9.*up to rank 8.*adapters.rank"):
        bridge.sync(random_adapter(CONFIG, large, 0), adapter=large)
    with pytest.raises(MappingError, match=r"has shape \[4, 32\], the tree \[8, 32\]"):
        bridge.sync(tree, adapter=Lora("a0", 4, 16, lora.targets))
    with pytest.raises(Unsupported, match=r"changes lm_head.*serves adapters of down_proj"):
        bridge.sync(tree, adapter=Lora("a0", 8, 16, ("lm_head",)))
    with pytest.raises(ConfigError, match=r"alone and whole"):
        bridge.sync(tree, adapter=lora, partial=True)
    with pytest.raises(ConfigError, match=r"name of an adapter"):
        Lora("no spaces", 8, 16, ("q_proj",))


def test_engines_with_few_targets_with_none_and_without_weights() -> None:
    lora, tree = adapter(0)
    with opened(adapters=None) as bridge, pytest.raises(Unsupported, match=r"serves no adapters.*AdapterConfig"):
        bridge.sync(tree, adapter=lora)
    narrow = AdapterConfig(rank=8, targets=("q_proj",))
    with opened(adapters=narrow) as bridge, pytest.raises(Unsupported, match=r"serves adapters of q_proj"):
        bridge.sync(tree, adapter=lora)
    with opened(None) as bridge, pytest.raises(NotReady, match=r"base model"):
        bridge.sync(tree, adapter=lora)
    with (
        pytest.raises(ConfigError, match=r"adapters.targets has qkv"),
        opened(adapters=AdapterConfig(targets=("qkv",))),
    ):
        pass


def test_sleep_and_updates_of_the_base_model_leave_adapters_loaded(module: Any) -> None:
    lora, tree = adapter(0)
    with opened(slots=NUM_SLOTS) as bridge:  # the programs are compiled already
        bridge.sync(tree, adapter=lora)
        before = generate(bridge, "", "a0")
        for level in (1, 2):
            bridge.sleep(level)
            assert bridge.memory()["engine"].weights == 0 or level == 1
            if level == 2:
                bridge.sync(jax.tree.map(jnp.asarray, PARAMS))
            bridge.wake()
            assert [bits(c) for c in generate(bridge, "", "a0")] == [bits(c) for c in before]
        bridge.sleep()
        other, others = adapter(4, "a0")
        bridge.sync(others, adapter=other)
        bridge.wake()
        with adapted(module, others, other):
            assert generate(bridge, "a0")[0].token_ids == hf_greedy(module, PROMPT, 6)


def test_shards_and_draft_tokens(module: Any) -> None:
    """Adapters are sharded with their projections, and verify what was looked up in the prompt."""
    with opened(tensor_parallel_size=2, speculation="prompt_lookup") as bridge:
        for lora, tree in ADAPTERS[:2]:
            bridge.sync(tree, adapter=lora)
        found = generate(bridge, "a0", "", "a1")
        for completion, (lora, tree) in zip((found[0], found[2]), ADAPTERS):
            with adapted(module, tree, lora):
                assert completion.token_ids == hf_greedy(module, PROMPT, 6)
        assert found[1].token_ids == hf_greedy(module, PROMPT, 6)
