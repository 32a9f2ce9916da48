"""The sampler against naive arithmetic, and its draws against the distribution they should follow."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from scipy.stats import chisquare

from slipstream.engines.embedded.sampling import Drawn, Settings, sample, truncate
from slipstream.types import SamplingParams
from tests.conformance.engines import log_softmax, naive_truncation

_sample, _truncate = jax.jit(sample), jax.jit(truncate)


def settings_for(rows: list[dict[str, Any]]) -> Settings:
    settings = Settings.for_slots(len(rows))
    for i, row in enumerate(rows):
        row = dict(row)
        seed, index = row.pop("seed", 0), row.pop("sample_index", 0)
        settings.put(i, SamplingParams(**row), seed, index)
    return settings


def draw(logits: np.ndarray, rows: list[dict[str, Any]], positions: Any = 5) -> Drawn:
    """One draw per row from the same logits, always in a batch of 128 (greedy rows fill up): compiled once."""
    padded = np.zeros(128, np.int32)
    padded[: len(rows)] = positions
    settings = settings_for(rows + [{"temperature": 0}] * (128 - len(rows)))
    drawn = _sample(np.broadcast_to(logits, (128, len(logits))), padded, settings)
    return Drawn(*(np.asarray(column)[: len(rows)] for column in drawn))


def logits_of(seed: int, vocab: int = 24) -> np.ndarray:
    return (2 * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


CUTS = [{}, {"top_k": 1}, {"top_k": 4}, {"top_k": 1000}, {"top_p": 0.05}, {"top_p": 0.7}, {"top_k": 6, "top_p": 0.8}]


def test_truncation_equals_the_naive_one() -> None:
    logits = np.stack([logits_of(i) for i in range(len(CUTS))])
    kept = np.asarray(_truncate(logits, settings_for([{"temperature": 1.0} | cut for cut in CUTS])))
    for row, found, cut in zip(logits, kept, CUTS):
        expected = naive_truncation(np.exp(log_softmax(row)), **cut)
        np.testing.assert_array_equal(np.isfinite(found), expected > 0)
        np.testing.assert_allclose(np.exp(log_softmax(found[expected > 0])), expected[expected > 0], rtol=1e-5)


def test_logprobs_are_of_the_distribution_drawn_from() -> None:
    logits = logits_of(1)
    rows = [{"temperature": t, "seed": s} | cut for t in (0.5, 1.0, 2.0) for cut in CUTS for s in range(5)]
    drawn = draw(logits, rows)
    raw = log_softmax(logits)
    for row, token, logprob, raw_logprob in zip(rows, drawn.token, drawn.logprob, drawn.raw_logprob):
        cut = {k: v for k, v in row.items() if k in ("top_k", "top_p")}
        expected = naive_truncation(np.exp(log_softmax(logits / row["temperature"])), **cut)
        assert logprob == pytest.approx(np.log(expected[token]), abs=1e-5)
        assert raw_logprob == pytest.approx(raw[token], abs=1e-5)


def test_greedy_takes_the_largest_and_reports_it_raw() -> None:
    logits = logits_of(2)
    drawn = draw(logits, [{"temperature": 0}, {"temperature": 0, "top_k": 3, "seed": 9}, {"temperature": 1.0}])
    assert drawn.token[0] == drawn.token[1] == logits.argmax()
    np.testing.assert_allclose(drawn.logprob[:2], log_softmax(logits).max(), atol=1e-6)
    np.testing.assert_array_equal(drawn.logprob[:2], drawn.raw_logprob[:2])


@pytest.mark.parametrize(
    ("kind", "row", "vary"),
    [
        ("temperature 1, by seed", {"temperature": 1.0}, "seed"),
        ("hot, by sample", {"temperature": 1.5}, "sample_index"),
        ("cold, by position", {"temperature": 0.7}, "position"),
        ("truncated, by seed", {"temperature": 1.0, "top_k": 8, "top_p": 0.9}, "seed"),
    ],
)
def test_draws_follow_the_distribution(kind: str, row: dict[str, Any], vary: str) -> None:
    """Chi-square over 20,000 draws with fixed keys: the outcome is the same on every run."""
    count, logits = 20_000, logits_of(3, vocab=12) / 3
    settings = settings_for([row] * count)
    positions = np.full(count, 5, np.int32)
    if vary == "seed":
        settings.seed[:, 1] = np.arange(count)
    elif vary == "sample_index":
        settings.sample_index[:] = np.arange(count)
    else:
        positions = np.arange(count, dtype=np.int32)
    tokens = np.asarray(_sample(np.broadcast_to(logits, (count, 12)), positions, settings).token)
    cut = {k: v for k, v in row.items() if k in ("top_k", "top_p")}
    expected = count * naive_truncation(np.exp(log_softmax(logits / row["temperature"])), **cut)
    observed = np.bincount(tokens, minlength=12)
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    assert possible.sum() >= 4 and expected[possible].min() >= 5  # what the chi-square test needs
    assert chisquare(observed[possible], expected[possible]).pvalue > 1e-3, kind


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = logits_of(4)
    rows = [{"temperature": 1.0, "seed": i, "sample_index": i % 3} | CUTS[i % len(CUTS)] for i in range(8)]
    together = draw(logits, rows, positions=np.arange(8))
    for i, row in enumerate(rows):
        alone = draw(logits, [row], positions=[i])
        assert alone.token[0] == together.token[i]
        np.testing.assert_allclose(alone.logprob[0], together.logprob[i], atol=1e-6)


def test_every_part_of_the_key_counts() -> None:
    flat = np.zeros(4096, np.float32)
    base = {"temperature": 1.0, "seed": 7, "sample_index": 2}
    rows = [base, base, base | {"seed": 8}, base | {"seed": 7 + (1 << 32)}, base | {"seed": 7 + (1 << 62)}]
    rows += [base | {"sample_index": 3}, base]
    tokens = draw(flat, rows, positions=[5, 5, 5, 5, 5, 5, 6]).token
    assert tokens[0] == tokens[1]
    assert len(set(tokens.tolist())) == 6
