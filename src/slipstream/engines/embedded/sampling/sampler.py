"""Token sampling on the device.

A token depends only on its logits, settings, seed and position, not on the rest of the batch: row `i` of the arguments
determines row `i` of the result, to the bit, for any number of rows from 8 up. So a computation that is skipped when no row
needs it must leave rows that do not need it unchanged.

Random numbers come from a counter-based PRNG. Nothing sorts the vocabulary or generates noise for all of it: on CPU either
would cost more than the model."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.engines.embedded.sampling.batch_settings import LARGEST, BatchSettings
from slipstream.engines.embedded.sampling.logits import (
    argmax,
    lane_logits,
    lane_sums,
    pairwise_sum,
    relative_probs,
    take_at,
    top_k_logits,
    weighted_choice,
)
from slipstream.engines.embedded.sampling.truncation import is_truncated, truncation_cut


class SampledTokens(NamedTuple):
    token: jax.Array
    logprob: jax.Array
    """Log probability under the sampling distribution; raw if greedy."""
    raw_logprob: jax.Array
    stopped: jax.Array
    """Whether the token is a stop token of its row."""
    top_ids: jax.Array
    """`[rows, num_top]`, likeliest first, ties by ascending id."""
    top_logprobs: jax.Array
    """Raw logprobs of `top_ids`."""


class TokenCounts(NamedTuple):
    """Token counts of the sequences so far, for the penalties."""

    completion: jax.Array
    """`[rows, vocab]`: occurrences of each token in the completion."""
    seen: jax.Array
    """`[rows, vocab]`: whether the token is in the prompt or the completion."""


def count_tokens(tokens: jax.Array, prompt_length: jax.Array, vocab: int) -> TokenCounts:
    """Count the tokens of prompts and completions so far. `tokens [rows, length]` is padded with -1."""
    rows, places = np.arange(tokens.shape[0])[:, None], np.arange(tokens.shape[1])
    tokens = jnp.where(tokens >= 0, tokens, vocab)  # out of range, so dropped; -1 would wrap around
    drawn = (places >= prompt_length[:, None]).astype(jnp.int32)
    return TokenCounts(
        jnp.zeros((tokens.shape[0], vocab), jnp.int32).at[rows, tokens].add(drawn, mode="drop"),
        jnp.zeros((tokens.shape[0], vocab), bool).at[rows, tokens].set(True, mode="drop"),
    )


def add_tokens(counts: TokenCounts, token: jax.Array, active: jax.Array) -> TokenCounts:
    """Add one completion token per `active` row."""
    rows, token = np.arange(token.shape[0]), jnp.where(active, token, counts.seen.shape[1])
    return TokenCounts(
        counts.completion.at[rows, token].add(1, mode="drop"), counts.seen.at[rows, token].set(True, mode="drop")
    )


def sample(
    logits: jax.Array,
    positions: jax.Array,
    settings: BatchSettings,
    counts: TokenCounts | None = None,
    num_top: int = 0,
) -> SampledTokens:
    """Draw one token per row of `logits [rows, vocab]` (float32). `positions` are the positions of the new tokens.

    Without `counts`, logit biases and penalties are not applied."""
    random, banned = settings.temperature > 0, positions < settings.min_length
    temperature = jnp.where(random, settings.temperature, 1.0)
    changed = banned | (random & ((temperature != 1) | is_truncated(settings, logits.shape[1])))
    if counts is not None:
        changed |= _needs_counts(settings)
    peak = logits.max(1)
    sums = lane_sums(logits, lambda chunk: relative_probs(peak[:, None] - chunk))
    uniform = _uniform(settings, positions)
    one, no_cut = jnp.ones_like(peak), jnp.full_like(peak, jnp.inf)

    def processed() -> tuple[jax.Array, jax.Array]:
        edited = logits if counts is None else _penalized(_add_bias(logits, settings), settings, counts)
        edited = _ban_stop_ids(edited, banned, settings.stop_ids)
        edited_peak = edited.max(1)
        cut = jnp.where(changed, truncation_cut(edited, edited_peak, temperature, settings), no_cut)
        edited_sums = lane_sums(
            edited, lambda chunk: relative_probs(edited_peak[:, None] - chunk, 1 / temperature, cut)
        )
        edited_sums = jnp.where(changed[:, None], edited_sums, sums)
        return _draw(edited, edited_peak, edited_sums, 1 / temperature, cut, random, uniform)

    # The branches return small arrays: one as large as the logits would be copied in either.
    token, probability = jax.lax.cond(
        changed.any(), processed, lambda: _draw(logits, peak, sums, one, no_cut, random, uniform)
    )
    total = pairwise_sum(sums)
    raw_logprob = _raw_logprob(take_at(logits, token), peak, total)
    top_values, top_ids = top_k_logits(logits, num_top)
    return SampledTokens(
        token,
        jnp.where(random & changed, jnp.log(probability), raw_logprob),
        raw_logprob,
        (token[:, None] == settings.stop_ids).any(1),
        top_ids,
        _raw_logprob(top_values, peak[:, None], total[:, None]),
    )


def raw_logprobs(logits: jax.Array, tokens: jax.Array, num_top: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Raw logprobs `[rows]` of one token per row, with the same bits as from `sample`; ids and raw logprobs of the `num_top`
    likeliest tokens, `[rows, num_top]`."""
    peak = logits.max(1)
    total = pairwise_sum(lane_sums(logits, lambda chunk: relative_probs(peak[:, None] - chunk)))
    values, ids = top_k_logits(logits, num_top)
    top = _raw_logprob(values, peak[:, None], total[:, None])
    return _raw_logprob(take_at(logits, tokens), peak, total), ids, top


def sampling_logprobs(logits: jax.Array, tokens: jax.Array, temperature: jax.Array) -> jax.Array:
    """Logprobs `[rows]` of one token per row at a temperature, without other settings, with the same bits as from `sample`."""

    def processed() -> jax.Array:
        peak, rate = logits.max(1), jnp.full(len(logits), 1 / temperature)
        cut = jnp.full_like(peak, jnp.inf)
        sums = lane_sums(logits, lambda chunk: relative_probs(peak[:, None] - chunk, rate, cut))
        weight = relative_probs((peak - take_at(logits, tokens))[:, None], rate, cut)[:, 0]
        return jnp.log(weight / pairwise_sum(sums))

    return jax.lax.cond(temperature == 1, lambda: raw_logprobs(logits, tokens)[0], processed)


# --- logit processors ---


def _add_bias(logits: jax.Array, settings: BatchSettings) -> jax.Array:
    ids = jnp.where(settings.bias_ids >= 0, settings.bias_ids, logits.shape[1])
    return logits.at[np.arange(len(logits))[:, None], ids].add(settings.bias, mode="drop")


def _penalized(logits: jax.Array, settings: BatchSettings, counts: TokenCounts) -> jax.Array:
    repetition = settings.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts.seen & (repetition != 1), repeated, logits)
    reduced = logits - settings.frequency[:, None] * counts.completion - settings.presence[:, None]
    return jnp.where(counts.completion > 0, reduced, logits)


def _needs_counts(settings: BatchSettings) -> jax.Array:
    penalized = (settings.repetition != 1) | (settings.presence != 0) | (settings.frequency != 0)
    return penalized | (settings.bias_ids >= 0).any(1)


def _ban_stop_ids(logits: jax.Array, banned: jax.Array, stop_ids: jax.Array) -> jax.Array:
    ids = jnp.where(banned[:, None] & (stop_ids >= 0), stop_ids, logits.shape[1])
    return logits.at[np.arange(len(logits))[:, None], ids].set(-LARGEST, mode="drop")


# --- probabilities and draws ---


def _raw_logprob(logit: jax.Array, peak: jax.Array, total: jax.Array) -> jax.Array:
    """Avoids the logsumexp, which is as large as the logits and therefore rounded more coarsely."""
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
    """Draw tokens where `random`, else take the likeliest. Returns tokens, and the probabilities of the random ones."""
    lane = weighted_choice(sums, uniform[:, 0])
    weights = relative_probs(peak[:, None] - lane_logits(logits, lane), rate, cut)
    place = weighted_choice(weights, uniform[:, 1])
    token = jnp.where(random, place * sums.shape[1] + lane, argmax(logits, peak))
    return token, take_at(weights, place) / pairwise_sum(sums)


def _uniform(settings: BatchSettings, positions: jax.Array) -> jax.Array:
    """`[rows, 2]` in [0, 1), 24 bits each: the two words of a counter-based PRNG key of (seed, sample index, position)."""

    def row(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        # A fixed generator rather than JAX's default, and the key rather than bits derived from it: tokens must not
        # depend on a process's JAX settings.
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, sample_index), position))

    words = jax.vmap(row)(settings.seed, settings.sample_index, positions)
    return (words >> 8).astype(jnp.float32) * 2.0**-24
