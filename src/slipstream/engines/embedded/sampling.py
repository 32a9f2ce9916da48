"""Drawing tokens on the device. A token depends on its logits, its settings, its seed and its position, and on nothing
else in the batch: row `i` of the arguments decides row `i` of the result."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.model.decoder import token_logprobs
from slipstream.types import SamplingParams

Column: TypeAlias = Any
"""A numpy array on the host, a JAX array inside a program."""


class Settings(NamedTuple):
    """One row per slot. A free slot is greedy, so that it asks for no work."""

    temperature: Column
    top_k: Column
    top_p: Column
    seed: Column
    """`[slots, 2]`: the high and the low 32 bits."""
    sample_index: Column

    @classmethod
    def for_slots(cls, num_slots: int) -> Settings:
        return cls(
            temperature=np.zeros(num_slots, np.float32),
            top_k=np.zeros(num_slots, np.int32),
            top_p=np.ones(num_slots, np.float32),
            seed=np.zeros((num_slots, 2), np.uint32),
            sample_index=np.zeros(num_slots, np.int32),
        )

    def put(self, slot: int, sampling: SamplingParams, seed: int, sample_index: int) -> None:
        row = (sampling.temperature, sampling.top_k, sampling.top_p, (seed >> 32, seed & 0xFFFFFFFF), sample_index)
        for column, value in zip(self, row):
            column[slot] = value

    def clear(self, slots: list[int]) -> None:
        self.temperature[slots], self.top_k[slots], self.top_p[slots] = 0.0, 0, 1.0

    def first(self, count: int) -> Settings:
        """A copy: on CPU a program may read host arrays in place, after the call has returned."""
        return Settings(*(column[:count].copy() for column in self))


class Drawn(NamedTuple):
    token: jax.Array
    logprob: jax.Array
    """Under the distribution that was drawn from; raw where greedy."""
    raw_logprob: jax.Array


def sample(logits: jax.Array, positions: jax.Array, settings: Settings) -> Drawn:
    """One token per row of `logits [rows, vocab]`; `positions` are those that the new tokens will take.

    The largest of logits plus Gumbel noise is a draw from their softmax. Noise and sort are branches that run only when
    some row needs them."""
    random = (settings.temperature > 0)[:, None]
    truncated = (settings.temperature > 0) & ((settings.top_k > 0) | (settings.top_p < 1))
    scaled = logits / jnp.where(random, settings.temperature[:, None], 1.0)
    scaled = jax.lax.cond(truncated.any(), lambda: truncate(scaled, settings), lambda: scaled)
    noise = jax.lax.cond(random.any(), lambda: _gumbel(settings, positions, logits), lambda: jnp.zeros_like(logits))
    token = jnp.argmax(jnp.where(random, scaled + noise, logits), axis=-1)
    raw = token_logprobs(logits, token)
    return Drawn(token, jnp.where(random[:, 0], token_logprobs(scaled, token), raw), raw)


def truncate(scaled: jax.Array, settings: Settings) -> jax.Array:
    """Top-k, then top-p of what is left; what falls out becomes -inf. Tokens that tie with the last one kept stay."""
    vocab = scaled.shape[1]
    top_k = jnp.where(settings.top_k > 0, settings.top_k, vocab)[:, None]
    ordered = -jnp.sort(-scaled, axis=-1)
    ordered = jnp.where(jnp.arange(vocab) < top_k, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # At top_p = 1 a rounded-up sum must not cut the tail.
    keep = (before < settings.top_p[:, None]) | (settings.top_p >= 1)[:, None]
    last = jnp.min(jnp.where(keep & jnp.isfinite(ordered), ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= last, scaled, -jnp.inf)


def _gumbel(settings: Settings, positions: jax.Array, like: jax.Array) -> jax.Array:
    """A counter-based key per row, made of (seed, sample index, position)."""

    def row(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        # Named, not the default generator: tokens must not depend on a process's JAX settings.
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
        return jax.random.gumbel(key, like.shape[1:], jnp.float32)

    return jax.vmap(row)(settings.seed, settings.sample_index, positions)
