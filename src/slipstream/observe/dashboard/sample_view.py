"""One completion with its tokens, or one group."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.observe.dashboard.pieces import pieces, token_bytes, unknown
from slipstream.observe.dashboard.recorded_run import RecordedRun, opened_rollouts
from slipstream.observe.dashboard.rollout_queries import columnar
from slipstream.observe.recorder.files import TOKENIZER_FILE
from slipstream.observe.recorder.rollouts import sample_text, unpacked

MAX_TOKENS = 1 << 16
MAX_SAMPLES = 4096
DIGITS, GAP_DIGITS = 5, 8


def group(run: RecordedRun, step: int, number: int) -> dict[str, Any] | None:
    """A group with the rows of its samples; None if it is not recorded."""
    with opened_rollouts(_file(run, step)) as db:
        if db is None:
            return None
        own = _group_row(db, step, number)
        rows = db.execute(
            "SELECT * FROM samples WHERE step = ? AND grp = ? ORDER BY sample LIMIT ?", (step, number, MAX_SAMPLES)
        ).fetchall()
        if own is None:
            return None
    samples = [dict(row) | {"id": f"{step}.{number}.{row['sample']}", "text": row["head"]} for row in rows]
    for sample in samples:
        for name in ("chunk", "first", "head", "spans", "grp", "step"):
            del sample[name]
    return {
        "id": f"{step}.{number}",
        "step": step,
        "group": number,
        "prompt_id": own["prompt_id"],
        "prompt": own["prompt"],
        "trained_version": own["trained_version"],
        "zero_variance": bool(own["zero_variance"]),
        "used": bool(own["used"]),
        "samples": columnar(samples),
    }


def sample(
    run: RecordedRun, step: int, number: int, index: int, first: int = 0, last: int | None = None
) -> dict[str, Any] | None:
    """A completion with its tokens `[first, last)`; None if it is not recorded."""
    with opened_rollouts(_file(run, step)) as db:
        if db is None:
            return None
        own = _group_row(db, step, number)
        row = db.execute(
            "SELECT * FROM samples WHERE step = ? AND grp = ? AND sample = ?", (step, number, index)
        ).fetchone()
        if own is None or row is None:
            return None
        chunk = db.execute("SELECT * FROM chunks WHERE step = ? AND chunk = ?", (step, row["chunk"])).fetchone()
        place = db.execute(
            "SELECT count(*) FROM samples WHERE step = ? AND chunk = ? AND (grp, sample) < (?, ?)",
            (step, row["chunk"], number, index),
        ).fetchone()[0]
        siblings = db.execute("SELECT sample FROM samples WHERE step = ? AND grp = ? ORDER BY sample", (step, number))
        sibling_ids = [f"{step}.{number}.{other}" for (other,) in siblings]
        before, after = _neighbours(db, step, number, index)
    to_bytes = _to_bytes(run)
    prompt = np.frombuffer(own["prompt_tokens"], "<u4")
    first = min(max(0, first), row["length"])
    last = min(row["length"], first + MAX_TOKENS, row["length"] if last is None else max(first, last))
    text = sample_text(row, chunk, place) or "".join(pieces(_ids(row, chunk), to_bytes))
    return {
        **{name: row[name] for name in ("reward", "finish", "engine", "staleness", "gap", "gap_max")},
        "id": f"{step}.{number}.{index}",
        "step": step,
        "group": number,
        "sample": index,
        "prompt_id": own["prompt_id"],
        "previous": before,
        "next": after,
        "siblings": sibling_ids,
        "prompt": {
            "text": own["prompt"],
            "tokens": own["prompt_length"],
            "pieces": pieces(prompt[:MAX_TOKENS].tolist(), to_bytes),
        },
        "text": text,
        "reward_parts": json.loads(row["parts"]) if row["parts"] else {},
        "used": bool(row["used"]),
        "zero_variance": bool(row["zero_variance"]),
        "trained_version": own["trained_version"],
        "count": row["length"],
        "from": first,
        "to": last,
        "tokens": _tokens(row, chunk, first, last, to_bytes),
    }


def add_pieces(run: RecordedRun, rows: list[dict[str, Any]]) -> None:
    """To rows with the id of a token, its text."""
    to_bytes = _to_bytes(run)
    for row in rows:
        row["token_id"] = row.pop("token")
        row["token"] = pieces([row["token_id"]], to_bytes)[0]


def _tokens(
    row: sqlite3.Row, chunk: sqlite3.Row, first: int, last: int, to_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
    start, stop = row["first"] + first, row["first"] + last

    def part(name: str, dtype: str) -> np.ndarray | None:
        return unpacked(chunk[name], dtype, start, stop)

    ids, engine, gaps = part("tokens", "<u4"), part("engine_logprobs", "<f4"), part("gaps", "<f2")
    assert ids is not None and engine is not None
    advantages, mask = part("advantages", "<f4"), part("mask", "u1")
    spans = json.loads(row["spans"]) if row["spans"] else [[row["version"], 0, row["length"]]]
    return {
        "id": ids.tolist(),
        "piece": pieces(ids.tolist(), to_bytes),
        "version": spans,
        "engine_logprob": _rounded(engine),
        "raw_logprob": _rounded(part("raw_logprobs", "<f4")),
        "trainer_logprob": None if gaps is None else _rounded(engine + gaps),
        "gap": None if gaps is None else _rounded(gaps, GAP_DIGITS),
        "advantage": row["advantage"] if advantages is None else _rounded(advantages),
        "mask": row["used"] if mask is None else mask.tolist(),
    }


def _rounded(values: np.ndarray | None, digits: int = DIGITS) -> list[float] | None:
    return None if values is None else np.round(values.astype(float), digits).tolist()


def _ids(row: sqlite3.Row, chunk: sqlite3.Row) -> list[int]:
    found = unpacked(chunk["tokens"], "<u4", row["first"], row["first"] + row["length"])
    assert found is not None
    return found[:MAX_TOKENS].tolist()


def _neighbours(db: sqlite3.Connection, step: int, number: int, index: int) -> tuple[str | None, str | None]:
    """The samples before and after this one in its step."""
    found: list[str | None] = []
    for sign, direction in (("<", "DESC"), (">", "ASC")):
        row = db.execute(
            f"SELECT grp, sample FROM samples WHERE step = ? AND (grp, sample) {sign} (?, ?) "
            f"ORDER BY grp {direction}, sample {direction} LIMIT 1",
            (step, number, index),
        ).fetchone()
        found.append(f"{step}.{row['grp']}.{row['sample']}" if row else None)
    return found[0], found[1]


def _group_row(db: sqlite3.Connection, step: int, number: int) -> sqlite3.Row | None:
    row: sqlite3.Row | None = db.execute("SELECT * FROM groups WHERE step = ? AND grp = ?", (step, number)).fetchone()
    return row


def _to_bytes(run: RecordedRun) -> Callable[[int], bytes]:
    path = run.directory / TOKENIZER_FILE
    try:
        return token_bytes(path, path.stat().st_mtime)
    except Exception:  # whatever is wrong with the file, ids can be shown
        return unknown


def _file(run: RecordedRun, step: int) -> Path:
    """The file with the completions of a step; one that does not exist if they are gone."""
    files = run.rollout_files()
    first = max((start for start in files if start <= step), default=None)
    return files[first] if first is not None else Path("missing")
