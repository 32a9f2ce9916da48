"""Thresholds of `diagnose` and `MismatchWatch` on synthetic tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipstream.errors import RequestError, Unsupported
from slipstream.observe import mismatch
from slipstream.observe.mismatch import MIN_TOKENS, NEGLIGIBLE, TOLERANCE, MismatchDiagnosis, diagnose
from slipstream.observe.mismatch_watch import HISTORY, LIMITS, MismatchWatch
from slipstream.types import Difference, Unchecked, VerifyReport

N = 400
SAME = VerifyReport((("e", 1),), 10)
OTHER = VerifyReport((("e", 1),), 10, (Difference("e", 0, "qkv", "q", ((0, 1),)),))
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(sorted(TOLERANCE))


def step(
    seed: int = 0,
    noise: float = 0.0,
    weights: float = 0.0,
    drift: float = 0.0,
    ages: tuple[int, ...] = (0,),
    processing: float = 0.0,
    count: int = N,
) -> tuple[np.ndarray, ...]:
    """Arrays of a step with normally distributed gaps; `drift` per version adds up as in a random walk."""
    rng = np.random.default_rng(seed)
    trainer = -rng.exponential(2.0, count)
    age = np.resize(np.array(ages), count)
    spread = np.sqrt(noise**2 + weights**2 + age * drift**2)
    raw = trainer + spread * rng.standard_normal(count)
    return trainer, raw + processing * np.abs(rng.standard_normal(count)), raw, age, np.ones(count)


def causes(found: MismatchDiagnosis) -> set[str]:
    return {f.cause for f in found.findings}


@settings(deadline=None)
@given(seeds, dtypes, st.floats(0, 0.9), st.booleans())
def test_noise_below_the_tolerance_is_never_wrong_weights(seed: int, dtype: str, part: float, aged: bool) -> None:
    noise = part * TOLERANCE[dtype]
    found = diagnose(*step(seed, noise, ages=(0, 1, 2) if aged else (0,)), dtype=dtype)
    assert causes(found) <= {"numerics"} and not found.suspects_weights
    assert (found.cause == "none") == (found.evidence.baseline <= NEGLIGIBLE)  # type: ignore[operator]


@settings(deadline=None)
@given(seeds, dtypes, st.floats(1.6, 1000))
def test_fresh_tokens_beyond_the_tolerance_are_always_suspect(seed: int, dtype: str, times: float) -> None:
    found = diagnose(*step(seed, weights=times * TOLERANCE[dtype]), dtype=dtype)
    assert found.cause == "weights" and found.suspects_weights
    assert diagnose(*step(seed, weights=times * TOLERANCE[dtype]), dtype=dtype, report=SAME).cause == "numerics"


@settings(deadline=None)
@given(
    seeds,
    dtypes,
    st.floats(0, 0.5),
    st.floats(2, 100),
    st.lists(st.integers(1, 8), min_size=1, max_size=3, unique=True),
)
def test_gaps_of_old_tokens_only_are_staleness(
    seed: int, dtype: str, noise: float, times: float, ages: list[int]
) -> None:
    unit = TOLERANCE[dtype]
    found = diagnose(*step(seed, noise * unit, drift=times * unit, ages=(0, *ages)), dtype=dtype)
    assert found.cause == "staleness" and causes(found) <= {"staleness", "numerics"} and not found.suspects_weights


@settings(deadline=None)
@given(seeds, dtypes, st.floats(2, 20), st.floats(0.05, 3), st.floats(3, 10))
def test_combined_causes_are_all_found(seed: int, dtype: str, weights: float, processing: float, drift: float) -> None:
    unit = TOLERANCE[dtype]
    one = step(seed, weights=weights * unit, drift=drift * weights * unit, ages=(0, 2), processing=processing)
    found = diagnose(*one, dtype=dtype)
    assert causes(found) == {"weights", "staleness", "sampling"} and found.cause == "weights"
    other = diagnose(*step(seed, drift=weights * unit, ages=(0, 2), processing=processing), dtype=dtype)
    assert causes(other) == {"staleness", "sampling"}
    assert other.findings[0].nats >= other.findings[1].nats


@settings(deadline=None)
@given(seeds, st.floats(0, 0.2), st.floats(0, 0.2), st.floats(0, 1))
def test_sizes_are_bounded_by_the_gaps_they_explain(seed: int, noise: float, drift: float, processing: float) -> None:
    found = diagnose(*step(seed, noise, drift=drift, ages=(0, 1, 3), processing=processing))
    evidence = found.evidence
    assert all(0 <= f.share <= 1 and f.nats >= 0 for f in found.findings)
    assert found.size("staleness") + (evidence.baseline or 0) <= evidence.raw_gap + 0.05
    assert sum(f.nats for f in found.findings) >= evidence.gap - 0.05 - NEGLIGIBLE


@settings(deadline=None)
@given(seeds, st.floats(0, 0.3), st.floats(0, 0.3), st.floats(0, 1))
def test_order_layout_and_masked_values_do_not_matter(seed: int, noise: float, drift: float, processing: float) -> None:
    one = step(seed, noise, drift=drift, ages=(0, 1, 3), processing=processing)
    found = diagnose(*one)
    order = np.random.default_rng(seed).permutation(N)
    shuffled = diagnose(*(x[order] for x in one))
    padded = [np.concatenate([x, np.full(50, np.nan if x.dtype == float else 3)]) for x in one]
    padded[4][N:] = 0
    for other in (shuffled, diagnose(*padded), diagnose(*(x.reshape(-1, 1) for x in one))):
        assert other.sentence == found.sentence and causes(other) == causes(found)
        assert other.evidence.gap == pytest.approx(found.evidence.gap)


@settings(deadline=None)
@given(seeds, st.lists(st.integers(1, 4), min_size=2, max_size=4, unique=True), st.floats(0.1, 1))
def test_without_fresh_tokens_a_gap_that_does_not_grow_is_suspect(seed: int, ages: list[int], size: float) -> None:
    assume(max(ages) >= 2 * min(ages))  # between ages 3 and 4 the growth is too small to be significant
    assert diagnose(*step(seed, weights=2 * size, ages=tuple(ages), count=4000)).suspects_weights
    grown = diagnose(*step(seed, drift=0.05, ages=tuple(ages), count=4000), dtype="bfloat16")
    assert grown.cause == "staleness" and "weights" not in causes(grown)


def test_without_fresh_tokens_and_with_one_age_only_a_gross_gap_is_suspect() -> None:
    assert not diagnose(*step(drift=0.3, ages=(1,))).suspects_weights
    found = diagnose(*step(drift=2.0, ages=(1,)))
    assert found.cause == "staleness" and found.suspects_weights
    assert diagnose(*step(drift=2.0, ages=(1,)), report=OTHER).cause == "weights"


def test_outliers_are_suspect_even_if_the_mean_is_small() -> None:
    trainer, _, raw, age, mask = step(noise=1e-3, count=4000)
    raw = raw.copy()
    raw[::80] += 1.5
    found = diagnose(trainer, raw, raw, age, mask)
    assert found.evidence.baseline < TOLERANCE["bfloat16"]  # type: ignore[operator]
    assert found.cause == "weights" and found.evidence.outlier_share > mismatch.OUTLIER_SHARE


def test_a_one_sided_gap_is_suspect_even_if_small() -> None:
    trainer, _, raw, age, mask = step(noise=5e-3)
    assert diagnose(trainer, raw, raw, age, mask).cause == "numerics"
    found = diagnose(trainer, raw + 0.02, raw + 0.02, age, mask)
    assert found.cause == "weights" and found.evidence.bias > mismatch.LOPSIDED


def test_checksums_overrule_the_numbers() -> None:
    quiet, loud = step(noise=1e-3), step(weights=1.0)
    assert diagnose(*quiet, report=OTHER).cause == "weights" and diagnose(*quiet, report=OTHER).tensors == ("q",)
    assert diagnose(*loud, report=SAME).cause == "numerics"
    partly = VerifyReport((("e", 1),), 10, unchecked=(Unchecked("e", "experts", "cannot be read"),))
    assert diagnose(*loud, report=partly).cause == "weights"  # parts that were not compared may be wrong


def test_nan_counts_as_the_largest_gap() -> None:
    trainer, processed, raw, age, mask = step(noise=1e-3)
    trainer = trainer.copy()
    trainer[::3], trainer[1::3] = np.nan, -np.inf
    found = diagnose(trainer, processed, raw, age, mask)
    assert found.cause == "weights" and found.evidence.num_not_finite > N // 2 and np.isfinite(found.evidence.gap)


@pytest.mark.parametrize("count", [0, 1, MIN_TOKENS - 1])
def test_checksums_suffice_with_too_few_tokens(count: int) -> None:
    one = step(weights=3.0, count=count)
    assert diagnose(*one).cause == "unknown" and not diagnose(*one).findings
    assert diagnose(*one, report=OTHER).cause == "weights"


def test_invalid_arrays_are_rejected() -> None:
    trainer, processed, raw, age, mask = step()
    with pytest.raises(RequestError, match="same shape"):
        diagnose(trainer[1:], processed, raw, age, mask)
    with pytest.raises(RequestError, match="at least 0"):
        diagnose(trainer, processed, raw, age - 1, mask)
    with pytest.raises(RequestError, match="int8"):
        diagnose(trainer, processed, raw, age, mask, dtype="int8")


def watched(**options: Any) -> tuple[MismatchWatch, list[str]]:
    told: list[str] = []
    return MismatchWatch(warn=lambda cause, _: told.append(cause), **options), told


def test_a_watch_warns_once_per_episode() -> None:
    watch, told = watched()
    for seed in range(10):
        watch.see(*step(seed, processing=1.0))
    assert told == ["sampling"] and watch.warned == {"sampling"}
    for seed in range(HISTORY):
        watch.see(*step(seed))
    assert watch.warned == frozenset()
    for seed in range(HISTORY):
        watch.see(*step(seed, processing=1.0))
    assert told == ["sampling", "sampling"]


def test_a_cause_near_its_limit_triggers_one_warning() -> None:
    watch, told = watched()
    for seed in range(40):
        watch.see(*step(seed, processing=LIMITS["sampling"] * (1.4 if seed % 2 else 1.1)))
    assert told == ["sampling"]


def test_a_single_bad_step_triggers_no_warning() -> None:
    watch, told = watched()
    for seed in range(HISTORY):
        watch.see(*step(seed))
    watch.see(*step(9, drift=0.4, ages=(0, 1)))
    assert told == []


def test_a_failed_comparison_is_not_retried() -> None:
    tried = []

    def verify() -> VerifyReport:
        tried.append(1)
        raise Unsupported("no engine can tell")

    watch, told = watched(verify=verify)
    for seed in range(5):
        assert watch.see(*step(seed, weights=1.0)).cause == "weights"
    assert tried == [1] and told == ["weights"]


def test_weights_cleared_by_the_comparison_trigger_no_warning() -> None:
    watch, told = watched(verify=lambda: SAME)
    assert watch.see(*step(weights=1.0)).cause == "numerics"
    assert told == ["numerics"]


def test_steps_without_tokens_have_no_effect() -> None:
    watch, told = watched()
    watch.see(*step(weights=1.0))
    for _ in range(2 * HISTORY):
        assert watch.see(*step(count=3)).cause == "unknown"
    assert watch.warned == {"weights"} and told == ["weights"]
