"""Round trips become shorter where commits wait for them, as far as the engine has time to spare, and end where fewer rows
would be quicker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.engines.embedded.pace import BUSY_COST, SHORTEST_SECONDS, TICK_SECONDS, Pace, worthwhile

SECONDS = st.floats(0, 10, allow_subnormal=False)
SIZES = (8, 16, 32)


def test_as_many_steps_as_fit() -> None:
    pace = Pace(SIZES)
    assert pace.steps(8, most=16) == 16 and pace.overhead(8) == 1  # nothing is known yet
    pace.stepped(7, 10, 0.1, 0.02)
    assert pace.steps(8, most=16) == 3 and pace.overhead(8) == 2
    assert pace.steps(32, most=16) == 3  # as the nearest that is known
    for _ in range(50):
        pace.stepped(17, 1, 1.0, 0.5)
    assert pace.steps(32, most=16) == 1 and pace.steps(0, most=16) == 3


def test_a_round_trip_ends_when_those_that_are_left_fit_a_smaller_program() -> None:
    pace = Pace(SIZES)
    assert pace.floor(32, steps=16) == 0  # nothing is known yet
    for rows, seconds in ((8, 0.0005), (16, 0.001), (32, 0.002)):
        pace.stepped(rows, 1, seconds, 0.001)
    assert pace.floor(20, steps=16) == 16 and pace.floor(16, steps=16) == 8
    assert pace.floor(8, steps=16) == 0  # there is no smaller one
    assert pace.floor(20, steps=2) == 8  # half as many would not pay
    assert pace.floor(20, steps=1) == 0
    assert pace.floor(0, steps=0) == 0


def test_where_rows_cost_nothing_a_round_trip_goes_on() -> None:
    """As on accelerators."""
    pace = Pace(SIZES)
    for rows in SIZES:
        pace.stepped(rows, 1, 0.005, 0.001)
    assert {pace.floor(rows, steps=32) for rows in range(33)} == {0}


def run(pace: Pace, commits: int, interval: float, idle: float, *, asks_when_idle: bool = False) -> None:
    """Commits that come at any moment of a round trip wait for half of it."""
    for _ in range(commits):
        pace.committed(interval, 0.0 if asks_when_idle else pace.tick_seconds / 2, idle)


def test_commits_that_wait_shorten_round_trips_of_an_engine_that_has_time() -> None:
    pace = Pace(SIZES)
    pace.stepped(8, 10, 0.01, 0.001)
    run(pace, 30, interval=0.07, idle=0.02)
    assert SHORTEST_SECONDS <= pace.tick_seconds < TICK_SECONDS / 2
    found = pace.tick_seconds
    run(pace, 100, interval=0.07, idle=0.02)
    assert pace.tick_seconds == found  # it has settled
    run(pace, 1, interval=0.07, idle=0.0)
    assert pace.tick_seconds == max(found, 0.001 / BUSY_COST)  # now it is busy


def test_round_trips_of_a_busy_engine_cost_no_more_than_a_small_share() -> None:
    pace = Pace(SIZES)
    pace.stepped(8, 10, 0.01, 0.001)
    run(pace, 100, interval=0.07, idle=0.0)
    assert pace.tick_seconds == 0.001 / BUSY_COST
    pace.stepped(8, 10, 0.01, 1.0)
    run(pace, 1, interval=0.07, idle=0.0)
    assert pace.tick_seconds == TICK_SECONDS
    run(pace, 100, interval=10.0, idle=0.0)
    assert pace.tick_seconds == TICK_SECONDS  # commits are rare: nobody waits for long


def test_a_trainer_that_waits_for_its_samples_costs_nothing() -> None:
    """It commits when the engine has nothing to do."""
    pace = Pace(SIZES)
    run(pace, 30, interval=0.13, idle=0.05, asks_when_idle=True)
    assert pace.tick_seconds == TICK_SECONDS


def test_round_trips_become_long_again() -> None:
    pace = Pace(SIZES)
    run(pace, 30, interval=0.07, idle=0.02)
    run(pace, 30, interval=10.0, idle=5.0)
    assert pace.tick_seconds == TICK_SECONDS


def test_where_others_wait_a_round_trip_ends_when_places_are_empty() -> None:
    assert worthwhile([6] * 24 + [80] * 8, 16, overhead=1) == 6
    assert worthwhile([80] * 32, 16, overhead=1) == 16  # none becomes free
    assert worthwhile([1] + [80] * 31, 16, overhead=1) == 16  # one empty place costs less than a round trip
    assert worthwhile([], 16, overhead=1) == 16


@given(st.lists(st.integers(0, 40), min_size=1, max_size=40), st.integers(1, 32), st.floats(0, 20))
def test_no_other_number_of_steps_gives_more_tokens_for_the_time(rooms: list[int], most: int, overhead: float) -> None:
    def rate(steps: int) -> float:
        return sum(min(room, steps) for room in rooms) / (steps + overhead)

    found = worthwhile(rooms, most, overhead)
    assert 1 <= found <= most and rate(found) >= max(rate(steps) for steps in range(1, most + 1)) - 1e-9


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS)))
def test_within_bounds_whatever_is_seen(commits: list[tuple[float, float, float]]) -> None:
    pace = Pace(SIZES)
    for interval, waited, idle in commits:
        pace.committed(interval, waited, idle)
        assert SHORTEST_SECONDS <= pace.tick_seconds <= TICK_SECONDS
