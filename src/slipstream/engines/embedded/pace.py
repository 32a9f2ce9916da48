"""How many decode steps a round trip to the device has. Pure: times in, a number out.

The more steps, the less the host costs. Two things speak for fewer. A commit waits for the round trip under way; prompts that
may start with the new version wait for the next one, too; and the trainer waits for both: so where commits wait for a good part
of the time between them, round trips become shorter. An engine that has nothing to do for a part of the time gives what nobody
needs; one that is always busy gives no more than a small share of its time. And a sample that ends in the middle of a round
trip leaves its place empty until the next: so where others wait for a place, a round trip ends when that costs more than
another one would; and where steps with fewer rows are quicker, as they are on a CPU, it ends when those that are left fit a
smaller program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.engines.embedded.shapes import bucket

TICK_SECONDS, SHORTEST_SECONDS = 0.03, 0.004
"""Of a round trip: new requests, commits and cancellations wait for it."""
MUCH, LITTLE = 1 / 16, 1 / 64
"""Of the time between two commits: waiting that is worth a shorter round trip, and that would allow a longer one."""
IDLE = 1 / 8
"""Of that time: an engine with less of it to spare is busy."""
BUSY_COST = 1 / 12
"""What a round trip of a busy engine may cost besides its steps, if it is shortened: a share of its time."""


@dataclass(slots=True)
class Pace:
    sizes: tuple[int, ...]
    """Rows that there are programs for, ascending."""
    step_seconds: dict[int, float] = field(default_factory=dict)
    """Of a decode step, by size, lately."""
    host_seconds: float = 0.0
    """What a round trip costs besides its steps, lately."""
    tick_seconds: float = TICK_SECONDS
    waiting: float = 0.0
    """What commits have waited, as a share of the time between them, lately."""

    def steps(self, rows: int, most: int) -> int:
        seconds = self._step(rows)
        return most if not seconds else min(max(int(self.tick_seconds / seconds), 1), most)

    def overhead(self, rows: int) -> float:
        """What a round trip costs besides its steps, in steps."""
        seconds = self._step(rows)
        return self.host_seconds / seconds if seconds else 1.0

    def floor(self, rows: int, steps: int) -> int:
        """When no more than so many rows are left, the round trip ends: by the middle of it, another one with a smaller program
        would cost less. 0 where none would."""
        known, size = self.step_seconds, bucket(rows, self.sizes)
        for smaller in reversed(self.sizes[: self.sizes.index(size)]):
            if smaller in known and (known.get(size, 0.0) - known[smaller]) * steps / 2 > self.host_seconds:
                return smaller
        return 0

    def _step(self, rows: int) -> float:
        """Seconds of a step; where that size has not been seen, of the nearest that has; 0 where none has."""
        size = bucket(rows, self.sizes)
        nearest = min(self.step_seconds, key=lambda known: abs(known - size), default=None)
        return 0.0 if nearest is None else self.step_seconds[nearest]

    def stepped(self, rows: int, steps: int, seconds: float, host_seconds: float) -> None:
        size = bucket(rows, self.sizes)
        self.step_seconds[size] = _lately(self.step_seconds.get(size, 0.0), seconds / max(steps, 1))
        self.host_seconds = _lately(self.host_seconds, host_seconds)

    def committed(self, interval: float, waited: float, idle: float) -> None:
        """A version has been committed `interval` seconds after the one before. Of these it has waited for a round trip to
        end, and for others there was nothing to do."""
        self.waiting = 0.7 * self.waiting + 0.3 * waited / max(interval, 1e-6)
        shortest = SHORTEST_SECONDS
        if idle < IDLE * interval:
            shortest = min(max(self.host_seconds / BUSY_COST, shortest), TICK_SECONDS)
        if self.waiting > MUCH and self.tick_seconds > shortest:
            self.tick_seconds /= 2
            self.waiting /= 2  # as it will be now
        elif self.waiting < LITTLE:
            self.tick_seconds = min(self.tick_seconds * 2, TICK_SECONDS)
        self.tick_seconds = max(self.tick_seconds, shortest)


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
