"""The forward pass of a batch through the policy and its critic.

The critic of PPO is a linear map from the decoder's hidden states to the expected return. It shares the policy's layers and
trains them. It starts at zero, so that the first advantages are plain returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from slipstream.model.config import ModelConfig
from slipstream.model.transformer import decoder
from slipstream.model.transformer.layers import PRECISION, Params
from slipstream.rl.algorithm.batch import Batch
from slipstream.rl.config import AlgorithmConfig


class TrainableParams(NamedTuple):
    """The parameters that the optimizer updates."""

    policy: Params
    critic: Params | None
    """The value head, for algorithms with a critic."""


class Forward(NamedTuple):
    """The model's outputs for a batch's tokens, each [B, T − 1]."""

    logprobs: jax.Array
    """log π_θ."""
    entropies: jax.Array | None = None
    """Entropy of the full distribution at each token; None without an entropy bonus."""
    values: jax.Array | None = None
    """The critic's values; None without a critic."""


def forward(params: TrainableParams, model: ModelConfig, batch: Batch, config: AlgorithmConfig) -> Forward:
    """All outputs that the loss needs, from one pass."""
    hidden = hidden_states(params.policy, model, batch)
    logits = decoder.unembed(params.policy, model, hidden) / config.temperature
    return Forward(
        logprobs=decoder.token_logprobs(logits, jnp.asarray(batch.tokens)[:, 1:]),
        entropies=decoder.entropies(logits) if config.entropy_weight else None,
        values=None if params.critic is None else apply_critic(params.critic, hidden),
    )


@functools.cache
def logprob_fn(model: ModelConfig, temperature: float) -> Callable[[Params, Batch], jax.Array]:
    """A compiled `logprobs(policy, batch)`, [B, T − 1], for `Batch.old` and `Batch.reference`."""

    def logprobs(policy: Params, batch: Batch) -> jax.Array:
        logits = decoder.unembed(policy, model, hidden_states(policy, model, batch)) / temperature
        return decoder.token_logprobs(logits, jnp.asarray(batch.tokens)[:, 1:])

    return jax.jit(logprobs)


@functools.cache
def value_fn(model: ModelConfig) -> Callable[[Params, Params, Batch], jax.Array]:
    """A compiled `values(policy, critic, batch)`, [B, T − 1]: column t is the expected return after `tokens[:, t]`."""
    return jax.jit(lambda policy, critic, batch: apply_critic(critic, hidden_states(policy, model, batch)))


def hidden_states(policy: Params, model: ModelConfig, batch: Batch) -> jax.Array:
    """[B, T − 1, hidden]: hidden states of all tokens but the last, packed or not."""
    tokens, positions, segments = (
        None if array is None else jnp.asarray(array)[:, :-1]
        for array in (batch.tokens, batch.positions, batch.segments)
    )
    assert tokens is not None
    return decoder.hidden_states(policy, model, tokens, positions, segments)


def init_critic(model: ModelConfig) -> Params:
    return {"weight": jnp.zeros((model.hidden_size,)), "bias": jnp.zeros(())}


def apply_critic(critic: Params, hidden: jax.Array) -> jax.Array:
    """Values [B, T] in float32, from hidden states [B, T, hidden]."""
    return jnp.einsum("bti,i->bt", hidden.astype(jnp.float32), critic["weight"], precision=PRECISION) + critic["bias"]
