"""Asks a fleet for its status again and again, in a thread: a gateway that hangs does not hold up the display."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from slipstream.bridge.bridge import Bridge
from slipstream.errors import SlipstreamError
from slipstream.observe.terminal.fleet_table import Throughput
from slipstream.types import FleetStatus

POLL_SECONDS = 1.0


class FleetPoller:
    def __init__(self, connect: Callable[[], Bridge]) -> None:
        self._connect, self._ending = connect, threading.Event()
        self.status: FleetStatus | None = None
        """The last answer; None while there is none, or no longer one."""
        self.rates: Mapping[str, float] = {}
        """Tokens per second by engine."""
        self.error = ""
        """Why there is no status."""
        self.asked = threading.Event()
        """Set after the first answer or failure."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="slipstream-poller", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ending.set()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                with self._connect() as bridge:
                    self._poll(bridge)
            except SlipstreamError as error:
                self.status, self.error = None, str(error)
                self.asked.set()
            self._ending.wait(POLL_SECONDS)

    def _poll(self, bridge: Bridge) -> None:
        throughput = Throughput()
        while not self._ending.is_set():
            status = bridge.status()
            self.rates = throughput.see(time.monotonic(), status)
            self.status, self.error = status, ""
            self.asked.set()
            self._ending.wait(POLL_SECONDS)
