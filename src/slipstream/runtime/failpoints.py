"""Named steps in the life of an update, a rollout and a launch, where a test can watch a process and make it fail.

`step` does nothing unless the environment variable SLIPSTREAM_CHAOS names a directory. Then it appends a line to the history
of this process, `history/PID.jsonl`, and carries out the fault that is armed for the step:

    echo "kill" > $SLIPSTREAM_CHAOS/armed/engine.commit

The first process that reaches the step removes the file, so a fault happens once. `slipstream chaos` arms faults and checks
the history."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from slipstream.errors import InjectedFault

VARIABLE = "SLIPSTREAM_CHAOS"

STEPS = """
    launch.gateway launch.engine launch.register
    sync.call sync.send sync.sent sync.done
    gateway.begin gateway.stage gateway.commit gateway.committed gateway.recorded
    engine.begin engine.stage engine.staged engine.commit engine.committed
    rollout.submit gateway.accept gateway.accepted gateway.start engine.generate engine.sample
    gateway.finish gateway.finished rollout.take gateway.take gateway.taken rollout.taken
    train.update train.updated train.save train.saved
"""
"""Where faults can be armed, in the order in which an update or a rollout passes them. `engine` and `gateway` steps happen in
those processes, all others but the first three in the trainer."""

FAULTS = ("kill", "freeze", "delay", "error", "disk full")
DELAY_SECONDS = 0.5

_directory = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None


def is_recording() -> bool:
    """Whether `step` does anything. For callers to whom the facts of a step cost something."""
    return _directory is not None


def step(name: str, **facts: Any) -> None:
    """Note that this process has reached a step, and fail there if a fault is armed."""
    if _directory is None:
        return
    assert name in STEPS.split(), name
    _record(step=name, **facts)
    try:
        armed = _directory / "armed" / name
        taken = armed.with_name(f"{name}.{os.getpid()}")
        armed.rename(taken)
        fault = taken.read_text().strip()
        taken.unlink()
    except FileNotFoundError:
        return
    _record(step=name, fault=fault)
    fail(name, fault)


def fail(name: str, fault: str) -> None:
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freeze":  # whoever armed it continues the process
            os.kill(os.getpid(), signal.SIGSTOP)
        case "delay":
            time.sleep(DELAY_SECONDS)
        case "error":
            raise InjectedFault(f"a fault was injected at {name}")
        case "disk full":
            raise OSError(errno.ENOSPC, f"injected at {name}")
        case _:
            raise ValueError(f"unknown fault {fault!r} at {name}; one of {', '.join(FAULTS)}")


def _record(**fields: Any) -> None:
    """Append one line. A single write: a process that is killed leaves whole lines."""
    assert _directory is not None
    line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), **fields}) + "\n"
    path = _directory / "history" / f"{os.getpid()}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
