"""Arithmetic along the vocabulary, row by row: weights, their sums, a draw among them, the largest logits.

What `sampling` promises holds here too: a row's result has the same bits whatever rows stand beside it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

MAX_LANES = 1024
"""The vocabulary is dealt out to so many lanes, token `i` to lane `i % lanes`, or to fewer if it is small. A draw picks a
lane, by the sum of its weights, and then a token in it."""


def weights_of(distance: jax.Array, rate: jax.Array | None = None, cut: jax.Array | None = None) -> jax.Array:
    """Probabilities relative to that of the likeliest token, from the distances below its logit; 0 beyond the cut. `rate`
    is one over the temperature."""
    if rate is None or cut is None:
        return jnp.exp(-distance)
    return jnp.where(distance <= cut[:, None], jnp.exp(-(distance * rate[:, None])), 0)


def _num_lanes(vocab: int) -> int:
    """A power of two, so that lanes can be added up by halves."""
    return min(MAX_LANES, 1 << (vocab - 1).bit_length())


def lane_sums(logits: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`[rows, lanes]`. Added up element by element, as is every sum of fractions here: the order in which a reduction
    adds depends on the number of rows."""
    lanes = _num_lanes(logits.shape[1])
    num_chunks, rest = divmod(logits.shape[1], lanes)

    def add(chunk: jax.Array, sums: jax.Array) -> jax.Array:
        return sums + weigh(jax.lax.dynamic_slice_in_dim(logits, chunk * lanes, lanes, axis=1))

    tail = weigh(_padded(logits[:, num_chunks * lanes :], lanes)) if rest else jnp.zeros((len(logits), lanes))
    return jax.lax.fori_loop(0, num_chunks, add, tail) if num_chunks else tail


def lane_of(logits: jax.Array, lane: jax.Array) -> jax.Array:
    """`[rows, tokens of a lane]`: the logits of one lane per row; -inf past the end of the vocabulary."""
    tokens = lane[:, None] + np.arange(0, logits.shape[1], _num_lanes(logits.shape[1]))
    return jnp.take_along_axis(logits, tokens, axis=1, mode="fill", fill_value=-jnp.inf)


def total_of(sums: jax.Array) -> jax.Array:
    """`[rows]`, of a power of two of them."""
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """`[rows]`: index `i` of `weights [rows, n]` with probability `weights[i] / sum`, for `uniform` in [0, 1). Never one
    of weight zero: rounded sums may grow where nothing is added, and may stay short of their end."""
    sums = jnp.cumsum(weights, axis=1)
    first = first_of((sums > (uniform * sums[:, -1])[:, None]) & (weights > 0))
    last = jnp.where(weights > 0, jnp.arange(weights.shape[1], dtype=jnp.int32), 0).max(1)
    return jnp.minimum(first, last)


def largest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest and their ids, as `jax.lax.top_k` has them, several times as fast: they lie in the `count`
    blocks whose own largest are the largest."""
    if count == 0:
        return jnp.zeros((len(logits), 0)), jnp.zeros((len(logits), 0), jnp.int32)
    size = 16
    blocks = _blocks(logits, size)
    _, ids = jax.lax.top_k(blocks.max(2), min(count, blocks.shape[1]))
    ids = jnp.sort(ids, axis=1)  # so that of equal logits the smaller id comes first
    candidates = jnp.take_along_axis(blocks, ids[:, :, None], axis=1).reshape(len(logits), -1)
    values, places = jax.lax.top_k(candidates, count)
    return values, jnp.take_along_axis(ids, places // size, axis=1) * size + places % size


def first_largest(logits: jax.Array, peak: jax.Array) -> jax.Array:
    """As argmax, several times as fast."""
    size = 128
    blocks = _blocks(logits, size)
    block = first_of(blocks.max(2) == peak[:, None])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * size + first_of(inside == peak[:, None])


def first_of(flags: jax.Array) -> jax.Array:
    """Index of the first that is set in each row; the last index where none is."""
    places = jnp.arange(flags.shape[1], dtype=jnp.int32)
    return jnp.where(flags, places, places[-1]).min(1)


def at(values: jax.Array, index: jax.Array) -> jax.Array:
    """`[rows]`: one of each row."""
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]


def _blocks(logits: jax.Array, size: int) -> jax.Array:
    return _padded(logits, size).reshape(len(logits), -1, size)


def _padded(logits: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % multiple)), constant_values=-jnp.inf)
