"""Engines that returned wrong results, or are far slower than their peers: kept out of use until a probe shows that they are
sound, and quick. Pure: the clock is an argument.

             a wrong or late result          new weights, another process, or a cool-down
    trusted ─────────────────► quarantined ─────────────────────────────────────────────► probed
       ▲                            ▲                 a wrong answer: double cool-down       │
       │                            └──────────────────────────────────────────────────────┤
       └──────────────────────────────────── a sound answer ────────────────────────────────┘

An engine that was reported from outside, such as by the trainer whose logprobs disagree, is not probed before it has new
weights or is another process: a probe may not see what the trainer saw. A circuit breaker (`circuit_breaker.py`) is for engines
that fail openly; those are used if there is no other. So are slow engines: their results are good. An engine that returned
wrong results is never used."""

from __future__ import annotations

FIRST_SECONDS, MOST_SECONDS = 5.0, 300.0
"""First and longest cool-down."""
FORGIVEN_SECONDS = 600.0
"""An engine that is quarantined again sooner than this after its release has a longer cool-down."""


class Quarantine:
    """The trust in one engine."""

    def __init__(self, reason: str = "") -> None:
        """With a reason it is quarantined already, until it is `renewed`."""
        self.reason = reason
        """Why it is quarantined; empty while it is trusted."""
        self.is_slow = False
        """It is quarantined because it is slow, and for no other reason."""
        self._needs_weights = bool(reason)
        self._cool_down = FIRST_SECONDS
        self._probe_at = self._trusted_at = 0.0
        self._is_renewed = self._is_probing = False

    def start(self, now: float, reason: str, needs_weights: bool = False, is_slow: bool = False) -> None:
        """`needs_weights`: no probe before `renewed`."""
        if not self.reason or (self.is_slow and not is_slow):
            is_again = self._trusted_at and now - self._trusted_at < FORGIVEN_SECONDS
            self._cool_down = min(2 * self._cool_down, MOST_SECONDS) if is_again else FIRST_SECONDS
            self.reason, self.is_slow, self._is_renewed = reason, is_slow, False
        self._probe_at, self._needs_weights = now + self._cool_down, self._needs_weights or needs_weights

    def renewed(self) -> None:
        """The engine has new weights, or is another process. The first time, it is probed at once."""
        self._needs_weights, self._is_renewed = False, self._cool_down == FIRST_SECONDS

    def wants_probe(self, now: float) -> bool:
        is_due = self._is_renewed or (now >= self._probe_at and not self._needs_weights)
        return bool(self.reason) and is_due and not self._is_probing

    def probe_sent(self) -> None:
        """One of the next three methods reports the outcome."""
        self._is_probing = True

    def passed(self, now: float) -> None:
        self.reason, self.is_slow, self._is_probing, self._trusted_at = "", False, False, now

    def failed(self, now: float, reason: str, is_slow: bool = False) -> None:
        self.reason, self.is_slow, self._is_probing, self._is_renewed = reason, is_slow, False, False
        self._cool_down = min(2 * self._cool_down, MOST_SECONDS)
        self._probe_at = now + self._cool_down

    def probe_ended(self) -> None:
        """The probe said nothing, because the engine is gone or was paused."""
        self._is_probing = False

    def note(self, now: float) -> str:
        """Return why the engine gets no requests, for people; empty while it is trusted."""
        if not self.reason:
            return ""
        if self._needs_weights:
            return f"{self.reason}. It is probed after the next sync or a restart"
        when = "now" if self.wants_probe(now) or self._is_probing else f"in {max(0.0, self._probe_at - now):.0f} s"
        return f"{self.reason}. It is probed {when}"
