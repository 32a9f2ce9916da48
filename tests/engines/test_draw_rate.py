"""How fast an engine draws tokens, from its last steps."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from slipstream.engines.frontend import draw_rate
from slipstream.engines.frontend.draw_rate import NUM_STEPS, DrawRate


def test_the_rate_is_that_of_the_last_steps() -> None:
    rate = DrawRate()
    assert rate.tokens_per_second == 0
    for _ in range(NUM_STEPS):
        rate.add(1, 1.0)
    rate.add(9, 0.5)
    assert rate.tokens_per_second == pytest.approx((NUM_STEPS - 1 + 9) / (NUM_STEPS - 1 + 0.5))
    for _ in range(NUM_STEPS):
        rate.add(8, 0.25)
    assert rate.tokens_per_second == 32


def test_a_step_that_was_held_up_does_not_count() -> None:
    rate = DrawRate()
    for seconds in (0.25, 0.25, 0.75, 0.25, 30.0):
        rate.add(6, seconds)
    assert rate.tokens_per_second == 24 / 1.5


def test_a_step_takes_the_time_since_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    times: Iterator[float] = iter([5.0, 5.5, 6.0])
    monkeypatch.setattr(draw_rate, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    rate = DrawRate()
    rate.step(100)
    assert rate.tokens_per_second == 0, "nobody knows when it began"
    rate.step(4)
    rate.step(6)
    assert rate.tokens_per_second == 10
