"""The sampler against naive arithmetic, and its draws against the expected distribution."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.engines.embedded.sampling import sampler
from slipstream.engines.embedded.sampling.batch_settings import BatchSettings
from slipstream.engines.embedded.sampling.logits import weighted_choice
from slipstream.engines.embedded.sampling.sampler import SampledTokens, TokenCounts
from slipstream.engines.embedded.sampling.truncation import NEAR
from slipstream.types import SamplingParams
from tests.conformance.engines import log_softmax
from tests.engines.naive import edited

_sample = jax.jit(sampler.sample, static_argnums=4)
_count_tokens = jax.jit(sampler.count_tokens, static_argnums=2)
_weighted_choice = jax.jit(weighted_choice)

STOPS = (1, 4)
PROMPT, COMPLETION = (3, 7, 7, 2), (7, 9, 9, 9, 0)
VOCAB, BIG = 24, 2999
"""The big one has several tokens per lane, more tokens than top-k considers first, and is no round multiple."""


def naive(logits: np.ndarray, params: SamplingParams, position: int = 99) -> np.ndarray:
    """The distribution after `PROMPT` and `COMPLETION`, in double precision. `position` is that of the token to draw."""
    banned = STOPS if position < len(PROMPT) + params.min_tokens else ()
    values = edited(logits, params, PROMPT, COMPLETION, banned).tolist()
    top = max(values)
    weights = [float(np.exp((x - top) / (params.temperature or 1))) for x in values]
    order = sorted(range(len(weights)), key=lambda i: -values[i])
    kept = [i for i in order if not params.top_k or values[i] >= values[order[min(params.top_k, len(order)) - 1]]]
    if params.top_p < 1:
        target, mass, number = params.top_p * sum(weights[i] for i in kept), 0.0, 0
        while mass < target and number < len(kept):
            mass, number = mass + weights[kept[number]], number + 1
        kept = [i for i in kept if values[i] >= values[kept[number - 1]]]
    kept = [i for i in kept if weights[i] >= params.min_p]
    result = np.zeros(len(values))
    result[kept] = np.array(weights)[kept] / sum(weights[i] for i in kept)
    return result


def draw(
    logits: np.ndarray, rows: list[dict[str, Any]], rich: bool = False, num_top: int = 0, positions: Any = 99
) -> SampledTokens:
    """One draw per row in a batch of 128, from shared logits or one set per row."""
    settings = BatchSettings.stack([row(**fields) for fields in rows], 128, rich)
    padded = np.full(128, -1, np.int32)
    padded[: len(rows)] = positions
    many = np.zeros((128, logits.shape[-1]), np.float32)
    many[: len(rows)] = logits
    counts = _count_tokens(history(128), settings.prompt_length, logits.shape[-1]) if rich else None
    drawn = _sample(many, padded, settings, counts, num_top)
    assert all(np.isfinite(column).all() for column in drawn)  # padding included
    return SampledTokens(*(np.asarray(column)[: len(rows)] for column in drawn))


def row(seed: int = 0, sample_index: int = 0, **fields: Any) -> bytes:
    return BatchSettings.row(SamplingParams(**fields), seed, sample_index, len(PROMPT), STOPS)


def history(num_rows: int) -> np.ndarray:
    return np.tile(np.array([*PROMPT, *COMPLETION, -1, -1], np.int32), (num_rows, 1))


def logits_of(seed: int, vocab: int = VOCAB) -> np.ndarray:
    return (2 * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


# --- processors against the naive reference ---

PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 1000},
    {"top_p": 0.05},
    {"top_p": 0.7},
    {"top_p": 0.999},
    {"top_k": 6, "top_p": 0.8, "temperature": 1.5},
    {"min_p": 0.1},
    {"min_p": 0.3, "temperature": 0.6},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.95, "min_p": 0.2, "temperature": 3.0},
    {"min_tokens": 10},
    {"min_tokens": 10, "top_k": 3},
]
RICH: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -0.8, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {"logit_bias": {5: 3.0, 0: -1.0, 9: 2.0}},
    {
        "logit_bias": {7: 4.0},
        "repetition_penalty": 2.0,
    },  # the bias is added first: a logit that it makes positive is divided
    {"logit_bias": {5: -1e300, 6: -100.0}},
    {"logit_bias": {5: 1e300}},
    {"logit_bias": {i: -1e30 for i in range(VOCAB) if i != 11}},
    {"logit_bias": {1: 9.0}, "min_tokens": 10, "frequency_penalty": 0.5, "top_k": 8, "top_p": 0.9, "temperature": 0.8},
]


@pytest.mark.parametrize(("rich", "variants"), [(False, PLAIN), (True, PLAIN + RICH)], ids=["plain", "rich"])
def test_every_processor_equals_the_naive_one(rich: bool, variants: list[dict[str, Any]]) -> None:
    """Draws are among the kept tokens and have the logprobs of the naive distribution. If few tokens are kept, all of them are
    drawn."""
    for fields, logits_seed in itertools.product(variants, range(2)):
        logits = logits_of(logits_seed)
        expected = naive(logits, SamplingParams(**fields), position=9)
        drawn = draw(logits, [fields | {"seed": seed} for seed in range(100)], rich, positions=9)
        assert (expected[drawn.token] > 0).all(), fields
        np.testing.assert_allclose(drawn.logprob, np.log(expected[drawn.token]), atol=2e-5, err_msg=str(fields))
        np.testing.assert_allclose(drawn.raw_logprob, log_softmax(logits)[drawn.token], atol=1e-5)
        assert set(np.flatnonzero(expected > 0.1)) <= set(drawn.token.tolist()), fields


FAR = [{"top_k": k} for k in (1, NEAR, NEAR + 1, 1000, BIG - 1, BIG, BIG + 1)]
FAR += [{"top_p": p, "temperature": t} for p in (0.3, 0.9, 0.999) for t in (0.5, 1.0, 3.0)]
FAR += [{"top_k": 500, "top_p": 0.95}, {"top_k": 50, "top_p": 0.95}, {"top_k": 2000, "top_p": 0.9999, "min_p": 0.01}]


def test_truncation_of_a_large_vocabulary_equals_the_naive_one() -> None:
    """Some rows find their cut among the likeliest tokens, others by bisection. One kept token more or less changes the logprob
    by more than the tolerance."""
    logits = np.stack([logits_of(seed, BIG) / 2 for seed in range(len(FAR))])
    drawn = draw(logits, FAR)
    for values, fields, token, logprob in zip(logits, FAR, drawn.token, drawn.logprob):
        expected = naive(values, SamplingParams(**fields))
        assert logprob == pytest.approx(np.log(expected[token]), abs=1e-5), fields


def test_ties_with_the_last_one_kept_stay() -> None:
    logits = np.array([0, 3, 2, 2, 1, 2, *[0] * (VOCAB - 6)], np.float32)
    for fields in ({"top_k": 2}, {"top_p": 0.6}):
        drawn = draw(logits, [fields | {"seed": seed} for seed in range(100)])
        assert set(drawn.token.tolist()) == {1, 2, 3, 5}
    many = np.zeros(BIG, np.float32)
    many[-1] = 1
    drawn = draw(many, [{"top_k": 200}, {"top_p": 0.5}])
    np.testing.assert_allclose(np.exp(drawn.logprob), np.exp(many[drawn.token]) / np.exp(many).sum(), rtol=1e-5)


def test_unprocessed_logprobs_are_the_raw_ones_to_the_bit() -> None:
    logits = np.stack([logits_of(seed, BIG) for seed in range(100)])
    rows = [{"seed": seed} | ({"top_k": 5, "temperature": 0.7} if seed % 2 else {}) for seed in range(100)]
    for rich in (False, True):
        drawn = draw(logits, rows, rich)
        np.testing.assert_array_equal(drawn.logprob[::2], drawn.raw_logprob[::2])
        assert (drawn.logprob[1::2] != drawn.raw_logprob[1::2]).any()
        found, ids, top = jax.jit(sampler.raw_logprobs, static_argnums=2)(logits, drawn.token, 3)
        np.testing.assert_array_equal(found, drawn.raw_logprob)
        np.testing.assert_array_equal(ids[:, 0], logits.argmax(1))
        np.testing.assert_allclose(top[7], np.sort(log_softmax(logits[7]))[::-1][:3], atol=1e-5)


def test_greedy_takes_the_first_of_the_largest_and_reports_it_raw() -> None:
    for vocab, winners in ((5, [4]), (5, [0]), (VOCAB, [3, 9]), (BIG, [129, 2998]), (BIG, [2998])):
        logits = np.minimum(logits_of(2, vocab), 3)
        logits[winners] = 5
        drawn = draw(logits, [{"temperature": 0}, {"temperature": 0, "top_k": 3, "seed": 9}, {"temperature": 1e-300}])
        assert drawn.token.tolist() == [winners[0]] * 3
        np.testing.assert_allclose(drawn.logprob, log_softmax(logits)[winners[0]], atol=1e-5)
        np.testing.assert_array_equal(drawn.logprob, drawn.raw_logprob)
    biased = draw(logits_of(2), [{"temperature": 0, "logit_bias": {8: 50.0}}], rich=True)
    assert biased.token[0] == 8 and biased.logprob[0] == biased.raw_logprob[0] < -1


# --- stop tokens ---


def test_stop_tokens_stop_and_are_banned_before_the_minimum() -> None:
    logits = np.full(VOCAB, -5, np.float32)
    logits[list(STOPS)] = 5
    rows = [{"min_tokens": 3, "temperature": t, "seed": seed} for t in (0, 1.0) for seed in range(20)]
    early, late = draw(logits, rows, positions=len(PROMPT) + 2), draw(logits, rows, positions=len(PROMPT) + 3)
    assert not set(early.token.tolist()) & set(STOPS) and not early.stopped.any()
    assert set(late.token.tolist()) == set(STOPS) and late.stopped.all()


# --- counts and top logprobs ---


def test_counts_grow_as_if_counted_anew() -> None:
    prompt_length = np.full(8, len(PROMPT), np.int32)
    counts = _count_tokens(history(8)[:, : len(PROMPT)], prompt_length, VOCAB)
    active = np.arange(8) < 6
    for token in COMPLETION:
        counts = jax.jit(sampler.add_tokens)(counts, np.full(8, token, np.int32), active)
    anew = _count_tokens(history(8), prompt_length, VOCAB)
    for found, expected in zip(counts, anew):
        np.testing.assert_array_equal(found[:6], expected[:6])
    np.testing.assert_array_equal(np.flatnonzero(anew.completion[0]), sorted(set(COMPLETION)))
    assert anew.completion[0, 9] == 3 and anew.completion[0, 7] == 1
    assert np.flatnonzero(anew.seen[0]).tolist() == sorted({*PROMPT, *COMPLETION})
    assert not counts.completion[6:].any() and np.flatnonzero(counts.seen[7]).tolist() == sorted(set(PROMPT))


def test_top_logprobs_are_raw_and_sorted() -> None:
    for vocab, num_top in ((BIG, 20), (5, 5)):
        logits = np.round(logits_of(6, vocab), 1)  # so that there are ties
        rows = [{"temperature": 0.3, "top_k": 2}, {"temperature": 0}]
        drawn = draw(logits, rows, num_top=num_top)
        order = np.argsort(-logits, kind="stable")[:num_top]
        for ids, logprobs in zip(drawn.top_ids, drawn.top_logprobs):
            np.testing.assert_array_equal(ids, order)
            np.testing.assert_allclose(logprobs, log_softmax(logits)[order], atol=1e-5)
        assert drawn.top_logprobs[1, 0] == drawn.raw_logprob[1]


# --- draws ---

KEYS = 4_000


LANE_ENDS = (0, 1, 16, 1023, 1024, 1025, 1500, 2046, 2047, 2048, 2049, BIG - 1)


@pytest.mark.parametrize(
    ("spread", "fields", "vary"),
    [
        (range(12), {}, "seed"),
        (range(12), {"temperature": 1.5}, "sample_index"),
        (range(12), {"temperature": 0.7}, "position"),
        (range(12), {"top_k": 8, "top_p": 0.9}, "seed"),
        (LANE_ENDS, {}, "seed"),
        (LANE_ENDS, {"top_k": 8, "top_p": 0.9}, "seed"),
    ],
)
def test_draws_follow_the_distribution(spread: Any, fields: dict[str, Any], vary: str) -> None:
    """Chi-square over draws with fixed keys, so the outcome is the same in every run. In the second spread the tokens are at the
    ends of lanes and chunks."""
    from scipy.stats import chisquare

    batch = 2000
    logits = np.full(max(spread) + 1, -1e9, np.float32)
    logits[list(spread)] = logits_of(3, vocab=12) / 3
    observed = np.zeros(len(logits), np.int64)
    settings = BatchSettings.stack([row(**fields)] * batch, batch, rich=False)
    for start in range(0, KEYS, batch):
        keys = np.arange(start, start + batch, dtype=np.int32)
        changed = {"seed": np.stack([0 * keys, keys], 1).astype(np.uint32)} if vary == "seed" else {}
        changed |= {"sample_index": keys} if vary == "sample_index" else {}
        positions = keys + 9 if vary == "position" else np.full(batch, 9, np.int32)
        many = np.broadcast_to(logits, (batch, len(logits)))
        tokens = _sample(many, positions, settings._replace(**changed), None, 0).token
        observed += np.bincount(tokens, minlength=len(logits))
    expected = KEYS * naive(logits, SamplingParams(**fields))
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    assert possible.sum() >= 4 and expected[possible].min() >= 5  # required by the chi-square test
    assert chisquare(observed[possible], expected[possible]).pvalue > 1e-3


def test_a_weighted_choice_is_in_range() -> None:
    top = 1 - 2.0**-24
    cases: list[tuple[list[float], float, int]] = [
        ([1, 1, 1, 1], 0.0, 0),
        ([1, 1, 1, 1], 0.25, 1),
        ([1, 1, 1, 1], 0.2499, 0),
        ([1, 1, 1, 1], top, 3),
        ([0, 0, 1, 1], 0.0, 2),
        ([1, 1, 0, 0], top, 1),
        ([0, 1, 0, 0], 0.0, 1),
        ([0, 1, 0, 0], top, 1),
        ([0, 0, 0, 1e-30], 0.5, 3),
        ([1, 0, 0, 1e-30], top, 0),
        ([0, 0, 0, 0], 0.5, 0),
    ]
    weights, uniform, expected = (np.array(column) for column in zip(*cases))
    np.testing.assert_array_equal(_weighted_choice(weights.astype(np.float32), uniform.astype(np.float32)), expected)


def test_a_weighted_choice_never_takes_a_zero_weight() -> None:
    rng = np.random.default_rng(0)
    weights = rng.exponential(size=(512, 1024)).astype(np.float32) ** 8 * (rng.random((512, 1024)) < 0.1)
    for uniform in (np.zeros(512), np.full(512, 1 - 2.0**-24), rng.random(512), rng.random(512)):
        picked = np.asarray(_weighted_choice(weights, np.minimum(uniform, 1 - 2.0**-24).astype(np.float32)))
        assert (np.take_along_axis(weights, picked[:, None], 1) > 0).all()


@pytest.mark.parametrize("vocab", [5, 1024, BIG])
def test_all_mass_on_one_token(vocab: int) -> None:
    for token in {0, 1, vocab // 2, vocab - 2, vocab - 1}:
        logits = np.full(vocab, -200, np.float32)
        logits[token] = 30
        drawn = draw(logits, [{"seed": seed, "temperature": t} for seed in range(20) for t in (0.5, 1.0)])
        assert (drawn.token == token).all() and (drawn.logprob == 0).all() and (drawn.raw_logprob == 0).all()


def test_every_part_of_the_key_counts() -> None:
    flat = np.zeros(BIG, np.float32)
    base = {"seed": 7, "sample_index": 2}
    rows = [base, base, base | {"seed": 8}, base | {"seed": 7 + (1 << 32)}, base | {"seed": 7 + (1 << 62)}]
    rows += [base | {"sample_index": 3}, base]
    tokens = draw(flat, rows, positions=[5, 5, 5, 5, 5, 5, 6]).token
    assert tokens[0] == tokens[1]
    assert len(set(tokens.tolist())) == 6


# --- rows are independent ---


def random_params(rng: np.random.Generator, rich: bool) -> SamplingParams:
    """Most settings of most rows are neutral, so that neutral rows are next to demanding ones."""

    def some(neutral: Any, *others: Any) -> Any:
        return neutral if rng.random() < 0.6 else others[rng.integers(len(others))]

    fields = {
        "temperature": some(1.0, 0.0, 0.5, 1.7),
        "top_k": some(0, 3, 50, 200),
        "top_p": some(1.0, 0.5, 0.99),
        "min_p": some(0.0, 0.05),
        "min_tokens": some(0, 30),
    }
    if rich:
        fields |= {
            "repetition_penalty": some(1.0, 1.3),
            "presence_penalty": some(0.0, 0.5),
            "frequency_penalty": some(0.0, 0.37),
            "logit_bias": some({}, {1: 0.3, 40: -1.7, 499: 2.0}),
        }
    return SamplingParams(**fields)


@pytest.mark.parametrize("rich", [False, True], ids=["plain", "rich"])
def test_a_row_has_the_same_bits_in_any_batch(rich: bool) -> None:
    rng = np.random.default_rng(0)
    total, vocab = 128, 4999  # large enough that plain reductions differ
    logits = (rng.standard_normal((total, vocab)) * rng.uniform(0.3, 5, (total, 1))).astype(np.float32)
    positions = rng.integers(10, 60, total).astype(np.int32)
    tokens = rng.integers(-1, vocab, (total, 40)).astype(np.int32)
    packed = [BatchSettings.row(random_params(rng, rich), i, i % 3, 10, STOPS) for i in range(total)]

    def run(ids: list[int], num_rows: int) -> list[np.ndarray]:
        filled = np.resize(ids, num_rows)
        settings = BatchSettings.stack([packed[i] for i in ids], num_rows, rich)
        counts = _count_tokens(tokens[filled], settings.prompt_length, vocab) if rich else None
        drawn = _sample(logits[filled], positions[filled], settings, counts, 5 if rich else 0)
        return [np.asarray(column)[: len(ids)] for column in drawn]

    together = run(list(range(total)), total)
    for number in (1, 4, 8, 8, 8, 8):
        ids = [int(i) for i in rng.permutation(total)[:number]]
        for name, found, expected in zip(SampledTokens._fields, run(ids, 8), together):
            assert found.tobytes() == expected[ids].tobytes(), (name, ids)


def test_it_runs_inside_a_loop() -> None:
    """As in the decode program, with counts carried along."""
    settings = BatchSettings.stack([row(temperature=0, presence_penalty=9.0)] * 8, 8)
    logits = jnp.tile(jnp.arange(VOCAB, dtype=jnp.float32) / 2, (8, 1))

    def step(carry: tuple[TokenCounts, jax.Array], _: None) -> tuple[tuple[TokenCounts, jax.Array], jax.Array]:
        counts, positions = carry
        drawn = sampler.sample(logits, positions, settings, counts, 0)
        return (sampler.add_tokens(counts, drawn.token, positions >= 0), positions + 1), drawn.token

    first = _count_tokens(history(8)[:, : len(PROMPT)], settings.prompt_length, VOCAB)
    start = (first, jnp.full(8, len(PROMPT), jnp.int32))
    _, tokens = jax.jit(functools.partial(jax.lax.scan, step, length=4))(start)
    assert tokens[:, 0].tolist() == [VOCAB - 1, VOCAB - 2, VOCAB - 3, VOCAB - 4]
