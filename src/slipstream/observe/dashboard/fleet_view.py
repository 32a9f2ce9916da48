"""The fleet: engines with their state, what they do now, and how versions spread over them."""

from __future__ import annotations

import json
import math
import sqlite3
from typing import Any

from slipstream.observe.dashboard.recorded_run import RecordedRun
from slipstream.observe.dashboard.rollout_queries import columnar
from slipstream.observe.dashboard.timeline import MERGED_SECONDS
from slipstream.runtime.clock import now

MAX_ENGINES, MAX_EVENTS, MAX_COMMITS = 256, 500, 50
MAX_SPANS = 10_000
"""Spans that are looked at for what engines do: ten minutes of eight engines."""
DOING_SECONDS = 2.5
"""What an engine did last counts as what it does now, if it is not older."""
ENDING_SECONDS = 10.0
RATE_SECONDS = 10.0
"""Time over which tokens per second are averaged for the present."""
_SERIES = ("requests", "tokens", "kv_use", "version", "state", "looked_up", "hit")


def fleet(run: RecordedRun, start: float | None, end: float | None, points: int) -> dict[str, Any]:
    with run.fleet_file() as db:
        if db is None:
            return {
                "at": None,
                "version": None,
                "engines": [],
                "series": {"at": [], "engines": {}},
                "events": {},
                "commits": {},
            }
        last = db.execute("SELECT max(at) FROM status").fetchone()[0]
        first = db.execute("SELECT min(at) FROM status").fetchone()[0]
        since, until = start or 0.0, math.inf if end is None else end
        start, end = max(first or 0.0, since), last or 0.0 if end is None else end
        doing = _doing(db, last) if last is not None and now() - last < DOING_SECONDS * 5 else {}
        return {
            "at": last,
            "version": db.execute("SELECT max(version) FROM commits").fetchone()[0],
            "engines": [_engine(db, row, last, doing.get(row["name"])) for row in _engines(db)],
            "series": _series(db, start, end, points),
            "events": _events(db, since, until),
            "commits": _commits(db),
        }


def _engines(db: sqlite3.Connection) -> list[sqlite3.Row]:
    return db.execute(
        "SELECT * FROM (SELECT * FROM engines ORDER BY joined DESC LIMIT ?) ORDER BY name", (MAX_ENGINES,)
    ).fetchall()


def _doing(db: sqlite3.Connection, last: float) -> dict[str, tuple[str, float]]:
    """By lane: what is being done, and since when. The recorder writes long work as one span a second."""
    rows = db.execute(
        'SELECT * FROM (SELECT lane, name, start, "end" FROM spans WHERE depth = 0 ORDER BY start DESC LIMIT ?) '
        'ORDER BY "end" DESC',
        (MAX_SPANS,),
    )
    found: dict[str, tuple[str, float]] = {}
    for lane, name, start, end in rows:
        if lane not in found and end >= last - DOING_SECONDS:
            found[lane] = name, start
        elif lane in found and name == found[lane][0] and end > found[lane][1] - MERGED_SECONDS:
            found[lane] = name, min(start, found[lane][1])
    return found


def _engine(
    db: sqlite3.Connection, engine: sqlite3.Row, last: float, doing: tuple[str, float] | None
) -> dict[str, Any]:
    found = dict(engine) | {"devices": json.loads(engine["devices"])}
    rows = db.execute(
        "SELECT * FROM status WHERE engine = ? AND at <= ? ORDER BY at DESC LIMIT 30", (engine["name"], last)
    ).fetchall()
    lost = db.execute(
        "SELECT at, kind, detail FROM events WHERE engine = ? AND kind IN ('lost', 'joined') ORDER BY at DESC LIMIT 1",
        (engine["name"],),
    ).fetchone()
    if not rows:
        return found | {"state": "empty", "doing": "idle"}
    row = rows[0]
    is_lost = lost is not None and lost["kind"] == "lost" and not _is_end(db, lost["at"])
    doing_now, since = doing if doing is not None and not is_lost else ("idle", None)
    return found | {
        **{name: row[name] for name in ("version", "requests", "kv_use", "activity", "speed", "faults", "circuit")},
        "state": "lost" if is_lost else row["state"],
        "note": lost["detail"] if is_lost else row["note"],
        "prefix_hit_share": _share(row),
        "tokens": row["tokens"],
        "tokens_per_second": _rate(rows, last),
        "seconds_since_heartbeat": row["silent"],
        "doing": doing_now,
        "doing_since": since,
    }


def _is_end(db: sqlite3.Connection, at: float) -> bool:
    """Whether the fleet was stopped then, engines first."""
    row = db.execute("SELECT ended FROM processes ORDER BY started DESC LIMIT 1").fetchone()
    return row is not None and row["ended"] is not None and row["ended"] - at < ENDING_SECONDS


def _rate(rows: list[sqlite3.Row], last: float) -> float | None:
    """Tokens per second, from rows newest first. Since the newest, which may be older than `last`, nothing has changed."""
    recent = [row for row in rows if row["at"] >= last - RATE_SECONDS]
    if len(recent) < 2:
        return None
    seconds, tokens = last - recent[-1]["at"], recent[0]["tokens"] - recent[-1]["tokens"]
    return tokens / seconds if seconds > 0 and tokens >= 0 else None


def _series(db: sqlite3.Connection, start: float, end: float, points: int) -> dict[str, Any]:
    """The status of each engine at `points` times: the last one known."""
    width = max((end - start) / points, 1e-3)
    # Of columns besides an aggregate, SQLite takes the row of the maximum.
    query = (
        f"SELECT cast((at - ?) / ? AS INTEGER) AS place, engine, max(at) AS at, {', '.join(_SERIES)} FROM status "
        "WHERE at BETWEEN ? AND ? GROUP BY 1, 2 ORDER BY 1"
    )
    rows = db.execute(query, (start, width, start, end)).fetchall()
    if not rows:
        return {"at": [], "engines": {}}
    places = sorted({row["place"] for row in rows})
    index = {place: n for n, place in enumerate(places)}
    engines: dict[str, dict[str, list[Any]]] = {}
    names = ("requests", "kv_use", "version", "state", "prefix_hit_share", "tokens_per_second")
    before: dict[str, sqlite3.Row] = {}
    for row in rows:
        columns = engines.setdefault(row["engine"], {name: [None] * len(places) for name in names})
        place, last = index[row["place"]], before.get(row["engine"])
        for name in ("requests", "kv_use", "version", "state"):
            columns[name][place] = row[name]
        columns["prefix_hit_share"][place] = _share(row)
        if last is not None and row["at"] > last["at"] and row["tokens"] >= last["tokens"]:
            columns["tokens_per_second"][place] = (row["tokens"] - last["tokens"]) / (row["at"] - last["at"])
        before[row["engine"]] = row
    for columns in engines.values():
        for values in columns.values():
            for n in range(1, len(values)):
                if values[n] is None:  # it did not change
                    values[n] = values[n - 1]
    return {"at": [start + (place + 1) * width for place in places], "engines": engines}


def _share(row: sqlite3.Row) -> float | None:
    return row["hit"] / row["looked_up"] if row["looked_up"] else None


def _events(db: sqlite3.Connection, start: float, end: float) -> dict[str, list[Any]]:
    rows = db.execute(
        "SELECT * FROM events WHERE at BETWEEN ? AND ? ORDER BY at DESC LIMIT ?", (start, end, MAX_EVENTS)
    ).fetchall()
    return columnar([dict(row) for row in reversed(rows)])


def _commits(db: sqlite3.Connection) -> dict[str, Any]:
    """When each engine began to serve each of the last versions."""
    newest = db.execute("SELECT max(version) FROM commits").fetchone()[0]
    if newest is None:
        return {"version": [], "first": [], "engines": {}}
    rows = db.execute(
        "SELECT version, engine, at FROM commits WHERE version > ? ORDER BY version", (newest - MAX_COMMITS,)
    ).fetchall()
    versions = sorted({row["version"] for row in rows})
    first = {version: min(row["at"] for row in rows if row["version"] == version) for version in versions}
    engines: dict[str, list[float | None]] = {}
    place = {version: n for n, version in enumerate(versions)}
    for row in rows:
        column = engines.setdefault(row["engine"], [None] * len(versions))
        column[place[row["version"]]] = row["at"] - first[row["version"]]
    return {"version": versions, "first": [first[version] for version in versions], "engines": engines}
