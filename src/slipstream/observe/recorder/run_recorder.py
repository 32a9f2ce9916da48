"""Records a training run: its steps, completions, syncs and phases."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slipstream.config import RecordConfig
from slipstream.observe.recorder import processes
from slipstream.observe.recorder.background import BackgroundWriter
from slipstream.observe.recorder.files import (
    DIRECTORY,
    RUN_FILE,
    RUN_TABLES,
    TOKENIZER_FILE,
    finish,
    insert,
    open_for_writing,
    set_fact,
    transaction,
)
from slipstream.observe.recorder.rollout_store import RolloutStore
from slipstream.observe.recorder.rollouts import StepRollouts, zero_variance
from slipstream.types import SyncReport

log = logging.getLogger(__name__)

TRAINER = "trainer"
"""Lane of the trainer's phases."""


class Phase(NamedTuple):
    """Something that the trainer did, in Unix seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step, once it is done."""

    step: int
    at: float
    """When it was done, in Unix seconds."""
    scalars: Mapping[str, float]
    """Columns of the table `steps`."""
    phases: Sequence[Phase]
    sync: SyncReport
    rollouts: StepRollouts | None = None
    diagnosis: str = ""
    """Why trainer and engines differ, in a sentence; empty if that was not examined."""


class RunRecorder:
    """Never waits for the disk, and never fails: if something cannot be recorded, recording ends, and the log says so.

    A context manager. The arrays and completions that it is given must not change afterwards."""

    def __init__(
        self, run_dir: Path, config: RecordConfig, step: int, settings: Mapping[str, Any], tokenizer: Path | None = None
    ) -> None:
        """`step` is the step that the run continues after; later ones that an earlier process recorded are forgotten.
        `settings` is the config of the run, and `tokenizer` the model's tokenizer.json."""
        self._directory, self._config = run_dir / DIRECTORY, config
        self._store = RolloutStore(self._directory, config)
        self._columns: set[str] = set()
        self._started = 0.0
        self._num_dropped = self._dropped_before = 0
        """Steps without completions, of this process and of those before it."""
        self._db: sqlite3.Connection | None = None
        self._writer = BackgroundWriter("the recorder", self._note_stop)
        self._writer.submit(lambda: self._open(step, settings, tokenizer))

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._writer.close(lambda: self._close(is_finished=kind is None))

    @property
    def stopped(self) -> str:
        """Why nothing is recorded any more; empty while all is well."""
        return self._writer.stopped

    def step(self, record: RecordedStep) -> None:
        """Record a step. Its completions are left out, and not kept in memory, if the disk is far behind."""
        if self.stopped:
            return
        if record.rollouts is not None:
            if self._writer.submit(partial(self._write_step, record), is_large=True):
                return
            self._num_dropped += 1
            record = replace(record, rollouts=None, scalars={**record.scalars, **_rollout_scalars(record.rollouts)})
        self._writer.submit(partial(self._write_step, record))

    def phases(self, phases: Iterable[Phase], step: int) -> None:
        """Record what is not part of a step, such as an evaluation."""
        rows = [_span(phase, step) for phase in phases]
        self._writer.submit(lambda: self._insert("spans", rows))

    def evaluation(self, step: int, at: float, version: int, accuracies: Sequence[float | None]) -> None:
        """`accuracies` in the order of the table's columns."""
        self._writer.submit(lambda: self._insert("evaluations", [(step, at, version, *accuracies)]))

    def sync(self, report: SyncReport, step: int, meanwhile: bool = False) -> None:
        """Record a sync that is no phase of a step, such as the first one. `meanwhile`: the trainer did not wait for it."""
        self._writer.submit(lambda: self._write_sync(report, step, is_alone=not meanwhile))

    # --- on the recorder's thread ---

    def _open(self, step: int, settings: Mapping[str, Any], tokenizer: Path | None) -> None:
        self._db = open_for_writing(self._directory / RUN_FILE, RUN_TABLES)
        with transaction(self._db):
            for table in ("steps", "evaluations", "mismatch", "worst_tokens", "diagnoses"):
                self._db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))
            set_fact(self._db, "config", json.dumps(settings))
            self._db.execute("DELETE FROM facts WHERE name IN ('finished', 'stopped')")
            if step == 0:
                self._db.execute("DELETE FROM facts WHERE name = 'dropped'")
            dropped = self._db.execute("SELECT value FROM facts WHERE name = 'dropped'").fetchone()
            self._dropped_before = int(dropped[0]) if dropped else 0
            self._started = processes.note_start(self._db, step)
        self._columns = {row[1] for row in self._db.execute("PRAGMA table_info(steps)")}
        self._store.resume(step)
        if tokenizer is not None and tokenizer.exists():
            shutil.copyfile(tokenizer, self._directory / TOKENIZER_FILE)

    def _write_step(self, record: RecordedStep) -> None:
        assert self._db is not None
        scalars, step = {**record.scalars}, record.step
        mismatch = None
        if record.rollouts is not None:
            mismatch = self._store.add(step, record.rollouts)
            scalars |= _rollout_scalars(record.rollouts) | mismatch.scalars()
        with transaction(self._db):
            self._add_columns(scalars)
            names = ", ".join(f'"{name}"' for name in ("step", "at", *scalars))
            marks = ", ".join("?" * (2 + len(scalars)))
            self._db.execute(
                f"INSERT OR REPLACE INTO steps ({names}) VALUES ({marks})", (step, record.at, *scalars.values())
            )
            insert(self._db, "spans", [_span(phase, step) for phase in record.phases])
            if mismatch is not None:
                insert(self._db, "mismatch", list(mismatch.rows(step)))
                insert(self._db, "worst_tokens", list(mismatch.worst(step)))
            if record.diagnosis:
                insert(self._db, "diagnoses", [(step, record.diagnosis)])
            self._insert_sync(record.sync, step)
            if self._num_dropped:
                set_fact(self._db, "dropped", str(self._dropped_before + self._num_dropped))

    def _write_sync(self, report: SyncReport, step: int, is_alone: bool) -> None:
        assert self._db is not None
        with transaction(self._db):
            self._insert_sync(report, step, is_alone)

    def _insert_sync(self, report: SyncReport, step: int, is_alone: bool = False) -> None:
        """Add a sync and the trainer's part of it, unless it is known: a mode that does not wait for syncs reports one twice.
        For one that is alone, the trainer did nothing else."""
        assert self._db is not None
        known = self._db.execute("SELECT start FROM syncs WHERE version = ?", (report.version,)).fetchone()
        if known is not None and known[0] == report.started:
            return
        seconds = (report.plan_seconds, report.send_seconds, report.stage_seconds, report.commit_seconds)
        row = (report.version, step, report.started, *seconds, report.total_seconds, report.num_bytes)
        insert(self._db, "syncs", [(*row, report.pause_seconds, json.dumps(report.lost))])
        engines = []
        for part in report.engines:
            stage, commit = part.stage, part.commit
            engines.append(
                (
                    *(report.version, part.engine, part.transport, int(part.checksummed), stage.num_bytes),
                    *(stage.receive_seconds, stage.verify_seconds, commit.wait_seconds, commit.pause_seconds),
                    *(commit.load_seconds, part.canary_gap, commit.lost_tokens),
                )
            )
        insert(self._db, "sync_engines", engines)
        at, spans = report.started, []
        if is_alone:
            spans.append((at, at + report.total_seconds, TRAINER, "sync", 0, step, report.version, 1, ""))
        for name, duration in zip(("plan", "send", "wait-stage", "commit"), seconds):
            spans.append((at, at + duration, TRAINER, name, 1, step, report.version, 1, ""))
            at += duration
        insert(self._db, "spans", spans)

    def _insert(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        assert self._db is not None
        with transaction(self._db):
            insert(self._db, table, rows)

    def _add_columns(self, scalars: Mapping[str, float]) -> None:
        assert self._db is not None
        for name in scalars.keys() - self._columns:
            self._db.execute(f'ALTER TABLE steps ADD COLUMN "{name}" REAL')
            self._columns.add(name)

    def _note_stop(self, reason: str) -> None:
        if self._db is not None:
            set_fact(self._db, "stopped", reason)

    def _close(self, is_finished: bool) -> None:
        if self._db is None:
            return
        with contextlib.ExitStack() as stack:  # as much of it as the disk takes
            stack.callback(finish, self._db)
            stack.callback(self._store.close)
            with transaction(self._db):
                processes.note_end(self._db, self._started)
                if is_finished:
                    set_fact(self._db, "finished", "yes")


def _span(phase: Phase, step: int) -> tuple[Any, ...]:
    return (phase.start, phase.end, TRAINER, phase.name, 0, step, None, 1, "")


def _rollout_scalars(rollouts: StepRollouts) -> dict[str, float]:
    completions = [c for group in rollouts.groups for c in group.completions]
    lengths = np.array([len(c.token_ids) for c in completions])
    ages = np.array([group.age for group in rollouts.groups])
    rewards = rollouts.rewards[~np.isnan(rollouts.rewards)]
    return {
        "rollout_length_mean": float(lengths.mean()),
        "rollout_length_max": float(lengths.max()),
        "rollout_truncated": sum(c.finish_reason == "length" for c in completions) / len(completions),
        "rollout_zero_variance": float(zero_variance(rollouts.rewards).mean()),
        "rollout_reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "rollout_staleness_mean": float(ages.mean()),
        "rollout_staleness_max": float(ages.max()),
    }
