"""How many decode steps a round trip to the device has. Pure: times in, a number out.

The more steps, the less the host costs. Two things speak for fewer. A commit waits for the round trip under way, and the
trainer waits for the commit: so where an engine has nothing to do for a part of the time, and its commits wait, its round
trips become shorter. That costs time which nobody needs; an engine that is always busy has none to give. And a sample that
ends in the middle of a round trip leaves its place empty until the next: so where others wait for a place, a round trip ends
when that costs more than another one would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

TICK_SECONDS, SHORTEST_SECONDS = 0.03, 0.004
"""Of a round trip: new requests, commits and cancellations wait for it."""
MUCH, LITTLE = 1 / 16, 1 / 64
"""Of the time between two commits: waiting that is worth a shorter round trip, and that would allow a longer one."""
IDLE = 1 / 8
"""Of that time: an engine with less of it to spare is busy."""


@dataclass(slots=True)
class Pace:
    step_seconds: float = 0.0
    """Of a decode step, lately."""
    host_seconds: float = 0.0
    """What a round trip costs besides its steps, lately."""
    tick_seconds: float = TICK_SECONDS
    waiting: float = 0.0
    """What commits have waited, as a share of the time between them, lately."""

    def steps(self, most: int) -> int:
        return most if not self.step_seconds else min(max(int(self.tick_seconds / self.step_seconds), 1), most)

    @property
    def overhead(self) -> float:
        """What a round trip costs besides its steps, in steps."""
        return self.host_seconds / self.step_seconds if self.step_seconds else 1.0

    def stepped(self, steps: int, seconds: float, host_seconds: float) -> None:
        self.step_seconds = _lately(self.step_seconds, seconds / max(steps, 1))
        self.host_seconds = _lately(self.host_seconds, host_seconds)

    def committed(self, interval: float, waited: float, idle: float) -> None:
        """A version has been committed `interval` seconds after the one before. Of these it has waited for a round trip to
        end, and for others there was nothing to do."""
        self.waiting = 0.7 * self.waiting + 0.3 * waited / max(interval, 1e-6)
        if idle < IDLE * interval:
            self.tick_seconds = TICK_SECONDS
        elif self.waiting > MUCH:
            self.tick_seconds = max(self.tick_seconds / 2, SHORTEST_SECONDS)
            self.waiting /= 2  # as it will be now
        elif self.waiting < LITTLE:
            self.tick_seconds = min(self.tick_seconds * 2, TICK_SECONDS)


def worthwhile(rooms: Sequence[int], most: int, overhead: float) -> int:
    """How many steps to run when others wait for a place: as many as give the most tokens for the time. `rooms` are the tokens
    that the samples which have one may still draw; `overhead` is what a round trip costs besides, in steps."""
    ends = Counter(min(room, most) for room in rooms if room > 0)
    drawing, tokens, before = ends.total(), 0, 0
    best, best_rate = most, 0.0
    for steps in sorted(ends):  # between two of these, more steps only spread the overhead
        tokens += drawing * (steps - before)
        rate = tokens / (steps + overhead)
        if rate > best_rate:
            best, best_rate = steps, rate
        drawing, before = drawing - ends[steps], steps
    return best


def _lately(before: float, now: float) -> float:
    return now if not before else 0.7 * before + 0.3 * now
