"""Starting a run, or going on with one: what a run directory holds decides, and the same command does both.

A directory without records is a new run. One with a checkpoint goes on from it, if its config is the same in all that
matters. One whose process was killed before its first checkpoint begins again. A finished run is left as it is."""

from __future__ import annotations

import dataclasses
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
from slipstream.rl import state
from slipstream.rl.config import TrainConfig
from slipstream.rl.records import Evaluation, Record, Saved, StepRecord, read_records, write_records

RECENT_STEPS = 10
"""Steps over whose mean accuracy `target_accuracy` is judged."""
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
    "generate_timeout",
    "patience",
    "diagnose_every",
)
"""Settings, or whole sections, that a run may be gone on with after a change: they say how long and how it is watched."""
LOG = "metrics.jsonl"
_RUN, _LOCK = "run.json", ".lock"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: at a checkpoint, or from nothing."""

    step: int = 0
    """Steps done before."""
    checkpoint: Path | None = None


def finished(config: TrainConfig, step: int, recent: Sequence[float]) -> bool:
    """Whether a run ends after `step`: all steps are done, or the mean of the `recent` accuracies is what was aimed at."""
    if step >= config.steps:
        return True
    if not config.target_accuracy or step < config.min_steps or len(recent) < RECENT_STEPS:
        return False
    return float(np.mean(recent)) >= config.target_accuracy


def earlier(config: TrainConfig, run_dir: Path) -> list[Record]:
    """The records that this run goes on from; none for a new one. `ConfigError` if it cannot. Changes nothing.

    For who wants to know before processes are started."""
    with _alone(run_dir):
        return _decide(config, run_dir)[1]


@contextmanager
def open_run(config: TrainConfig, run_dir: Path) -> Iterator[Start]:
    """Where to go on, or to begin. The log is cut back to it, so that no step is there twice.

    Until the end of the context no other process can open the directory."""
    with _alone(run_dir):
        start, records = _decide(config, run_dir)
        if (run_dir / LOG).exists():
            write_records(run_dir / LOG, records)
        if start.checkpoint is None:
            part = run_dir / f".{_RUN}.part"
            part.write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n")
            part.rename(run_dir / _RUN)  # a kill leaves the old one or the new one
        yield start


def save(config: TrainConfig, run_dir: Path, now: state.TrainState) -> Path:
    """A checkpoint of the run. The records that it includes reach the disk before it does."""
    with (run_dir / LOG).open("rb") as log:
        os.fsync(log.fileno())
    return state.save(run_dir, now, dataclasses.asdict(config), config.keep_checkpoints)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`algorithm.group: then 8, now 16` for each setting that must not change and did. A setting that was not there then had
    its default."""
    before, after, defaults = _flat(then), _flat(now), _flat(dataclasses.asdict(TrainConfig()))
    found = []
    for key in {**before, **after}:
        old, new = before.get(key, defaults.get(key, "no such setting")), after.get(key, "no such setting")
        if old != new and not any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE):
            found.append(f"{key}: then {old!r}, now {new!r}")
    return found


def _decide(config: TrainConfig, run_dir: Path) -> tuple[Start, list[Record]]:
    """Where to go on, and the records up to it."""
    checkpoint = state.latest(run_dir)
    if checkpoint is None:
        _require_restartable(config, run_dir)
        return Start(), []
    facts, then = state.read(checkpoint)
    _require_same(config, then, f"the checkpoint {checkpoint}")
    if not (run_dir / LOG).exists():
        raise ConfigError(
            f"{run_dir} has a checkpoint of step {facts.step} and no {LOG}, which holds the records of the steps before it; "
            "put it back, or choose another directory"
        )
    records = read_records(run_dir / LOG)
    if any(isinstance(record, Saved) for record in records) and finished(config, facts.step, facts.recent):
        raise ConfigError(
            f"{run_dir} holds a run already, which is finished after {facts.step} steps; choose another directory, or go on "
            "with it by more steps"
        )
    kept = [record for record in records if _belongs(record, facts.step)]
    done = {record.step for record in kept if isinstance(record, StepRecord)}
    if missing := sorted(set(range(1, facts.step + 1)) - done):
        raise ConfigError(
            f"{run_dir / LOG} lacks step {missing[0]} ({len(missing)} in all), and the checkpoint is of step {facts.step}: it "
            "was changed; put the whole file back, or choose another directory"
        )
    return Start(facts.step, checkpoint), kept


def _belongs(record: Record, step: int) -> bool:
    """Whether a checkpoint after `step` includes what the record says."""
    match record:
        case Saved():
            return False
        case StepRecord() | Evaluation():
            return record.step <= step
        case _:
            return True


def _require_restartable(config: TrainConfig, run_dir: Path) -> None:
    """Without a checkpoint a run can only begin again, and only if it was to make some and had no time to."""
    if not (run_dir / LOG).exists():
        return
    try:
        then = json.loads((run_dir / _RUN).read_text())
        every = int(then["save_every"])
    except (OSError, ValueError, KeyError, TypeError):
        then, every = {}, 0
    if not every:
        raise ConfigError(
            f"{run_dir} holds a run already (it has a {LOG}) and no checkpoint to go on from; choose another directory. "
            "A run with save_every above 0 makes checkpoints"
        )
    if any(isinstance(r, Saved) or (isinstance(r, StepRecord) and r.step > every) for r in read_records(run_dir / LOG)):
        raise ConfigError(
            f"{run_dir} holds a run already (it has a {LOG}), and none of the checkpoints that it made is left whole in "
            f"{run_dir / 'state'}; put one back, or choose another directory"
        )
    _require_same(config, then, f"the run in {run_dir}")


def _require_same(config: TrainConfig, then: Mapping[str, Any], what: str) -> None:
    if found := differences(then, dataclasses.asdict(config)):
        lines = "\n  ".join(found)
        raise ConfigError(
            f"{what} has another config, and would not be the same run if it went on with this one:\n  {lines}\n"
            f"Choose another run_dir, or set these back. What may change: {', '.join(MAY_CHANGE)}"
        )


def _flat(tree: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{at}{key}.")
        else:
            found[f"{at}{key}"] = list(value) if isinstance(value, tuple) else value
    return found


@contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    """Holds the directory against other processes. The lock is the system's: it ends with the process, however that ends."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{run_dir} is in use: another process trains there now; choose another directory"
            ) from None
        yield
