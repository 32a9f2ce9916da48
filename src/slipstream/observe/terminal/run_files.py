"""What the files of a run directory say: its state, its settings, and its records so far. Nothing here locks or writes.

A run may be writing to these files, may have been killed in mid-write, or may have been resumed, which replaces metrics.jsonl
by a shorter one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slipstream.config import LOOPBACK
from slipstream.deploy.processes.process_group import running_gateway
from slipstream.runtime.log_lines import tail
from slipstream.runtime.tls import host_of

RunState: TypeAlias = Literal["live", "elsewhere", "finished", "dead", "empty"]
"""`live`: its trainer or its gateway runs. `elsewhere`: its gateway was on another machine, which this one cannot ask.
`finished`: it has its trained model. `dead`: it neither runs nor has ended. `empty`: nothing was recorded."""
MARKS = ("gateway.log", "gateway.json", "run.json", "journal.sqlite", "metrics.jsonl")
"""A directory with one of these is a run directory."""
METRICS = "metrics.jsonl"
RECORDS_LOOKED_AT = 20
STEPS_KEPT = 50
"""Last step records that are kept whole."""


def is_run(directory: Path) -> bool:
    return any((directory / name).is_file() for name in MARKS)


def run_state(directory: Path) -> RunState:
    """Say whether the run goes on, and if not, how it ended."""
    if running_gateway(directory) or _is_locked(directory / ".lock"):
        return "live"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if host_of(json.loads((directory / "gateway.json").read_text())["address"])[0] not in LOOPBACK:
            return "elsewhere"
    if last_record(directory, "Saved"):
        return "finished"
    return "dead" if is_run(directory) else "empty"


def last_record(directory: Path, kind: str) -> Mapping[str, Any]:
    """Return the last record of a kind, if it is one of the last records; otherwise an empty one."""
    for line in reversed(tail(directory / METRICS, RECORDS_LOOKED_AT)):
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            if (record := json.loads(line)).get("kind") == kind:
                return record
    return {}


def _is_locked(path: Path) -> bool:
    """Whether a process holds a lock on a file. Reads the kernel's list: trying to lock it could make the run fail that is just
    starting."""
    try:
        inode = f":{path.stat().st_ino} "
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    return any("FLOCK" in line and inode in line for line in locks.splitlines())


def last_change(directory: Path) -> float:
    """Return when a file of the run was last written, in Unix seconds; 0 if there is none."""
    times = [0.0]
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            with contextlib.suppress(OSError):
                times.append(entry.stat(follow_symlinks=False).st_mtime)
    return max(times)


def size_of(directory: Path) -> int:
    """Return the bytes that a directory takes on disk."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(Path(parent) / name).st_blocks * 512
    return total


@dataclass
class RunRecords:
    """The records of metrics.jsonl, read as they are appended."""

    directory: Path
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    """The last step records."""
    rewards: list[float] = field(default_factory=list)
    """Reward of every step."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """The last one."""
    warmup: Mapping[str, Any] = field(default_factory=dict)
    _offset: int = 0
    _inode: int = 0

    def read(self) -> None:
        """Read what was appended since the last call. A line that is not complete, or not a record, is left out."""
        for line in self._new_lines():
            try:
                self._add(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue

    @property
    def step(self) -> int:
        """The last step done; 0 if there is none."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def step_seconds(self) -> float:
        """Median time of the last steps; 0 if there are none."""
        times = sorted(sum(record["seconds"].values()) for record in self.steps[-20:])
        return float(times[len(times) // 2]) if times else 0.0

    def settings(self) -> Mapping[str, Any]:
        """Return the settings of the training run; empty if it has none."""
        try:
            found = json.loads((self.directory / "run.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _new_lines(self) -> Iterator[str]:
        try:
            with (self.directory / METRICS).open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._inode or facts.st_size < self._offset:
                    vars(self).update(vars(RunRecords(self.directory)))  # the file was replaced
                    self._inode = facts.st_ino
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        self._offset += end
        yield from data[:end].decode(errors="replace").splitlines()

    def _add(self, record: Mapping[str, Any]) -> None:
        match record["kind"]:
            case "StepRecord":
                _check_step(record)
                self.rewards.append(float(record["reward"]))
                self.steps = [*self.steps[1 - STEPS_KEPT :], record]
            case "Evaluation":
                self.evaluation = record
            case "WarmupRecord":
                self.warmup = record


def _check_step(record: Mapping[str, Any]) -> None:
    """Raise `KeyError` or `TypeError` unless a record has what is shown of a step."""
    numbers = (record["step"], record["version"], record["accuracy"], record["num_tokens"])
    sync = record["sync"]
    phases = [sync[f"{name}_seconds"] for name in ("plan", "send", "stage", "commit", "total")]
    shown = [record["metrics"][name] for name in ("kl", "entropy", "gradient_norm")]
    pauses = [engine["commit"]["pause_seconds"] for engine in sync["engines"]]
    counts = [sync["version"], sync["num_bytes"], *record["staleness"].values(), *record["seconds"].values()]
    for value in (*numbers, *phases, *shown, *pauses, *counts):
        if not isinstance(value, (int, float)):
            raise TypeError(f"{value!r} is not a number")


def log_files(directory: Path) -> dict[str, Path]:
    """Return the logs of a run by process, the gateway's first."""
    found = {path.stem: path for path in sorted(directory.glob("*.log")) if path.is_file()}
    return dict(sorted(found.items(), key=lambda item: (item[0] != "gateway", item[0])))


def age_in_words(seconds: float) -> str:
    """Return `5 s`, `12 min`, `3 h` or `9 d`."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"
