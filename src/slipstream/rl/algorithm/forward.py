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
from slipstream.model.transformer.attention import Attention, causal_attention, packed_attention
from slipstream.model.transformer.chunked_logprobs import Projection, chunked_logprobs
from slipstream.model.transformer.layers import PRECISION, Params, rms_norm
from slipstream.model.transformer.long_attention import chunked_attention, fused_attention
from slipstream.model.transformer.stacked_layers import apply_stacked
from slipstream.rl.algorithm import compute
from slipstream.rl.algorithm.batch import Batch
from slipstream.rl.algorithm.compute import ComputePlan
from slipstream.rl.config import AlgorithmConfig, ComputeConfig


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
    same_routes: jax.Array | None = None
    """Share of the layers in which the policy's own router chooses the experts in `Batch.routes`; None without them."""


def forward(params: TrainableParams, model: ModelConfig, batch: Batch, config: AlgorithmConfig) -> Forward:
    """All outputs that the loss needs, from one pass. They are 0 where a chunk of positions has no token to learn from.

    The policy may have been prepared (`compute.prepare`), to do it once for several micro-batches."""
    needs_entropy = config.entropy_weight > 0
    outputs, hidden = _policy_outputs(
        params.policy, model, batch, config.temperature, config.compute, jnp.asarray(batch.mask), needs_entropy
    )
    if batch.exact is not None:
        outputs = outputs._replace(logprobs=with_value(outputs.logprobs, jnp.asarray(batch.exact)))
    return outputs._replace(values=None if params.critic is None else apply_critic(params.critic, hidden))


def logprob_fn(
    model: ModelConfig, temperature: float, config: ComputeConfig = compute.AUTO
) -> Callable[[Params, Batch], jax.Array]:
    """A compiled `logprobs(policy, batch)`, [B, T − 1], for `Batch.old` and `Batch.reference`. It computes them for all tokens,
    also for those with mask 0."""
    return _logprob_fn(model, temperature, config)


def with_value(logprobs: jax.Array, exact: jax.Array) -> jax.Array:
    """`exact` as the value, with the gradient of `logprobs`: x − x is 0 for finite x."""
    return exact + (logprobs - jax.lax.stop_gradient(logprobs))


@functools.cache
def _logprob_fn(model: ModelConfig, temperature: float, config: ComputeConfig) -> Callable[[Params, Batch], jax.Array]:
    def logprobs(policy: Params, batch: Batch) -> jax.Array:
        everywhere = jnp.ones(jnp.shape(batch.mask), bool)
        return _policy_outputs(policy, model, batch, temperature, config, everywhere, needs_entropy=False)[0].logprobs

    return jax.jit(logprobs)


def value_fn(model: ModelConfig, config: ComputeConfig = compute.AUTO) -> Callable[[Params, Params, Batch], jax.Array]:
    """A compiled `values(policy, critic, batch)`, [B, T − 1]: column t is the expected return after `tokens[:, t]`."""
    return _value_fn(model, config)


@functools.cache
def _value_fn(model: ModelConfig, config: ComputeConfig) -> Callable[[Params, Params, Batch], jax.Array]:
    def values(policy: Params, critic: Params, batch: Batch) -> jax.Array:
        policy = compute.prepare(policy, model, config)
        plan = _plan(policy, model, batch, config)
        return apply_critic(critic, hidden_states(policy, model, batch, plan, config)[0])

    return jax.jit(values)


def _policy_outputs(
    policy: Params,
    model: ModelConfig,
    batch: Batch,
    temperature: float,
    config: ComputeConfig,
    needed: jax.Array,
    needs_entropy: bool,
) -> tuple[Forward, jax.Array]:
    """Logprobs and entropies where `needed` [B, T − 1], and hidden states."""
    policy = compute.prepare(policy, model, config)
    plan = _plan(policy, model, batch, config)
    hidden, same_routes = hidden_states(policy, model, batch, plan, config)
    if not plan.logits_chunk:
        logits = decoder.unembed(policy, model, hidden) / temperature
        logprobs = decoder.token_logprobs(logits, jnp.asarray(batch.tokens)[:, 1:])
        entropies = decoder.entropies(logits) if needs_entropy else None
        return Forward(logprobs, entropies, same_routes=same_routes), hidden
    how = Projection(plan.logits_chunk, temperature, model.final_softcap, needs_entropy)
    head, targets = decoder.head_weight(policy, model), jnp.asarray(batch.tokens)[:, 1:]
    logprobs, entropies = chunked_logprobs(hidden, head, targets, needed, how)
    return Forward(logprobs, entropies if needs_entropy else None, same_routes=same_routes), hidden


def hidden_states(
    policy: Params, model: ModelConfig, batch: Batch, plan: ComputePlan, config: ComputeConfig
) -> tuple[jax.Array, jax.Array | None]:
    """[B, T − 1, hidden]: hidden states of all tokens but the last, packed or not, by a prepared policy. Also
    `Forward.same_routes`."""
    tokens, positions, segments = (
        None if array is None else jnp.asarray(array)[:, :-1]
        for array in (batch.tokens, batch.positions, batch.segments)
    )
    assert tokens is not None
    if positions is None:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    dtype, tree = compute.compute_dtype(config, compute.platform()), policy["model"]
    attention = _attention(segments, plan)
    x = decoder.embed(policy, model, tokens, dtype)
    angles = decoder.rotary_tables(model, positions)
    routes = None if batch.routes is None else jnp.moveaxis(jnp.asarray(batch.routes), 2, 0)
    x, same = apply_stacked(tree["layers"], model, x, angles, attention, plan.remat, routes)
    hidden = rms_norm(x, compute.cast(tree["norm"], dtype), model)
    return hidden, None if routes is None else same / len(routes)


def _attention(segments: jax.Array | None, plan: ComputePlan) -> Attention:
    if plan.attention == "whole":
        return causal_attention if segments is None else packed_attention(segments)
    chunked = chunked_attention(segments, plan.query_chunk)
    return chunked if plan.attention == "chunked" else fused_attention(segments, otherwise=chunked)


def _plan(policy: Params, model: ModelConfig, batch: Batch, config: ComputeConfig) -> ComputePlan:
    dtype = compute.compute_dtype(config, compute.platform()) or policy["model"]["embed_tokens"]["weight"].dtype
    rows, time = jnp.shape(batch.mask)
    return compute.make_plan(config, model, rows, time, jnp.dtype(dtype).itemsize)


def init_critic(model: ModelConfig) -> Params:
    return {"weight": jnp.zeros((model.hidden_size,)), "bias": jnp.zeros(())}


def apply_critic(critic: Params, hidden: jax.Array) -> jax.Array:
    """Values [B, T] in float32, from hidden states [B, T, hidden]."""
    return jnp.einsum("bti,i->bt", hidden.astype(jnp.float32), critic["weight"], precision=PRECISION) + critic["bias"]
