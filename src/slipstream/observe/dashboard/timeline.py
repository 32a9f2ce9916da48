"""What trainer, gateway and engines did when: spans by lane, and the report of a sync."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.observe.dashboard.recorded_run import RecordedRun
from slipstream.observe.dashboard.rollout_queries import columnar
from slipstream.observe.recorder.fleet_recorder import GATEWAY
from slipstream.observe.recorder.run_recorder import TRAINER

DEFAULT_SECONDS = 30.0
MAX_SPANS, MAX_MARKS = 5000, 1000
MERGED_SECONDS = 1e-3
"""Spans of one name that lie closer than this are one: an engine's work is written once a second."""
CANDIDATES = 20_000
"""Spans that are looked at one by one. Of more, those that would be too short to see are merged in the database."""


@dataclass(frozen=True, slots=True)
class Span:
    lane: str
    name: str
    start: float
    end: float
    depth: int
    step: int | None
    version: int | None
    count: int
    detail: str


def timeline(
    run: RecordedRun, start: float | None, end: float | None, limit: int, seconds: float = DEFAULT_SECONDS
) -> dict[str, Any]:
    """The last `seconds` before `end`, unless there is a `start`."""
    begin, finish = extent(run)
    end = finish if end is None else end
    start = max(begin, end - seconds) if start is None else start
    found: list[Span] = []
    resolution = 0.0
    for file in (run.run_file, run.fleet_file):
        with file() as db:
            if db is not None:
                spans, merged = _spans(db, start, end, limit)
                found, resolution = found + spans, max(resolution, merged)
    found = _joined(found)
    if len(found) > limit:
        found.sort(key=lambda span: span.start - span.end)
        resolution = max(resolution, found[limit].end - found[limit].start)
        del found[limit:]
    return {
        "from": start,
        "to": end,
        "begin": begin,
        "end": finish,
        "aggregated": resolution > 0,
        "resolution": resolution,
        **by_lane(sorted(found, key=lambda span: (span.start, span.depth)), marks(run, start, end)),
    }


def extent(run: RecordedRun) -> tuple[float, float]:
    """When the first span or event began, and the last one ended."""
    low, high = [], []
    for file in (run.run_file, run.fleet_file):
        with file() as db:
            if db is not None:
                first = db.execute("SELECT min(start) FROM spans").fetchone()[0]
                # The last span to end is among the last to be written.
                last = db.execute('SELECT max("end") FROM (SELECT "end" FROM spans ORDER BY rowid DESC LIMIT 200)')
                if first is not None:
                    low.append(first)
                    high.append(last.fetchone()[0])
    with run.fleet_file() as db:
        if db is not None:
            first, last = db.execute("SELECT min(at), max(at) FROM events").fetchone()
            if first is not None:
                low.append(first)
                high.append(last)
    return min(low, default=0.0), max(high, default=0.0)


def by_lane(spans: Sequence[Span], marks: Sequence[tuple[str, str, float, str]]) -> dict[str, Any]:
    """Columns, in which a lane is its number in `lanes`."""
    lanes = sorted({span.lane for span in spans} | {mark[0] for mark in marks}, key=_lane_order)
    number = {lane: index for index, lane in enumerate(lanes)}
    columns = {name: [getattr(span, name) for span in spans] for name in _FIELDS}
    columns["lane"] = [number[lane] for lane in columns["lane"]]
    shown: dict[str, list[Any]] = {
        "lane": [number[mark[0]] for mark in marks],
        "name": [mark[1] for mark in marks],
        "at": [mark[2] for mark in marks],
        "detail": [mark[3] for mark in marks],
    }
    return {"lanes": lanes, "spans": columns, "marks": shown}


def syncs(run: RecordedRun, before: int | None, limit: int) -> dict[str, list[Any]]:
    """The syncs, newest first."""
    with run.run_file() as db:
        if db is None:
            return {}
        rows = db.execute(
            "SELECT version, step, start AS at, total AS seconds, bytes, pause, lost, "
            "(SELECT count(*) FROM sync_engines WHERE sync_engines.version = syncs.version) AS engines "
            "FROM syncs WHERE version < ? ORDER BY version DESC LIMIT ?",
            (before if before is not None else 1 << 62, limit),
        ).fetchall()
    return columnar([dict(row) | {"lost": len(json.loads(row["lost"]))} for row in rows])


def sync(run: RecordedRun, version: int) -> dict[str, Any] | None:
    """The report of a sync; None if it is not recorded."""
    with run.run_file() as db:
        if db is None:
            return None
        row = db.execute("SELECT * FROM syncs WHERE version = ?", (version,)).fetchone()
        if row is None:
            return None
        engines = db.execute("SELECT * FROM sync_engines WHERE version = ? ORDER BY engine", (version,)).fetchall()
    spans: list[Span] = []
    for file in (run.run_file, run.fleet_file):
        with file() as db:
            if db is not None:
                around = (row["start"] - 5, row["start"] + row["total"] + 5, version)
                query = f"SELECT {_COLUMNS} FROM spans WHERE start BETWEEN ? AND ? AND version = ? LIMIT 1000"
                spans += [Span(*found) for found in db.execute(query, around)]
    phases = {name: row[name] for name in ("plan", "send", "stage", "commit", "total")}
    return {
        "version": version,
        "step": row["step"],
        "start": row["start"],
        "bytes": row["bytes"],
        "bytes_per_second": row["bytes"] / max(row["send"] + row["stage"], 1e-9),
        "pause": row["pause"],
        "phases": phases,
        "engines": [{**engine, "checksummed": bool(engine["checksummed"])} for engine in map(dict, engines)],
        "lost": json.loads(row["lost"]),
        "timeline": by_lane(sorted(spans, key=lambda span: span.start), []),
    }


def spans_between(run: RecordedRun, start: float | None, end: float | None, limit: int) -> list[Span]:
    """The newest `limit` spans between two times, in order."""
    found: list[Span] = []
    for file in (run.run_file, run.fleet_file):
        with file() as db:
            if db is not None:
                query = f"SELECT {_COLUMNS} FROM spans WHERE {_BETWEEN} ORDER BY start DESC LIMIT ?"
                values = _bounds(db, 0.0 if start is None else start, 1e11 if end is None else end)
                found += [Span(*row) for row in db.execute(query, (*values, limit))]
    return sorted(found, key=lambda span: (span.start, span.depth))[-limit:]


_FIELDS = ("lane", "name", "start", "end", "depth", "step", "version", "count", "detail")
_COLUMNS = 'lane, name, start, "end", depth, step, version, count, detail'
_BETWEEN = 'start BETWEEN ? AND ? AND "end" >= ?'
"""Condition on spans; `_bounds` has its values."""
_longest: dict[str, tuple[float, int, float]] = {}
"""By file: when its last writer started, the last row that was looked at, and the length of the longest span up to there."""


def _bounds(db: sqlite3.Connection, start: float, end: float) -> tuple[float, float, float]:
    """The index knows only when spans start. Those that started before are found by the length of the longest one."""
    path = db.execute("PRAGMA database_list").fetchone()["file"]
    # A run that is resumed from an earlier step may use numbers of rows again.
    writer = db.execute("SELECT coalesce(max(started), 0) FROM processes").fetchone()[0]
    last = db.execute("SELECT coalesce(max(rowid), 0) FROM spans").fetchone()[0]
    known_writer, known, longest = _longest.get(path, (0.0, 0, 0.0))
    if known_writer != writer or known > last:
        known, longest = 0, 0.0
    if last > known:
        query = 'SELECT max("end" - start) FROM spans WHERE rowid > ? AND rowid <= ?'
        longest = max(longest, db.execute(query, (known, last)).fetchone()[0] or 0.0)
        _longest[path] = writer, last, longest
    return start - longest, end, start


def _spans(db: sqlite3.Connection, start: float, end: float, limit: int) -> tuple[list[Span], float]:
    """The spans between two times, and the length below which they were merged; 0 if none were."""
    values = _bounds(db, start, end)
    if db.execute(f"SELECT count(*) FROM spans WHERE {_BETWEEN}", values).fetchone()[0] <= CANDIDATES:
        return [Span(*row) for row in db.execute(f"SELECT {_COLUMNS} FROM spans WHERE {_BETWEEN}", values)], 0.0
    query = f"SELECT count(*) FROM (SELECT DISTINCT lane, name, depth FROM spans WHERE {_BETWEEN})"
    series = db.execute(query, values).fetchone()[0]
    width = (end - start) * max(1 / limit, 2 * series / CANDIDATES)  # what is merged are at most CANDIDATES spans
    long = f'SELECT {_COLUMNS} FROM spans WHERE {_BETWEEN} AND "end" - start >= ? ORDER BY "end" - start DESC LIMIT ?'
    short = (
        'SELECT lane, name, min(start), max("end"), depth, min(step), min(version), sum(count), '
        f"'' FROM spans WHERE {_BETWEEN} AND \"end\" - start < ? GROUP BY lane, name, depth, cast((start - ?) / ? AS INTEGER) "
        "LIMIT ?"
    )
    found = [Span(*row) for row in db.execute(long, (*values, width, CANDIDATES))]
    return found + [Span(*row) for row in db.execute(short, (*values, width, start, width, CANDIDATES))], width


def _joined(spans: list[Span]) -> list[Span]:
    """Spans of one lane, name and version that touch each other become one."""
    found: list[Span] = []
    last: dict[tuple[Any, ...], int] = {}
    for span in sorted(spans, key=lambda span: span.start):
        key = (span.lane, span.name, span.depth, span.version, span.step)
        if key in last and span.start - found[last[key]].end < MERGED_SECONDS and span.lane not in (TRAINER, GATEWAY):
            before = found[last[key]]
            found[last[key]] = replace(before, end=max(before.end, span.end), count=max(before.count, span.count))
        else:
            last[key] = len(found)
            found.append(span)
    return found


def marks(run: RecordedRun, start: float, end: float) -> list[tuple[str, str, float, str]]:
    with run.fleet_file() as db:
        if db is None:
            return []
        query = "SELECT engine, kind, at, detail FROM events WHERE at BETWEEN ? AND ? ORDER BY at DESC LIMIT ?"
        rows = db.execute(query, (start, end, MAX_MARKS)).fetchall()
    return [(row["engine"] or GATEWAY, row["kind"], row["at"], row["detail"]) for row in reversed(rows)]


def _lane_order(lane: str) -> tuple[int, int, str]:
    """The trainer, the gateway, then engines, engine-2 before engine-10."""
    place = {TRAINER: 0, GATEWAY: 1}.get(lane, 2)
    number = lane.rpartition("-")[2]
    return place, int(number) if number.isdecimal() else 0, lane
