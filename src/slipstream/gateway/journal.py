"""The rollout journal: what was accepted, generated and taken, in a SQLite file of the run directory. It survives the gateway.

    accepted ──► finished ──► taken           by the trainer, once, at a position that counts from 1
        ▲            │
        └── renewed ─┘                        too old, or its engine died: next attempt, earlier samples are dropped
        └──────────► failed ──► taken         a typed error replaces the completions

A group is a prompt and its samples. The journal deduplicates results: a sample counts once per attempt, and only the last
attempt counts. `events` is the complete history."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import JournalError, RequestError

FORMAT = 1
_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE groups (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    request BLOB NOT NULL,
    num_samples INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL DEFAULT 'accepted',
    error BLOB
);
CREATE INDEX groups_by_state ON groups (state, number);
CREATE TABLE samples (
    number INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    completion BLOB NOT NULL,
    oldest INTEGER NOT NULL,
    PRIMARY KEY (number, sample)
);
CREATE TABLE takes (
    position INTEGER PRIMARY KEY,
    number INTEGER NOT NULL UNIQUE,
    version INTEGER NOT NULL,
    age INTEGER NOT NULL
);
CREATE TABLE events (
    at INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    number INTEGER NOT NULL DEFAULT 0,
    sample INTEGER NOT NULL DEFAULT -1,
    attempt INTEGER NOT NULL DEFAULT 0,
    version INTEGER NOT NULL DEFAULT -1
);
"""
_SELECT_GROUP = "SELECT number, id, request, num_samples, attempt FROM groups"


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


class Journal:
    """For one thread at a time. Every method is a transaction: after a crash it has happened completely or not at all."""

    def __init__(self, path: Path | None = None) -> None:
        """Open or create the file; without a path the journal is kept in memory."""
        self._path = path
        try:
            self._db = sqlite3.connect(
                str(path) if path else ":memory:", isolation_level=None, timeout=10.0, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            # Commits survive the process; a power failure may lose the last ones.
            self._db.execute("PRAGMA synchronous = NORMAL")
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone():
                self._db.executescript(f"BEGIN;{_SCHEMA}COMMIT;")
                self.remember(format=str(FORMAT))
            file_format = self.fact("format")
        except sqlite3.DatabaseError as error:
            raise JournalError(f"{path} is not a rollout journal: {error}; move it away to start a new one") from None
        if file_format != str(FORMAT):
            raise JournalError(
                f"the journal {path} has format {file_format}, this release reads {FORMAT}; use the release that wrote it"
            )

    def close(self) -> None:
        self._db.close()

    # --- facts of the run ---

    def fact(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return row and str(row[0])

    def remember(self, **facts: str) -> None:
        self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", list(facts.items()))

    # --- groups ---

    def accept(self, requests: Mapping[str, tuple[bytes, int]]) -> list[Group]:
        """Accept requests, given by id as `(serialized request, number of samples)`; return the new groups.

        Raises `RequestError` if a known id comes with another request."""
        new = []
        with self._transaction():
            for id, (request, num_samples) in requests.items():
                row = self._db.execute("SELECT request FROM groups WHERE id = ?", (id,)).fetchone()
                if row is not None and row[0] != request:
                    raise RequestError(
                        f"a prompt with id {id!r} was accepted before with other tokens or sampling params; give every prompt "
                        "its own id"
                    )
                if row is None:
                    added = self._db.execute(
                        "INSERT INTO groups (id, request, num_samples) VALUES (?, ?, ?)", (id, request, num_samples)
                    )
                    number = int(added.lastrowid or 0)
                    new.append(Group(number, id, request, num_samples, 0))
                    self._event("accept", number)
        return new

    def waiting(self) -> list[Group]:
        """Return the groups that are accepted and not finished."""
        return [Group(*row) for row in self._db.execute(f"{_SELECT_GROUP} WHERE state = 'accepted' ORDER BY number")]

    def started(self, group: Group, version: int) -> None:
        self._event("start", group.number, attempt=group.attempt, version=version)

    def finished(self) -> dict[int, int]:
        """Return the groups that could be taken, each with the version of its oldest token, -1 if it failed."""
        rows = self._db.execute(
            "SELECT number, coalesce((SELECT min(oldest) FROM samples WHERE samples.number = groups.number), -1) "
            "FROM groups WHERE state IN ('finished', 'failed') ORDER BY number"
        )
        return dict(rows.fetchall())

    def finish(self, group: Group, samples: Mapping[int, tuple[bytes, int]]) -> int | None:
        """Store all samples of a group, given by index as `(completion, version of its oldest token)`. Return the version of
        the group's oldest token, or None if the attempt is no longer current or samples are missing."""
        with self._transaction():
            if not self._is_current(group) or samples.keys() != set(range(group.num_samples)):
                return None
            number, attempt = group.number, group.attempt
            rows = [(number, index, completion, oldest) for index, (completion, oldest) in sorted(samples.items())]
            self._db.executemany("INSERT INTO samples VALUES (?, ?, ?, ?)", rows)
            self._db.executemany(
                "INSERT INTO events (kind, number, sample, attempt, version) VALUES ('sample', ?, ?, ?, ?)",
                [(number, index, attempt, oldest) for _, index, _, oldest in rows],
            )
            self._db.execute("UPDATE groups SET state = 'finished' WHERE number = ?", (number,))
            return min(oldest for *_, oldest in rows)

    def fail(self, group: Group, error: bytes) -> bool:
        """End the group with an error. Return False if the attempt is no longer current."""
        with self._transaction():
            if not self._is_current(group):
                return False
            self._db.execute("DELETE FROM samples WHERE number = ?", (group.number,))
            self._db.execute("UPDATE groups SET state = 'failed', error = ? WHERE number = ?", (error, group.number))
            self._event("fail", group.number, attempt=group.attempt)
        return True

    def renew(self, number: int) -> Group | None:
        """Start the next attempt at a group; return None if it was taken or failed."""
        with self._transaction():
            changed = self._db.execute(
                "UPDATE groups SET state = 'accepted', attempt = attempt + 1 WHERE number = ? AND state IN ('accepted', "
                "'finished')",
                (number,),
            )
            if not changed.rowcount:
                return None
            self._db.execute("DELETE FROM samples WHERE number = ?", (number,))
            group = Group(*self._db.execute(f"{_SELECT_GROUP} WHERE number = ?", (number,)).fetchone())
            self._event("renew", number, attempt=group.attempt)
        return group

    def synced(self, version: int) -> None:
        with self._transaction():
            self._event("sync", version=version)
            self.remember(version=str(version))

    # --- taking ---

    def take(self, numbers: Iterable[int], version: int) -> None:
        """Give groups to the trainer, in this order."""
        with self._transaction():
            for position, number in enumerate(numbers, self.last_position() + 1):
                changed = self._db.execute(
                    "UPDATE groups SET state = 'taken' WHERE number = ? AND state IN ('finished', 'failed')", (number,)
                )
                if not changed.rowcount:
                    raise JournalError(f"group {number} cannot be taken: it is not finished or was taken before")
                oldest = self._number("SELECT coalesce(min(oldest), ?) FROM samples WHERE number = ?", version, number)
                self._db.execute("INSERT INTO takes VALUES (?, ?, ?, ?)", (position, number, version, version - oldest))
                self._event("take", number, position, version=version)

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
        return self._number("SELECT count(*) FROM groups")

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
        rows = self._db.execute(
            "SELECT position, groups.number, id, version, age, coalesce(error, x'') FROM takes JOIN groups USING (number) "
            "WHERE position > ? ORDER BY position LIMIT ?",
            (after, count),
        ).fetchall()
        groups = []
        for position, number, id, version, age, error in rows:
            samples = self._db.execute("SELECT completion FROM samples WHERE number = ? ORDER BY sample", (number,))
            groups.append(TakenGroup(position, id, version, age, tuple(row[0] for row in samples), error))
        return groups

    @property
    def forgotten(self) -> int:
        """Last position whose completions are deleted."""
        return int(self.fact("forgotten") or 0)

    def forget(self, position: int) -> None:
        """Delete completions up to a position that the trainer has saved. The history keeps their events."""
        if position <= self.forgotten:
            return
        with self._transaction():
            self._db.execute(
                "DELETE FROM samples WHERE number IN (SELECT number FROM takes WHERE position <= ?)", (position,)
            )
            self.remember(forgotten=str(position))

    # --- statements ---

    def _number(self, query: str, *parameters: int) -> int:
        """Run a query whose result is one number."""
        return int(self._db.execute(query, parameters).fetchone()[0])

    def _is_current(self, group: Group) -> bool:
        row = self._db.execute("SELECT attempt, state FROM groups WHERE number = ?", (group.number,)).fetchone()
        return bool(row == (group.attempt, "accepted"))

    def _event(self, kind: str, number: int = 0, sample: int = -1, attempt: int = 0, version: int = -1) -> None:
        self._db.execute(
            "INSERT INTO events (kind, number, sample, attempt, version) VALUES (?, ?, ?, ?, ?)",
            (kind, number, sample, attempt, version),
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
