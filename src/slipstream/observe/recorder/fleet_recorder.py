"""Records a fleet as its gateway sees it: engines, what each is doing, and what happens to them.

The gateway's event loop only appends to lists. Once a second they are written on another thread."""

from __future__ import annotations

import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.observe.recorder import processes
from slipstream.observe.recorder.background import BackgroundWriter
from slipstream.observe.recorder.files import (
    DIRECTORY,
    FLEET_FILE,
    FLEET_TABLES,
    finish,
    insert,
    open_for_writing,
    set_fact,
    transaction,
)
from slipstream.runtime.clock import unix_time
from slipstream.types import EngineInfo, EngineStatus

STATUS_SECONDS = 1.0
"""Time between two looks at the engines."""
UNCHANGED_SECONDS = 10.0
"""An engine whose status does not change is noted this often."""
MAX_ROWS = 2_000_000
"""Rows kept of each table that grows with time."""
PRUNE_EVERY = 1000
GATEWAY = "gateway"
"""Lane of what the gateway itself does."""
_SHOWN_STATES = ("asleep", "stale", "quarantined", "draining", "drained")
"""States with a span on the engine's lane."""
_NOTED_STATES = ("empty", "ready", "asleep", "stale", "drained")
"""States with an event when they begin; the others follow from decisions, which are events already."""


@dataclass
class EngineWork:
    """The requests of an engine that are not answered."""

    num_open: int = 0
    num_started: int = 0
    since: float = 0.0
    """Start of the span that is not written yet."""
    num_tokens: int = 0
    """Delivered since the gateway started."""


class FleetRecorder:
    """All methods but those of the thread run on the gateway's event loop. Times are readings of `time.perf_counter`."""

    def __init__(self, run_dir: Path | None = None) -> None:
        """Without a directory nothing is recorded."""
        self._rows: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self._work: dict[str, EngineWork] = defaultdict(EngineWork)
        self._last: dict[str, tuple[float, tuple[Any, ...]]] = {}
        """By engine: its last row in `status`."""
        self._looked_at = time.perf_counter()
        self._db: sqlite3.Connection | None = None
        self._num_flushes = 0
        self._started = 0.0
        self._writer: BackgroundWriter | None = None
        if run_dir is not None:
            path = run_dir / DIRECTORY / FLEET_FILE
            self._writer = BackgroundWriter("the gateway's recorder", self._note_stop)
            self._writer.submit(lambda: self._open(path))

    @property
    def is_on(self) -> bool:
        return self._writer is not None and not self._writer.stopped

    def event(self, kind: str, engine: str = "", detail: str = "", version: int | None = None) -> None:
        if self.is_on:
            self._rows["events"].append((unix_time(time.perf_counter()), kind, engine, version, detail))

    def span(self, lane: str, name: str, start: float, end: float, **more: Any) -> None:
        """Note what an engine or the gateway did. `more` are `depth`, `version`, `count` and `detail`."""
        if self.is_on:
            facts = (more.get("depth", 0), None, more.get("version"), more.get("count", 1), more.get("detail", ""))
            self._rows["spans"].append((unix_time(start), unix_time(end), lane, name, *facts))

    def joined(self, info: EngineInfo) -> None:
        now = unix_time(time.perf_counter())
        if self.is_on:
            shape = (info.num_ranks, info.dtype, info.max_model_len, info.max_num_seqs)
            row = (info.name, info.kind, info.host, info.pid, json.dumps(info.devices), *shape, now)
            self._rows["engines"].append(row)
            self.event("joined", info.name, f"{info.kind}, pid {info.pid}, {info.weights}", info.version)

    def committed(self, version: int, engine: str) -> None:
        if self.is_on:
            self._rows["commits"].append((version, engine, unix_time(time.perf_counter())))

    def update(
        self, engine: str, version: int, start: float, steps: Sequence[tuple[str, float, dict[str, float]]]
    ) -> None:
        """Note the steps of a weight update on an engine. `steps` are names, ends and, by the engine's report, the seconds of
        what each step consisted of, which lie at its end."""
        for name, end, parts in steps:
            self.span(engine, name, start, end, version=version)
            at = max(start, end - sum(parts.values()))
            for part, seconds in parts.items():
                if seconds > 0:
                    self.span(engine, part, at, min(end, at + seconds), depth=1, version=version)
                at += seconds
            start = end

    def started(self, engine: str, num_requests: int) -> None:
        """An engine was given requests."""
        work = self._work[engine]
        if not work.num_open:
            work.since, work.num_started = time.perf_counter(), 0
        work.num_open += num_requests
        work.num_started += num_requests

    def ended(self, engine: str, num_requests: int) -> None:
        """An engine has answered requests, or they were given to another."""
        work = self._work[engine]
        work.num_open -= num_requests
        if not work.num_open:
            self._end_work(engine, time.perf_counter())

    def tokens(self, engine: str, count: int) -> None:
        """An engine has delivered tokens."""
        self._work[engine].num_tokens += count

    def status(self, engines: Iterable[EngineStatus], version: int) -> None:
        """Look at the engines, and write what has gathered. To be called every `STATUS_SECONDS`."""
        if not self.is_on:
            return
        now = time.perf_counter()
        at, before, self._looked_at = unix_time(now), self._looked_at, now
        for engine in engines:
            name = engine.info.name
            if self._work[name].num_open:
                self._end_work(name, now)
            shown = "paused" if engine.is_paused else engine.state if engine.state in _SHOWN_STATES else ""
            if shown:
                self.span(name, shown, before, now, detail=engine.note)
            row = self._status_row(engine)
            last_at, last = self._last.get(name, (0.0, ()))
            if row != last or at - last_at >= UNCHANGED_SECONDS:
                if last and last[0] != row[0] and engine.state in _NOTED_STATES:
                    self.event(engine.state, name, engine.note, engine.info.version)
                self._last[name] = at, row
                self._rows["status"].append((at, name, *row, engine.seconds_since_heartbeat))
        self._flush()

    def close(self) -> None:
        if self._writer is not None:
            self._flush()
            self._writer.close(self._close)

    def _status_row(self, engine: EngineStatus) -> tuple[Any, ...]:
        work = self._work[engine.info.name]
        return (
            *(engine.state, engine.note, engine.info.version, engine.num_requests, work.num_tokens),
            *(
                engine.kv_use,
                engine.activity,
                engine.looked_up_tokens,
                engine.hit_tokens,
            ),
            *(engine.speed or None, engine.num_faults, engine.circuit),
        )

    def _end_work(self, engine: str, now: float) -> None:
        work = self._work[engine]
        self.span(engine, "generate", work.since, now, count=work.num_started, version=None)
        work.since, work.num_started = now, work.num_open

    # --- on the recorder's thread ---

    def _flush(self) -> None:
        rows, self._rows = self._rows, defaultdict(list)
        if rows and self._writer is not None:
            self._writer.submit(lambda: self._write(rows))

    def _open(self, path: Path) -> None:
        self._db = open_for_writing(path, FLEET_TABLES)
        self._db.execute("DELETE FROM facts WHERE name = 'stopped'")
        self._started = processes.note_start(self._db, 0)

    def _write(self, rows: dict[str, list[tuple[Any, ...]]]) -> None:
        assert self._db is not None
        with transaction(self._db):
            for table, added in rows.items():
                insert(self._db, table, added, replace=table != "commits")  # a repair commits a version again
            self._num_flushes += 1
            if self._num_flushes % PRUNE_EVERY == 0:
                for table in ("spans", "status", "events"):
                    self._db.execute(
                        f"DELETE FROM {table} WHERE rowid <= (SELECT max(rowid) FROM {table}) - ?", (MAX_ROWS,)
                    )

    def _note_stop(self, reason: str) -> None:
        if self._db is not None:
            set_fact(self._db, "stopped", reason)

    def _close(self) -> None:
        if self._db is not None:
            processes.note_end(self._db, self._started)
            finish(self._db)
