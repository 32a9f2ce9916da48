"""Models with shapes that the GPU kernels support, engines for them, and bitwise comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.model.config import ModelConfig
from slipstream.model.transformer import decoder
from slipstream.types import Completion, Request
from tests.conformance.engines import Subject

LARGE = ModelConfig(
    "llama", vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8,
    head_dim=64, rope_theta=500_000.0, tie_word_embeddings=True, max_position_embeddings=2048,
)  # fmt: skip
"""1.24B parameters."""

SMALL = ModelConfig(
    "llama", vocab_size=8192, hidden_size=512, intermediate_size=1536, num_layers=4, num_heads=8, num_kv_heads=4,
    head_dim=64, tie_word_embeddings=True, max_position_embeddings=512,
)  # fmt: skip
"""Large enough for the GPU to have a choice of ways to multiply its matrices."""


def lively(config: ModelConfig, dtype: Any = jnp.bfloat16, seed: int = 0, size: float = 2.5) -> Any:
    """Random weights, `size` times those of `decoder.init`, so that the likeliest tokens stand out."""
    params = decoder.init(config, jax.random.key(seed), dtype)
    return jax.tree.map(lambda p: p if p.ndim == 1 else (p * size).astype(p.dtype), params)


@contextlib.contextmanager
def serving(config: ModelConfig, params: Any, draft: Any = None, **options: Any) -> Iterator[Subject]:
    """`draft`: weights of a draft model of the same shape."""
    drafted = {} if draft is None else {"draft": config, "draft_params": draft}
    engine = EmbeddedEngine(config, params, options=EmbeddedConfig(**options), **drafted)
    subject = Subject(engine, config, params, tolerance=1e-4)
    try:
        yield subject
    finally:
        subject.runner.run(engine.close())
        subject.runner.close()


def completions(subject: Subject, requests: Sequence[Request]) -> dict[str, Completion]:
    outcomes = subject.generate(*requests)
    for outcome in outcomes:
        assert isinstance(outcome, Completion), outcome.error
    return {outcome.request_id: outcome for outcome in outcomes if isinstance(outcome, Completion)}


def same_bits(a: Completion, b: Completion, skip: int = 0) -> bool:
    """`b` lacks the first `skip` tokens of `a`."""
    return (a.token_ids[skip:], a.logprobs[skip:], a.raw_logprobs[skip:]) == (b.token_ids, b.logprobs, b.raw_logprobs)


def difference(a: Completion, b: Completion, skip: int = 0) -> str:
    """In words, where they part."""
    if same_bits(a, b, skip):
        return "same bits"
    pairs = list(zip(a.token_ids[skip:], b.token_ids, strict=True))
    parted = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
    gaps = np.abs(np.subtract(a.logprobs[skip:], b.logprobs))[:parted]
    where = f"tokens part at {parted} of {len(pairs)}" if parted < len(pairs) else "same tokens"
    if not gaps.any():
        return f"{where}, logprobs equal before"
    return f"{where}, {(gaps > 0).sum()} of {len(gaps)} logprobs differ, by {gaps.max():.1e} at most"
