"""A run directory as the dashboard sees it: its files, its facts, and whether it is still written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.observe.recorder import processes
from slipstream.observe.recorder.files import DIRECTORY, FLEET_FILE, RUN_FILE, open_for_reading, rollout_files
from slipstream.runtime.clock import now

UNREADABLE = (sqlite3.Error, OSError, SlipstreamError)
"""What reading a file raises that is damaged, of another release, or somebody else's."""
LATEST = {
    "reward": "rollout_reward",
    "accuracy": "rollout_accuracy",
    "tokens_per_second": "rollout_tokens_per_second",
    "step_seconds": "seconds_step",
    "staleness": "rollout_staleness_mean",
}
"""Columns of the last step that the list of runs shows."""


class RecordedRun:
    """May be empty, damaged, or not there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.directory = self.path / DIRECTORY
        self.id = hashlib.sha256(str(self.path).encode()).hexdigest()[:10]

    @contextlib.contextmanager
    def run_file(self) -> Iterator[sqlite3.Connection | None]:
        """The trainer's file; None if there is none."""
        with _opened(self.directory / RUN_FILE) as db:
            yield db

    @contextlib.contextmanager
    def fleet_file(self) -> Iterator[sqlite3.Connection | None]:
        """The gateway's file; None if there is none."""
        with _opened(self.directory / FLEET_FILE) as db:
            yield db

    def rollout_files(self) -> dict[int, Path]:
        return rollout_files(self.directory)

    @property
    def updated(self) -> float | None:
        """When a file changed last, in Unix seconds."""
        times = []
        for name in (RUN_FILE, FLEET_FILE, f"{RUN_FILE}-wal", f"{FLEET_FILE}-wal"):
            with contextlib.suppress(OSError):
                status = (self.directory / name).stat()
                times += [status.st_mtime] if status.st_size else []  # a reader may create an empty log
        return max(times, default=None)

    def entry(self) -> dict[str, Any]:
        """An entry of the list of runs."""
        try:
            return self.summary()
        except UNREADABLE as error:
            return self._empty() | {"state": "unreadable", "stopped": str(error)}

    def summary(self) -> dict[str, Any]:
        """The entry of a run that can be read."""
        found = self._empty()
        with self.fleet_file() as db:
            if db is not None:
                found |= _of_processes(db, self.updated)
                found["engines"] = db.execute("SELECT count(*) FROM engines").fetchone()[0]
                found["version"] = db.execute("SELECT max(version) FROM commits").fetchone()[0]
        with self.run_file() as db:
            if db is not None:
                found |= _of_processes(db, self.updated) | self._of_trainer(db)
        return found

    def _empty(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.path.name,
            "path": str(self.path),
            "state": "empty",
            "recording": False,
            "stopped": "",
            "steps": 0,
            "last_step": 0,
            "total_steps": None,
            "version": None,
            "started": None,
            "updated": self.updated,
            "ended": None,
            "engines": 0,
            "config": {},
            "latest": dict.fromkeys(LATEST),
            "now": now(),
        }

    def settings(self) -> dict[str, Any]:
        """The config of the run; empty if it is not known."""
        with self.run_file() as db:
            return {} if db is None else json.loads(facts(db).get("config", "{}"))

    def _of_trainer(self, db: sqlite3.Connection) -> dict[str, Any]:
        settings = json.loads(facts(db).get("config", "{}"))
        columns = {row[1] for row in db.execute("PRAGMA table_info(steps)")}
        num_steps, last = db.execute("SELECT count(*), coalesce(max(step), 0) FROM steps").fetchone()
        row = db.execute("SELECT * FROM steps WHERE step = ?", (last,)).fetchone()
        version = db.execute("SELECT max(version) FROM syncs").fetchone()[0]
        return {
            "steps": num_steps,
            "last_step": last,
            "total_steps": settings.get("steps"),
            "config": _config_summary(settings),
            "latest": {name: row[column] if row and column in columns else None for name, column in LATEST.items()},
            **({} if version is None else {"version": version}),
        }


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection | None]:
    """Open a file for one request. None if it is missing, or was not completed when its writer was killed."""
    try:
        db = open_for_reading(path) if path.exists() else None
    except sqlite3.OperationalError:
        db = None
    if db is None:
        yield None
        return
    with contextlib.closing(db):
        yield db


@contextlib.contextmanager
def opened_rollouts(path: Path) -> Iterator[sqlite3.Connection | None]:
    """A file with completions; None if it has just been dropped."""
    with _opened(path) as db:
        yield db


def facts(db: sqlite3.Connection) -> dict[str, str]:
    return dict(map(tuple, db.execute("SELECT name, value FROM facts")))


def columns_of(db: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in db.execute(f"PRAGMA table_info({table})")]


def _of_processes(db: sqlite3.Connection, updated: float | None) -> dict[str, Any]:
    """Whether the file is written, by the process that opened it last. Nothing if no process has got that far yet."""
    known = facts(db)
    first = db.execute("SELECT min(started) FROM processes").fetchone()[0]
    last = db.execute("SELECT * FROM processes ORDER BY started DESC LIMIT 1").fetchone()
    if last is None:
        return {}
    is_running = processes.is_running(last, updated or 0.0)
    is_finished = "finished" in known or (last["ended"] is not None and not _is_trainers(db))
    stopped = known.get("stopped", "")
    return {
        "state": "live" if is_running else "finished" if is_finished else "dead",
        "recording": is_running and not stopped,
        "stopped": stopped,
        "started": first,
        "ended": None if is_running else last["ended"],
    }


def _is_trainers(db: sqlite3.Connection) -> bool:
    return "steps" in {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _config_summary(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings by which people tell runs apart."""
    algorithm, engine = settings.get("algorithm", {}), settings.get("engine", {})
    return {
        "task": settings.get("task", {}).get("name"),
        "model": settings.get("model"),
        "algorithm": algorithm.get("kind"),
        "mode": settings.get("mode"),
        "prompts": algorithm.get("prompts"),
        "group": algorithm.get("group"),
        "max_tokens": algorithm.get("max_tokens"),
        "engine": engine.get("kind"),
        "engines": settings.get("engines"),
        "seed": settings.get("seed"),
    }


def find_runs(paths: list[Path]) -> list[RecordedRun]:
    """The runs of directories: each is a run, or, if it is none, holds runs."""
    found: dict[str, RecordedRun] = {}
    for path in paths:
        inner = []
        if _is_directory(path) and not _is_directory(path / DIRECTORY):
            inner = sorted(entry.parent for entry in path.glob(f"*/{DIRECTORY}") if entry.is_dir())
        for directory in inner or [path]:
            run = RecordedRun(directory)
            found[run.id] = run
    return list(found.values())


def _is_directory(path: Path) -> bool:
    """False for what lies in somebody else's private directory."""
    try:
        return path.is_dir()
    except OSError:
        return False
