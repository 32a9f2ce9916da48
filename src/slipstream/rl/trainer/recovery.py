"""A bridge that survives the loss of fleet processes: wait for a restart, resend the weights, retry, up to a time limit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from slipstream.bridge.bridge import Bridge
from slipstream.bridge.rollouts import Rollouts
from slipstream.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    JournalUnavailable,
    NotReady,
    PeerError,
    SlipstreamError,
    TransferError,
    UpdateInProgress,
)
from slipstream.types import InFlight, RolloutGroup, SyncReport

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 0.2
REPAIR_SECONDS = 2.0
"""How often the fleet is repaired while no rollouts arrive."""
TRANSIENT = (PeerError, NotReady, UpdateInProgress, JournalUnavailable, ChecksumMismatch, TransferError)
"""Errors worth a retry. `UpdateInProgress`: the gateway has not yet noticed that the trainer's old connection is gone. Bytes
that were damaged, or found no room, are sent again to other memory."""


class RecoveringBridge:
    def __init__(self, bridge: Bridge, patience: float, in_flight: InFlight = "keep") -> None:
        """`patience` is how many seconds the fleet may be unavailable; 0 raises at once. `in_flight` says what a sync does
        with running requests."""
        self._bridge, self._patience, self._in_flight = bridge, patience, in_flight
        self._serving: Any = None
        """The weights that the fleet serves."""
        self._pending: tuple[Any, Future[SyncReport]] | None = None
        """A started sync and its weights."""
        self.last_sync: SyncReport
        """The report of the last sync that finished."""

    def sync(self, params: Any, kept: Any = None) -> SyncReport:
        """`kept` is a copy of `params` for later repairs, for callers that want `params` freed."""
        self.finish_sync()
        self.last_sync = self._retry(lambda: self._bridge.sync(params, in_flight=self._in_flight), repair=False)
        self._serving = params if kept is None else kept
        return self.last_sync

    def start_sync(self, params: Any) -> None:
        """Start a sync without waiting for its end. A sync that was started before is finished first."""
        self.finish_sync()
        self._pending = params, self._bridge.start_sync(params, in_flight=self._in_flight)

    def finish_sync(self) -> SyncReport | None:
        """Wait for the started sync. None if none was started."""
        if self._pending is None:
            return None
        (params, pending), self._pending = self._pending, None
        try:
            self.last_sync = pending.result()
        except TRANSIENT as error:
            log.warning("%s; retrying", error)
            return self.sync(params)
        self._serving = params
        return self.last_sync

    def retry(self, call: Callable[[], T]) -> T:
        """Call `call`, again from its beginning after a transient error."""
        return self._retry(call, repair=True)

    def take(self, rollouts: Rollouts, timeout: float, *, more: bool = False) -> list[RolloutGroup]:
        """Take the next groups; `more` if this is not the first batch since the last sync. Raises the error of a group that
        failed: a failed group is not a group without reward."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                wait = min(REPAIR_SECONDS, max(0.1, deadline - time.monotonic()))
                groups = self.retry(partial(rollouts.take, timeout=wait, more=more))
                break
            except DeadlineExceeded:
                if time.monotonic() >= deadline:
                    raise
                self._repair()
        for group in groups:
            if group.error is not None:
                raise type(group.error)(f"prompt {group.id}: {group.error}")
        return groups

    def _retry(self, call: Callable[[], T], repair: bool) -> T:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return call()
            except TRANSIENT as error:
                if time.monotonic() >= deadline:
                    raise
                log.warning("%s; retrying", error)
                time.sleep(RETRY_SECONDS)
            if repair:
                self._repair()

    def _repair(self) -> None:
        """Send the current weights to restarted engines, which get no requests before they have them. Best effort: failures
        are logged, not raised."""
        self.finish_sync()
        if self._serving is None:
            return
        try:
            try:
                report = self._bridge.repair(self._serving)
            except NotReady:  # gateway and engines all restarted, before any version was in the gateway's journal
                report = self._bridge.sync(self._serving, in_flight=self._in_flight)
            if report is not None:
                log.warning("sent version %d to %s", report.version, ", ".join(e.engine for e in report.engines))
        except SlipstreamError as error:
            log.info("not repaired yet: %s", error)
