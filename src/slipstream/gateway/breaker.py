"""A circuit breaker for each engine: one that fails again and again is left alone for a while, then tried with one request.

        FAULTS in a row                    a while
closed ────────────────► open ────────────────────► half-open: one request at a time
   ▲                      ▲   a fault: twice the while    │
   │                      └───────────────────────────────┤
   └──────────────────────── a completion ────────────────┘

Only an engine's own faults count. A client's bad request says nothing about an engine, however often it is sent. Pure: the
clock is an argument."""

from __future__ import annotations

from typing import Literal, TypeAlias

from slipstream.errors import ConfigError, NotReady, RequestError, SlipstreamError, WeightsError
from slipstream.types import Circuit

FAULTS = 3
FIRST_SECONDS, MOST_SECONDS = 5.0, 60.0
"""How long an engine is left alone, at first and at most."""

Blame: TypeAlias = Literal["client", "moment", "engine"]
"""Whose doing an error is. `client`: no engine would do it. `moment`: this engine cannot just now, another might. `engine`: it
has failed, or is gone; another might not."""


def blame(error: SlipstreamError) -> Blame:
    if isinstance(error, (RequestError, ConfigError)):
        return "client"
    return "moment" if isinstance(error, (NotReady, WeightsError)) else "engine"


class Breaker:
    def __init__(self) -> None:
        self.num_faults = 0
        """Since the start."""
        self.why = ""
        """The last fault."""
        self._in_a_row = 0
        self._seconds = 0.0
        """That it is left alone; 0 while it is closed."""
        self._until = 0.0
        self._is_tried = False

    def state(self, now: float) -> Circuit:
        if not self._seconds:
            return "closed"
        return "open" if now < self._until else "half-open"

    def wants_probe(self, now: float) -> bool:
        """Half-open, and nothing has been sent to see how it is."""
        return self.state(now) == "half-open" and not self._is_tried

    def tried(self) -> None:
        """The one request has been sent. How it ends is told by one of the three below."""
        self._is_tried = True

    def succeeded(self) -> None:
        self._in_a_row, self._seconds, self._is_tried = 0, 0.0, False

    def faulted(self, now: float, why: str) -> None:
        """Of requests that were sent before it opened, faults change nothing any more."""
        self.num_faults += 1
        self._in_a_row += 1
        self.why = why
        state = self.state(now)
        if state == "half-open" or (state == "closed" and self._in_a_row >= FAULTS):
            self._seconds = min(2 * self._seconds, MOST_SECONDS) or FIRST_SECONDS
            self._until = now + self._seconds
            self._is_tried = False

    def unanswered(self) -> None:
        """A call has ended and says nothing of the engine: it was cancelled, or the request was a bad one."""
        self._is_tried = False

    def note(self, now: float) -> str:
        """Why it gets no requests, for people; empty while it is closed."""
        state, first = self.state(now), self.why.strip().splitlines()[-1:] or [""]
        if state == "closed":
            return ""
        when = f"tried again in {self._until - now:.0f} s" if state == "open" else "tried with one request at a time"
        return f"circuit {state} after {self._in_a_row} faults in a row; {when}. The last: {first[0][:200]}"
