"""Row-wise arithmetic over the vocabulary: relative probabilities, sums, weighted draws, top-k, argmax.

As everywhere in `sampling`, a row's result has the same bits whatever other rows are in the batch."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

MAX_LANES = 1024
"""The vocabulary is divided into this many lanes (fewer if it is small); token `i` is in lane `i % lanes`. A draw picks a lane
by the sum of its weights, then a token in the lane."""


def relative_probs(distance: jax.Array, rate: jax.Array | None = None, cut: jax.Array | None = None) -> jax.Array:
    """Probabilities relative to the likeliest token's, given each logit's distance below the largest; 0 beyond `cut`. `rate` is
    1 / temperature."""
    if rate is None or cut is None:
        return jnp.exp(-distance)
    return jnp.where(distance <= cut[:, None], jnp.exp(-(distance * rate[:, None])), 0)


def _num_lanes(vocab: int) -> int:
    """A power of two, for pairwise sums."""
    return min(MAX_LANES, 1 << (vocab - 1).bit_length())


def lane_sums(logits: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`[rows, lanes]`: the sum of each lane's weights. Added element by element, as every sum of fractions here: the order of
    a reduction depends on the number of rows."""
    lanes = _num_lanes(logits.shape[1])
    num_chunks, rest = divmod(logits.shape[1], lanes)

    def add(chunk: jax.Array, sums: jax.Array) -> jax.Array:
        return sums + weigh(jax.lax.dynamic_slice_in_dim(logits, chunk * lanes, lanes, axis=1))

    tail = weigh(_padded(logits[:, num_chunks * lanes :], lanes)) if rest else jnp.zeros((len(logits), lanes))
    return jax.lax.fori_loop(0, num_chunks, add, tail) if num_chunks else tail


def lane_logits(logits: jax.Array, lane: jax.Array) -> jax.Array:
    """`[rows, tokens per lane]`: the logits of one lane per row; -inf past the end of the vocabulary."""
    tokens = lane[:, None] + np.arange(0, logits.shape[1], _num_lanes(logits.shape[1]))
    return jnp.take_along_axis(logits, tokens, axis=1, mode="fill", fill_value=-jnp.inf)


def pairwise_sum(sums: jax.Array) -> jax.Array:
    """`[rows]`: the sum over a power of two of columns, in an order that does not depend on the number of rows."""
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def weighted_choice(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """`[rows]`: index `i` of `weights [rows, n]` with probability `weights[i] / sum`, for `uniform` in [0, 1). Never picks a
    zero weight: rounded cumulative sums may grow where zero is added, and may end short of the total."""
    sums = jnp.cumsum(weights, axis=1)
    first = first_true((sums > (uniform * sums[:, -1])[:, None]) & (weights > 0))
    last = jnp.where(weights > 0, jnp.arange(weights.shape[1], dtype=jnp.int32), 0).max(1)
    return jnp.minimum(first, last)


def top_k_logits(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest logits and their ids, as `jax.lax.top_k` but several times as fast: they are in the `count` blocks
    with the largest maxima."""
    if count == 0:
        return jnp.zeros((len(logits), 0)), jnp.zeros((len(logits), 0), jnp.int32)
    size = 16
    blocks = _blocks(logits, size)
    _, ids = jax.lax.top_k(blocks.max(2), min(count, blocks.shape[1]))
    ids = jnp.sort(ids, axis=1)  # of equal logits the smaller id comes first
    candidates = jnp.take_along_axis(blocks, ids[:, :, None], axis=1).reshape(len(logits), -1)
    values, places = jax.lax.top_k(candidates, count)
    return values, jnp.take_along_axis(ids, places // size, axis=1) * size + places % size


def argmax(logits: jax.Array, peak: jax.Array) -> jax.Array:
    """As `jnp.argmax` but several times as fast. `peak` is the largest logit of each row."""
    size = 128
    blocks = _blocks(logits, size)
    block = first_true(blocks.max(2) == peak[:, None])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * size + first_true(inside == peak[:, None])


def first_true(flags: jax.Array) -> jax.Array:
    """`[rows]`: index of the first true flag of each row; the last index if none is."""
    places = jnp.arange(flags.shape[1], dtype=jnp.int32)
    return jnp.where(flags, places, places[-1]).min(1)


def take_at(values: jax.Array, index: jax.Array) -> jax.Array:
    """`[rows]`: the element `index` of each row."""
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]


def _blocks(logits: jax.Array, size: int) -> jax.Array:
    return _padded(logits, size).reshape(len(logits), -1, size)


def _padded(logits: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % multiple)), constant_values=-jnp.inf)
