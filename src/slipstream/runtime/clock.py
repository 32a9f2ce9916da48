"""Unix time that does not jump while a process runs.

All processes of a machine read the same monotonic clock, so their times compare to the microsecond. Between machines they
compare as well as the machines' clocks do."""

from __future__ import annotations

import time

_OFFSET = time.time() - time.perf_counter()


def unix_time(perf_counter: float) -> float:
    """Convert a reading of `time.perf_counter`."""
    return _OFFSET + perf_counter


def now() -> float:
    return unix_time(time.perf_counter())
