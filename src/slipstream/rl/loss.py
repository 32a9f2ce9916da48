"""The loss of policy optimisation, term by term.

    ρ_t = π_θ(o_t) / π_old(o_t)                                                importance ratio, token by token
    s_t = min(ρ_t A_t, clip(ρ_t, 1 − ε_low, 1 + ε_high) A_t)                   PPO, Schulman et al. 2017, arXiv:1707.06347;
                                                                               ε_high > ε_low: DAPO, arXiv:2503.14476
    L   = ⟨ −w_t s_t + β KL_t − η H_t + c (V_t − R_t)² / 2 ⟩                   w_t: `rl/correction.py`

⟨·⟩ averages over the tokens of the completions o_1 … o_B:

    sequence   1/B Σ_i 1/|o_i| Σ_t         GRPO, Shao et al. 2024, arXiv:2402.03300: each completion alike
    token      1/Σ_i |o_i| Σ_i Σ_t         DAPO, Yu et al. 2025: each token alike
    constant   1/B Σ_i 1/L Σ_t             Dr. GRPO, Liu et al. 2025, arXiv:2503.20783: length earns nothing

Without a correction, π_old is the engine's own logprob of the token that it drew (`Completion.logprobs`), so that a gap
between trainer and engine, in numerics or in policy version, is part of the ratio instead of ignored.

Every term is a sum over tokens divided by a total of the whole batch (`Totals`). So the losses of its parts, given the
whole's totals, add up to the loss of the whole, and so do their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from slipstream.errors import ConfigError
from slipstream.rl import correction
from slipstream.rl.batch import Batch, sequence_sums
from slipstream.rl.config import Aggregation, AlgorithmConfig


class Forward(NamedTuple):
    """What the model says of a batch's tokens, each [B, T − 1]."""

    logprobs: jax.Array
    """log π_θ."""
    entropies: jax.Array | None = None
    """Of the whole distribution at each token, where there is a bonus for it."""
    values: jax.Array | None = None
    """The critic's, where there is one."""


class Totals(NamedTuple):
    """What averages divide by; never below 1, so that of a batch without tokens the loss is 0, and all metrics are."""

    tokens: jax.Array
    sequences: jax.Array


class Objective(NamedTuple):
    """The loss, and what tells how far θ has moved from the policy that sampled."""

    loss: jax.Array
    ratio: jax.Array
    """Mean ρ: 1 before the first update."""
    clip_share: jax.Array
    """Share of tokens whose ratio was clipped and which therefore gave no gradient."""
    kl: jax.Array
    """KL(engine ‖ θ), estimated by k3, which is never negative."""
    entropy: jax.Array
    """In nats per token. Without an entropy bonus estimated as the mean of −log π_θ over the sampled tokens."""
    gap: jax.Array
    """Mean |log π_θ − log μ|: how far the trainer's logprobs are from the engine's. 0 when both compute the same policy
    alike."""
    reference_kl: jax.Array
    """KL(θ ‖ reference), estimated by k3; 0 without a reference."""
    value_loss: jax.Array
    """Before its weight; 0 without a critic."""
    correction: jax.Array
    """Mean w: 1 when trainer and engine agree."""
    dropped: jax.Array
    """Share of tokens with w = 0."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """`Objective` and the gradient's norm before clipping, as numbers for the log."""

    loss: float
    ratio: float
    clip_share: float
    kl: float
    entropy: float
    gap: float
    gradient_norm: float
    reference_kl: float = 0.0
    value_loss: float = 0.0
    correction: float = 1.0
    dropped: float = 0.0


def totals(batch: Batch) -> Totals:
    """A sequence counts if it has a token to learn from."""
    mask = jnp.asarray(batch.mask)
    sequences = jnp.sum(sequence_sums(mask, batch) > 0, dtype=jnp.float32)
    return Totals(jnp.maximum(jnp.sum(mask), 1.0), jnp.maximum(sequences, 1.0))


def aggregate(values: jax.Array, batch: Batch, how: Aggregation, total: Totals, length: int) -> jax.Array:
    """⟨values⟩ over the tokens of the mask; `length` is the L of `constant`."""
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
    """s_t. Moving on in the direction that the advantage asks for earns nothing beyond the clip; moving back always counts."""
    return jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)


def kl_estimate(logprobs: jax.Array, reference: jax.Array, estimator: Literal["k1", "k2", "k3"]) -> jax.Array:
    """KL(π ‖ π_ref) from the logprobs of tokens that π drew, one estimate per token (Schulman 2020, "Approximating KL
    Divergence"). With r = π_ref / π:

        k1 = −log r            unbiased, of either sign
        k2 = (log r)² / 2      biased; its gradient is the true one on average
        k3 = r − 1 − log r     unbiased, never negative; GRPO's

    The gradient of k1 is zero on average: it belongs in a reward, not in a loss (Tang and Munos 2025, arXiv:2506.09477)."""
    log_r = reference - logprobs
    match estimator:
        case "k1":
            return -log_r
        case "k2":
            return jnp.square(log_r) / 2
        case "k3":
            return jnp.exp(log_r) - 1 - log_r


def clipped_value_loss(values: jax.Array, old: jax.Array, returns: jax.Array, clip: float) -> jax.Array:
    """PPO's, per token: max((V − R)², (clip(V, V_old − clip, V_old + clip) − R)²) / 2. A `clip` of 0 clips nothing."""
    error = jnp.square(values - returns)
    if clip:
        error = jnp.maximum(error, jnp.square(jnp.clip(values, old - clip, old + clip) - returns))
    return error / 2


def objective(found: Forward, batch: Batch, config: AlgorithmConfig, total: Totals | None = None) -> Objective:
    """L and its companions. `total` is of the whole batch, where this one is a part of it."""
    total = totals(batch) if total is None else total
    recipe, mask, advantages = config.recipe, batch.mask, jnp.asarray(batch.advantages)
    # Masked before any exponential: padding would overflow it, and 0 · inf poisons the gradient.
    sampled, engine = jnp.where(mask > 0, found.logprobs, 0.0), jnp.where(mask > 0, batch.logprobs, 0.0)
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
        loss -= config.entropy_weight * average(_entropies(found))
    value_loss = average(_value_loss(found, batch, config)) if recipe.critic else jnp.zeros(())
    if recipe.critic:
        loss += config.value.weight * value_loss
    reference_kl = jnp.zeros(())
    if batch.reference is not None:
        reference_kl = token_mean(kl_estimate(sampled, _reference(batch), "k3"))
    return Objective(
        loss=loss,
        ratio=token_mean(ratio),
        clip_share=token_mean(clipped),
        kl=token_mean(kl_estimate(engine, sampled, "k3")),
        entropy=token_mean(-sampled if found.entropies is None else found.entropies),
        gap=token_mean(jnp.abs(sampled - engine)),
        reference_kl=reference_kl,
        value_loss=value_loss,
        correction=token_mean(weight),
        dropped=token_mean(weight == 0),
    )


def _old_policy(
    logprobs: jax.Array, engine: jax.Array, batch: Batch, config: AlgorithmConfig
) -> tuple[jax.Array, jax.Array]:
    """log π_old and w. Without a correction π_old is the engine's policy, and w is 1."""
    if config.correction.kind == "none":
        return engine, jnp.ones_like(logprobs)
    old = jax.lax.stop_gradient(logprobs) if batch.old is None else jnp.where(batch.mask > 0, batch.old, 0.0)
    return old, correction.weights(old, batch, config.correction)


def _reference(batch: Batch) -> jax.Array:
    if batch.reference is None:
        raise ConfigError("kl.weight is set, but the batch has no reference logprobs; see experience.prepare")
    return jnp.where(batch.mask > 0, batch.reference, 0.0)


def _entropies(found: Forward) -> jax.Array:
    if found.entropies is None:
        raise ConfigError("entropy_weight is set, but the forward pass gave no entropies")
    return found.entropies


def _value_loss(found: Forward, batch: Batch, config: AlgorithmConfig) -> jax.Array:
    if found.values is None or batch.values is None or batch.returns is None:
        raise ConfigError("a critic learns from values and returns, and the batch lacks them; see experience.prepare")
    return clipped_value_loss(found.values, jnp.asarray(batch.values), jnp.asarray(batch.returns), config.value.clip)
