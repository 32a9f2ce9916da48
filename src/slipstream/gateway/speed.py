"""How fast each engine is, compared with its peers. Pure: the clock is an argument.

The speed of an engine is that of one sequence: work over the time from sending a request to its answer. Throughput would not
do: an engine that gets less has less, and would get less again. It is the median over windows. A window is at least as long as
its answers took on average: all requests that one stall holds up, such as a compilation, end up in one window, and do not
count."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

WINDOW_SECONDS, MIN_ANSWERS = 0.1, 4
"""A window is at least this long and has at least this many answers."""
WINDOWS, MIN_WINDOWS = 5, 3
"""Windows that the median is taken of, and from how many on it is known."""
PROMPT_SHARE = 1 / 5
"""Work of a prompt token, in generated tokens; as in `router.PREFIX_WORTH`."""
EVEN = 0.5
"""Engines above this share of their peers' speed get the same work."""
SLOW = 0.2
"""An engine below this share is quarantined, if a canary confirms it, until it is above `EVEN`."""
LEAST = 0.05
"""Least share of work, so that an engine is measured again."""
VALID_SECONDS = 60.0
"""A speed that was not measured for this long is not known any more. A slow engine that got no work has another chance."""


class SpeedMeter:
    """The speed of one engine."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=WINDOWS)
        self._began = self._ended = self._work = self._seconds = 0.0
        self._median = 0.0
        self._answers = 0

    def add(self, now: float, work: float, seconds: float, answers: int = 1) -> None:
        """Count answers that arrived together: their work and the times they took, in sum."""
        if not self._answers:
            self._began = now
        self._work, self._seconds, self._answers = self._work + work, self._seconds + seconds, self._answers + answers
        is_long = now - self._began >= max(WINDOW_SECONDS, self._seconds / self._answers)
        if is_long and self._answers >= MIN_ANSWERS:
            if now - self._ended > VALID_SECONDS:
                self._rates.clear()
            self._rates.append(self._work / max(self._seconds, 1e-9))
            self._median = statistics.median(self._rates)
            self._ended, self._work, self._seconds, self._answers = now, 0.0, 0.0, 0

    def rate(self, now: float) -> float | None:
        """Tokens per second of one sequence; None if not known."""
        is_known = len(self._rates) >= MIN_WINDOWS and now - self._ended <= VALID_SECONDS
        return self._median if is_known else None


def relative_speeds(rates: Mapping[str, float | None]) -> dict[str, float]:
    """Return each engine's speed relative to the median of the others; only of engines that can be compared."""
    ordered = sorted((rate, name) for name, rate in rates.items() if rate)
    if len(ordered) < 2:
        return {}
    middle = (len(ordered) - 1) // 2
    relative = {}
    for place, (rate, name) in enumerate(ordered):
        # The median of the others, without sorting them again.
        upper = ordered[middle + (place <= middle)][0]
        lower = ordered[middle - 1 + (place < middle)][0]
        relative[name] = rate / (upper if len(ordered) % 2 == 0 else (lower + upper) / 2)
    return relative


def share_of_work(relative: float) -> float:
    """Return the weight of an engine when work is shared out: 1, or its relative speed if that is far below."""
    return 1.0 if relative >= EVEN else max(relative, LEAST)
