"""A bridge that survives the loss of fleet processes: wait for a restart and retry, up to a time limit. The bridge itself sends
restarted engines the weights (`bridge/background_repair.py`)."""

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
    TransferError,
    UpdateInProgress,
)
from slipstream.runtime.waiting import waiting_for
from slipstream.types import InFlight, Lora, RolloutGroup, SyncReport

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 0.2
LOOK_SECONDS = 2.0
"""How often a started sync is looked at while no rollouts arrive; they may wait for its version."""
TRANSIENT = (PeerError, NotReady, UpdateInProgress, JournalUnavailable, ChecksumMismatch, TransferError)
"""Errors worth a retry. `UpdateInProgress`: the gateway has not yet noticed that the trainer's old connection is gone. Bytes
that were damaged, or found no room, are sent again to other memory."""


class RecoveringBridge:
    def __init__(
        self, bridge: Bridge, patience: float, in_flight: InFlight = "keep", adapter: Lora | None = None
    ) -> None:
        """`patience` is how many seconds the fleet may be unavailable; 0 raises at once. `in_flight` says what a sync does
        with running requests. With an `adapter`, syncs are of its weights."""
        self._bridge, self._patience, self._in_flight, self._adapter = bridge, patience, in_flight, adapter
        self._pending: tuple[Any, Future[SyncReport]] | None = None
        """A started sync and its weights."""
        self.last_sync: SyncReport
        """The report of the last sync that finished."""

    def sync(self, params: Any) -> SyncReport:
        self.finish_sync()
        sync = partial(self._bridge.sync, params, in_flight=self._in_flight, adapter=self._adapter)
        self.last_sync = self._retry(sync)
        return self.last_sync

    def sync_base(self, params: Any) -> SyncReport:
        """Sync the model that the adapter belongs to."""
        return self._retry(partial(self._bridge.sync, params, in_flight=self._in_flight))

    def start_sync(self, params: Any) -> Future[SyncReport]:
        """Start a sync without waiting for its end. A sync that was started before is finished first."""
        self.finish_sync()
        future = self._bridge.start_sync(params, in_flight=self._in_flight, adapter=self._adapter)
        self._pending = params, future
        return future

    def finish_sync(self) -> SyncReport | None:
        """Wait for the started sync. None if none was started."""
        if self._pending is None:
            return None
        (params, pending), self._pending = self._pending, None
        try:
            with waiting_for("the started sync to end"):
                self.last_sync = pending.result()
        except TRANSIENT as error:
            log.warning("%s; retrying", error)
            return self.sync(params)
        return self.last_sync

    def retry(self, call: Callable[[], T]) -> T:
        """Call `call`, again from its beginning after a transient error."""
        return self._retry(call, self.finish_sync)

    def take(self, rollouts: Rollouts, timeout: float, *, more: bool = False) -> list[RolloutGroup]:
        """Take the next groups; `more` if this is not the first batch since the last sync. Raises the error of a group that
        failed: a failed group is not a group without reward."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                wait = min(LOOK_SECONDS, max(0.1, deadline - time.monotonic()))
                groups = self.retry(partial(rollouts.take, timeout=wait, more=more))
                break
            except DeadlineExceeded:
                if time.monotonic() >= deadline:
                    raise
                self.finish_sync()
        for group in groups:
            if group.error is not None:
                raise type(group.error)(f"prompt {group.id}: {group.error}")
        return groups

    def _retry(self, call: Callable[[], T], meanwhile: Callable[[], object] = lambda: None) -> T:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return call()
            except TRANSIENT as error:
                if time.monotonic() >= deadline:
                    raise
                log.warning("%s; retrying", error)
                time.sleep(RETRY_SECONDS)
            meanwhile()
