"""What a run has left behind: processes with their open sockets, shared memory, socket files. Linux only; elsewhere nothing is
found."""

from __future__ import annotations

import stat
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from slipstream.runtime.failpoints import VARIABLE
from slipstream.weights.transports.host import shm

END_SECONDS = 60.0
"""How long processes whose trainer is gone have to end. Long, for machines that are busy."""


def leftovers(directory: Path, pids: Collection[int]) -> list[str]:
    """Return what is left of the run with this directory, after the time that its processes have to end. `pids` are all
    processes that it had."""
    until = time.monotonic() + END_SECONDS
    while (found := [*_processes(directory), *_segments(pids)]) and time.monotonic() < until:
        time.sleep(0.1)
    return [*found, *_sockets(directory)]


def num_fds(pid: int) -> int:
    """Return the number of open file descriptors of a process; 0 if it is gone."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0


def _processes(directory: Path) -> Iterator[str]:
    setting = f"{VARIABLE}={directory}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if setting in (path / "environ").read_bytes().split(b"\0"):
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield f"process {path.name} is left: {command.strip()}"
        except OSError:  # it has ended, or is not ours
            continue


def _segments(pids: Collection[int]) -> Iterator[str]:
    for path, pid, _ in shm.segments():
        if pid in pids:
            yield f"shared memory {path} is left"


def _sockets(directory: Path) -> Iterator[str]:
    for path in directory.rglob("*"):
        if stat.S_ISSOCK(path.lstat().st_mode):
            yield f"socket {path} is left"
