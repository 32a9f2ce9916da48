"""What was accepted, generated and taken, in a SQLite file of the run's directory. It survives the gateway.

    accepted ──► finished ──► taken           by the trainer, once, at a position that counts from 1
        ▲            │
        └── anew ────┘                        too old, or its engine died: the next attempt; what earlier ones made is dropped
        └──────────► failed ──► taken         a typed error takes the place of the completions

A group is a prompt and its samples. Results are deduplicated here: a sample counts once per attempt, an attempt only while
it is the last. `events` is the whole history, which `check` reads."""

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


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt that was accepted."""

    number: int
    """In the order of acceptance, from 1."""
    id: str
    request: bytes
    num_samples: int
    attempt: int
    """How often it has been begun anew."""


@dataclass(frozen=True, slots=True)
class Taken:
    position: int
    id: str
    version: int
    """What was being trained when it was taken."""
    age: int
    completions: tuple[bytes, ...]
    """By sample; none if it has failed."""
    error: bytes


class Journal:
    """Used by one thread at a time. Every method is a transaction: after a crash it has happened, or it has not."""

    def __init__(self, path: Path | None = None) -> None:
        """Opens the file, or makes it; without one, the journal lives as long as this object."""
        self._path = path
        try:
            self._db = sqlite3.connect(
                str(path) if path else ":memory:", isolation_level=None, timeout=10.0, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            # What is written survives the process; a power failure may take the last moments.
            self._db.execute("PRAGMA synchronous = NORMAL")
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone():
                self._db.executescript(f"BEGIN;{_SCHEMA}COMMIT;")
                self.remember(format=str(FORMAT))
            found = self.fact("format")
        except sqlite3.DatabaseError as error:
            raise JournalError(f"{path} is no journal of rollouts: {error}; move it away to begin a new one") from None
        if found != str(FORMAT):
            raise JournalError(
                f"the journal {path} has format {found}, this release reads {FORMAT}; use the one that made it"
            )

    def close(self) -> None:
        self._db.close()

    # --- facts of the run ---

    def fact(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def remember(self, **facts: str) -> None:
        self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", list(facts.items()))

    # --- groups ---

    def accept(self, requests: Mapping[str, tuple[bytes, int]]) -> list[Group]:
        """By id: the request, and how many samples it asks for. Those that are new; one that is known must be the same."""
        fresh = []
        with self._transaction():
            for id, (request, num_samples) in requests.items():
                row = self._db.execute("SELECT request FROM groups WHERE id = ?", (id,)).fetchone()
                if row is not None and row[0] != request:
                    raise RequestError(
                        f"a prompt with id {id!r} was accepted before, with other tokens or sampling; give every prompt an "
                        "id of its own"
                    )
                if row is None:
                    added = self._db.execute(
                        "INSERT INTO groups (id, request, num_samples) VALUES (?, ?, ?)", (id, request, num_samples)
                    )
                    number = int(added.lastrowid or 0)
                    fresh.append(Group(number, id, request, num_samples, 0))
                    self._event("accept", number)
        return fresh

    def waiting(self) -> list[Group]:
        """Accepted, and not finished: after a restart, all that has to be generated."""
        rows = self._db.execute(
            "SELECT number, id, request, num_samples, attempt FROM groups WHERE state = 'accepted' ORDER BY number"
        )
        return [Group(*row) for row in rows]

    def started(self, group: Group, version: int) -> None:
        self._event("start", group.number, attempt=group.attempt, version=version)

    def finished(self) -> dict[int, int]:
        """Groups that could be taken: the oldest version that made one of their tokens, -1 for those that failed."""
        rows = self._db.execute(
            "SELECT number, coalesce((SELECT min(oldest) FROM samples WHERE samples.number = groups.number), -1) "
            "FROM groups WHERE state IN ('finished', 'failed') ORDER BY number"
        )
        return dict(rows.fetchall())

    def finish(self, group: Group, samples: Mapping[int, tuple[bytes, int]]) -> int | None:
        """All samples of a group at once, each with the version that made its oldest token. That of the group's oldest; None if
        the attempt was given up meanwhile."""
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
        """A typed error ends the group. Whether it does: not if it has ended, or begun anew."""
        with self._transaction():
            if not self._is_current(group):
                return False
            self._db.execute("DELETE FROM samples WHERE number = ?", (group.number,))
            self._db.execute("UPDATE groups SET state = 'failed', error = ? WHERE number = ?", (error, group.number))
            self._event("fail", group.number, attempt=group.attempt)
        return True

    def renew(self, number: int) -> Group | None:
        """The next attempt at a group that has not been taken; None if it has."""
        with self._transaction():
            changed = self._db.execute(
                "UPDATE groups SET state = 'accepted', attempt = attempt + 1 WHERE number = ? AND state IN ('accepted', "
                "'finished')",
                (number,),
            )
            if not changed.rowcount:
                return None
            self._db.execute("DELETE FROM samples WHERE number = ?", (number,))
            row = self._db.execute(
                "SELECT number, id, request, num_samples, attempt FROM groups WHERE number = ?", (number,)
            ).fetchone()
            group = Group(*row)
            self._event("renew", number, attempt=group.attempt)
        return group

    def synced(self, version: int) -> None:
        with self._transaction():
            self._event("sync", version=version)
            self.remember(version=str(version))

    # --- taking ---

    def take(self, numbers: Iterable[int], version: int) -> None:
        """These groups are the trainer's now, in this order."""
        with self._transaction():
            for position, number in enumerate(numbers, self.last_position() + 1):
                changed = self._db.execute(
                    "UPDATE groups SET state = 'taken' WHERE number = ? AND state IN ('finished', 'failed')", (number,)
                )
                if not changed.rowcount:
                    raise JournalError(f"group {number} cannot be taken: it is not finished, or was taken before")
                (oldest,) = self._db.execute(
                    "SELECT coalesce(min(oldest), ?) FROM samples WHERE number = ?", (version, number)
                ).fetchone()
                self._db.execute("INSERT INTO takes VALUES (?, ?, ?, ?)", (position, number, version, version - oldest))
                self._event("take", number, position, version=version)

    def last_position(self) -> int:
        base = int(self.fact("base") or 0)
        (last,) = self._db.execute("SELECT coalesce(max(position), ?) FROM takes", (base,)).fetchone()
        return int(last)

    def count_from(self, position: int) -> None:
        """A trainer goes on behind this position. A journal that is new counts from there: its own was lost."""
        if position <= self.last_position():
            return
        if self.num_taken():
            raise JournalError(
                f"the trainer has taken up to position {position}, and this journal knows of {self.last_position()}: it is "
                "older than the trainer's checkpoint, or of another run"
            )
        self.remember(base=str(position))

    def num_groups(self) -> int:
        (count,) = self._db.execute("SELECT count(*) FROM groups").fetchone()
        return int(count)

    def num_taken(self) -> int:
        (count,) = self._db.execute("SELECT count(*) FROM takes").fetchone()
        return int(count)

    def num_taken_at(self, version: int) -> int:
        """Groups that were taken while this version was being trained."""
        (count,) = self._db.execute("SELECT count(*) FROM takes WHERE version = ?", (version,)).fetchone()
        return int(count)

    def taken(self, after: int, count: int) -> list[Taken]:
        """What was taken behind a position, in order. Not before what is forgotten."""
        if after < self.forgotten:
            raise JournalError(
                f"a trainer wants to go on from position {after}, and had said that all up to {self.forgotten} is saved: it is "
                "no longer here; go on from a later checkpoint, or begin a new run"
            )
        rows = self._db.execute(
            "SELECT position, groups.number, id, version, age, coalesce(error, x'') FROM takes JOIN groups USING (number) "
            "WHERE position > ? ORDER BY position LIMIT ?",
            (after, count),
        ).fetchall()
        found = []
        for position, number, id, version, age, error in rows:
            samples = self._db.execute("SELECT completion FROM samples WHERE number = ? ORDER BY sample", (number,))
            found.append(Taken(position, id, version, age, tuple(row[0] for row in samples), error))
        return found

    def ids_taken(self) -> list[str]:
        """In order, also of those whose completions are no longer here."""
        rows = self._db.execute("SELECT id FROM takes JOIN groups USING (number) ORDER BY position")
        return [id for (id,) in rows]

    @property
    def forgotten(self) -> int:
        """The last position whose completions are no longer here."""
        return int(self.fact("forgotten") or 0)

    def forget(self, position: int) -> None:
        """Completions up to a position are no longer needed: whoever took them has saved what it made of them. That they were
        made and taken stays in the history."""
        if position <= self.forgotten:
            return
        with self._transaction():
            self._db.execute(
                "DELETE FROM samples WHERE number IN (SELECT number FROM takes WHERE position <= ?)", (position,)
            )
            self.remember(forgotten=str(position))

    # --- history ---

    def events(self) -> Iterator[tuple[str, int, int, int, int]]:
        """`(kind, group, sample or position, attempt, version)` in order."""
        yield from self._db.execute("SELECT kind, number, sample, attempt, version FROM events ORDER BY at")

    def states(self) -> dict[int, tuple[str, int, int]]:
        """By group: state, samples asked for, attempt."""
        rows = self._db.execute("SELECT number, state, num_samples, attempt FROM groups")
        return {number: (state, num_samples, attempt) for number, state, num_samples, attempt in rows}

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


def check(journal: Journal, max_staleness: int | None = None) -> list[str]:
    """What is wrong with a run's history, in words; nothing, if all is well.

    Every group that was accepted has been taken once or not at all; what was taken has every sample once, all of the last
    attempt; positions follow each other; and nothing was older than `max_staleness` when it was taken."""
    wrong: list[str] = []
    accepted: set[int] = set()
    attempts: dict[int, int] = {}
    samples: dict[int, dict[int, int]] = {}
    """By group: the version of each sample of the attempt under way."""
    failed: set[int] = set()
    taken: dict[int, int] = {}
    serving = -1
    base, states = int(journal.fact("base") or 0), journal.states()
    for kind, number, sample, attempt, version in journal.events():
        match kind:
            case "accept":
                if number in accepted:
                    wrong.append(f"group {number} was accepted twice")
                accepted.add(number)
                attempts[number], samples[number] = 0, {}
            case "renew":
                if number in taken:
                    wrong.append(f"group {number} was begun anew after it had been taken at position {taken[number]}")
                attempts[number], samples[number] = attempt, {}
            case "sample":
                if attempt != attempts.get(number):
                    wrong.append(
                        f"group {number}: a sample of attempt {attempt} came during attempt {attempts.get(number)}"
                    )
                if sample in samples.setdefault(number, {}):
                    wrong.append(f"group {number}: sample {sample} came twice in attempt {attempt}")
                samples[number][sample] = version
            case "fail":
                failed.add(number)
            case "take":
                if number in taken:
                    wrong.append(f"group {number} was taken twice, at positions {taken[number]} and {sample}")
                if sample != base + len(taken) + 1:
                    wrong.append(f"position {sample} was given out after position {base + len(taken)}")
                taken[number] = sample
                wanted = states[number][1]
                if number not in failed and sorted(samples.get(number, {})) != list(range(wanted)):
                    wrong.append(f"group {number} was taken with samples {sorted(samples.get(number, {}))} of {wanted}")
                oldest = min(samples.get(number, {}).values(), default=version)
                if max_staleness is not None and version - oldest > max_staleness:
                    wrong.append(
                        f"group {number} was taken at version {version} with tokens of version {oldest}: older than "
                        f"{max_staleness}"
                    )
            case "sync":
                if version < serving:
                    wrong.append(f"the fleet went back from version {serving} to {version}")
                serving = version
    for number, (state, _, _) in states.items():
        if number not in accepted:
            wrong.append(f"group {number} was never accepted")
        if (state == "taken") != (number in taken):
            wrong.append(f"group {number} is {state}, and its history says otherwise")
    return wrong
