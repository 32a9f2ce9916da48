"""Drawing tokens on the device. A token depends on its logits, its settings, its seed and its position, and on nothing
else in the batch: row `i` of the arguments decides row `i` of the result, to the last bit, for any number of rows from
8 up. So whatever is skipped because no row asks for it must leave the rows that do not ask for it as they are.

Nothing sorts the vocabulary, or makes noise for all of it: on a CPU both cost more than the model does."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.engines.embedded.logits import (
    at,
    first_largest,
    lane_of,
    lane_sums,
    largest,
    pick,
    total_of,
    weights_of,
)
from slipstream.engines.embedded.settings import LARGEST, Settings
from slipstream.engines.embedded.truncation import cut_of, is_truncated


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
    changed = banned | (random & ((temperature != 1) | is_truncated(settings, logits.shape[1])))
    if counts is not None:
        changed |= _needs_counts(settings)
    peak = logits.max(1)
    sums = lane_sums(logits, lambda chunk: weights_of(peak[:, None] - chunk))
    uniform = _uniform(settings, positions)
    one, whole = jnp.ones_like(peak), jnp.full_like(peak, jnp.inf)

    def processed() -> tuple[jax.Array, jax.Array]:
        edited = logits if counts is None else _penalised(_biased(logits, settings), settings, counts)
        edited = _without_stops(edited, banned, settings.stop_ids)
        edited_peak = edited.max(1)
        cut = jnp.where(changed, cut_of(edited, edited_peak, temperature, settings), whole)
        edited_sums = lane_sums(edited, lambda chunk: weights_of(edited_peak[:, None] - chunk, 1 / temperature, cut))
        edited_sums = jnp.where(changed[:, None], edited_sums, sums)
        return _draw(edited, edited_peak, edited_sums, 1 / temperature, cut, random, uniform)

    # The branches return little: an array as large as the logits would be copied in either.
    token, probability = jax.lax.cond(
        changed.any(), processed, lambda: _draw(logits, peak, sums, one, whole, random, uniform)
    )
    total = total_of(sums)
    raw_logprob = _raw_logprob(at(logits, token), peak, total)
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
    total = total_of(lane_sums(logits, lambda chunk: weights_of(peak[:, None] - chunk)))
    values, ids = largest(logits, num_top)
    top = _raw_logprob(values, peak[:, None], total[:, None])
    return _raw_logprob(at(logits, tokens), peak, total), ids, top


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


# --- weights and draws ---


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
    weights = weights_of(peak[:, None] - lane_of(logits, lane), rate, cut)
    place = pick(weights, uniform[:, 1])
    token = jnp.where(random, place * sums.shape[1] + lane, first_largest(logits, peak))
    return token, at(weights, place) / total_of(sums)


def _uniform(settings: Settings, positions: jax.Array) -> jax.Array:
    """`[rows, 2]` in [0, 1), 24 bits each: the two words of a counter-based key of (seed, sample index, position)."""

    def row(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        # Named, not the default generator, and the key itself, not bits made from it: tokens must not depend on a
        # process's JAX settings.
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, sample_index), position))

    words = jax.vmap(row)(settings.seed, settings.sample_index, positions)
    return (words >> 8).astype(jnp.float32) * 2.0**-24
