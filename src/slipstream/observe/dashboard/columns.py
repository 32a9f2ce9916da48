"""Numbers over steps: the columns of a run's steps, thinned out for a plot."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from slipstream.observe.dashboard.recorded_run import columns_of
from slipstream.observe.recorder.mismatch import HISTOGRAM_EDGES, POSITION_EDGES, TOLERANCE

MAX_COLUMNS = 120
MAX_WORST = 50
ROWS_AT_ONCE = 8192
NOT_METRICS = ("step", "at")
MISMATCH = ("mean", "p50", "p99", "max", "signed")


class Buckets(NamedTuple):
    """Consecutive steps that become one point."""

    first: int
    last: int
    stride: int

    @property
    def where(self) -> str:
        return f"step BETWEEN {self.first} AND {self.last}"

    @property
    def number(self) -> str:
        return f"(step - {self.first}) / {self.stride}"


def buckets(db: sqlite3.Connection, first: int | None, last: int | None, points: int) -> Buckets:
    low, high = db.execute("SELECT min(step), max(step) FROM steps").fetchone()
    first, last = max(first or 0, low or 0), min(high or 0, last if last is not None else high or 0)
    return Buckets(first, last, max(1, -(-(last - first + 1) // points)))


def metrics(db: sqlite3.Connection) -> list[str]:
    return [name for name in columns_of(db, "steps") if name not in NOT_METRICS]


def steps(db: sqlite3.Connection, part: Buckets, columns: Sequence[str]) -> dict[str, Any]:
    """The given columns of the table `steps`. A point of several steps has their mean, minimum and maximum."""
    selected = ", ".join(["step", "at", *(f'"{name}"' for name in columns)])
    query = f"SELECT {selected} FROM steps WHERE step BETWEEN ? AND ? ORDER BY step"
    width = part.stride * max(1, ROWS_AT_ONCE // part.stride)  # whole buckets
    points: list[np.ndarray] = [np.empty((5, 0, 2 + len(columns)))]
    for first in range(part.first, part.last + 1, width):
        rows = db.execute(query, (first, min(part.last, first + width - 1))).fetchall()
        if rows:
            points.append(_points(np.array([tuple(row) for row in rows], float), part))
    start, end, mean, low, high = np.concatenate(points, axis=1)
    kinds = {"mean": mean} if part.stride == 1 else {"mean": mean, "min": low, "max": high}
    return {
        "from": part.first,
        "to": part.last,
        "stride": part.stride,
        "step": start[:, 0].astype(int).tolist(),
        "at": end[:, 1].tolist(),
        "series": {
            name: {kind: values[:, 2 + index].tolist() for kind, values in kinds.items()}
            for index, name in enumerate(columns)
        },
    }


def _points(rows: np.ndarray, part: Buckets) -> np.ndarray:
    """[5, buckets, columns]: first, last, mean, least and greatest value of each bucket; NaN where all are unknown."""
    place = (rows[:, 0] - part.first) // part.stride
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    ends = np.append(starts[1:], len(rows)) - 1
    is_known = ~np.isnan(rows)
    with np.errstate(invalid="ignore"):
        mean = np.add.reduceat(np.where(is_known, rows, 0.0), starts) / np.add.reduceat(is_known.astype(float), starts)
    return np.stack([rows[starts], rows[ends], mean, np.fmin.reduceat(rows, starts), np.fmax.reduceat(rows, starts)])


def mismatch(db: sqlite3.Connection, part: Buckets, dtype: str) -> dict[str, Any]:
    """Differences of logprobs between trainer and engines: over the steps, and by what may cause them."""
    known = set(metrics(db))
    found = steps(db, part, [f"mismatch_{name}" for name in MISMATCH if f"mismatch_{name}" in known])
    found["series"] = {name.removeprefix("mismatch_"): values for name, values in found["series"].items()}
    points = found["step"]
    worst = db.execute(
        f"SELECT * FROM worst_tokens WHERE {part.where} ORDER BY abs(gap) DESC LIMIT ?", (MAX_WORST,)
    ).fetchall()
    diagnoses = db.execute(
        f"SELECT step, sentence FROM diagnoses WHERE {part.where} ORDER BY step DESC LIMIT 50"
    ).fetchall()
    histogram, position = _total(db, part, "histogram"), _total(db, part, "position")
    return {
        **found,
        "by_engine": _over_steps(db, part, "engine", points),
        "by_staleness": _over_steps(db, part, "staleness", points),
        "by_position": {
            "edges": POSITION_EDGES,
            "mean": [_mean(position.get(str(edge))) for edge in POSITION_EDGES],
        },
        "histogram": {
            "edges": HISTOGRAM_EDGES,
            "tokens": [histogram.get(f"{edge:g}", (0, 0.0))[0] for edge in HISTOGRAM_EDGES],
        },
        "diagnoses": {"step": [row[0] for row in diagnoses], "sentence": [row[1] for row in diagnoses]},
        "worst": [dict(row) | {"id": f"{row['step']}.{row['grp']}.{row['sample']}"} for row in worst],
        "threshold": TOLERANCE.get(dtype),
    }


def _over_steps(
    db: sqlite3.Connection, part: Buckets, kind: str, points: Sequence[int]
) -> dict[str, list[float | None]]:
    """The mean difference at each point, by what it is counted by."""
    place = {(step - part.first) // part.stride: index for index, step in enumerate(points)}
    query = f"SELECT key, {part.number}, sum(total) / sum(tokens) FROM mismatch WHERE kind = ? AND {part.where} GROUP BY 1, 2"
    found: dict[str, list[float | None]] = {}
    for key, bucket, mean in db.execute(query, (kind,)):
        if bucket in place:
            found.setdefault(key, [None] * len(points))[place[bucket]] = mean
    return found


def _total(db: sqlite3.Connection, part: Buckets, kind: str) -> dict[str, tuple[int, float]]:
    query = f"SELECT key, sum(tokens), sum(total) FROM mismatch WHERE kind = ? AND {part.where} GROUP BY key"
    return {key: (tokens, total) for key, tokens, total in db.execute(query, (kind,))}


def _mean(entry: tuple[int, float] | None) -> float | None:
    return entry[1] / entry[0] if entry is not None and entry[0] else None
