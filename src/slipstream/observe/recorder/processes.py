"""Which process writes a record, and whether it still runs."""

from __future__ import annotations

import os
import socket
import sqlite3

from slipstream.runtime import clock
from slipstream.runtime.process_times import process_start_time

ELSEWHERE_SECONDS = 120.0
"""A process on another machine counts as running if its record changed within this time."""


def note_start(db: sqlite3.Connection, step: int) -> float:
    """Note that this process writes from now on; return its key for `note_end`."""
    started = clock.now()
    row = (started, step, os.getpid(), process_start_time(os.getpid()), socket.gethostname(), None)
    db.execute("INSERT OR REPLACE INTO processes VALUES (?, ?, ?, ?, ?, ?)", row)
    return started


def note_end(db: sqlite3.Connection, started: float) -> None:
    db.execute("UPDATE processes SET ended = ? WHERE started = ?", (clock.now(), started))


def is_running(process: sqlite3.Row, changed: float) -> bool:
    """Whether the process of a row of `processes` runs. `changed` is when its file changed last."""
    if process["ended"] is not None:
        return False
    if process["host"] != socket.gethostname():
        return clock.now() - changed < ELSEWHERE_SECONDS
    started = process_start_time(process["pid"])
    return started != 0 and started == process["pid_started"]
