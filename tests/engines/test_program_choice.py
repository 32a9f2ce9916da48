"""A program size is compiled when running without it has cost as much time as compiling it would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engines.embedded.compute import program_choice
from slipstream.engines.embedded.compute.program_choice import ProgramChoice, ProgramSize

SIZES = (8, 16, 32)


def taken(choice: ProgramChoice, needed: int, upcoming: int = 0) -> int:
    size = choice.choose("decode", SIZES, needed, upcoming)
    assert size.name == "decode" and size.fitting == next(s for s in SIZES if s >= needed)
    return size.taken


def test_the_first_size_fits_the_upcoming_rows() -> None:
    assert [taken(ProgramChoice(), needed) for needed in (1, 8, 9, 32)] == [8, 8, 16, 32]
    assert [taken(ProgramChoice(), 3, upcoming) for upcoming in (2, 9, 32, 10_000)] == [8, 16, 32, 32]


def test_a_larger_size_runs_until_it_has_cost_as_much_as_compiling() -> None:
    choice = ProgramChoice()
    choice.compiled["decode", 32] = 5.0
    for _ in range(4):
        size = choice.choose("decode", SIZES, 3)
        assert size == ProgramSize("decode", 8, 32)
        choice.record(size, 1.6)  # three quarters of it lost
    assert taken(choice, 16) == 32  # no losses recorded for this size
    choice.record(size, 1.6)
    assert taken(choice, 3) == 8
    choice.compiled["decode", 8] = 4.0
    assert taken(choice, 3) == 8 and taken(choice, 9) == 32 and taken(choice, 9, upcoming=20) == 32
    assert choice.choose("decode rich", SIZES, 3).taken == 8  # another program, with no compiled size


def test_the_smallest_compiled_size_runs() -> None:
    choice = ProgramChoice()
    choice.compiled |= {("decode", 32): 5.0, ("decode", 16): 5.0}
    assert taken(choice, 3) == 16 and taken(choice, 17) == 32


def test_a_cheap_size_is_compiled_early() -> None:
    """Such as one in the compilation cache."""
    choice = ProgramChoice()
    choice.compiled["decode", 32] = 0.2
    choice.record(choice.choose("decode", SIZES, 8), 0.3)
    assert taken(choice, 8) == 8


def test_without_patience_the_fitting_size_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_choice, "PATIENCE", 0)
    choice = ProgramChoice()
    assert taken(choice, 3, upcoming=32) == 8
    choice.compiled["decode", 32] = 5.0
    assert taken(choice, 3) == 8


@given(
    st.lists(st.tuples(st.integers(1, 32), st.integers(0, 40), st.floats(0.001, 1.0)), max_size=200), st.floats(0, 9)
)
def test_the_cost_is_at_most_twice_the_optimum(runs: list[tuple[int, int, float]], price: float) -> None:
    """For each size, losses plus compilation cost at most twice the better of compiling never or at once, plus twice the loss of
    one run. The time of a run is proportional to its rows."""
    choice, spent = ProgramChoice(), dict.fromkeys(SIZES, 0.0)
    loss, worst = dict.fromkeys(SIZES, 0.0), dict.fromkeys(SIZES, 0.0)
    """The loss without compiling, once a larger size is there; the largest loss of one run."""
    for needed, upcoming, seconds in runs:
        size = choice.choose("decode", SIZES, needed, upcoming)
        assert needed <= size.taken and size.taken in SIZES
        larger = [s for s in SIZES if s > size.fitting and ("decode", s) in choice.compiled]
        if larger:
            loss[size.fitting] += seconds * (larger[0] / size.fitting - 1)
        if ("decode", size.taken) not in choice.compiled:
            choice.compiled["decode", size.taken] = price
            spent[size.taken] += price if larger else 0.0
        lost = seconds * (size.taken / size.fitting - 1)
        spent[size.fitting] += lost
        worst[size.fitting] = max(worst[size.fitting], lost)
        choice.record(size, seconds * size.taken / size.fitting)
    for size in SIZES:
        assert spent[size] <= 2 * min(price, loss[size]) + 2 * worst[size] + 1e-9
