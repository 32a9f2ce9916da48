"""Going on when a process of the fleet dies: wait until it is back, bring it what it missed, try again. Not for ever."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from slipstream.bridge import Bridge
from slipstream.errors import DeadlineExceeded, NotReady, PeerError, SlipstreamError, UpdateInProgress
from slipstream.rollouts import Rollouts
from slipstream.types import InFlight, RolloutGroup, SyncReport

log = logging.getLogger(__name__)

T = TypeVar("T")

AGAIN_SECONDS = 0.2
LOOK_SECONDS = 2.0
"""Between two looks at the fleet, while nothing comes."""
GONE = (PeerError, NotReady, UpdateInProgress)
"""What may be over in a moment. `UpdateInProgress`: a gateway has not noticed yet that the trainer's old connection is gone."""


class Steady:
    """`patience` is how many seconds the fleet may be unable to go on; 0 raises at once. `in_flight` says what becomes of
    requests that are running when weights are synced."""

    def __init__(self, bridge: Bridge, patience: float, in_flight: InFlight = "keep") -> None:
        self._bridge, self._patience, self._in_flight = bridge, patience, in_flight
        self._serving: Any = None
        """The weights that the fleet serves."""
        self._begun: tuple[Any, Future[SyncReport]] | None = None
        """Weights on their way."""

    def sync(self, params: Any, kept: Any = None) -> SyncReport:
        """`kept` is a copy of `params` to mend engines with later, where `params` are not to stay in memory for it."""
        self.finish_sync()
        report = self._again(lambda: self._bridge.sync(params, in_flight=self._in_flight), heal=False)
        self._serving = params if kept is None else kept
        return report

    def start_sync(self, params: Any) -> None:
        """Without waiting for its end; but one that was started before ends first."""
        self.finish_sync()
        self._begun = params, self._bridge.start_sync(params, in_flight=self._in_flight)

    def finish_sync(self) -> SyncReport | None:
        """Of the one that was started, if any."""
        if self._begun is None:
            return None
        (params, begun), self._begun = self._begun, None
        try:
            report = begun.result()
        except GONE as error:
            log.warning("%s; trying again", error)
            return self.sync(params)
        self._serving = params
        return report

    def run(self, call: Callable[[], T]) -> T:
        """Something that may be done again from its beginning."""
        return self._again(call, heal=True)

    def take(self, rollouts: Rollouts, timeout: float, *, more: bool = False) -> list[RolloutGroup]:
        """The next groups; `more` if there was a batch since the last sync. The first that has failed is raised: it is not a
        group without reward."""
        until = time.monotonic() + timeout
        while True:
            try:
                wait = min(LOOK_SECONDS, max(0.1, until - time.monotonic()))
                groups = self.run(partial(rollouts.take, timeout=wait, more=more))
                break
            except DeadlineExceeded:
                if time.monotonic() >= until:
                    raise
                self._heal()
        for group in groups:
            if group.error is not None:
                raise type(group.error)(f"prompt {group.id}: {group.error}")
        return groups

    def _again(self, call: Callable[[], T], heal: bool) -> T:
        until = time.monotonic() + self._patience
        while True:
            try:
                return call()
            except GONE as error:
                if time.monotonic() >= until:
                    raise
                log.warning("%s; trying again", error)
                time.sleep(AGAIN_SECONDS)
            if heal:
                self._heal()

    def _heal(self) -> None:
        """An engine that was started again has no weights, and nothing is sent to it before it has."""
        self.finish_sync()
        if self._serving is None:
            return
        try:
            report = self._repaired()
            if report is not None:
                log.warning("brought version %d to %s", report.version, ", ".join(e.engine for e in report.engines))
        except SlipstreamError as error:
            log.info("not repaired yet: %s", error)

    def _repaired(self) -> SyncReport | None:
        try:
            return self._bridge.repair(self._serving)
        except NotReady:  # gateway and engines have all been started again, before anything was worth writing down
            return self._bridge.sync(self._serving, in_flight=self._in_flight)
