"""Importance corrections for tokens that another policy drew.

Three policies meet in an update. The engine drew the tokens with μ; the trainer held π_old when the update began; π_θ
is what the update moves. π_old and μ differ when the engine had older weights, or computes with other kernels or in
another dtype. Decoupled PPO (Hilton et al. 2021, arXiv:2110.00641) gives each its own place:

    J(θ) = E_μ[ w(π_old / μ) · min(ρ A, clip(ρ, 1 − low, 1 + high) A) ],    ρ = π_θ / π_old

The clip then bounds how far the update goes, and not how far engine and trainer were apart before it. The weights, of
which no gradient is taken, with r = π_old / μ:

    decoupled   w = r                               as AReaL uses it, Fu et al. 2025, arXiv:2505.24298
    tis         w = min(r, C)                       truncated; IMPALA, Espeholt et al. 2018, arXiv:1802.01561
    mis         w = r where low ≤ r ≤ high, else 0  masked; IcePop in Ling Team 2025, arXiv:2510.18855

r is a token's own ratio, or its sequence's: the product over it (exact, but it varies wildly with length), or the
geometric mean. Where trainer and engine agree, r = exp(0), and every weight is exactly 1."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from slipstream.rl.batch import Batch, at_tokens, sequence_sums
from slipstream.rl.config import CorrectionConfig

_MOST = 20.0
"""Log-ratios are kept within ± this, so that no product over a long sequence overflows."""


def ratios(old: jax.Array, batch: Batch, level: Literal["token", "sequence", "geometric"] = "token") -> jax.Array:
    """π_old / μ for each token [B, T − 1], from log π_old; 1 outside the mask."""
    # Masked before the exponential: padding would overflow it, and 0 · inf is no number.
    log_ratio = jnp.where(batch.mask > 0, old - batch.logprobs, 0.0)
    if level != "token":
        sums = sequence_sums(log_ratio, batch)
        if level == "geometric":
            sums = sums / jnp.maximum(sequence_sums(jnp.asarray(batch.mask), batch), 1)
        log_ratio = jnp.where(batch.mask > 0, at_tokens(sums, batch), 0.0)
    return jnp.exp(jnp.clip(log_ratio, -_MOST, _MOST))


def truncated(ratio: jax.Array, cap: float) -> jax.Array:
    """TIS: at most `cap`. Biased towards what the engine liked better, with a variance that is bounded."""
    return jnp.minimum(ratio, cap)


def masked(ratio: jax.Array, low: float, high: float) -> jax.Array:
    """MIS, IcePop: tokens that trainer and engine see too differently are not learned from at all."""
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
