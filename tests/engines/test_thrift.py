"""A program is compiled when doing without it has cost as much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engines.embedded import thrift
from slipstream.engines.embedded.thrift import Size, Thrift

SIZES = (8, 16, 32)


def taken(found: Thrift, needed: int, soon: int = 0) -> int:
    size = found.choose("decode", SIZES, needed, soon)
    assert size.name == "decode" and size.fitting == next(s for s in SIZES if s >= needed)
    return size.taken


def test_where_nothing_is_compiled_what_waits_has_a_say() -> None:
    assert [taken(Thrift(), needed) for needed in (1, 8, 9, 32)] == [8, 8, 16, 32]
    assert [taken(Thrift(), 3, soon) for soon in (2, 9, 32, 10_000)] == [8, 16, 32, 32]


def test_a_larger_one_is_run_until_that_has_cost_as_much_as_compiling() -> None:
    found = Thrift()
    found.compiled["decode", 32] = 5.0
    for _ in range(4):
        size = found.choose("decode", SIZES, 3)
        assert size == Size("decode", 8, 32)
        found.ran(size, 1.6)  # three quarters of it for nothing
    assert taken(found, 16) == 32  # of this one nothing is known
    found.ran(size, 1.6)
    assert taken(found, 3) == 8
    found.compiled["decode", 8] = 4.0
    assert taken(found, 3) == 8 and taken(found, 9) == 32 and taken(found, 9, soon=20) == 32
    assert found.choose("decode rich", SIZES, 3).taken == 8  # another program: of that there is none


def test_the_smallest_that_is_there_is_run() -> None:
    found = Thrift()
    found.compiled |= {("decode", 32): 5.0, ("decode", 16): 5.0}
    assert taken(found, 3) == 16 and taken(found, 17) == 32


def test_one_that_costs_next_to_nothing_is_had_soon() -> None:
    """As programs do that another process has left behind."""
    found = Thrift()
    found.compiled["decode", 32] = 0.2
    found.ran(found.choose("decode", SIZES, 8), 0.3)
    assert taken(found, 8) == 8


def test_without_patience_the_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thrift, "PATIENCE", 0)
    found = Thrift()
    assert taken(found, 3, soon=32) == 8
    found.compiled["decode", 32] = 5.0
    assert taken(found, 3) == 8


@given(
    st.lists(st.tuples(st.integers(1, 32), st.integers(0, 40), st.floats(0.001, 1.0)), max_size=200), st.floats(0, 9)
)
def test_it_costs_at_most_twice_what_it_would_to_know_beforehand(
    runs: list[tuple[int, int, float]], price: float
) -> None:
    """Of each size, beside the better of never and at once: what it loses, with what it compiles, is no more than the double of
    that and of what one run loses. The time of a run follows its rows."""
    found, spent = Thrift(), dict.fromkeys(SIZES, 0.0)
    loss, worst = dict.fromkeys(SIZES, 0.0), dict.fromkeys(SIZES, 0.0)
    """What never compiling costs, once a larger one is there; the most that a run has lost."""
    for needed, soon, seconds in runs:
        size = found.choose("decode", SIZES, needed, soon)
        assert needed <= size.taken and size.taken in SIZES
        larger = [s for s in SIZES if s > size.fitting and ("decode", s) in found.compiled]
        if larger:
            loss[size.fitting] += seconds * (larger[0] / size.fitting - 1)
        if ("decode", size.taken) not in found.compiled:
            found.compiled["decode", size.taken] = price
            spent[size.taken] += price if larger else 0.0
        lost = seconds * (size.taken / size.fitting - 1)
        spent[size.fitting] += lost
        worst[size.fitting] = max(worst[size.fitting], lost)
        found.ran(size, seconds * size.taken / size.fitting)
    for size in SIZES:
        assert spent[size] <= 2 * min(price, loss[size]) + 2 * worst[size] + 1e-9
