"""Steps per tick: fewer while a commit waits and the engine has capacity to spare, and an early end when a smaller
batch is faster."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.engines.embedded.scheduling.steps_per_tick import (
    MAX_BUSY_OVERHEAD,
    MAX_OVERHEAD,
    MAX_TICK_SECONDS,
    MIN_TICK_SECONDS,
    USUAL_TICK_SECONDS,
    StepsPerTick,
    best_num_steps,
)

SECONDS = st.floats(0, 10, allow_subnormal=False)
SIZES = (8, 16, 32)


def test_as_many_steps_as_fit() -> None:
    limits = StepsPerTick(SIZES)
    assert limits.steps(8, most=16) == 16 and limits.overhead(8) == 1  # no measurements yet
    limits.record_tick(7, 10, 0.1, 0.02)
    assert limits.steps(8, most=16) == 15 and limits.overhead(8) == 2
    assert limits.steps(32, most=16) == 15  # taken from the nearest measured size
    for _ in range(50):
        limits.record_tick(17, 1, 1.0, 0.0)
    assert limits.steps(32, most=16) == 1 and limits.steps(0, most=16) == 3


def test_ticks_are_long_enough_for_the_overhead_of_the_host() -> None:
    limits = StepsPerTick(SIZES)
    for host_seconds, expected in (
        (0.0001, USUAL_TICK_SECONDS),
        (0.002, 0.002 / MAX_OVERHEAD),
        (0.1, MAX_TICK_SECONDS),
    ):
        for _ in range(100):
            limits.record_tick(8, 1, 0.01, host_seconds)
        assert round(limits.tick_seconds, 9) == expected


def test_a_tick_ends_early_when_the_remaining_rows_fit_a_smaller_program() -> None:
    limits = StepsPerTick(SIZES)
    assert limits.early_exit_rows(32, steps=16) == 0  # no measurements yet
    for rows, seconds in ((8, 0.0005), (16, 0.001), (32, 0.002)):
        limits.record_tick(rows, 1, seconds, 0.001)
    assert limits.early_exit_rows(20, steps=16) == 16 and limits.early_exit_rows(16, steps=16) == 8
    assert limits.early_exit_rows(8, steps=16) == 0  # there is no smaller one
    assert limits.early_exit_rows(20, steps=2) == 8  # half as many steps would not pay off
    assert limits.early_exit_rows(20, steps=1) == 0
    assert limits.early_exit_rows(0, steps=0) == 0


def test_no_early_exit_where_step_time_does_not_depend_on_rows() -> None:
    """As on accelerators."""
    limits = StepsPerTick(SIZES)
    for rows in SIZES:
        limits.record_tick(rows, 1, 0.005, 0.001)
    assert {limits.early_exit_rows(rows, steps=32) for rows in range(33)} == {0}


def run(limits: StepsPerTick, commits: int, interval: float, idle: float, *, asks_when_idle: bool = False) -> None:
    """Commits at random moments wait for half a tick on average."""
    for _ in range(commits):
        limits.record_commit(interval, 0.0 if asks_when_idle else limits.tick_seconds / 2, idle)


def test_waiting_commits_shorten_the_ticks_of_an_idle_engine() -> None:
    limits = StepsPerTick(SIZES)
    limits.record_tick(8, 10, 0.01, 0.0005)
    run(limits, 30, interval=0.07, idle=0.02)
    assert MIN_TICK_SECONDS <= limits.tick_seconds < USUAL_TICK_SECONDS / 2
    found = limits.tick_seconds
    run(limits, 100, interval=0.07, idle=0.02)
    assert limits.tick_seconds == found  # it has settled
    run(limits, 1, interval=0.07, idle=0.0)
    assert limits.tick_seconds == max(found, 0.0005 / MAX_BUSY_OVERHEAD)  # now it is busy


def test_the_overhead_of_a_busy_engine_is_bounded() -> None:
    limits = StepsPerTick(SIZES)
    limits.record_tick(8, 10, 0.01, 0.001)
    run(limits, 100, interval=0.07, idle=0.0)
    assert limits.tick_seconds == 0.001 / MAX_BUSY_OVERHEAD
    limits.record_tick(8, 10, 0.01, 1.0)
    run(limits, 1, interval=0.07, idle=0.0)
    assert limits.tick_seconds == USUAL_TICK_SECONDS
    run(limits, 100, interval=10.0, idle=0.0)
    assert limits.tick_seconds == MAX_TICK_SECONDS  # commits are rare, so they wait for a small share


def test_commits_to_an_idle_engine_do_not_shorten_ticks() -> None:
    """As of a trainer that waits for its samples."""
    limits = StepsPerTick(SIZES)
    run(limits, 30, interval=0.13, idle=0.05, asks_when_idle=True)
    assert limits.tick_seconds == USUAL_TICK_SECONDS


def test_ticks_become_long_again() -> None:
    limits = StepsPerTick(SIZES)
    run(limits, 30, interval=0.07, idle=0.02)
    run(limits, 30, interval=10.0, idle=5.0)
    assert limits.tick_seconds == USUAL_TICK_SECONDS


def test_a_tick_ends_when_rows_become_free_for_waiting_samples() -> None:
    assert best_num_steps([6] * 24 + [80] * 8, 16, overhead=1) == 6
    assert best_num_steps([80] * 32, 16, overhead=1) == 16  # none becomes free
    assert best_num_steps([1] + [80] * 31, 16, overhead=1) == 16  # one empty row costs less than a tick
    assert best_num_steps([], 16, overhead=1) == 16


@given(st.lists(st.integers(0, 40), min_size=1, max_size=40), st.integers(1, 32), st.floats(0, 20))
def test_no_other_number_of_steps_has_a_higher_token_rate(remaining: list[int], most: int, overhead: float) -> None:
    def rate(steps: int) -> float:
        return sum(min(room, steps) for room in remaining) / (steps + overhead)

    found = best_num_steps(remaining, most, overhead)
    assert 1 <= found <= most and rate(found) >= max(rate(steps) for steps in range(1, most + 1)) - 1e-9


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS)))
def test_tick_seconds_stay_within_bounds(commits: list[tuple[float, float, float]]) -> None:
    limits = StepsPerTick(SIZES)
    for interval, waited, idle in commits:
        limits.record_commit(interval, waited, idle)
        assert MIN_TICK_SECONDS <= limits.tick_seconds <= MAX_TICK_SECONDS
