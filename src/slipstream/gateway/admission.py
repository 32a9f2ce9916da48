"""Bounds on what a server holds for its callers: requests in progress, and bytes of prompts and of results not yet read.

Pure bookkeeping. Once a limit is reached, a caller is refused unless it holds less than an equal share of the limit. So one
caller cannot shut out the others. Nobody gets more once twice the limit is held."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Iterator

from slipstream.errors import MessageTooLarge, Overloaded

MAX_RETRY_SECONDS = 30
RATE_ENDS, RATE_SECONDS = 256, 60.0
"""How many ends of requests, and how much time, their rate is measured over at most."""


class Admission:
    def __init__(self, max_requests: int, max_bytes: int, where: str) -> None:
        """`where` names the server in errors."""
        self._requests = _Pool("requests", max_requests, "max_requests", where)
        self._bytes = _Pool("bytes", max_bytes, "max_buffered_bytes", where)
        self._ends: deque[float] = deque(maxlen=RATE_ENDS)

    @property
    def held(self) -> tuple[int, int]:
        """Requests and bytes held for all callers."""
        return self._requests.held.total(), self._bytes.held.total()

    @contextlib.contextmanager
    def ticket(self, caller: str) -> Iterator[Ticket]:
        """What one call holds. Leaving the context gives all of it back."""
        ticket = Ticket(caller, self._requests, self._bytes)
        try:
            yield ticket
        finally:
            if ticket.requests:
                self._ends.append(time.monotonic())
            ticket.give_back(ticket.requests, ticket.bytes)

    @property
    def retry_seconds(self) -> int:
        """When a refused caller should ask again: about when what is in progress now will have ended."""
        now = time.monotonic()
        while self._ends and now - self._ends[0] > RATE_SECONDS:
            self._ends.popleft()
        if not self._ends:
            return 1
        seconds_per_end = (now - self._ends[0]) / len(self._ends)
        return max(1, min(MAX_RETRY_SECONDS, math.ceil(self._requests.held.total() * seconds_per_end)))


class Ticket:
    """What one call holds of its caller's share."""

    def __init__(self, caller: str, requests: _Pool, num_bytes: _Pool) -> None:
        self._caller, self._pools = caller, (requests, num_bytes)
        self.requests = self.bytes = 0

    def take(self, requests: int = 0, num_bytes: int = 0) -> None:
        """Hold more. Raises `Overloaded` if there is no room now, `MessageTooLarge` if there never is."""
        for pool, more, own in zip(self._pools, (requests, num_bytes), (self.requests, self.bytes)):
            pool.check(self._caller, more, own)
        self._add(requests, num_bytes)

    def give_back(self, requests: int = 0, num_bytes: int = 0) -> None:
        self._add(-requests, -num_bytes)

    def _add(self, requests: int, num_bytes: int) -> None:
        self.requests += requests
        self.bytes += num_bytes
        for pool, more in zip(self._pools, (requests, num_bytes)):
            pool.add(self._caller, more)


class _Pool:
    """One limited quantity, by caller."""

    def __init__(self, what: str, limit: int, setting: str, where: str) -> None:
        self._what, self._limit, self._setting, self._where = what, limit, setting, where
        self.held: Counter[str] = Counter()

    def check(self, caller: str, more: int, own: int) -> None:
        """`own` is what the asking call holds already."""
        if own + more > self._limit:
            raise MessageTooLarge(
                f"one call needs {own + more} {self._what}, and {self._where} takes at most {self._limit} ({self._setting}); "
                "split it into several calls"
            )
        total, share = self.held.total() + more, self._limit / len(self.held.keys() | {caller})
        if more and total > self._limit and (self.held[caller] + more > share or total > 2 * self._limit):
            raise Overloaded(
                f"{self._where} holds {total - more} of {self._limit} {self._what} ({self._setting}), {self.held[caller]} of "
                "them for this caller; retry later"
            )

    def add(self, caller: str, more: int) -> None:
        self.held[caller] += more
        if not self.held[caller]:
            del self.held[caller]
