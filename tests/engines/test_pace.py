"""Round trips become shorter where commits wait for them and the engine has time to spare, and only there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.engines.embedded.pace import SHORTEST_SECONDS, TICK_SECONDS, Pace

SECONDS = st.floats(0, 10, allow_subnormal=False)


def test_as_many_steps_as_fit() -> None:
    pace = Pace()
    assert pace.steps(16) == 16  # nothing is known yet
    pace.stepped(10, 0.1)
    assert pace.steps(16) == 3
    for _ in range(50):
        pace.stepped(1, 1.0)
    assert pace.steps(16) == 1


def run(pace: Pace, commits: int, interval: float, idle: float, *, asks_when_idle: bool = False) -> None:
    """Commits that come at any moment of a round trip wait for half of it."""
    for _ in range(commits):
        pace.committed(interval, 0.0 if asks_when_idle else pace.tick_seconds / 2, idle)


def test_commits_that_wait_shorten_round_trips_of_an_engine_that_has_time() -> None:
    pace = Pace()
    run(pace, 30, interval=0.07, idle=0.02)
    assert SHORTEST_SECONDS <= pace.tick_seconds < TICK_SECONDS / 2
    found = pace.tick_seconds
    run(pace, 100, interval=0.07, idle=0.02)
    assert pace.tick_seconds == found  # it has settled
    run(pace, 1, interval=0.07, idle=0.0)
    assert pace.tick_seconds == TICK_SECONDS  # now it is busy


def test_a_trainer_that_waits_for_its_samples_costs_nothing() -> None:
    """It commits when the engine has nothing to do."""
    pace = Pace()
    run(pace, 30, interval=0.13, idle=0.05, asks_when_idle=True)
    assert pace.tick_seconds == TICK_SECONDS


def test_round_trips_become_long_again() -> None:
    pace = Pace()
    run(pace, 30, interval=0.07, idle=0.02)
    run(pace, 30, interval=10.0, idle=5.0)
    assert pace.tick_seconds == TICK_SECONDS


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS)))
def test_within_bounds_whatever_is_seen(commits: list[tuple[float, float, float]]) -> None:
    pace = Pace()
    for interval, waited, idle in commits:
        pace.committed(interval, waited, idle)
        assert SHORTEST_SECONDS <= pace.tick_seconds <= TICK_SECONDS
