"""The policy optimization loss, term by term.

    ρ_t = π_θ(o_t) / π_old(o_t)                                                importance ratio, token by token
    s_t = min(ρ_t A_t, clip(ρ_t, 1 − ε_low, 1 + ε_high) A_t)                   PPO, Schulman et al. 2017, arXiv:1707.06347;
                                                                               ε_high > ε_low: DAPO, arXiv:2503.14476
    L   = ⟨ −w_t s_t + β KL_t − η H_t + c (V_t − R_t)² / 2 ⟩                   w_t: `rl/algorithm/correction.py`

⟨·⟩ averages over the tokens of the completions o_1 … o_B:

    sequence   1/B Σ_i 1/|o_i| Σ_t         GRPO, Shao et al. 2024, arXiv:2402.03300: every completion weighs the same
    token      1/Σ_i |o_i| Σ_i Σ_t         DAPO, Yu et al. 2025: every token weighs the same
    constant   1/B Σ_i 1/L Σ_t             Dr. GRPO, Liu et al. 2025, arXiv:2503.20783: no weight by length

Without a correction, log π_old is the engine's logprob of the sampled token (`Completion.logprobs`), so that the ratio
includes any gap between trainer and engine, in numerics or in policy version.

Every term is a sum over tokens divided by a total of the whole batch (`Totals`). Losses and gradients of micro-batches that
use the totals of the whole batch therefore add up to those of the whole batch."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from slipstream.errors import ConfigError
from slipstream.rl.algorithm import correction
from slipstream.rl.algorithm.batch import Batch, sequence_sums, unknown_expert
from slipstream.rl.algorithm.forward import Forward
from slipstream.rl.config import Aggregation, AlgorithmConfig


class Totals(NamedTuple):
    """Denominators of the averages. At least 1, so that loss and metrics of a batch without tokens are 0."""

    tokens: jax.Array
    sequences: jax.Array
    routed: jax.Array
    """Tokens of prompts and completions whose experts are known."""


class Objective(NamedTuple):
    """The loss, and metrics of the distance between θ and the policy that sampled."""

    loss: jax.Array
    ratio: jax.Array
    """Mean ρ: 1 before the first update."""
    clip_share: jax.Array
    """Share of tokens whose ratio was clipped, which therefore have no gradient."""
    kl: jax.Array
    """KL(engine ‖ θ), the k3 estimate, which is never negative."""
    entropy: jax.Array
    """Nats per token. Without an entropy bonus, estimated as the mean of −log π_θ over the sampled tokens."""
    gap: jax.Array
    """Mean |log π_θ − log μ| between trainer and engine. 0 if both compute the same policy identically."""
    equal_share: jax.Array
    """Share of tokens for which log π_θ and log μ are equal to the bit."""
    reference_kl: jax.Array
    """KL(θ ‖ reference), the k3 estimate; 0 without a reference."""
    value_loss: jax.Array
    """Unweighted; 0 without a critic."""
    correction: jax.Array
    """Mean w: 1 when trainer and engine agree."""
    dropped: jax.Array
    """Share of tokens with w = 0."""
    route_agreement: jax.Array
    """Share of the tokens and layers in which the policy's own router chooses the engine's experts, which the update uses in
    any case; 0 without recorded routes."""


def totals(batch: Batch) -> Totals:
    """The numbers of tokens with mask 1, and of sequences that have one."""
    mask = jnp.asarray(batch.mask)
    sequences = jnp.sum(sequence_sums(mask, batch) > 0, dtype=jnp.float32)
    counts = jnp.sum(mask), sequences, jnp.sum(_routed(batch), dtype=jnp.float32)
    return Totals(*(jnp.maximum(count, 1.0) for count in counts))


def aggregate(values: jax.Array, batch: Batch, how: Aggregation, total: Totals, length: int) -> jax.Array:
    """⟨values⟩ over the tokens with mask 1; `length` is the L of `constant`."""
    summed = sequence_sums(values * batch.mask, batch)
    match how:
        case "sequence":
            lengths = sequence_sums(jnp.asarray(batch.mask), batch)
            return jnp.sum(summed / jnp.maximum(lengths, 1)) / total.sequences
        case "token":
            return jnp.sum(summed) / total.tokens
        case "constant":
            return jnp.sum(summed) / length / total.sequences


def clipped_surrogate(ratio: jax.Array, advantages: jax.Array, low: float, high: float) -> jax.Array:
    """s_t: beyond the clip, no gain in the direction of the advantage; the opposite direction is never clipped."""
    return jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)


def kl_estimate(logprobs: jax.Array, reference: jax.Array, estimator: Literal["k1", "k2", "k3"]) -> jax.Array:
    """Per-token estimates of KL(π ‖ π_ref) from tokens sampled by π (Schulman 2020, "Approximating KL Divergence").
    With r = π_ref / π:

        k1 = −log r            unbiased, of either sign
        k2 = (log r)² / 2      biased, with an unbiased gradient
        k3 = r − 1 − log r     unbiased, never negative; used by GRPO

    The gradient of k1 has mean zero: use it in a reward, not in a loss (Tang and Munos 2025, arXiv:2506.09477)."""
    log_r = reference - logprobs
    match estimator:
        case "k1":
            return -log_r
        case "k2":
            return jnp.square(log_r) / 2
        case "k3":
            return jnp.exp(log_r) - 1 - log_r


def clipped_value_loss(values: jax.Array, old: jax.Array, returns: jax.Array, clip: float) -> jax.Array:
    """PPO's value loss per token: max((V − R)², (clip(V, V_old − clip, V_old + clip) − R)²) / 2. No clipping if `clip` is 0."""
    error = jnp.square(values - returns)
    if clip:
        error = jnp.maximum(error, jnp.square(jnp.clip(values, old - clip, old + clip) - returns))
    return error / 2


def objective(outputs: Forward, batch: Batch, config: AlgorithmConfig, total: Totals | None = None) -> Objective:
    """L and its metrics. `total` is that of the whole batch, if this one is a micro-batch of it."""
    total = totals(batch) if total is None else total
    recipe, mask, advantages = config.recipe, batch.mask, jnp.asarray(batch.advantages)
    # Mask before any exponential: padding would overflow it, and 0 · inf poisons the gradient.
    sampled, engine = jnp.where(mask > 0, outputs.logprobs, 0.0), jnp.where(mask > 0, batch.logprobs, 0.0)
    old, weight = _old_policy(sampled, engine, batch, config)
    ratio = jnp.exp(sampled - old)
    clipped = jnp.where(advantages > 0, ratio > 1 + recipe.clip_high, ratio < 1 - config.clip) & (advantages != 0)

    def token_mean(values: jax.Array) -> jax.Array:
        return jnp.sum(values * mask) / total.tokens

    def average(values: jax.Array) -> jax.Array:
        return aggregate(values, batch, recipe.aggregation, total, config.max_tokens)

    loss = -average(weight * clipped_surrogate(ratio, advantages, config.clip, recipe.clip_high))
    if config.kl.weight and not recipe.token_rewards:
        loss += config.kl.weight * average(kl_estimate(sampled, _reference(batch), config.kl.estimator))
    if config.entropy_weight:
        loss -= config.entropy_weight * average(_entropies(outputs))
    value_loss = average(_value_loss(outputs, batch, config)) if recipe.critic else jnp.zeros(())
    if recipe.critic:
        loss += config.value.weight * value_loss
    route_agreement = jnp.zeros(())
    if outputs.same_routes is not None:
        route_agreement = jnp.sum(outputs.same_routes * _routed(batch)) / total.routed
    reference_kl = jnp.zeros(())
    if batch.reference is not None:
        reference_kl = token_mean(kl_estimate(sampled, _reference(batch), "k3"))
    return Objective(
        loss=loss,
        ratio=token_mean(ratio),
        clip_share=token_mean(clipped),
        kl=token_mean(kl_estimate(engine, sampled, "k3")),
        entropy=token_mean(-sampled if outputs.entropies is None else outputs.entropies),
        gap=token_mean(jnp.abs(sampled - engine)),
        equal_share=token_mean(sampled == engine),
        reference_kl=reference_kl,
        value_loss=value_loss,
        correction=token_mean(weight),
        dropped=token_mean(weight == 0),
        route_agreement=route_agreement,
    )


def _routed(batch: Batch) -> jax.Array:
    """[B, T − 1]: whether the engine's experts of a token are known."""
    if batch.routes is None:
        return jnp.zeros(())
    return jnp.asarray(batch.routes)[:, :, 0, 0] != unknown_expert(batch.routes.dtype)


def _old_policy(
    logprobs: jax.Array, engine: jax.Array, batch: Batch, config: AlgorithmConfig
) -> tuple[jax.Array, jax.Array]:
    """log π_old and w. Without a correction, π_old is the engine's policy and w is 1."""
    if config.correction.kind == "none":
        return engine, jnp.ones_like(logprobs)
    old = jax.lax.stop_gradient(logprobs) if batch.old is None else jnp.where(batch.mask > 0, batch.old, 0.0)
    return old, correction.weights(old, batch, config.correction)


def _reference(batch: Batch) -> jax.Array:
    if batch.reference is None:
        raise ConfigError("kl.weight is set, but the batch has no reference logprobs; see experience.prepare")
    return jnp.where(batch.mask > 0, batch.reference, 0.0)


def _entropies(outputs: Forward) -> jax.Array:
    if outputs.entropies is None:
        raise ConfigError("entropy_weight is set, but the forward pass returned no entropies")
    return outputs.entropies


def _value_loss(outputs: Forward, batch: Batch, config: AlgorithmConfig) -> jax.Array:
    if outputs.values is None or batch.values is None or batch.returns is None:
        raise ConfigError("the critic needs values and returns, but the batch has none; see experience.prepare")
    return clipped_value_loss(outputs.values, jnp.asarray(batch.values), jnp.asarray(batch.returns), config.value.clip)
