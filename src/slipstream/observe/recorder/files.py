"""The files of a record: their names, tables and connections.

    RUN_DIR/record/run.sqlite                  written by the trainer: steps, syncs, phases, logprob differences
    RUN_DIR/record/rollouts-00000001.sqlite    written by the trainer: the completions from step 1 on
    RUN_DIR/record/fleet.sqlite                written by the gateway: engines, what they do, and what happens to them
    RUN_DIR/record/tokenizer.json              the model's tokenizer, which turns token ids into text

Each file has one writer. Rows are added and, unless a run is resumed from an earlier step, never changed."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.runtime.private_files import private_directory, private_file

FORMAT = 1
DIRECTORY, RUN_FILE, FLEET_FILE, TOKENIZER_FILE = "record", "run.sqlite", "fleet.sqlite", "tokenizer.json"
BUSY_SECONDS = 10.0
_FIRST_STEP_DIGITS = 8

_COMMON = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE processes (started REAL PRIMARY KEY, step INTEGER, pid INTEGER, pid_started INTEGER, host TEXT, ended REAL);
CREATE TABLE spans (
    start REAL, end REAL, lane TEXT, name TEXT, depth INTEGER, step INTEGER, version INTEGER, count INTEGER, detail TEXT
);
CREATE INDEX spans_by_start ON spans (start);
"""

RUN_TABLES = (
    _COMMON
    + """
CREATE TABLE steps (step INTEGER PRIMARY KEY, at REAL);
CREATE TABLE evaluations (
    step INTEGER PRIMARY KEY, at REAL, version INTEGER,
    sampled_train REAL, greedy_train REAL, sampled_heldout REAL, greedy_heldout REAL
);
CREATE TABLE syncs (
    version INTEGER PRIMARY KEY, step INTEGER, start REAL, plan REAL, send REAL, stage REAL, "commit" REAL, total REAL,
    bytes INTEGER, pause REAL, lost TEXT
);
CREATE TABLE sync_engines (
    version INTEGER, engine TEXT, transport TEXT, checksummed INTEGER, bytes INTEGER,
    receive REAL, verify REAL, wait REAL, pause REAL, load REAL, canary_gap REAL,
    lost_tokens REAL, PRIMARY KEY (version, engine)
) WITHOUT ROWID;
CREATE TABLE mismatch (
    kind TEXT, step INTEGER, key TEXT, tokens INTEGER, total REAL, PRIMARY KEY (kind, step, key)
) WITHOUT ROWID;
CREATE TABLE worst_tokens (
    step INTEGER, grp INTEGER, sample INTEGER, position INTEGER, token INTEGER, engine TEXT, staleness INTEGER,
    engine_logprob REAL, trainer_logprob REAL, gap REAL, PRIMARY KEY (step, grp, sample, position)
) WITHOUT ROWID;
CREATE TABLE diagnoses (step INTEGER PRIMARY KEY, sentence TEXT);
"""
)

ROLLOUT_TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    step INTEGER, grp INTEGER, prompt_id TEXT, prompt TEXT, prompt_length INTEGER, prompt_tokens BLOB,
    trained_version INTEGER, used INTEGER, zero_variance INTEGER, PRIMARY KEY (step, grp)
) WITHOUT ROWID;
CREATE TABLE samples (
    step INTEGER, grp INTEGER, sample INTEGER, chunk INTEGER, first INTEGER, length INTEGER, head TEXT,
    reward REAL, parts TEXT, advantage REAL, finish TEXT, engine TEXT, version INTEGER, version_max INTEGER, spans TEXT,
    staleness INTEGER, gap REAL, gap_max REAL, used INTEGER, zero_variance INTEGER, PRIMARY KEY (step, grp, sample)
) WITHOUT ROWID;
CREATE TABLE chunks (
    step INTEGER, chunk INTEGER, num_tokens INTEGER, tokens BLOB, engine_logprobs BLOB, raw_logprobs BLOB, gaps BLOB,
    advantages BLOB, mask BLOB, texts BLOB, PRIMARY KEY (step, chunk)
);
"""

FLEET_TABLES = (
    _COMMON
    + """
CREATE TABLE engines (
    name TEXT PRIMARY KEY, kind TEXT, host TEXT, pid INTEGER, devices TEXT, ranks INTEGER, dtype TEXT,
    max_model_len INTEGER, max_num_seqs INTEGER, joined REAL
) WITHOUT ROWID;
CREATE TABLE status (
    at REAL, engine TEXT, state TEXT, note TEXT, version INTEGER, requests INTEGER, tokens INTEGER, kv_use REAL,
    activity TEXT, looked_up INTEGER, hit INTEGER, speed REAL, faults INTEGER, circuit TEXT, silent REAL
);
CREATE INDEX status_by_time ON status (at);
CREATE INDEX status_by_engine ON status (engine, at);
CREATE TABLE events (at REAL, kind TEXT, engine TEXT, version INTEGER, detail TEXT);
CREATE INDEX events_by_time ON events (at);
CREATE TABLE commits (version INTEGER, engine TEXT, at REAL, PRIMARY KEY (version, engine)) WITHOUT ROWID;
"""
)


def rollout_file(first_step: int) -> str:
    return f"rollouts-{first_step:0{_FIRST_STEP_DIGITS}d}.sqlite"


def rollout_files(directory: Path) -> dict[int, Path]:
    """The files with completions by their first step, in order."""
    found = {}
    for path in sorted(directory.glob("rollouts-*.sqlite")):
        number = path.stem.removeprefix("rollouts-")
        if number.isdecimal():
            found[int(number)] = path
    return found


def open_for_writing(path: Path, tables: str) -> sqlite3.Connection:
    """Open or create a file. What is committed survives the process; a power failure may lose the last transactions.

    Raises `OSError` or `sqlite3.Error` if the file cannot be written, `ConfigError` if another release wrote it."""
    try:
        private_directory(path.parent, "the record")
        private_file(path)
    except ConfigError as error:
        raise OSError(str(error)) from None
    db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        with transaction(db):
            # A process that was killed while it created the file leaves one without tables.
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in filter(str.strip, tables.split(";")):
                    db.execute(statement)
                db.execute("INSERT INTO facts VALUES ('format', ?)", (str(FORMAT),))
        check_format(db, path)
    except BaseException:
        db.close()
        raise
    return db


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open a file that may be written to at the same time, or lie in a directory that cannot be written to."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    db = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        check_format(db, path)
    except sqlite3.OperationalError:
        # The log of a writer needs an index, which cannot be created here. Without the log, the last steps may be missing.
        db.close()
        db = sqlite3.connect(f"{uri}&immutable=1", uri=True, isolation_level=None, check_same_thread=False)
        check_format(db, path)
    db.row_factory = sqlite3.Row
    return db


def check_format(db: sqlite3.Connection, path: Path) -> None:
    row = db.execute("SELECT value FROM facts WHERE name = 'format'").fetchone()
    if row is None or row[0] != str(FORMAT):
        raise ConfigError(
            f"{path} has record format {row[0] if row else 'unknown'}, this release reads {FORMAT}; use the release that wrote "
            "it"
        )


def finish(db: sqlite3.Connection) -> None:
    """Close a file that is complete. Without its log it is a single file, which can also be read in a directory that cannot be
    written to; while somebody reads it, the log stays."""
    with contextlib.suppress(sqlite3.OperationalError):
        db.execute("PRAGMA busy_timeout = 0")
        db.execute("PRAGMA journal_mode = DELETE")
    db.close()


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing. For a connection without isolation level, whose statements otherwise each are a transaction."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def insert(db: sqlite3.Connection, table: str, rows: list[tuple[Any, ...]], replace: bool = True) -> None:
    """Add rows that have a value for each column. A row that is there already is replaced, or with `replace=False` kept."""
    if rows:
        how = "REPLACE" if replace else "IGNORE"
        db.executemany(f"INSERT OR {how} INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)


def set_fact(db: sqlite3.Connection, name: str, value: str) -> None:
    db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))
