"""Which tokens may be drawn: top-k, top-p and min-p as one number per row, the distance below the largest logit at which
the row is cut off."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from slipstream.engines.embedded.logits import at, first_of, lane_sums, largest, total_of, weights_of
from slipstream.engines.embedded.settings import Settings

NEAR = 128
"""Likeliest tokens that top-k and top-p look at first. Where they do not suffice, the whole vocabulary is bisected, at
many times the price."""


def is_truncated(settings: Settings, vocab: int) -> jax.Array:
    """`[rows]`. Of no meaning in greedy rows."""
    return _cuts_k(settings, vocab) | _cuts_p(settings) | (settings.min_p > 0)


def cut_of(logits: jax.Array, peak: jax.Array, temperature: jax.Array, settings: Settings) -> jax.Array:
    """`[rows]`: how far below the largest logit a token may lie to be kept by top-k, then top-p, then min-p. Tokens that
    tie with the last one kept stay."""
    cuts_k, cuts_p = _cuts_k(settings, logits.shape[1]), _cuts_p(settings)
    whole = jnp.full(peak.shape, jnp.inf)

    def top_k_and_p() -> jax.Array:
        near = peak[:, None] - largest(logits, min(NEAR, logits.shape[1]))[0]
        cut = jnp.where(cuts_k, _top_k_cut(logits, peak, near, settings), whole)
        return jax.lax.cond(
            cuts_p.any(), lambda: _top_p_cut(logits, peak, temperature, near, cut, settings), lambda: cut
        )

    cut = jax.lax.cond((cuts_k | cuts_p).any(), top_k_and_p, lambda: whole)
    return jnp.minimum(cut, -temperature * jnp.log(settings.min_p))


def _top_k_cut(logits: jax.Array, peak: jax.Array, near: jax.Array, settings: Settings) -> jax.Array:
    """Of no meaning where top-k is off."""
    num_near = near.shape[1]
    far = _cuts_k(settings, logits.shape[1]) & (settings.top_k > num_near)

    def enough(cut: jax.Array) -> jax.Array:
        return (peak[:, None] - logits <= cut[:, None]).sum(1, dtype=jnp.int32) >= settings.top_k

    last = at(near, jnp.clip(settings.top_k - 1, 0, num_near - 1))
    whole = jnp.full(peak.shape, jnp.inf)
    return jnp.where(far, _bisect(logits, peak, near[:, -1], whole, far, enough), last)


def _top_p_cut(
    logits: jax.Array, peak: jax.Array, temperature: jax.Array, near: jax.Array, cut: jax.Array, settings: Settings
) -> jax.Array:
    """Leaves, of what `cut` leaves, the fewest whose weights reach `top_p` of the sum."""

    def mass(cut: jax.Array) -> jax.Array:
        return total_of(lane_sums(logits, lambda chunk: weights_of(peak[:, None] - chunk, 1 / temperature, cut)))

    target = settings.top_p * mass(cut)
    reached = jnp.cumsum(weights_of(near, 1 / temperature, cut), axis=1) >= target[:, None]
    cuts = _cuts_p(settings)
    far = cuts & ~reached.any(1)
    found = _bisect(logits, peak, near[:, -1], cut, far, lambda cut: mass(cut) >= target)
    return jnp.where(far, found, jnp.where(cuts, at(near, first_of(reached)), cut))


def _bisect(
    logits: jax.Array,
    peak: jax.Array,
    least: jax.Array,
    most: jax.Array,
    asked: jax.Array,
    enough: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The smallest cut in `[least, most]` whose tokens are `enough`, or else the largest; of no meaning in rows that are
    not `asked` for. Bisects the bits of the cut, which are ordered as the numbers are, since no cut is negative: exact,
    in at most 31 passes over the logits, and none where no row asks."""

    def bits(cut: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(cut, jnp.int32)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        found = enough(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(found, low, middle), jnp.where(found, middle, high)

    farthest = peak - jnp.where(jnp.isfinite(logits), logits, jnp.inf).min(1)
    high = bits(jnp.minimum(most, farthest))
    low = jnp.where(asked, bits(least) - 1, high)
    _, high = jax.lax.while_loop(lambda bounds: (bounds[1] - bounds[0] > 1).any(), halve, (low, high))
    return jax.lax.bitcast_convert_type(high, jnp.float32)


def _cuts_k(settings: Settings, vocab: int) -> jax.Array:
    return (settings.temperature > 0) & (settings.top_k > 0) & (settings.top_k < vocab)


def _cuts_p(settings: Settings) -> jax.Array:
    return (settings.temperature > 0) & (settings.top_p < 1)
