"""How fast an engine draws tokens. Pure: tokens and times of its last steps in, a rate out."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TypeAlias

Drawn: TypeAlias = tuple[dict[str, int], float]
"""How many tokens each running request has drawn, without requests that have drawn none, and how many all draw per second."""

NUM_STEPS = 16
LONG_STEP = 4.0
"""Steps that took this many times the median are left out: a program was compiled, or a commit or a lack of requests held
them up."""


class DrawRate:
    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=NUM_STEPS)
        self._ended_at: float | None = None

    def add(self, tokens: int, seconds: float) -> None:
        """A step drew `tokens` in `seconds`."""
        self._steps.append((tokens, seconds))

    def step(self, tokens: int) -> None:
        """A step that drew `tokens` ends now, and began when the previous one ended."""
        now, before = time.perf_counter(), self._ended_at
        self._ended_at = now
        if before is not None:
            self.add(tokens, now - before)

    @property
    def tokens_per_second(self) -> float:
        """0 if nothing was drawn yet."""
        if not self._steps:
            return 0.0
        longest = LONG_STEP * statistics.median(seconds for _, seconds in self._steps)
        usual = [(tokens, seconds) for tokens, seconds in self._steps if seconds <= longest]
        return sum(tokens for tokens, _ in usual) / max(sum(seconds for _, seconds in usual), 1e-9)
