"""How many decode steps one tick (a round trip to the device) runs. Pure: measured times in, a number out.

More steps per tick amortize the host's overhead, until it is a small share of the time. Two things call for fewer:

- A commit waits for the tick in progress, new prompts wait for the next one, and the trainer waits for both. Ticks become
  shorter where commits spend a good part of the time between them waiting. An idle engine shortens them freely, a busy one
  only as far as the extra overhead stays a small share of its time.
- A sample that finishes inside a tick leaves its row empty until the next. Where samples wait for a row, the tick ends when
  empty rows cost more than another tick would. Where steps with fewer rows are faster, as on CPU, it ends when the remaining
  rows fit a smaller program."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.engines.embedded.scheduling.shapes import bucket

MAX_TICK_SECONDS, USUAL_TICK_SECONDS, MIN_TICK_SECONDS = 0.15, 0.03, 0.004
"""New requests, commits and cancellations wait for a tick to end. Above the second, a tick is as long as `MAX_OVERHEAD`
needs."""
MAX_OVERHEAD = 1 / 50
"""Share of the time that the host may take where nobody waits for ticks to end."""
LONG_WAIT, SHORT_WAIT = 1 / 16, 1 / 64
"""Shares of the time between commits: waiting above the first shortens ticks, below the second lengthens them."""
MIN_IDLE = 1 / 8
"""Share of the time between commits; an engine that is idle for less counts as busy."""
MAX_BUSY_OVERHEAD = 1 / 12
"""Share of a busy engine's time that shortened ticks may spend outside decode steps."""


@dataclass(slots=True)
class StepsPerTick:
    sizes: tuple[int, ...]
    """Compiled row counts, ascending."""
    step_seconds: dict[int, float] = field(default_factory=dict)
    """Moving average of a decode step's time, by row count."""
    host_seconds: float = 0.0
    """Moving average of a tick's time outside its steps."""
    limit: float = math.inf
    """Seconds to which waiting commits have shortened ticks."""
    commit_wait: float = 0.0
    """Moving average of the share of time that commits waited for a tick to end."""

    @property
    def tick_seconds(self) -> float:
        longest = min(max(self.host_seconds / MAX_OVERHEAD, USUAL_TICK_SECONDS), MAX_TICK_SECONDS)
        return min(self.limit, longest)

    def steps(self, rows: int, most: int) -> int:
        seconds = self._step_seconds(rows)
        return most if not seconds else min(max(int(self.tick_seconds / seconds), 1), most)

    def overhead(self, rows: int) -> float:
        """The time of a tick outside its steps, in steps."""
        seconds = self._step_seconds(rows)
        return self.host_seconds / seconds if seconds else 1.0

    def early_exit_rows(self, rows: int, steps: int) -> int:
        """The number of unfinished rows at which the tick should end, because a tick of a smaller program would pay off from
        halfway on. 0 if none would."""
        known, size = self.step_seconds, bucket(rows, self.sizes)
        for smaller in reversed(self.sizes[: self.sizes.index(size)]):
            if smaller in known and (known.get(size, 0.0) - known[smaller]) * steps / 2 > self.host_seconds:
                return smaller
        return 0

    def _step_seconds(self, rows: int) -> float:
        """The time of a step with this many rows, or of the nearest measured row count; 0 before any measurement."""
        size = bucket(rows, self.sizes)
        nearest = min(self.step_seconds, key=lambda known: abs(known - size), default=None)
        return 0.0 if nearest is None else self.step_seconds[nearest]

    def record_tick(self, rows: int, steps: int, seconds: float, host_seconds: float) -> None:
        size = bucket(rows, self.sizes)
        self.step_seconds[size] = _moving_average(self.step_seconds.get(size, 0.0), seconds / max(steps, 1))
        self.host_seconds = _moving_average(self.host_seconds, host_seconds)

    def record_commit(self, interval: float, waited: float, idle: float) -> None:
        """A version was committed `interval` seconds after the previous one. The commit waited `waited` seconds for a tick to
        end, and the engine had no work for `idle` seconds of the interval."""
        self.commit_wait = 0.7 * self.commit_wait + 0.3 * waited / max(interval, 1e-6)
        shortest = MIN_TICK_SECONDS
        if idle < MIN_IDLE * interval:
            shortest = min(max(self.host_seconds / MAX_BUSY_OVERHEAD, shortest), USUAL_TICK_SECONDS)
        if self.commit_wait > LONG_WAIT and self.tick_seconds > shortest:
            self.limit = self.tick_seconds / 2
            self.commit_wait /= 2  # what it will be with ticks half as long
        elif self.commit_wait < SHORT_WAIT:
            self.limit *= 2
        self.limit = max(self.limit, shortest)


def best_num_steps(remaining: Sequence[int], most: int, overhead: float) -> int:
    """The number of steps with the most tokens per time while other samples wait for a row. `remaining` has the tokens that
    each running sample may still draw; `overhead` is a tick's time outside its steps, in steps."""
    ends = Counter(min(tokens, most) for tokens in remaining if tokens > 0)
    active, tokens, before = ends.total(), 0, 0
    best, best_rate = most, 0.0
    for steps in sorted(ends):  # between two of these, more steps only amortize the overhead
        tokens += active * (steps - before)
        rate = tokens / (steps + overhead)
        if rate > best_rate:
            best, best_rate = steps, rate
        active, before = active - ends[steps], steps
    return best


def _moving_average(before: float, now: float) -> float:
    return now if not before else 0.7 * before + 0.3 * now
