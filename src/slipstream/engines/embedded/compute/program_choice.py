"""Which size of a program to run: the one that fits, or a larger one that is already compiled. Pure: times in, sizes out.

Compiling takes seconds, during which the engine stands still; a larger program gives the same result but takes longer. So the
fitting size is compiled once running without it has cost as much as compiling it would. This ski-rental rule costs at most
twice the optimum. A short run, or one whose last rows finish soon, compiles one size instead of six."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from slipstream.engines.embedded.scheduling.shapes import bucket

PATIENCE = 1.0
"""How much running without a program may cost, relative to compiling it. 0 always takes the fitting size."""


class ProgramSize(NamedTuple):
    name: str
    fitting: int
    """The smallest sufficient number of rows or blocks."""
    taken: int


class ProgramChoice:
    def __init__(self) -> None:
        self.compiled: dict[tuple[str, int], float] = {}
        """Seconds of each program's first call, by name and size."""
        self.compiling = ""
        """The program being compiled, in words; empty if there is none."""
        self._excess: dict[tuple[str, int], float] = defaultdict(float)
        """Seconds lost in larger programs, by name and fitting size."""

    def choose(self, name: str, sizes: tuple[int, ...], needed: int, upcoming: int = 0) -> ProgramSize:
        """`upcoming` is the size needed soon. It counts only if no sufficient size is compiled yet."""
        fitting = bucket(needed, sizes)
        ready = next((size for size in sizes if size >= fitting and (name, size) in self.compiled), None)
        if ready is None:
            taken = bucket(min(max(needed, upcoming), sizes[-1]), sizes) if PATIENCE else fitting
        elif self._excess[name, fitting] >= PATIENCE * self.compiled[name, ready]:
            taken = fitting
        else:
            taken = ready
        return ProgramSize(name, fitting, taken)

    def record(self, size: ProgramSize, seconds: float) -> None:
        """Count a run. Assumes time proportional to size; where it is not, the loss is overestimated."""
        self._excess[size.name, size.fitting] += seconds * (1 - size.fitting / size.taken)
