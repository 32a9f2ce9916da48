"""What weight updates took, for the status and the metrics of the gateway."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from slipstream.gateway import slipstream_pb2 as pb
from slipstream.types import UpdatePhases, UpdateRecord, UpdateTotals

RECENT = 8
"""Updates kept for the status."""


class UpdateHistory:
    def __init__(self) -> None:
        self.totals = UpdateTotals()
        self._recent: deque[tuple[float, UpdateRecord]] = deque(maxlen=RECENT)
        """Each with the time of its end."""
        self._begun: tuple[float, int] | None = None
        """Start and version of the update in progress."""
        self._reports: list[pb.UpdateReports] = []

    def begin(self, version: int) -> None:
        self._begun, self._reports = (time.monotonic(), version), []

    def add(self, reports: Iterable[pb.UpdateReports]) -> None:
        """Note what engines report of the steps they have done."""
        self._reports += reports

    def end(self, error: str = "") -> None:
        """Record the update as committed, or as rolled back because of `error`. Does nothing if it has ended."""
        if self._begun is None:
            return
        (began, version), self._begun, now = self._begun, None, time.monotonic()
        stages = [report.stage for report in self._reports if report.HasField("stage")]
        commits = [report.commit for report in self._reports if report.HasField("commit")]
        phases = UpdatePhases(
            total=now - began,
            receive=max((stage.receive_seconds for stage in stages), default=0.0),
            verify=max((stage.verify_seconds for stage in stages), default=0.0),
            wait=max((commit.wait_seconds for commit in commits), default=0.0),
            load=max((commit.load_seconds for commit in commits), default=0.0),
            pause=max((commit.pause_seconds for commit in commits), default=0.0),
        )
        num_bytes = sum(stage.num_bytes for stage in stages)
        self._recent.append((now, UpdateRecord(version, len(commits), num_bytes, phases, 0.0, error)))
        totals = self.totals
        if error:
            self.totals = replace(totals, failed=totals.failed + 1)
        else:
            self.totals = UpdateTotals(
                totals.committed + 1, totals.failed, totals.num_bytes + num_bytes, totals.phases + phases
            )

    def recent(self, now: float) -> tuple[UpdateRecord, ...]:
        """The last updates, oldest first."""
        return tuple(replace(record, seconds_ago=now - at) for at, record in self._recent)
