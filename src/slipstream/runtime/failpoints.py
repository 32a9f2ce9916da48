"""Named steps in the life of an update, a rollout and a launch, where a test can watch a process and make it fail.

`step` does nothing unless the environment variable SLIPSTREAM_CHAOS names a directory. Then it appends a line to the history
of this process, `history/PID.jsonl`, and carries out the fault that is armed for the step:

    echo "kill" > $SLIPSTREAM_CHAOS/armed/engine.commit

The first process that reaches the step removes the file, so a fault happens once. `kill PID` kills another process when the
step is reached. `slipstream chaos` arms faults and checks the history."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

from slipstream.errors import InjectedFault

VARIABLE = "SLIPSTREAM_CHAOS"

STEPS = """
    launch.gateway launch.engine launch.register
    sync.call sync.send sync.sent sync.done
    gateway.begin gateway.stage gateway.commit gateway.committed gateway.recorded
    engine.begin engine.allocate engine.stage engine.verify engine.staged engine.commit engine.committed
    rollout.submit gateway.accept gateway.accepted gateway.start engine.generate engine.sample
    gateway.finish gateway.finished rollout.take gateway.take gateway.taken rollout.taken
    train.update train.updated train.save train.saved
"""
"""Where faults can be armed, in the order in which an update or a rollout passes them. `engine` and `gateway` steps happen in
those processes, all others but the first three in the trainer."""

FAULTS = ("kill", "kill PID", "freeze", "delay", "error", "disk full", "shm full", "corrupt", "clock jump", "partition")
DELAY_SECONDS = 0.5
PARTITION_SECONDS = 2.0
CLOCK_JUMP_SECONDS = 6 * 3600.0
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
"""Linux's SO_ATTACH_FILTER and SO_DETACH_FILTER."""

_directory = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None


def is_recording() -> bool:
    """Whether `step` does anything. For callers to whom the facts of a step cost something."""
    return _directory is not None


def step(name: str, memory: Any = None, **facts: Any) -> None:
    """Note that this process has reached a step, and fail there if a fault is armed. `memory` is an array whose bytes may be
    corrupted there."""
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
    fail(name, fault, memory)


def fail(name: str, fault: str, memory: Any = None) -> None:
    match fault.split():
        case ["kill", *pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid[0]) if pid else os.getpid(), signal.SIGKILL)
        case ["freeze"]:  # whoever armed it continues the process
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["delay"]:
            time.sleep(DELAY_SECONDS)
        case ["error"]:
            raise InjectedFault(f"a fault was injected at {name}")
        case ["disk" | "shm", "full"]:
            raise OSError(errno.ENOSPC, f"injected at {name}")
        case ["corrupt"] if memory is not None:
            memory.flat[0] = -memory.flat[0]
        case ["clock", "jump"]:
            time.time = lambda now=time.time: now() + CLOCK_JUMP_SECONDS  # type: ignore[misc]
        case ["partition"]:
            threading.Thread(target=_hear_nothing, args=(time.monotonic() + PARTITION_SECONDS,), daemon=True).start()
        case _:
            raise ValueError(f"unknown fault {fault!r} at {name}; one of {', '.join(FAULTS)}")


def _hear_nothing(until: float) -> None:
    """Have the kernel drop whatever arrives at the TCP sockets of this process, new ones included. Peers get no answer and no
    error, as in a network partition; what this process sends still leaves."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # the BPF program "return 0"
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    while time.monotonic() < until:
        _set_option(_ATTACH_FILTER, program)
        time.sleep(0.02)
    _set_option(_DETACH_FILTER, struct.pack("i", 0))


def _set_option(option: int, value: bytes) -> None:
    """Set an option of every TCP socket of this process."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # not a socket, or closed meanwhile
            if str(path.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as own:
                    if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                        own.setsockopt(socket.SOL_SOCKET, option, value)


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
