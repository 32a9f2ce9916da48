"""Tells a process from a later one that has its pid."""

from __future__ import annotations

import os
from pathlib import Path


def process_start_time(pid: int) -> int:
    """Return when a process started, in clock ticks, to tell it from a later process with the same pid; 0 if the
    process does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (FileNotFoundError, ProcessLookupError):
        pass
    if Path("/proc/self").exists():
        return 0
    try:  # without /proc (macOS) only whether the process is alive is known
        os.kill(pid, 0)
    except ProcessLookupError:
        return 0
    except PermissionError:
        pass
    return 1
