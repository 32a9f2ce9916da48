"""The rollout journal: what was accepted, generated and taken, in a SQLite file of the run directory. It survives the gateway.

    accepted ──► finished ──► taken           by the trainer, once, at a position that counts from 1
        ▲            │
        └── renewed ─┘                        too old, or its engine died or lied: next attempt, earlier samples are dropped
        └──────────► failed ──► taken         a typed error replaces the completions

A group is a prompt and its samples. The journal deduplicates results: a sample counts once per attempt, and only the last
attempt counts. `events` is the complete history. Every row has a checksum (`journal_integrity.py`); a damaged journal is not
opened, and `slipstream journal` says what is damaged and saves the rest."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.errors import JournalDamaged, JournalError, JournalUnavailable, RequestError
from slipstream.gateway.journal_integrity import COLUMNS, Mark, find_damage, mark_path, open_for_reading, seal

FORMAT = 2
_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE groups (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    request BLOB NOT NULL,
    num_samples INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL,
    error BLOB,
    checksum INTEGER NOT NULL
);
CREATE INDEX groups_by_state ON groups (state, number);
CREATE TABLE samples (
    number INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    completion BLOB NOT NULL,
    oldest INTEGER NOT NULL,
    newest INTEGER NOT NULL,
    engine TEXT NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (number, sample)
);
CREATE TABLE takes (
    position INTEGER PRIMARY KEY,
    number INTEGER NOT NULL UNIQUE,
    version INTEGER NOT NULL,
    age INTEGER NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE events (
    at INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    number INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    version INTEGER NOT NULL,
    detail TEXT NOT NULL,
    checksum INTEGER NOT NULL
);
"""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_CONSTRAINT)
"""SQLite's errors that repeating the call does not mend. The others come from the disk: full, read-only, failing."""
_QUARANTINE, _DRAIN = "quarantine of ", "drain of "
"""Prefix of the names of facts about engines that are not trusted."""
_SHOWN = 3
"""Problems in the error of a damaged journal; `slipstream journal` shows all."""


@dataclass(frozen=True, slots=True)
class Group:
    """An accepted prompt."""

    number: int
    """Counts accepted prompts from 1."""
    id: str
    request: bytes
    num_samples: int
    attempt: int
    """How often it has been renewed."""


class FinishedSample(NamedTuple):
    """A finished sample of a group."""

    completion: bytes
    oldest: int
    """Version of its oldest token."""
    newest: int
    engine: str


@dataclass(frozen=True, slots=True)
class TakenGroup:
    position: int
    id: str
    version: int
    """Version being trained when it was taken."""
    age: int
    completions: tuple[bytes, ...]
    """One per sample; none if the group failed."""
    error: bytes
    request: bytes
    """As it was accepted."""


class Journal:
    """For one thread at a time. Every method is a transaction: after a crash it has happened completely or not at all.

    Methods raise `JournalUnavailable` if the disk is full or fails, and have then changed nothing; they may be called again.
    They raise `JournalDamaged` if a record does not match its checksum."""

    def __init__(self, path: Path | None = None) -> None:
        """Open or create the file; without a path the journal is kept in memory."""
        self._path = path
        self._mark: int | None = None
        """File descriptor of the mark."""
        self._at = self._chain = 0
        """Number and checksum of the last event."""
        is_new = path is None or self._is_new(path)
        try:
            self._db = sqlite3.connect(
                str(path) if path else ":memory:", isolation_level=None, timeout=10.0, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise self._error(error) from None
        self._run("PRAGMA journal_mode = WAL")
        # Commits survive the process; a power failure may lose the last ones, which the mark then shows.
        self._run("PRAGMA synchronous = NORMAL")
        if path is not None:
            self._mark = os.open(mark_path(path), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if is_new:
            with self._transaction():
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._run(statement)
                self._set_fact("format", str(FORMAT))
        elif row := self._rows("SELECT at, checksum FROM events ORDER BY at DESC LIMIT 1"):
            self._at, self._chain = row[0]

    def _is_new(self, path: Path) -> bool:
        """Whether the file is to be created. Raises unless it is that or a whole journal of this format."""
        mark = Mark.read(mark_path(path))
        problems: list[str] = []
        try:
            is_new = not path.exists() or not path.stat().st_size
            if not is_new:
                with open_for_reading(path) as db:
                    # A gateway that was killed while it created the file leaves one without tables.
                    is_new = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
                    if not is_new:
                        self._check_format(db)
                        problems = find_damage(db, mark)
        except sqlite3.Error as error:
            raise self._error(error) from None
        if is_new and mark is not None and mark.at:
            problems = [f"it is empty, and had {mark.num_groups} prompts, of which {mark.position} were taken"]
        if problems:
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise JournalDamaged(
                f"the journal {path} is damaged: {'; '.join(problems[:_SHOWN])}{more}. `slipstream journal {path.parent}` "
                "shows everything, and with --repair saves what is intact"
            )
        return is_new

    def _check_format(self, db: sqlite3.Connection) -> None:
        row = db.execute("SELECT value FROM facts WHERE name = 'format'").fetchone()
        if row is not None and row[0] != str(FORMAT):
            raise JournalError(
                f"the journal {self._path} has format {row[0]}, this release reads {FORMAT}; use the release that wrote it"
            )

    def close(self) -> None:
        self._db.close()
        if self._mark is not None:
            os.close(self._mark)
            self._mark = None

    # --- facts of the run ---

    def fact(self, name: str) -> str | None:
        rows = self._rows("SELECT value FROM facts WHERE name = ?", name)
        return str(rows[0][0]) if rows else None

    def remember(self, **facts: str) -> None:
        with self._transaction():
            for name, value in facts.items():
                self._set_fact(name, value)

    # --- groups ---

    def accept(self, requests: Mapping[str, tuple[bytes, int]]) -> list[Group]:
        """Accept requests, given by id as `(serialized request, number of samples)`; return the new groups.

        Raises `RequestError` if a known id comes with another request."""
        new = []
        with self._transaction():
            number = self.num_groups()
            for id, (request, num_samples) in requests.items():
                rows = self._rows("SELECT request FROM groups WHERE id = ?", id)
                if rows and rows[0][0] not in (request, b""):  # empty if forgotten
                    raise RequestError(
                        f"a prompt with id {id!r} was accepted before with other tokens or sampling params; give every prompt "
                        "its own id"
                    )
                if not rows:
                    number += 1
                    self._insert("groups", number, id, request, num_samples, 0, "accepted", None)
                    new.append(Group(number, id, request, num_samples, 0))
                    self._event("accept", number)
        return new

    def store(self, id: str, request: bytes, sample: FinishedSample) -> int:
        """Accept a group of one sample and finish it at once; return its number. Raises `RequestError` if the id is known."""
        with self._transaction():
            if self._rows("SELECT 1 FROM groups WHERE id = ?", id):
                raise RequestError(f"the journal has a group with the id {id!r}")
            number = self.num_groups() + 1
            self._insert("groups", number, id, request, 1, 0, "finished", None)
            self._event("accept", number)
            self._insert("samples", number, 0, *sample)
            self._event("sample", number, 0, 0, sample.oldest, sample.engine)
            return number

    def find(self, id: str) -> Group | None:
        rows = self._groups("WHERE id = ?", id)
        return rows[0].group if rows else None

    def finished_groups(self) -> Iterator[tuple[Group, tuple[bytes, ...]]]:
        """Yield the groups that are finished and not taken, each with its samples."""
        for row in self._groups("WHERE state = 'finished' ORDER BY number"):
            yield row.group, self._samples(row.number)

    def has_all(self, ids: Iterable[str]) -> bool:
        """Whether all of these prompts were accepted before."""
        return all(self._rows("SELECT 1 FROM groups WHERE id = ?", id) for id in ids)

    def waiting(self) -> list[Group]:
        """Return the groups that are accepted and not finished."""
        return [row.group for row in self._groups("WHERE state = 'accepted' ORDER BY number")]

    def started(self, group: Group, version: int) -> None:
        with self._transaction():
            self._event("start", group.number, attempt=group.attempt, version=version)

    def finished(self) -> dict[int, int]:
        """Return the groups that could be taken, each with the version of its oldest token, -1 if it failed."""
        return dict(
            self._rows(
                "SELECT number, coalesce((SELECT min(oldest) FROM samples WHERE samples.number = groups.number), -1) "
                "FROM groups WHERE state IN ('finished', 'failed') ORDER BY number"
            )
        )

    def finish(self, group: Group, samples: Mapping[int, FinishedSample]) -> int | None:
        """Store all samples of a group, given by index. Return the version of the group's oldest token, or None if the attempt
        is no longer current or samples are missing."""
        with self._transaction():
            row = self._group(group.number)
            if not row.is_current(group) or samples.keys() != set(range(group.num_samples)):
                return None
            for index, sample in sorted(samples.items()):
                self._insert("samples", group.number, index, *sample)
                self._event("sample", group.number, index, group.attempt, sample.oldest, sample.engine)
            self._update(row, state="finished")
            return min(sample.oldest for sample in samples.values())

    def fail(self, group: Group, error: bytes) -> bool:
        """End the group with an error. Return False if the attempt is no longer current."""
        with self._transaction():
            row = self._group(group.number)
            if not row.is_current(group):
                return False
            self._update(row, state="failed", error=error)
            self._event("fail", group.number, attempt=group.attempt)
        return True

    def renew(self, number: int, reason: str = "") -> Group | None:
        """Start the next attempt at a group; return None if it was taken or failed."""
        with self._transaction():
            return self._renew(number, reason)

    def renew_all(self, engine: str, since: int, reason: str) -> None:
        """Start the next attempt at the groups of `generated_by`."""
        with self._transaction():
            for number in self.generated_by(engine, since):
                self._renew(number, reason)

    def _renew(self, number: int, reason: str) -> Group | None:
        row = self._group(number)
        if row.state not in ("accepted", "finished"):
            return None
        self._run("DELETE FROM samples WHERE number = ?", number)
        row = self._update(row, state="accepted", attempt=row.attempt + 1)
        self._event("renew", number, attempt=row.attempt, detail=reason)
        return row.group

    def generated_by(self, engine: str, since: int) -> list[int]:
        """Return the finished groups that have a sample of this engine with a token of version `since` or later."""
        rows = self._rows(
            "SELECT DISTINCT number FROM samples JOIN groups USING (number) WHERE engine = ? AND newest >= ? AND state = "
            "'finished' ORDER BY number",
            engine,
            since,
        )
        return [number for (number,) in rows]

    def synced(self, version: int) -> None:
        with self._transaction():
            self._event("sync", version=version)
            self._set_fact("version", str(version))

    def decided(self, kind: str, engine: str, reason: str, version: int) -> None:
        """Record a decision about an engine (`engine_watch.py`)."""
        with self._transaction():
            self._event(kind, version=version, detail=f"{engine}: {reason}")
            if kind == "quarantine":
                self._set_fact(f"{_QUARANTINE}{engine}", reason)
            elif kind == "drain":
                self._set_fact(f"{_DRAIN}{engine}", reason)
            elif kind in ("release", "undrain"):
                self._run("DELETE FROM facts WHERE name = ?", f"{_QUARANTINE if kind == 'release' else _DRAIN}{engine}")

    def quarantined(self) -> dict[str, str]:
        """Return the engines that are not trusted, with the reasons."""
        return self._facts_of(_QUARANTINE)

    def drained(self) -> set[str]:
        """Return the engines that an operator has taken out of use."""
        return set(self._facts_of(_DRAIN))

    def _facts_of(self, prefix: str) -> dict[str, str]:
        rows = self._rows("SELECT name, value FROM facts WHERE substr(name, 1, ?) = ?", len(prefix), prefix)
        return {name.removeprefix(prefix): value for name, value in rows}

    # --- taking ---

    def take(self, numbers: Iterable[int], version: int) -> None:
        """Give groups to the trainer, in this order."""
        with self._transaction():
            for position, number in enumerate(numbers, self.last_position() + 1):
                row = self._group(number)
                if row.state not in ("finished", "failed"):
                    raise JournalError(f"group {number} cannot be taken: it is not finished or was taken before")
                self._update(row, state="taken")
                oldest = self._number("SELECT coalesce(min(oldest), ?) FROM samples WHERE number = ?", version, number)
                self._insert("takes", position, number, version, version - oldest)
                self._event("take", number, position, version=version)

    def position_of(self, number: int) -> int | None:
        """Return where a group was taken; None if it was not."""
        rows = self._rows("SELECT position FROM takes WHERE number = ?", number)
        return int(rows[0][0]) if rows else None

    def last_position(self) -> int:
        return self._number("SELECT coalesce(max(position), ?) FROM takes", int(self.fact("base") or 0))

    def count_from(self, position: int) -> None:
        """Continue behind a trainer's position. A new journal, whose predecessor was lost, counts from there."""
        if position <= self.last_position():
            return
        if self.num_taken():
            raise JournalError(
                f"the trainer is at position {position} and this journal ends at {self.last_position()}; the journal is older "
                "than the trainer's checkpoint or belongs to another run"
            )
        self.remember(base=str(position))

    def num_groups(self) -> int:
        return self._number("SELECT coalesce(max(number), 0) FROM groups")

    def num_taken(self) -> int:
        return self._number("SELECT count(*) FROM takes")

    def num_taken_at(self, version: int) -> int:
        """Return the number of groups taken while this version was being trained."""
        return self._number("SELECT count(*) FROM takes WHERE version = ?", version)

    def taken(self, after: int, count: int) -> list[TakenGroup]:
        """Return the groups taken behind a position, in order. Raises `JournalError` if their completions are deleted."""
        if after < self.forgotten:
            raise JournalError(
                f"the trainer continues from position {after}, but reported position {self.forgotten} as saved, so earlier "
                "completions are deleted; continue from a later checkpoint or start a new run"
            )
        rows = self._rows(
            "SELECT position, number, version, age, checksum FROM takes WHERE position > ? ORDER BY position LIMIT ?",
            after,
            count,
        )
        groups = []
        for position, number, version, age in self._checked("takes", rows):
            row = self._group(number)
            samples = self._samples(number)
            if row.error is None and len(samples) != row.num_samples:
                raise JournalDamaged(
                    f"position {position} (id {row.id!r}) has {len(samples)} of its {row.num_samples} completions; continue "
                    "from a later checkpoint"
                )
            groups.append(TakenGroup(position, row.id, version, age, samples, row.error or b"", row.request))
        return groups

    @property
    def forgotten(self) -> int:
        """Last position whose completions are deleted."""
        return int(self.fact("forgotten") or 0)

    def forget(self, position: int) -> None:
        """Delete prompts and completions up to a position that the trainer has saved. The history keeps their events."""
        if position <= (forgotten := self.forgotten):
            return
        with self._transaction():
            taken = "number IN (SELECT number FROM takes WHERE position > ? AND position <= ?)"
            self._run(f"DELETE FROM samples WHERE {taken}", forgotten, position)
            for row in self._groups(f"WHERE {taken}", forgotten, position):
                self._update(row, request=b"")
            self._set_fact("forgotten", str(position))

    def restore(self, rows: Mapping[str, Iterable[Sequence[Any]]], losses: str) -> None:
        """Fill a new journal with rows of a damaged one, by table (`journal_recovery.py`)."""
        with self._transaction():
            for name, value in rows["facts"]:
                self._set_fact(name, value)
            for table in ("groups", "samples", "takes"):
                for row in rows[table]:
                    self._insert(table, *row)
            for _, *event in rows["events"]:
                self._event(*event)
            self._event("repair", detail=losses)

    # --- rows ---

    def _groups(self, where: str, *parameters: object) -> list[_GroupRow]:
        rows = self._rows(f"SELECT {', '.join(COLUMNS['groups'])}, checksum FROM groups {where}", *parameters)
        return [_GroupRow(*row) for row in self._checked("groups", rows)]

    def _group(self, number: int) -> _GroupRow:
        rows = self._groups("WHERE number = ?", number)
        if not rows:
            raise JournalDamaged(f"group {number} is missing from the journal {self._path}")
        return rows[0]

    def _samples(self, number: int) -> tuple[bytes, ...]:
        """Return the completions of a group, in order."""
        columns = ", ".join(COLUMNS["samples"])
        rows = self._rows(f"SELECT {columns}, checksum FROM samples WHERE number = ? ORDER BY sample", number)
        return tuple(completion for _, _, completion, *_ in self._checked("samples", rows))

    def _checked(self, table: str, rows: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
        """Yield rows without their checksums. Raise `JournalDamaged` at one that does not match."""
        for *values, checksum in rows:
            if seal(*values) != checksum:
                raise JournalDamaged(
                    f"a row of table {table} in the journal {self._path} does not match its checksum (key {values[0]!r}); "
                    "stop the gateway and run `slipstream journal` on its run directory"
                )
            yield values

    def _insert(self, table: str, *values: object) -> None:
        places = ", ".join("?" * (len(values) + 1))
        self._run(f"INSERT INTO {table} VALUES ({places})", *values, seal(*values))

    def _update(self, row: _GroupRow, **changes: Any) -> _GroupRow:
        row = row._replace(**changes)
        self._run(
            "UPDATE groups SET request = ?, attempt = ?, state = ?, error = ?, checksum = ? WHERE number = ?",
            row.request,
            row.attempt,
            row.state,
            row.error,
            seal(*row),
            row.number,
        )
        return row

    def _set_fact(self, name: str, value: str) -> None:
        self._run("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", name, value, seal(name, value))

    def _event(
        self, kind: str, number: int = 0, sample: int = -1, attempt: int = 0, version: int = -1, detail: str = ""
    ) -> None:
        values = (self._at + 1, kind, number, sample, attempt, version, detail)
        chain = seal(self._chain, *values)
        self._run("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *values, chain)
        self._at, self._chain = self._at + 1, chain

    # --- statements ---

    def _run(self, statement: str, *parameters: object) -> None:
        try:
            self._db.execute(statement, parameters)
        except sqlite3.Error as error:
            raise self._error(error) from None

    def _rows(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(query, parameters).fetchall()
        except sqlite3.Error as error:
            raise self._error(error) from None

    def _number(self, query: str, *parameters: int) -> int:
        """Run a query whose result is one number."""
        return int(self._rows(query, *parameters)[0][0])

    def _error(self, error: sqlite3.Error) -> JournalError:
        if isinstance(error, sqlite3.ProgrammingError):
            return JournalError(f"the journal {self._path} is closed")
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the rest are details
        if code == sqlite3.SQLITE_NOTADB:
            return JournalDamaged(f"{self._path} is not a rollout journal: {error}; move it away to start a new one")
        if code in _DAMAGED:
            return JournalDamaged(
                f"the journal {self._path} is damaged: {error}; stop the gateway and run `slipstream journal` on its run "
                "directory"
            )
        return JournalUnavailable(
            f"the journal {self._path} cannot be read or written: {error}; is the disk full? Nothing has changed, and the "
            "call may be repeated"
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        before = self._at, self._chain
        self._run("BEGIN IMMEDIATE")
        try:
            yield
            mark = Mark(self._at, self._chain, self.num_groups(), self.last_position())
            self._run("COMMIT")
        except BaseException:
            self._at, self._chain = before
            if self._db.in_transaction:  # SQLite itself rolls some errors back
                self._run("ROLLBACK")
            raise
        if self._mark is not None:
            # If this fails, the mark is behind the journal, which is no sign of damage.
            with contextlib.suppress(OSError):
                os.pwrite(self._mark, mark.to_bytes(), 0)


class _GroupRow(NamedTuple):
    """A row of table `groups`."""

    number: int
    id: str
    request: bytes
    num_samples: int
    attempt: int
    state: str
    error: bytes | None

    @property
    def group(self) -> Group:
        return Group(*self[:5])

    def is_current(self, group: Group) -> bool:
        """Whether no later attempt was started, and this one has not ended."""
        return (self.attempt, self.state) == (group.attempt, "accepted")
