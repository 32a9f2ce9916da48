"""A trainer's logprobs of the engine's tokens are the engine's, to the bit: families of all kinds, prefix cache, chunks,
preemption, speculation, tensor parallelism."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded import sequence_logprobs
from slipstream.engines.embedded.sequence_logprobs import SequenceLogprobs
from slipstream.model.config import SLIDING, ModelConfig
from slipstream.model.transformer import decoder
from slipstream.rl.algorithm.batch import Batch, make_batch
from slipstream.types import Completion
from tests.conformance.engines import other_params, request
from tests.engines.subjects import CONFIG, OPTIONS, opened, stats
from tests.engines.test_determinism import repetitive
from tests.tiny import random_params, variant

SMALL: dict[str, Any] = {"num_layers": 1, "layer_types": ()}
CASES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "llama, prompt lookup": (CONFIG, {"speculation": "prompt_lookup"}),
    "qwen2, two devices": (variant("qwen2", **SMALL), {"tensor_parallel_size": 2}),
    "qwen3_moe": (variant("qwen3_moe", **SMALL), {}),
    "gemma2, bfloat16": (variant("gemma2", num_layers=1, layer_types=(SLIDING,)), {"dtype": "bfloat16"}),
}
BEGINNINGS = [(7, 8, 9), (7, 8, 9, 7, 8, 9, 7, 8), tuple(range(5, 36))]


def drawn(subject: Any, temperature: float) -> list[Completion]:
    """Groups of samples of prompts that begin alike, twice: the second time from the prefix cache."""
    rng = np.random.default_rng(0)
    requests = [
        request(
            str(i),
            BEGINNINGS[i % 3] + tuple(rng.integers(5, 90, 1 + i).tolist()),
            n=3,
            seed=i,
            temperature=temperature,
            max_tokens=6 + 3 * i,
        )
        for i in range(5)
    ]
    outcomes = [*subject.generate(*requests), *subject.generate(*requests)]
    assert all(isinstance(outcome, Completion) for outcome in outcomes)
    return outcomes


def raw_logprobs(completions: list[Completion], batch: Batch) -> np.ndarray:
    raw = np.zeros_like(batch.logprobs)
    for row, completion in enumerate(completions):
        raw[row, len(completion.prompt_token_ids) - 1 :][: len(completion.token_ids)] = completion.raw_logprobs
    return raw


@pytest.mark.parametrize("case", CASES)
def test_they_are_the_engines_to_the_bit(case: str) -> None:
    config, options = CASES[case]
    options = OPTIONS | options
    exact = SequenceLogprobs(config, EmbeddedConfig(**options))
    with opened(config, repetitive(config), num_pages=18, **options) as subject:
        params = subject.params
        for _ in range(2):
            completions = drawn(subject, temperature=0.7)
            batch = make_batch(completions, version=subject.engine.describe().version, max_tokens=18)
            sampled = batch.mask > 0
            np.testing.assert_array_equal(exact(params, batch.tokens, sampled, 0.7), batch.logprobs)
            raw = raw_logprobs(completions, batch)
            np.testing.assert_array_equal(exact(params, batch.tokens, sampled, 1.0), raw)
            params = other_params(subject)
            subject.publish(params)
        counted = stats(subject)
    assert counted["hit_tokens"] > 0 and counted["preemptions"] > 0
    assert "lookup" not in case or counted["accepted_tokens"] > 0


def reference(params: Any, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(decoder.logprobs, static_argnums=1)(params, CONFIG, jnp.asarray(tokens)))


def test_turns_pages_and_waves_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of other parties between completions, full pages shared by rows, and more sequences than the cache has room for."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(5, 90, (6, 40)).astype(np.int32)
    tokens[:, :17] = tokens[0, :17]  # four full pages and a bit
    tokens[3, 9] += 1  # shares two
    wanted = np.zeros((6, 39), bool)
    wanted[:, 18:24] = wanted[:4, 30:37] = True
    wanted[5] = False
    params = random_params(CONFIG)
    options = EmbeddedConfig(**OPTIONS)
    exact = SequenceLogprobs(CONFIG, options)
    found = exact(params, tokens, wanted, 1.0)
    np.testing.assert_allclose(found, reference(params, tokens) * wanted, atol=1e-5)
    _, num_pages, prefill, scoring = exact._plan(tokens[:5], wanted[:5])
    assert num_pages == 4 * 10 + 6 - 3 * 4 - 2  # of the rows to 37 and to 24, less what they share
    assert len(set(zip(scoring.row, scoring.start))) == len(scoring.row) and not set(prefill.start) & {1, 2, 3}

    monkeypatch.setattr(sequence_logprobs, "CACHE_BYTES", 1)
    in_turn = SequenceLogprobs(CONFIG, options)
    assert [len(rows) for rows in in_turn._waves(wanted)] == [1, 1, 1, 2]
    np.testing.assert_array_equal(in_turn(params, tokens, wanted, 1.0), found)


def test_another_page_size_gives_other_bits() -> None:
    """The comparison is strict enough to see one."""
    tokens = np.random.default_rng(2).integers(5, 90, (4, 40)).astype(np.int32)
    wanted, params = np.ones((4, 39), bool), random_params(CONFIG)
    one, other = (
        SequenceLogprobs(CONFIG, EmbeddedConfig(**(OPTIONS | {"block_size": size})))(params, tokens, wanted, 1.0)
        for size in (4, 8)
    )
    np.testing.assert_allclose(one, other, atol=1e-5)
    assert (one != other).mean() > 0.1
