"""Drawing tokens on the device. A token depends on its logits, its settings, its seed and its position, and on nothing
else in the batch: row `i` of the arguments decides row `i` of the result, to the last bit, for any number of rows from
8 up. So whatever is skipped because no row asks for it must leave the rows that do not ask for it as they are.

Nothing here sorts the vocabulary, or makes noise for all of it: on a CPU both cost more than the model does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.errors import InvalidSampling
from slipstream.types import MAX_BIASES, MAX_STOP_TOKENS, SamplingParams

Column: TypeAlias = Any
"""A numpy array on the host, a JAX array inside a program."""
Row: TypeAlias = bytes
"""One sample's settings, packed once and stacked at every step."""

MAX_STOPS = MAX_STOP_TOKENS + 8
"""A request's stop tokens and the model's own."""
BLOCK = 128
"""Tokens whose weights are summed together: a draw picks a block and then a token in it."""
NEAR = 128
"""Likeliest tokens that top-k and top-p look at first. Where they do not suffice, the whole vocabulary is bisected, at
many times the price."""
LARGEST = 1e30
"""Biases end here, and banned tokens get its negative: differences of such numbers are finite, so that no NaN arises."""


# --- on the host ------------------------------------------------------------------------------------------------------

_RICH = ("repetition", "presence", "frequency", "prompt_length", "bias_ids", "bias")
_PACKED = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.uint32, (2,)),
        ("sample_index", np.int32),
        ("stop_ids", np.int32, (MAX_STOPS,)),
        ("min_length", np.int32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("prompt_length", np.int32),
        ("bias_ids", np.int32, (MAX_BIASES,)),
        ("bias", np.float32, (MAX_BIASES,)),
    ]
)


class Settings(NamedTuple):
    """One row per row of the batch. A neutral row, as padding has it, is greedy and asks for no work."""

    temperature: Column
    top_k: Column
    top_p: Column
    min_p: Column
    seed: Column
    """`[rows, 2]`: the high and the low 32 bits."""
    sample_index: Column
    stop_ids: Column
    """`[rows, MAX_STOPS]`, -1 where there is none."""
    min_length: Column
    """Stop tokens are not drawn at positions before this one."""
    # From here on None where no row needs them: the plain programs do not read them.
    repetition: Column = None
    presence: Column = None
    frequency: Column = None
    prompt_length: Column = None
    bias_ids: Column = None
    """`[rows, MAX_BIASES]`, -1 where there is none."""
    bias: Column = None

    @classmethod
    def for_rows(cls, num_rows: int, rich: bool = True) -> Settings:
        """Neutral rows, to be filled by `put`."""
        return cls.stack((), num_rows, rich)

    @classmethod
    def row(
        cls, sampling: SamplingParams, seed: int, sample_index: int, prompt_length: int, stops: Sequence[int]
    ) -> Row:
        """`stops`: every token that ends this sample, the model's own among them unless they are to be ignored."""
        return _record(sampling, seed, sample_index, prompt_length, stops).tobytes()

    @classmethod
    def stack(cls, rows: Sequence[Row], num_rows: int, rich: bool = True) -> Settings:
        """New arrays, of `num_rows` rows, those after `rows` neutral."""
        packed = np.frombuffer(b"".join([*rows, _NEUTRAL * (num_rows - len(rows))]), _PACKED)
        return cls(*(packed[name].copy() if rich or name not in _RICH else None for name in cls._fields))

    def put(
        self, row: int, sampling: SamplingParams, seed: int, sample_index: int, prompt_length: int, stops: Sequence[int]
    ) -> None:
        record = _record(sampling, seed, sample_index, prompt_length, stops)
        for name, column in zip(self._fields, self):
            if column is not None:
                column[row] = record[name]


def is_rich(sampling: SamplingParams) -> bool:
    """Whether its tokens need more than a plain program offers: penalties, biases or top logprobs."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return penalties != (1, 0, 0) or bool(sampling.logit_bias) or sampling.top_logprobs > 0


def _record(
    sampling: SamplingParams, seed: int, sample_index: int, prompt_length: int, stops: Sequence[int]
) -> np.ndarray:
    if len(stops) > MAX_STOPS:
        raise InvalidSampling(
            f"at most {MAX_STOPS} tokens can end a completion, got {len(stops)}: the request's stop_token_ids and the "
            "model's end-of-sequence tokens; name fewer stop_token_ids, or set ignore_eos"
        )
    temperature = np.float32(sampling.temperature)
    record = np.zeros((), _PACKED)
    # Below the normal numbers a device may round to zero, and divide by it.
    record["temperature"] = temperature if temperature >= np.finfo(np.float32).tiny else 0
    record["top_k"], record["top_p"], record["min_p"] = sampling.top_k, sampling.top_p, sampling.min_p
    record["seed"], record["sample_index"] = (seed >> 32, seed & 0xFFFFFFFF), sample_index
    record["stop_ids"][...] = -1
    record["stop_ids"][: len(stops)] = stops
    record["min_length"] = min(prompt_length + sampling.min_tokens, 2**31 - 1)
    record["repetition"] = sampling.repetition_penalty
    record["presence"], record["frequency"] = sampling.presence_penalty, sampling.frequency_penalty
    record["prompt_length"] = prompt_length
    record["bias_ids"][...] = -1
    for i, (token, bias) in enumerate(sampling.logit_bias):
        record["bias_ids"][i], record["bias"][i] = token, min(max(bias, -LARGEST), LARGEST)
    return record


_NEUTRAL = _record(SamplingParams(temperature=0), 0, 0, 0, ()).tobytes()


# --- on the device ----------------------------------------------------------------------------------------------------


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
    raw = _padded(logits)
    banned = positions < settings.min_length
    random = settings.temperature > 0
    temperature = jnp.where(random, settings.temperature, 1.0)

    edited = raw
    untouched = ~banned & (temperature == 1) & ~_truncates(settings, logits.shape[1])
    if counts is not None:
        edited = _penalised(_biased(raw, settings), settings, counts)
        untouched &= ~_needs_counts(settings)
    edited = jax.lax.cond(banned.any(), lambda: _without_stops(edited, banned, settings.stop_ids), lambda: edited)

    raw_peak, peak = raw.max(1), edited.max(1)
    raw_sums = _block_sums(_weights(raw, raw_peak))
    raw_total = raw_sums.sum(1)

    def changed_sums() -> tuple[jax.Array, jax.Array]:
        cut = _cut(edited, peak, temperature, settings, logits.shape[1])
        return _block_sums(_weights(edited, peak, temperature, cut)), cut

    everything = jnp.full(peak.shape, jnp.inf)
    sums, cut = jax.lax.cond((random & ~untouched).any(), changed_sums, lambda: (raw_sums, everything))
    sums, cut = jnp.where(untouched[:, None], raw_sums, sums), jnp.where(untouched, everything, cut)

    uniform = _uniform(settings, positions)
    block = pick(sums, uniform[:, 0])
    inside = pick(_weights(_block(edited, block), peak, temperature, cut), uniform[:, 1])
    token = jnp.where(random, block * BLOCK + inside, _first_largest(edited, peak))
    raw_logprob = _logprob(_at(raw, token), raw_peak, 1.0, raw_total)
    logprob = _logprob(_at(edited, token), peak, temperature, sums.sum(1))
    top_values, top_ids = largest(raw, num_top)
    return Drawn(
        token,
        jnp.where(random & ~untouched, logprob, raw_logprob),
        raw_logprob,
        (token[:, None] == settings.stop_ids).any(1),
        top_ids,
        _logprob(top_values, raw_peak[:, None], 1.0, raw_total[:, None]),
    )


def raw_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """`[rows]`: of one token per row, with the bits that `sample` would give it."""
    raw = _padded(logits)
    peak = raw.max(1)
    return _logprob(_at(raw, tokens), peak, 1.0, _block_sums(_weights(raw, peak)).sum(1))


# --- what changes the logits ---


def score_rows(logits: jax.Array, tokens: jax.Array, num_top: int) -> tuple[jax.Array, ...]:
    """Raw logprobs of one token per row, with the bits that `sample` would give it; and, where asked for, ids and raw
    logprobs of the `num_top` likeliest."""
    raw = _padded(logits)
    peak = raw.max(1)
    total = _block_sums(_weights(raw, peak)).sum(1)
    chosen = _logprob(_at(raw, tokens), peak, 1.0, total)
    if not num_top:
        return (chosen,)
    values, ids = largest(raw, num_top)
    return chosen, ids, _logprob(values, peak[:, None], 1.0, total[:, None])


def _biased(logits: jax.Array, settings: Settings) -> jax.Array:
    ids = jnp.where(settings.bias_ids >= 0, settings.bias_ids, logits.shape[1])
    return logits.at[np.arange(len(logits))[:, None], ids].add(settings.bias, mode="drop")


def _penalised(logits: jax.Array, settings: Settings, counts: Counts) -> jax.Array:
    padding = ((0, 0), (0, logits.shape[1] - counts.seen.shape[1]))
    seen, completion = jnp.pad(counts.seen, padding), jnp.pad(counts.completion, padding)
    repetition = settings.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen & (repetition != 1), repeated, logits)
    lessened = logits - settings.frequency[:, None] * completion - settings.presence[:, None]
    return jnp.where(completion > 0, lessened, logits)


def _needs_counts(settings: Settings) -> jax.Array:
    penalised = (settings.repetition != 1) | (settings.presence != 0) | (settings.frequency != 0)
    return penalised | (settings.bias_ids >= 0).any(1)


def _without_stops(logits: jax.Array, banned: jax.Array, stop_ids: jax.Array) -> jax.Array:
    ids = jnp.where(banned[:, None] & (stop_ids >= 0), stop_ids, logits.shape[1])
    return logits.at[np.arange(len(logits))[:, None], ids].set(-LARGEST, mode="drop")


# --- truncation ---


def _cuts_k(settings: Settings, vocab: int) -> jax.Array:
    return (settings.top_k > 0) & (settings.top_k < vocab)


def _truncates(settings: Settings, vocab: int) -> jax.Array:
    return _cuts_k(settings, vocab) | (settings.top_p < 1) | (settings.min_p > 0)


def _cut(logits: jax.Array, peak: jax.Array, temperature: jax.Array, settings: Settings, vocab: int) -> jax.Array:
    """`[rows]`: how far below the largest logit a token may lie to be kept by top-k, then top-p, then min-p. Tokens that
    tie with the last one kept stay."""
    cuts_k, cuts_p = _cuts_k(settings, vocab), settings.top_p < 1
    everything = jnp.full(peak.shape, jnp.inf)

    def top_k_and_p() -> jax.Array:
        near = peak[:, None] - largest(logits, min(NEAR, vocab))[0]
        cut = jax.lax.cond(cuts_k.any(), lambda: _top_k_cut(logits, peak, near, cuts_k, settings), lambda: everything)
        return jax.lax.cond(
            cuts_p.any(), lambda: _top_p_cut(logits, peak, temperature, near, cut, settings), lambda: cut
        )

    cut = jax.lax.cond((cuts_k | cuts_p).any(), top_k_and_p, lambda: everything)
    return jnp.minimum(cut, -temperature * jnp.log(settings.min_p))


def _top_k_cut(logits: jax.Array, peak: jax.Array, near: jax.Array, cuts: jax.Array, settings: Settings) -> jax.Array:
    num_near = near.shape[1]
    cut = jnp.where(cuts, _at(near, jnp.clip(settings.top_k - 1, 0, num_near - 1)), jnp.inf)
    far = cuts & (settings.top_k > num_near)

    def enough(inside: jax.Array) -> jax.Array:
        return inside.sum(1, dtype=jnp.int32) >= settings.top_k

    whole = jnp.full_like(cut, jnp.inf)
    return jax.lax.cond(
        far.any(), lambda: jnp.where(far, _bisect(logits, peak, near[:, -1], whole, far, enough), cut), lambda: cut
    )


def _top_p_cut(
    logits: jax.Array, peak: jax.Array, temperature: jax.Array, near: jax.Array, cut: jax.Array, settings: Settings
) -> jax.Array:
    """Of what `cut` leaves, the fewest whose weights reach their part of the sum."""
    target = settings.top_p * _block_sums(_weights(logits, peak, temperature, cut)).sum(1)
    near_weights = jnp.where(near <= cut[:, None], jnp.exp(-near / temperature[:, None]), 0)
    reached = jnp.cumsum(near_weights, axis=1) >= target[:, None]
    far = (settings.top_p < 1) & ~reached.any(1)
    # The sum may be rounded up, and never be reached: then the cut stays where it was.
    found = jnp.where(settings.top_p < 1, jnp.minimum(cut, _at(near, _first(reached))), cut)

    def bisect() -> jax.Array:
        weights = _weights(logits, peak, temperature, cut)

        def enough(inside: jax.Array) -> jax.Array:
            return _block_sums(jnp.where(inside, weights, 0)).sum(1) >= target

        return jnp.where(far, _bisect(logits, peak, near[:, -1], cut, far, enough), found)

    return jax.lax.cond(far.any(), bisect, lambda: found)


def _bisect(
    logits: jax.Array,
    peak: jax.Array,
    least: jax.Array,
    most: jax.Array,
    asked: jax.Array,
    enough: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The smallest cut in `[least, most]` whose tokens are `enough`, for the rows that are `asked` for. Bisects the bits
    of the cut, which are ordered as the numbers are, since no cut is negative: exact, in at most 31 passes."""
    distance = peak[:, None] - logits
    farthest = jnp.where(jnp.isfinite(distance), distance, 0).max(1)
    high = _bits(jnp.minimum(most, farthest))
    low = jnp.where(asked, _bits(least) - 1, high)  # never enough: one less would have been found

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        cut = jax.lax.bitcast_convert_type(middle, jnp.float32)
        found = enough(peak[:, None] - logits <= cut[:, None])
        return jnp.where(found, low, middle), jnp.where(found, middle, high)

    _, high = jax.lax.while_loop(lambda bounds: (bounds[1] - bounds[0] > 1).any(), halve, (low, high))
    return jax.lax.bitcast_convert_type(high, jnp.float32)


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def largest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest and their ids, as `jax.lax.top_k`, ten times as fast: they lie in the blocks whose own largest
    are the `count` largest."""
    if count == 0:
        return jnp.zeros((len(logits), 0)), jnp.zeros((len(logits), 0), jnp.int32)
    size = 16
    blocks = logits.reshape(len(logits), -1, size)
    _, ids = jax.lax.top_k(blocks.max(2), min(count, blocks.shape[1]))
    ids = jnp.sort(ids, axis=1)  # so that of equal ones the smaller id comes first
    candidates = jnp.take_along_axis(blocks, ids[:, :, None], axis=1).reshape(len(logits), -1)
    values, places = jax.lax.top_k(candidates, count)
    return values, jnp.take_along_axis(ids, places // size, axis=1) * size + places % size


# --- weights and draws ---


def _padded(logits: jax.Array) -> jax.Array:
    """To whole blocks; what is added has no weight."""
    return jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % BLOCK)), constant_values=-jnp.inf)


def _weights(
    logits: jax.Array, peak: jax.Array, temperature: jax.Array | None = None, cut: jax.Array | None = None
) -> jax.Array:
    """Probabilities relative to that of the likeliest token, and 0 for what lies farther below it than the cut."""
    distance = peak[:, None] - logits
    if temperature is None or cut is None:
        return jnp.exp(-distance)
    return jnp.where(distance <= cut[:, None], jnp.exp(-distance / temperature[:, None]), 0)


def _block_sums(weights: jax.Array) -> jax.Array:
    return weights.reshape(len(weights), -1, BLOCK).sum(2)


def _logprob(logit: jax.Array, peak: jax.Array, temperature: jax.Array | float, total: jax.Array) -> jax.Array:
    """Not through the logsumexp, which is as large as the logits are and has lost their last bits."""
    return (logit - peak) / temperature - jnp.log(total)


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
    of weight zero: a sum of parts may be rounded so that it grows where nothing is added, or never reaches its end."""
    sums = jnp.cumsum(weights, axis=1)
    places = jnp.arange(weights.shape[1], dtype=jnp.int32)
    past = (sums > (uniform * sums[:, -1])[:, None]) & (weights > 0)
    last = jnp.where(weights > 0, places, 0).max(1)
    return jnp.minimum(jnp.where(past, places, places[-1]).min(1), last)


def _first(flags: jax.Array) -> jax.Array:
    """Index of the first that is set in each row; the last index where none is."""
    places = jnp.arange(flags.shape[1], dtype=jnp.int32)
    return jnp.where(flags, places, places[-1]).min(1)


def _first_largest(logits: jax.Array, peak: jax.Array) -> jax.Array:
    """As argmax, several times as fast."""
    block = _first(logits.reshape(len(logits), -1, BLOCK).max(2) == peak[:, None])
    return block * BLOCK + _first(_block(logits, block) == peak[:, None])


def _block(logits: jax.Array, block: jax.Array) -> jax.Array:
    blocks = logits.reshape(len(logits), -1, BLOCK)
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]
