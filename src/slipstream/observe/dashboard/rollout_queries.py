"""Lists of completions: filtered and sorted, page by page, within a time limit.

Steps are searched from the newest to the oldest, one file after the other. Of a run with millions of completions, a list that
takes too long ends early and says which steps it has covered."""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slipstream.observe.dashboard.recorded_run import RecordedRun, opened_rollouts

View: TypeAlias = Literal["samples", "groups"]
Order: TypeAlias = Literal["asc", "desc"]
Sort: TypeAlias = Literal["step", "reward", "length", "staleness", "gap", "advantage", "engine", "reward_std"]

BUDGET_SECONDS = 2.0
OPERATIONS = 100_000
"""Of SQLite, between two looks at the clock."""
MAX_LIMIT, MAX_OFFSET = 200, 100_000
HEAD = 200
_RANGES = {"reward": "reward", "length": "length", "staleness": "staleness"}

_SAMPLE_COLUMNS = (
    "step, grp, sample, head AS text, length, reward, advantage, finish, engine, version, version_max, staleness, gap, "
    "gap_max, used, zero_variance"
)
_GROUP_COLUMNS = (
    "step, grp, count(*) AS samples, avg(reward) AS reward, min(reward) AS reward_min, max(reward) AS reward_max, "
    "sqrt(max(0, avg(reward * reward) - avg(reward) * avg(reward))) AS reward_std, avg(length) AS length, "
    "max(length) AS length_max, max(staleness) AS staleness, avg(gap) AS gap, max(gap_max) AS gap_max, "
    "avg(abs(advantage)) AS advantage, group_concat(DISTINCT engine) AS engine, max(zero_variance) AS zero_variance, "
    "max(used) AS used"
)


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """What to list. None does not restrict."""

    view: View
    first: int
    last: int
    low: dict[str, float] = field(default_factory=dict)
    """Least reward, length and staleness."""
    high: dict[str, float] = field(default_factory=dict)
    finish: str | None = None
    engine: str | None = None
    text: str | None = None
    zero_variance: bool | None = None
    used: bool | None = None
    sort: Sort = "step"
    order: Order = "desc"
    limit: int = 50
    offset: int = 0

    def where(self) -> tuple[str, list[Any]]:
        """The condition on samples, without the text, and its parameters."""
        parts = ["step BETWEEN ? AND ?"]
        values: list[Any] = [self.first, self.last]
        for name, column in _RANGES.items():
            for bounds, sign in ((self.low, ">="), (self.high, "<=")):
                if name in bounds:
                    parts.append(f"{column} {sign} ?")
                    values.append(bounds[name])
        for column, value in (
            ("finish", self.finish),
            ("engine", self.engine),
            ("zero_variance", self.zero_variance),
            ("used", self.used),
        ):
            if value is not None:
                parts.append(f"{column} = ?")
                values.append(value)
        return " AND ".join(parts), values


def rollouts(run: RecordedRun, query: RolloutQuery) -> dict[str, Any]:
    """The page of a list, as `docs/dashboard.md` describes it."""
    until = time.monotonic() + BUDGET_SECONDS
    rows: list[dict[str, Any]] = []
    total, oldest, is_complete = 0, query.last, True
    files = run.rollout_files()
    for first, path in reversed(files.items()):
        if first > query.last:
            continue
        if time.monotonic() > until and oldest < query.last:
            is_complete = False
            break
        with opened_rollouts(path) as db:
            if db is not None:
                found: list[dict[str, Any]] = []
                try:
                    found, count = _search(db, query, until)
                    total += count()
                except sqlite3.OperationalError as error:
                    if str(error) != "interrupted":
                        raise
                    total, is_complete = total + len(found), False
                rows = _merged(rows, found, query)
        if not is_complete:
            break
        oldest = max(first, query.first)
        is_early = query.sort == "step" and query.order == "desc" and query.text is None
        if first <= query.first or (is_early and len(rows) >= query.offset + query.limit and total > 20 * query.limit):
            is_complete = first <= query.first
            break
    page = rows[query.offset : query.offset + query.limit]
    _add_prompts(run, files, page)
    if query.view == "groups":
        _add_samples(run, files, page)
    return {
        "view": query.view,
        "from": query.first,
        "to": query.last,
        "total": total,
        "total_is_exact": is_complete,
        "scanned": {"from": oldest, "to": query.last, "complete": is_complete},
        "rows": columnar(page),
    }


def _search(
    db: sqlite3.Connection, query: RolloutQuery, until: float
) -> tuple[list[dict[str, Any]], Callable[[], int]]:
    """The first rows of a file, in order, and what counts all of them."""
    where, values = query.where()
    # A list that takes longer than all of its time is given up between two rows.
    db.set_progress_handler(lambda: time.monotonic() > until + BUDGET_SECONDS, OPERATIONS)
    if query.text is not None:
        db.execute(
            "CREATE TEMP TABLE matches (step INTEGER, grp INTEGER, sample INTEGER, PRIMARY KEY (step, grp, sample))"
        )
        for step, group, sample in _with_text(db, query, until):
            db.execute("INSERT OR IGNORE INTO matches VALUES (?, ?, ?)", (step, group, sample))
        where += " AND (step, grp, sample) IN (SELECT step, grp, sample FROM matches)"
    direction = "ASC" if query.order == "asc" else "DESC"
    if query.view == "samples":
        sort = "step" if query.sort in ("step", "reward_std") else query.sort
        selected = f"SELECT {_SAMPLE_COLUMNS} FROM samples WHERE {where}"
        counted = f"SELECT count(*) FROM samples WHERE {where}"
    else:
        sort = query.sort
        groups = f"SELECT DISTINCT step, grp FROM samples WHERE {where}"
        selected = f"SELECT {_GROUP_COLUMNS} FROM samples JOIN ({groups}) USING (step, grp) GROUP BY step, grp"
        counted = f"SELECT count(*) FROM ({groups})"
    place = "grp, sample" if query.view == "samples" else "grp"
    tail = f"ORDER BY {sort} {direction} NULLS LAST, step DESC, {place} LIMIT ?"
    found = db.execute(f"{selected} {tail}", (*values, query.offset + query.limit)).fetchall()
    return [dict(row) for row in found], lambda: int(db.execute(counted, values).fetchone()[0])


def _with_text(db: sqlite3.Connection, query: RolloutQuery, until: float) -> Iterator[tuple[int, int, int]]:
    """Yield the samples whose prompt or completion has the text."""
    assert query.text is not None
    steps, wanted = (query.first, query.last), query.text.casefold()
    in_head = "SELECT step, grp, sample, head FROM samples WHERE step BETWEEN ? AND ?"
    yield from ((s, g, n) for s, g, n, head in db.execute(in_head, steps) if wanted in head.casefold())
    in_prompt = "SELECT step, grp, prompt FROM groups WHERE step BETWEEN ? AND ?"
    for step, group, prompt in db.execute(in_prompt, steps):
        if wanted in prompt.casefold():
            rows = db.execute("SELECT step, grp, sample FROM samples WHERE step = ? AND grp = ?", (step, group))
            yield from map(tuple, rows)
    long = "SELECT step, chunk, texts FROM chunks WHERE step BETWEEN ? AND ? AND texts IS NOT NULL ORDER BY step DESC"
    for step, chunk, texts in db.execute(long, steps):
        if time.monotonic() > until:
            return
        places = [n for n, text in enumerate(json.loads(zlib.decompress(texts))) if wanted in text.casefold()]
        if places:
            found = db.execute(
                "SELECT step, grp, sample FROM samples WHERE step = ? AND chunk = ? ORDER BY grp, sample", (step, chunk)
            ).fetchall()
            yield from (tuple(found[place]) for place in places)


def _merged(rows: list[dict[str, Any]], more: list[dict[str, Any]], query: RolloutQuery) -> list[dict[str, Any]]:
    """The first rows of two sorted lists. `more` is of earlier steps."""
    sort = "step" if query.view == "samples" and query.sort == "reward_std" else query.sort
    known = [row for row in [*rows, *more] if row[sort] is not None]
    unknown = [row for row in [*rows, *more] if row[sort] is None]
    known.sort(key=lambda row: row[sort], reverse=query.order == "desc")
    return [*known, *unknown][: query.offset + query.limit]


def _add_prompts(run: RecordedRun, files: dict[int, Path], rows: list[dict[str, Any]]) -> None:
    for db, own in _by_file(files, rows):
        for row in own:
            group = db.execute(
                "SELECT substr(prompt, 1, ?) AS prompt, prompt_length FROM groups WHERE step = ? AND grp = ?",
                (HEAD, row["step"], row["grp"]),
            ).fetchone()
            row["prompt"], row["prompt_tokens"] = tuple(group) if group else ("", None)
            row["group"] = row.pop("grp")
            row["id"] = f"{row['step']}.{row['group']}" + (f".{row['sample']}" if "sample" in row else "")


def _add_samples(run: RecordedRun, files: dict[int, Path], rows: list[dict[str, Any]]) -> None:
    """To rows of groups, what their samples have."""
    for db, own in _by_file(files, rows):
        for row in own:
            samples = db.execute(
                "SELECT sample, reward, length FROM samples WHERE step = ? AND grp = ? ORDER BY sample",
                (row["step"], row["group"]),
            ).fetchall()
            row["rewards"] = [sample["reward"] for sample in samples]
            row["lengths"] = [sample["length"] for sample in samples]
            row["sample_ids"] = [f"{row['id']}.{sample['sample']}" for sample in samples]


def _by_file(
    files: dict[int, Path], rows: list[dict[str, Any]]
) -> Iterator[tuple[sqlite3.Connection, list[dict[str, Any]]]]:
    own: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        first = max((start for start in files if start <= row["step"]), default=None)
        if first is not None:
            own.setdefault(first, []).append(row)
    for first, members in own.items():
        with opened_rollouts(files[first]) as db:
            if db is not None:
                yield db, members


def columnar(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = rows[0].keys() if rows else ()
    return {name: [row.get(name) for row in rows] for name in names}
