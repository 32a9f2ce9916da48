"""Start or resume a run, depending on the contents of its run directory.

A directory without records starts a new run. A directory with a checkpoint resumes from it, if the config is the same except
for `MAY_CHANGE`. A run that was killed before its first checkpoint starts again. A finished run is not touched."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import ConfigError
from slipstream.rl.config import TrainConfig
from slipstream.rl.reporting.records import Record, Saved, StepRecord, WarmupRecord, read_records, write_records
from slipstream.rl.trainer import checkpoint

RECENT_STEPS = 10
"""Steps over which accuracy is averaged for `target_accuracy`."""
MAY_CHANGE = (
    "steps",
    "run_dir",
    "target_accuracy",
    "min_steps",
    "eval_every",
    "eval_prompts",
    "save_every",
    "keep_checkpoints",
    "logging",
    "record",
    "generate_timeout",
    "patience",
    "diagnose_every",
    "on_nonfinite",
)
"""Settings and sections that may change when a run is resumed: its length and how it is observed."""
LOG = "metrics.jsonl"
_CONFIG_FILE, _LOCK_FILE = "run.json", ".lock"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run starts: at a checkpoint, or from the beginning."""

    step: int = 0
    """Steps already done."""
    checkpoint: Path | None = None


def finished(config: TrainConfig, step: int, recent: Sequence[float]) -> bool:
    """Whether a run ends after `step`: all steps are done, or the mean of the `recent` accuracies reaches the target."""
    if step >= config.steps:
        return True
    if not config.target_accuracy or step < config.min_steps or len(recent) < RECENT_STEPS:
        return False
    return float(np.mean(recent)) >= config.target_accuracy


def earlier(config: TrainConfig, run_dir: Path) -> list[Record]:
    """The records up to the point of resumption; none for a new run. `ConfigError` if the run cannot be resumed.

    Changes nothing, so that a problem is reported before processes start."""
    with _lock(run_dir):
        return _decide(config, run_dir)[1]


@contextmanager
def open_run(config: TrainConfig, run_dir: Path) -> Iterator[ResumePoint]:
    """Lock the directory, truncate its log to the point of resumption, and yield that point."""
    with _lock(run_dir):
        start, records = _decide(config, run_dir)
        if (run_dir / LOG).exists():
            write_records(run_dir / LOG, records)
        if start.checkpoint is None:
            part = run_dir / f".{_CONFIG_FILE}.part"
            part.write_text(json.dumps(config.model_dump(), indent=1) + "\n")
            part.rename(run_dir / _CONFIG_FILE)  # atomic: a kill leaves the old file or the new one
        yield start


def save(config: TrainConfig, run_dir: Path, state: checkpoint.RunState) -> Path:
    """Write a checkpoint, after the records that it covers are synced to disk."""
    with (run_dir / LOG).open("rb") as log:
        os.fsync(log.fileno())
    return checkpoint.save(run_dir, state, config.model_dump(), config.keep_checkpoints)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`algorithm.group: then 8, now 16` for each setting that changed and must not. A setting missing then had its default."""
    before, after, defaults = _flat(then), _flat(now), _flat(TrainConfig().model_dump())
    changes = []
    for key in {**before, **after}:
        old, new = before.get(key, defaults.get(key, "no such setting")), after.get(key, "no such setting")
        if old != new and not any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE):
            changes.append(f"{key}: then {old!r}, now {new!r}")
    return changes


def _decide(config: TrainConfig, run_dir: Path) -> tuple[ResumePoint, list[Record]]:
    """The point of resumption and the records up to it."""
    latest = checkpoint.latest(run_dir)
    if latest is None:
        _require_restartable(config, run_dir)
        return ResumePoint(), []
    progress, then = checkpoint.read(latest)
    _require_same(config, then, f"the checkpoint {latest}")
    if not (run_dir / LOG).exists():
        raise ConfigError(
            f"{run_dir} has a checkpoint of step {progress.step} but no {LOG} with the records of the steps before it; restore "
            "the file, or choose another directory"
        )
    records = read_records(run_dir / LOG)
    if any(isinstance(record, Saved) for record in records) and finished(config, progress.step, progress.recent):
        raise ConfigError(
            f"{run_dir} already holds a run, which finished after {progress.step} steps; choose another directory, or increase "
            "steps to continue it"
        )
    kept: list[Record] = [  # what the checkpoint covers; a warm-up record has no RL step
        r for r in records if not isinstance(r, Saved) and (isinstance(r, WarmupRecord) or r.step <= progress.step)
    ]
    done = {record.step for record in kept if isinstance(record, StepRecord)}
    if missing := sorted(set(range(1, progress.step + 1)) - done):
        raise ConfigError(
            f"{run_dir / LOG} lacks step {missing[0]} ({len(missing)} in all), but the checkpoint is of step {progress.step}: "
            "the file was changed; restore it, or choose another directory"
        )
    return ResumePoint(progress.step, latest), kept


def _require_restartable(config: TrainConfig, run_dir: Path) -> None:
    """Without a checkpoint, a run can only start again, and only if it was killed before its first checkpoint."""
    if not (run_dir / LOG).exists():
        return
    try:
        then = json.loads((run_dir / _CONFIG_FILE).read_text())
        every = int(then["save_every"])
    except (OSError, ValueError, KeyError, TypeError):
        then, every = {}, 0
    if not every:
        raise ConfigError(
            f"{run_dir} already holds a run (it has a {LOG}) without a checkpoint to resume from; choose another directory. "
            "Set save_every above 0 to save checkpoints"
        )
    if any(isinstance(r, Saved) or (isinstance(r, StepRecord) and r.step > every) for r in read_records(run_dir / LOG)):
        raise ConfigError(
            f"{run_dir} already holds a run (it has a {LOG}), but no complete checkpoint is left in {run_dir / 'state'}; "
            "restore one, or choose another directory"
        )
    _require_same(config, then, f"the run in {run_dir}")


def _require_same(config: TrainConfig, then: Mapping[str, Any], what: str) -> None:
    if changes := differences(then, config.model_dump()):
        lines = "\n  ".join(changes)
        raise ConfigError(
            f"{what} has another config and cannot be resumed with this one:\n  {lines}\n"
            f"Choose another run_dir, or revert these settings. Only these may change: {', '.join(MAY_CHANGE)}"
        )


def _flat(tree: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{at}{key}.")
        else:
            flat[f"{at}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


@contextmanager
def _lock(run_dir: Path) -> Iterator[None]:
    """Lock the directory against other processes. The kernel releases the lock when the process ends."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / _LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{run_dir} is in use by another training process; choose another directory") from None
        yield
