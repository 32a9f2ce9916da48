"""How many decode steps a round trip to the device has. Pure: times in, a number out.

The more steps, the less the host costs. But a commit waits for the round trip under way, and the trainer waits for the commit.
So where an engine has nothing to do for a part of the time, and its commits wait, its round trips become shorter: that costs
time which nobody needs. An engine that is always busy has none to give."""

from __future__ import annotations

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
    tick_seconds: float = TICK_SECONDS
    waiting: float = 0.0
    """What commits have waited, as a share of the time between them, lately."""

    def steps(self, most: int) -> int:
        return most if not self.step_seconds else min(max(int(self.tick_seconds / self.step_seconds), 1), most)

    def stepped(self, steps: int, seconds: float) -> None:
        each = seconds / max(steps, 1)
        self.step_seconds = each if not self.step_seconds else 0.7 * self.step_seconds + 0.3 * each

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
