"""Which size of a program to run: the one that fits, or a larger one that is there already. Pure: times in, sizes out.

A program takes seconds to compile, and meanwhile the engine stands still; a larger one gives the same result, and takes longer.
So the one that fits is compiled when doing without it has cost as much as compiling it would: whatever comes, that is at most
twice what it would cost to know beforehand. A short run, or one whose last rows end soon, compiles one size and not six."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from slipstream.engines.embedded.shapes import bucket

PATIENCE = 1.0
"""What doing without a program may cost, in units of what it costs to compile; with 0 the one that fits is always taken."""


class Size(NamedTuple):
    """Of a program that is about to run."""

    name: str
    fitting: int
    """Rows, or blocks: the fewest that hold what is to be done."""
    taken: int


class Thrift:
    def __init__(self) -> None:
        self.compiled: dict[tuple[str, int], float] = {}
        """Seconds of the first call of each program, by name and size."""
        self._lost: dict[tuple[str, int], float] = defaultdict(float)
        """Seconds spent in larger programs, by the name and size of the one that would have fitted."""

    def choose(self, name: str, sizes: tuple[int, ...], needed: int, soon: int = 0) -> Size:
        """`soon` is what will be needed next: it has a say where something has to be compiled anyway."""
        fitting = bucket(needed, sizes)
        ready = next((size for size in sizes if size >= fitting and (name, size) in self.compiled), None)
        if ready is None:
            taken = bucket(min(max(needed, soon), sizes[-1]), sizes) if PATIENCE else fitting
        elif self._lost[name, fitting] >= PATIENCE * self.compiled[name, ready]:
            taken = fitting
        else:
            taken = ready
        return Size(name, fitting, taken)

    def ran(self, size: Size, seconds: float) -> None:
        """A step's time follows its rows, or else there was less to lose."""
        self._lost[size.name, size.fitting] += seconds * (1 - size.fitting / size.taken)
