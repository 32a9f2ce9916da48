"""Circuit breaker per engine: after repeated faults an engine gets no requests for a while, then one request as a probe.

        FAULTS in a row                    cool-down
closed ────────────────► open ────────────────────► half-open: one request at a time
   ▲                      ▲   a fault: double cool-down   │
   │                      └───────────────────────────────┤
   └──────────────────────── a completion ────────────────┘

Only the engine's own faults count; a client's bad request says nothing about an engine. Pure: the clock is an argument."""

from __future__ import annotations

from typing import Literal, TypeAlias

from slipstream.errors import (
    ConfigError,
    EngineDrained,
    EngineQuarantined,
    NotReady,
    Overloaded,
    RequestError,
    SlipstreamError,
    WeightsError,
)
from slipstream.types import Circuit

FAULTS = 3
FIRST_SECONDS, MOST_SECONDS = 5.0, 60.0
"""First and longest cool-down."""

Blame: TypeAlias = Literal["client", "moment", "engine"]
"""Who caused an error. `client`: no engine accepts the request, or its caller asks for too much. `moment`: this engine cannot
serve it now, another might. `engine`: the engine failed or is gone, another might not be."""


def blame(error: SlipstreamError) -> Blame:
    if isinstance(error, (RequestError, ConfigError, Overloaded)):
        return "client"
    # Quarantine and drain have their own rules for when an engine is used again.
    return "moment" if isinstance(error, (NotReady, WeightsError, EngineQuarantined, EngineDrained)) else "engine"


class CircuitBreaker:
    def __init__(self) -> None:
        self.num_faults = 0
        """Faults since the gateway started."""
        self.last_fault = ""
        self._faults_in_a_row = 0
        self._cool_down = 0.0
        """Seconds; 0 while closed."""
        self._open_until = 0.0
        self._is_probing = False

    def state(self, now: float) -> Circuit:
        if not self._cool_down:
            return "closed"
        return "open" if now < self._open_until else "half-open"

    def wants_probe(self, now: float) -> bool:
        """Whether the circuit is half-open and no probe is in flight."""
        return self.state(now) == "half-open" and not self._is_probing

    def probe_sent(self) -> None:
        """A probe was sent. One of the three methods below reports its outcome."""
        self._is_probing = True

    def succeeded(self) -> None:
        self._faults_in_a_row, self._cool_down, self._is_probing = 0, 0.0, False

    def faulted(self, now: float, error: str) -> None:
        """Count a fault. Faults of requests sent before the circuit opened do not extend the cool-down."""
        self.num_faults += 1
        self._faults_in_a_row += 1
        self.last_fault = error
        state = self.state(now)
        if state == "half-open" or (state == "closed" and self._faults_in_a_row >= FAULTS):
            self._cool_down = min(2 * self._cool_down, MOST_SECONDS) or FIRST_SECONDS
            self._open_until = now + self._cool_down
            self._is_probing = False

    def probe_ended(self) -> None:
        """A probe ended without saying anything about the engine: it was cancelled, or the request was bad."""
        self._is_probing = False

    def note(self, now: float) -> str:
        """Return why the engine gets no requests, for people; empty while closed."""
        state, error = self.state(now), self.last_fault.strip().splitlines()[-1:] or [""]
        if state == "closed":
            return ""
        when = f"probed in {self._open_until - now:.0f} s" if state == "open" else "probed with one request at a time"
        return f"circuit {state} after {self._faults_in_a_row} faults in a row; {when}. Last fault: {error[0][:200]}"
