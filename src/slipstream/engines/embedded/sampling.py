"""Drawing tokens on the device. A token depends on its logits, its settings, its seed and its position, and on nothing
else in the batch: row `i` of the arguments decides row `i` of the result, to the last bit, for any number of rows from
8 up. So whatever is skipped because no row asks for it must leave the rows that do not ask for it as they are.

Nothing here sorts the vocabulary, or makes noise for all of it: on a CPU both cost more than the model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.engines.embedded.settings import LARGEST, Settings

MAX_LANES = 1024
"""The vocabulary is dealt out to so many lanes, token `i` to lane `i % lanes`, or to fewer if it is small. A draw picks a
lane, by the sum of its weights, and then a token in it."""
NEAR = 128
"""Likeliest tokens that top-k and top-p look at first. Where they do not suffice, the whole vocabulary is bisected, at
many times the price."""


class Drawn(NamedTuple):
    token: jax.Array
    logprob: jax.Array
    """Under the distribution that was drawn from; raw where greedy."""
    raw_logprob: jax.Array
    stopped: jax.Array
    """The token is one of the row's stop tokens."""
    top_ids: jax.Array
    """`[rows, num_top]`, likeliest first; of equally likely ones the smaller id first."""
    top_logprobs: jax.Array
    """Raw."""


class Counts(NamedTuple):
    """What the penalties need to know of the sequences so far."""

    completion: jax.Array
    """`[rows, vocab]`: how often each token is in the completion."""
    seen: jax.Array
    """`[rows, vocab]`: whether it is in prompt or completion."""


def counts_of(tokens: jax.Array, prompt_length: jax.Array, vocab: int) -> Counts:
    """`tokens [rows, length]`: prompts and completions so far, -1 after their ends."""
    rows, places = np.arange(tokens.shape[0])[:, None], np.arange(tokens.shape[1])
    tokens = jnp.where(tokens >= 0, tokens, vocab)  # past the end, where it is dropped: -1 would be the last token
    drawn = (places >= prompt_length[:, None]).astype(jnp.int32)
    return Counts(
        jnp.zeros((tokens.shape[0], vocab), jnp.int32).at[rows, tokens].add(drawn, mode="drop"),
        jnp.zeros((tokens.shape[0], vocab), bool).at[rows, tokens].set(True, mode="drop"),
    )


def counts_with(counts: Counts, token: jax.Array, active: jax.Array) -> Counts:
    """After one more token of the completions of the `active` rows."""
    rows, token = np.arange(token.shape[0]), jnp.where(active, token, counts.seen.shape[1])
    return Counts(
        counts.completion.at[rows, token].add(1, mode="drop"), counts.seen.at[rows, token].set(True, mode="drop")
    )


def sample(
    logits: jax.Array, positions: jax.Array, settings: Settings, counts: Counts | None = None, num_top: int = 0
) -> Drawn:
    """One token per row of `logits [rows, vocab]` (float32); `positions` are those that the new tokens will take.

    Without `counts` there are no biases and no penalties, whatever the settings say."""
    random, banned = settings.temperature > 0, positions < settings.min_length
    temperature = jnp.where(random, settings.temperature, 1.0)
    truncated = _cuts_k(settings, logits.shape[1]) | _cuts_p(settings) | (settings.min_p > 0)
    changed = banned | (random & ((temperature != 1) | truncated))
    if counts is not None:
        changed |= _needs_counts(settings)
    peak = logits.max(1)
    sums = _lane_sums(logits, lambda chunk: _weights(peak[:, None] - chunk))
    uniform = _uniform(settings, positions)
    one, whole = jnp.ones_like(peak), jnp.full_like(peak, jnp.inf)

    def processed() -> tuple[jax.Array, jax.Array]:
        edited = logits if counts is None else _penalised(_biased(logits, settings), settings, counts)
        edited = _without_stops(edited, banned, settings.stop_ids)
        edited_peak = edited.max(1)
        cut = jnp.where(changed, _cut(edited, edited_peak, temperature, settings), whole)
        edited_sums = _lane_sums(edited, lambda chunk: _weights(edited_peak[:, None] - chunk, 1 / temperature, cut))
        edited_sums = jnp.where(changed[:, None], edited_sums, sums)
        return _draw(edited, edited_peak, edited_sums, 1 / temperature, cut, random, uniform)

    # The branches return little: an array as large as the logits would be copied in either.
    token, probability = jax.lax.cond(
        changed.any(), processed, lambda: _draw(logits, peak, sums, one, whole, random, uniform)
    )
    total = _total(sums)
    raw_logprob = _raw_logprob(_at(logits, token), peak, total)
    top_values, top_ids = largest(logits, num_top)
    return Drawn(
        token,
        jnp.where(random & changed, jnp.log(probability), raw_logprob),
        raw_logprob,
        (token[:, None] == settings.stop_ids).any(1),
        top_ids,
        _raw_logprob(top_values, peak[:, None], total[:, None]),
    )


def raw_logprobs(logits: jax.Array, tokens: jax.Array, num_top: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`[rows]`: of one token per row, with the bits that `sample` would give it; and ids and raw logprobs of the `num_top`
    likeliest, `[rows, num_top]`."""
    peak = logits.max(1)
    total = _total(_lane_sums(logits, lambda chunk: _weights(peak[:, None] - chunk)))
    values, ids = largest(logits, num_top)
    top = _raw_logprob(values, peak[:, None], total[:, None])
    return _raw_logprob(_at(logits, tokens), peak, total), ids, top


# --- what changes the logits ---


def _biased(logits: jax.Array, settings: Settings) -> jax.Array:
    ids = jnp.where(settings.bias_ids >= 0, settings.bias_ids, logits.shape[1])
    return logits.at[np.arange(len(logits))[:, None], ids].add(settings.bias, mode="drop")


def _penalised(logits: jax.Array, settings: Settings, counts: Counts) -> jax.Array:
    repetition = settings.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts.seen & (repetition != 1), repeated, logits)
    lessened = logits - settings.frequency[:, None] * counts.completion - settings.presence[:, None]
    return jnp.where(counts.completion > 0, lessened, logits)


def _needs_counts(settings: Settings) -> jax.Array:
    penalised = (settings.repetition != 1) | (settings.presence != 0) | (settings.frequency != 0)
    return penalised | (settings.bias_ids >= 0).any(1)


def _without_stops(logits: jax.Array, banned: jax.Array, stop_ids: jax.Array) -> jax.Array:
    ids = jnp.where(banned[:, None] & (stop_ids >= 0), stop_ids, logits.shape[1])
    return logits.at[np.arange(len(logits))[:, None], ids].set(-LARGEST, mode="drop")


# --- truncation ---


def _cuts_k(settings: Settings, vocab: int) -> jax.Array:
    return (settings.temperature > 0) & (settings.top_k > 0) & (settings.top_k < vocab)


def _cuts_p(settings: Settings) -> jax.Array:
    return (settings.temperature > 0) & (settings.top_p < 1)


def _cut(logits: jax.Array, peak: jax.Array, temperature: jax.Array, settings: Settings) -> jax.Array:
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

    last = _at(near, jnp.clip(settings.top_k - 1, 0, num_near - 1))
    whole = jnp.full(peak.shape, jnp.inf)
    return jnp.where(far, _bisect(logits, peak, near[:, -1], whole, far, enough), last)


def _top_p_cut(
    logits: jax.Array, peak: jax.Array, temperature: jax.Array, near: jax.Array, cut: jax.Array, settings: Settings
) -> jax.Array:
    """Leaves, of what `cut` leaves, the fewest whose weights reach `top_p` of the sum."""

    def mass(cut: jax.Array) -> jax.Array:
        return _total(_lane_sums(logits, lambda chunk: _weights(peak[:, None] - chunk, 1 / temperature, cut)))

    target = settings.top_p * mass(cut)
    reached = jnp.cumsum(_weights(near, 1 / temperature, cut), axis=1) >= target[:, None]
    cuts = _cuts_p(settings)
    far = cuts & ~reached.any(1)
    found = _bisect(logits, peak, near[:, -1], cut, far, lambda cut: mass(cut) >= target)
    return jnp.where(far, found, jnp.where(cuts, _at(near, _first(reached)), cut))


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


# --- weights and draws ---


def _weights(distance: jax.Array, rate: jax.Array | None = None, cut: jax.Array | None = None) -> jax.Array:
    """Probabilities relative to that of the likeliest token, from the distances below its logit; 0 beyond the cut. `rate`
    is one over the temperature."""
    if rate is None or cut is None:
        return jnp.exp(-distance)
    return jnp.where(distance <= cut[:, None], jnp.exp(-(distance * rate[:, None])), 0)


def num_lanes(vocab: int) -> int:
    """A power of two, so that lanes can be added up by halves."""
    return min(MAX_LANES, 1 << (vocab - 1).bit_length())


def _lane_sums(logits: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`[rows, lanes]`. Added up element by element, as is every sum of fractions here: the order in which a reduction
    adds depends on the number of rows."""
    lanes = num_lanes(logits.shape[1])
    num_chunks, rest = divmod(logits.shape[1], lanes)

    def add(chunk: jax.Array, sums: jax.Array) -> jax.Array:
        return sums + weigh(jax.lax.dynamic_slice_in_dim(logits, chunk * lanes, lanes, axis=1))

    tail = weigh(_padded(logits[:, num_chunks * lanes :], lanes)) if rest else jnp.zeros((len(logits), lanes))
    return jax.lax.fori_loop(0, num_chunks, add, tail) if num_chunks else tail


def _lane(logits: jax.Array, lane: jax.Array) -> jax.Array:
    tokens = lane[:, None] + np.arange(0, logits.shape[1], num_lanes(logits.shape[1]))
    return jnp.take_along_axis(logits, tokens, axis=1, mode="fill", fill_value=-jnp.inf)


def _total(sums: jax.Array) -> jax.Array:
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def _raw_logprob(logit: jax.Array, peak: jax.Array, total: jax.Array) -> jax.Array:
    """Not by way of the logsumexp, which is as large as the logits, and rounded accordingly."""
    return (logit - peak) - jnp.log(total)


def _draw(
    logits: jax.Array,
    peak: jax.Array,
    sums: jax.Array,
    rate: jax.Array,
    cut: jax.Array,
    random: jax.Array,
    uniform: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Tokens, and the probabilities of those that are `random`; the others are the likeliest."""
    lane = pick(sums, uniform[:, 0])
    weights = _weights(peak[:, None] - _lane(logits, lane), rate, cut)
    place = pick(weights, uniform[:, 1])
    token = jnp.where(random, place * sums.shape[1] + lane, _first_largest(logits, peak))
    return token, _at(weights, place) / _total(sums)


def _uniform(settings: Settings, positions: jax.Array) -> jax.Array:
    """`[rows, 2]` in [0, 1), 24 bits each: the two words of a counter-based key of (seed, sample index, position)."""

    def row(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        # Named, not the default generator, and the key itself, not bits made from it: tokens must not depend on a
        # process's JAX settings.
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, sample_index), position))

    words = jax.vmap(row)(settings.seed, settings.sample_index, positions)
    return (words >> 8).astype(jnp.float32) * 2.0**-24


def pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """`[rows]`: index `i` of `weights [rows, n]` with probability `weights[i] / sum`, for `uniform` in [0, 1). Never one
    of weight zero: rounded sums may grow where nothing is added, and may stay short of their end."""
    sums = jnp.cumsum(weights, axis=1)
    first = _first((sums > (uniform * sums[:, -1])[:, None]) & (weights > 0))
    last = jnp.where(weights > 0, jnp.arange(weights.shape[1], dtype=jnp.int32), 0).max(1)
    return jnp.minimum(first, last)


def _first_largest(logits: jax.Array, peak: jax.Array) -> jax.Array:
    """As argmax, several times as fast."""
    size = 128
    blocks = _blocks(logits, size)
    block = _first(blocks.max(2) == peak[:, None])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * size + _first(inside == peak[:, None])


def _first(flags: jax.Array) -> jax.Array:
    """Index of the first that is set in each row; the last index where none is."""
    places = jnp.arange(flags.shape[1], dtype=jnp.int32)
    return jnp.where(flags, places, places[-1]).min(1)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]


def _blocks(logits: jax.Array, size: int) -> jax.Array:
    return _padded(logits, size).reshape(len(logits), -1, size)


def _padded(logits: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % multiple)), constant_values=-jnp.inf)
