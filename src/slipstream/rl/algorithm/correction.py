"""Importance-sampling corrections for tokens sampled by a policy other than the trainer's.

An update involves three policies: μ, with which the engine sampled the tokens; π_old, the trainer's before the update; and
π_θ, which the update changes. π_old and μ differ if the engine had older weights, or uses other kernels or another dtype.
Decoupled PPO (Hilton et al. 2021, arXiv:2110.00641) separates them:

    J(θ) = E_μ[ w(π_old / μ) · min(ρ A, clip(ρ, 1 − low, 1 + high) A) ],    ρ = π_θ / π_old

The clip then bounds the update alone, not the distance between engine and trainer before it. The weights, without
gradient, with r = π_old / μ:

    decoupled   w = r                               as in AReaL, Fu et al. 2025, arXiv:2505.24298
    tis         w = min(r, C)                       truncated; IMPALA, Espeholt et al. 2018, arXiv:1802.01561
    mis         w = r where low ≤ r ≤ high, else 0  masked; IcePop in Ling Team 2025, arXiv:2510.18855

r is the ratio of the token, or of its sequence: the product over its tokens (exact, but with a variance that grows with
length) or their geometric mean. Where trainer and engine agree, r = exp(0) and every weight is exactly 1."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from slipstream.rl.algorithm.batch import Batch, at_tokens, sequence_sums
from slipstream.rl.config import CorrectionConfig

_MAX_LOG_RATIO = 20.0
"""Log-ratios are clipped to ± this, so that the product over a long sequence does not overflow."""


def ratios(old: jax.Array, batch: Batch, level: Literal["token", "sequence", "geometric"] = "token") -> jax.Array:
    """π_old / μ for each token [B, T − 1], from log π_old; 1 outside the mask."""
    # Mask before the exponential: padding would overflow it, and 0 · inf is NaN.
    log_ratio = jnp.where(batch.mask > 0, old - batch.logprobs, 0.0)
    if level != "token":
        sums = sequence_sums(log_ratio, batch)
        if level == "geometric":
            sums = sums / jnp.maximum(sequence_sums(jnp.asarray(batch.mask), batch), 1)
        log_ratio = jnp.where(batch.mask > 0, at_tokens(sums, batch), 0.0)
    return jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def truncated(ratio: jax.Array, cap: float) -> jax.Array:
    """TIS: at most `cap`. Bounds the variance, at the price of a bias towards the engine's policy."""
    return jnp.minimum(ratio, cap)


def masked(ratio: jax.Array, low: float, high: float) -> jax.Array:
    """MIS, IcePop: tokens on which trainer and engine differ too much are masked."""
    return jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def weights(old: jax.Array, batch: Batch, config: CorrectionConfig) -> jax.Array:
    """w for each token [B, T − 1], without gradient; 1 outside the mask."""
    ratio = jax.lax.stop_gradient(ratios(old, batch, config.level))
    match config.kind:
        case "none":
            return jnp.ones_like(ratio)
        case "tis":
            return truncated(ratio, config.cap)
        case "mis":
            return masked(ratio, config.low, config.high)
        case "decoupled":
            return ratio
