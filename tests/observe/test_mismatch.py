"""Diagnosis of planted mismatches between the embedded engine and the decoder as trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.bridge.bridge import Bridge
from slipstream.bridge.in_process import LocalFleet
from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.model.transformer import decoder
from slipstream.model.tree import flatten, unflatten
from slipstream.observe.mismatch import (
    MismatchDiagnosis,
    TokenLogprobs,
    diagnose,
    disagreeing_engines,
    engine_logprobs,
)
from slipstream.observe.mismatch_watch import MismatchWatch
from slipstream.types import Completion, SamplingParams, VerifyReport
from tests.conformance.engines import request
from tests.engines.subjects import Hold, close, collect, publish, subject_of
from tests.tiny import random_params, tiny_config

CONFIG = tiny_config(num_layers=1)
PARAMS = random_params(CONFIG)
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_model_len": 64,
    "block_size": 4,
    "kv_cache_tokens": 2048,
    "max_num_batched_tokens": 64,
}
PROMPTS = [tuple(np.random.default_rng(i).integers(8, 96, 5).tolist()) for i in range(16)]
LENGTH = 32
_logprobs = jax.jit(lambda params, tokens: decoder.logprobs(params, CONFIG, tokens, 1.0))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bridge(dtype: str) -> Iterator[Bridge]:
    engine = EmbeddedEngine(CONFIG, PARAMS, options=EmbeddedConfig(dtype=dtype, **OPTIONS))
    with Bridge(LocalFleet(engine)) as it:
        yield it


@pytest.fixture(autouse=True)
def as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "bridge" in request.fixturenames:
        request.getfixturevalue("bridge").sync(PARAMS)


def moved(params: Any, seed: int, scale: float = 0.01) -> Any:
    """Parameters after a large training step."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(np.asarray(p) + scale * rng.standard_normal(p.shape), p.dtype), params)


def swapped(params: Any, a: str = "k_proj", b: str = "v_proj") -> Any:
    named = flatten(params)
    first, second = (f"model.layers.0.self_attn.{x}.weight" for x in (a, b))
    return unflatten(named | {first: named[second], second: named[first]})


SWAPPED = ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight")


def sample(bridge: Bridge, **sampling: Any) -> list[Completion]:
    how: dict[str, Any] = {"max_tokens": 24, "seed": 3, "ignore_eos": True} | sampling
    return bridge.generate(PROMPTS, SamplingParams(**how))


def arrays(completions: list[Completion], params: Any, version: int) -> tuple[np.ndarray, TokenLogprobs]:
    tokens = np.zeros((len(completions), LENGTH + 1), np.int32)
    for row, c in enumerate(completions):
        ids = c.prompt_token_ids + c.token_ids
        tokens[row, : len(ids)] = ids
    return np.asarray(_logprobs(params, tokens)), engine_logprobs(completions, version, LENGTH)


def diagnosed(completions: list[Completion], params: Any, version: int, dtype: str, **more: Any) -> MismatchDiagnosis:
    trainer, tokens = arrays(completions, params, version)
    return diagnose(trainer, *tokens, dtype=dtype, **more)


def causes(found: MismatchDiagnosis) -> set[str]:
    return {f.cause for f in found.findings}


def rounding(dtype: str) -> set[str]:
    return {"numerics"} if dtype == "bfloat16" else set()


def test_no_mismatch(bridge: Bridge, dtype: str) -> None:
    found = diagnosed(sample(bridge), PARAMS, bridge.version, dtype)
    assert causes(found) == rounding(dtype) and not found.suspects_weights
    assert found.cause == ("numerics" if dtype == "bfloat16" else "none")
    assert found.evidence.num_tokens == 16 * 24 and found.evidence.by_age[0][0] == 0


def test_staleness_of_several_versions(bridge: Bridge, dtype: str) -> None:
    """One batch from each of three versions, with the trainer at the last."""
    params, completions = PARAMS, sample(bridge)
    for seed in (1, 2):
        params = moved(params, seed)
        bridge.sync(params)
        completions = completions + sample(bridge, seed=seed)
    found = diagnosed(completions, params, bridge.version, dtype)
    assert found.cause == "staleness" and causes(found) == {"staleness"} | rounding(dtype)
    assert not found.suspects_weights
    (_, fresh, _), (_, one, _), (_, two, _) = found.evidence.by_age
    assert fresh < one < two
    assert found.size("staleness") == pytest.approx((one + two - 2 * fresh) / 3, rel=1e-6)


def test_staleness_without_fresh_tokens(bridge: Bridge, dtype: str) -> None:
    completions, params = sample(bridge), moved(PARAMS, 1)
    found = diagnosed(completions, params, bridge.version + 1, dtype)
    assert found.cause == "staleness" and found.evidence.baseline is None and not found.suspects_weights


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.8}, {"min_p": 0.05}])
def test_sampling_settings(bridge: Bridge, dtype: str, setting: dict[str, float]) -> None:
    found = diagnosed(sample(bridge, **setting), PARAMS, bridge.version, dtype)
    assert found.cause == "sampling" and causes(found) == {"sampling"} | rounding(dtype)
    assert not found.suspects_weights


def test_noise_on_logprobs(bridge: Bridge, dtype: str) -> None:
    trainer, tokens = arrays(sample(bridge), PARAMS, bridge.version)
    noise = 1e-3 * np.random.default_rng(0).standard_normal(trainer.shape)
    found = diagnose(trainer + noise, *tokens, dtype=dtype)
    assert found.cause == "numerics" and causes(found) == {"numerics"} and not found.suspects_weights


def test_a_swapped_tensor_is_suspected_and_the_comparison_names_it(bridge: Bridge, dtype: str) -> None:
    bridge.sync(swapped(PARAMS))
    completions = sample(bridge)
    found = diagnosed(completions, PARAMS, bridge.version, dtype)
    assert found.cause == "weights" and causes(found) == {"weights"} and found.suspects_weights
    report = bridge.verify(PARAMS)
    assert report.tensors == SWAPPED
    named = diagnosed(completions, PARAMS, bridge.version, dtype, report=report)
    assert named.cause == "weights" and named.tensors == SWAPPED and not named.suspects_weights
    assert SWAPPED[0] in named.sentence


def test_an_engine_with_wrong_weights_stands_out_from_those_that_agree(bridge: Bridge, dtype: str) -> None:
    good = sample(bridge)
    bridge.sync(swapped(PARAMS))
    # It says that it serves the same version.
    bad = [replace(c, engine="bad", spans=good[0].spans) for c in sample(bridge)]

    def found(completions: list[Completion]) -> set[str]:
        trainer, engines = arrays(completions, PARAMS, good[0].version)
        return set(disagreeing_engines(trainer, engines, [c.engine for c in completions], dtype=dtype))

    half = [replace(c, engine="other") for c in good[: len(good) // 2]]
    assert found([*half, *good[len(half) :]]) == set()
    assert found([*good, *bad]) == {"bad"}
    assert found(bad) == set(), "there is nobody to compare it with"


def test_a_different_forward_pass_is_not_wrong_weights(bridge: Bridge, dtype: str) -> None:
    trainer, tokens = arrays(sample(bridge), swapped(PARAMS), bridge.version)  # a trainer with a different forward pass
    assert diagnose(trainer, *tokens, dtype=dtype).cause == "weights"
    cleared = diagnose(trainer, *tokens, dtype=dtype, report=bridge.verify(PARAMS))
    assert cleared.cause == "numerics" and "forward pass" in cleared.sentence


def test_a_swapped_tensor_and_sampling_settings(bridge: Bridge, dtype: str) -> None:
    bridge.sync(swapped(PARAMS))
    found = diagnosed(sample(bridge, top_p=0.9), PARAMS, bridge.version, dtype)
    assert found.cause == "weights" and causes(found) == {"weights", "sampling"}


def test_staleness_and_sampling_settings(bridge: Bridge, dtype: str) -> None:
    completions, new = sample(bridge, temperature=0.8), moved(PARAMS, 1)
    bridge.sync(new)
    found = diagnosed(completions + sample(bridge, temperature=0.8), new, bridge.version, dtype)
    assert causes(found) == {"staleness", "sampling"} | rounding(dtype)


def test_staleness_and_a_swapped_tensor(bridge: Bridge, dtype: str) -> None:
    """The swap is in both versions, as with a wrong mapping; fresh tokens reveal it."""
    new = moved(PARAMS, 1, 0.1)
    bridge.sync(swapped(PARAMS))
    completions = sample(bridge)
    bridge.sync(swapped(new))
    completions += sample(bridge)
    found = diagnosed(completions, new, bridge.version, dtype)
    assert found.cause == "weights" and found.suspects_weights
    assert bridge.verify(new).tensors == SWAPPED


def test_completions_that_span_a_commit() -> None:
    """With `keep`, tokens after the commit are the new version's, over a cache that the old one computed: they disagree, and
    that is staleness, not wrong weights."""
    subject = subject_of(CONFIG, PARAMS, max_num_seqs=16, kv_cache_tokens=2048)
    new = moved(PARAMS, 1)

    async def scenario() -> list[Completion]:
        requests = [request(str(i), p, max_tokens=24) for i, p in enumerate(PROMPTS)]
        hold = Hold(subject, tick=12)
        running = asyncio.create_task(collect(subject, *requests))
        await hold.reached()
        publishing = asyncio.create_task(publish(subject, new))
        await hold.release()
        await publishing
        return [c for c in (*await running, *await collect(subject, *requests)) if isinstance(c, Completion)]

    completions = subject.runner.run(scenario())
    assert any(len(c.spans) == 2 for c in completions) and any(c.version == 1 for c in completions)
    trainer, tokens = arrays(completions, new, 1)
    for row, c in enumerate(completions):
        ages = [1 - span.version for span in c.spans for _ in range(span.start, span.stop)]
        assert tokens.age[row][tokens.mask[row]].tolist() == ages
    found = diagnose(trainer, *tokens, dtype="float32")
    assert found.cause == "staleness" and causes(found) == {"staleness"} and found.evidence.num_mixed > 0
    kept = np.abs(trainer - tokens.raw)[(tokens.age == 0) & (tokens.age.max(1) > 0)[:, None] & tokens.mask]
    assert kept.mean() > 0.01  # would look like wrong weights if it were not known to be mixed
    close(subject)


def test_a_watch_compares_checksums_only_when_weights_are_suspected(bridge: Bridge, dtype: str) -> None:
    asked: list[VerifyReport] = []
    told: list[str] = []

    def verify() -> VerifyReport:
        asked.append(bridge.verify(PARAMS))
        return asked[-1]

    watch = MismatchWatch(verify, dtype=dtype, warn=lambda cause, _: told.append(cause))

    def step(**sampling: Any) -> MismatchDiagnosis:
        trainer, tokens = arrays(sample(bridge, **sampling), PARAMS, bridge.version)
        return watch.see(trainer, *tokens)

    step()
    step(top_p=0.5)
    assert not asked and told == ["sampling"]
    bridge.sync(swapped(PARAMS))
    for _ in range(3):
        assert step().tensors == SWAPPED
    assert len(asked) == 1 and told == ["sampling", "weights"]
    bridge.sync(PARAMS)
    for _ in range(4):
        step()
    assert watch.warned == frozenset()
    bridge.sync(swapped(PARAMS, "q_proj", "o_proj"))
    assert step().tensors == tuple(sorted(f"model.layers.0.self_attn.{x}_proj.weight" for x in "qo"))
    assert len(asked) == 2 and told == ["sampling", "weights", "weights"]


def test_verify_does_not_affect_later_syncs(bridge: Bridge) -> None:
    new = moved(PARAMS, 5)
    bridge.sync(new)
    report = bridge.verify(new)
    assert report.is_same and dict(report.versions) == {"engine": bridge.version}
    assert bridge.sync(new).num_bytes == 0  # unchanged tensors are not sent again
    assert set(bridge.verify(PARAMS).tensors) == flatten(PARAMS).keys()


def test_completions_newer_than_the_trainer_are_rejected(bridge: Bridge) -> None:
    from slipstream.errors import VersionError

    with pytest.raises(VersionError, match="newer than the trainer's"):
        engine_logprobs(sample(bridge), bridge.version - 1, LENGTH)
