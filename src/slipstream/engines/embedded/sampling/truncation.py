"""Top-k, top-p and min-p truncation as one number per row: the cut, a distance below the largest logit beyond which tokens
are excluded."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from slipstream.engines.embedded.sampling.batch_settings import BatchSettings
from slipstream.engines.embedded.sampling.logits import (
    first_true,
    lane_sums,
    pairwise_sum,
    relative_probs,
    take_at,
    top_k_logits,
)

NEAR = 128
"""Likeliest tokens that top-k and top-p consider first. If they do not suffice, the whole vocabulary is bisected at many times
the cost."""


def is_truncated(settings: BatchSettings, vocab: int) -> jax.Array:
    """`[rows]`: whether tokens may be excluded. Undefined for greedy rows."""
    return _uses_top_k(settings, vocab) | _uses_top_p(settings) | (settings.min_p > 0)


def truncation_cut(logits: jax.Array, peak: jax.Array, temperature: jax.Array, settings: BatchSettings) -> jax.Array:
    """`[rows]`: the largest distance below the largest logit that top-k, then top-p, then min-p keep. Tokens that tie with the
    last one kept are kept, too."""
    uses_top_k, uses_top_p = _uses_top_k(settings, logits.shape[1]), _uses_top_p(settings)
    no_cut = jnp.full(peak.shape, jnp.inf)

    def top_k_and_p() -> jax.Array:
        near = peak[:, None] - top_k_logits(logits, min(NEAR, logits.shape[1]))[0]
        cut = jnp.where(uses_top_k, _top_k_cut(logits, peak, near, settings), no_cut)
        return jax.lax.cond(
            uses_top_p.any(), lambda: _top_p_cut(logits, peak, temperature, near, cut, settings), lambda: cut
        )

    cut = jax.lax.cond((uses_top_k | uses_top_p).any(), top_k_and_p, lambda: no_cut)
    return jnp.minimum(cut, -temperature * jnp.log(settings.min_p))


def _top_k_cut(logits: jax.Array, peak: jax.Array, near: jax.Array, settings: BatchSettings) -> jax.Array:
    """Undefined for rows without top-k."""
    num_near = near.shape[1]
    far = _uses_top_k(settings, logits.shape[1]) & (settings.top_k > num_near)

    def enough(cut: jax.Array) -> jax.Array:
        return (peak[:, None] - logits <= cut[:, None]).sum(1, dtype=jnp.int32) >= settings.top_k

    last = take_at(near, jnp.clip(settings.top_k - 1, 0, num_near - 1))
    no_cut = jnp.full(peak.shape, jnp.inf)
    return jnp.where(far, _bisect(logits, peak, near[:, -1], no_cut, far, enough), last)


def _top_p_cut(
    logits: jax.Array, peak: jax.Array, temperature: jax.Array, near: jax.Array, cut: jax.Array, settings: BatchSettings
) -> jax.Array:
    """Keep the fewest tokens within `cut` whose probabilities sum to at least `top_p` of the total."""

    def mass(cut: jax.Array) -> jax.Array:
        return pairwise_sum(
            lane_sums(logits, lambda chunk: relative_probs(peak[:, None] - chunk, 1 / temperature, cut))
        )

    target = settings.top_p * mass(cut)
    reached = jnp.cumsum(relative_probs(near, 1 / temperature, cut), axis=1) >= target[:, None]
    cuts = _uses_top_p(settings)
    far = cuts & ~reached.any(1)
    found = _bisect(logits, peak, near[:, -1], cut, far, lambda cut: mass(cut) >= target)
    return jnp.where(far, found, jnp.where(cuts, take_at(near, first_true(reached)), cut))


def _bisect(
    logits: jax.Array,
    peak: jax.Array,
    least: jax.Array,
    most: jax.Array,
    needed: jax.Array,
    enough: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The smallest cut in `[least, most]` for which `enough` holds, or else the largest; undefined for rows not in `needed`.

    Bisects the bits of the cut, which are ordered like the numbers since cuts are not negative. Exact, in at most 31 passes
    over the logits; none if no row needs it."""

    def bits(cut: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(cut, jnp.int32)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        found = enough(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(found, low, middle), jnp.where(found, middle, high)

    farthest = peak - jnp.where(jnp.isfinite(logits), logits, jnp.inf).min(1)
    high = bits(jnp.minimum(most, farthest))
    low = jnp.where(needed, bits(least) - 1, high)
    _, high = jax.lax.while_loop(lambda bounds: (bounds[1] - bounds[0] > 1).any(), halve, (low, high))
    return jax.lax.bitcast_convert_type(high, jnp.float32)


def _uses_top_k(settings: BatchSettings, vocab: int) -> jax.Array:
    return (settings.temperature > 0) & (settings.top_k > 0) & (settings.top_k < vocab)


def _uses_top_p(settings: BatchSettings) -> jax.Array:
    return (settings.temperature > 0) & (settings.top_p < 1)
