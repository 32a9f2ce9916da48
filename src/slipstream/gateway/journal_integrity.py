"""How damage to the journal is noticed: a checksum in every row, a chain through the events, and a mark beside the file.

    row     its checksum covers all columns, the key included: a row that changed or moved is noticed
    event   its checksum also covers that of the event before it: a missing event is noticed
    mark    written after each transaction: number and checksum of the last event. SQLite takes a damaged place in its
            write-ahead log for the end of the log, so the last records can be missing from a file that looks whole

Nothing here writes to the journal."""

from __future__ import annotations

import contextlib
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar

import xxhash

COLUMNS = {
    "facts": ("name", "value"),
    "groups": ("number", "id", "request", "num_samples", "attempt", "state", "error"),
    "samples": ("number", "sample", "completion", "oldest", "newest", "engine"),
    "takes": ("position", "number", "version", "age"),
    "events": ("at", "kind", "number", "sample", "attempt", "version", "detail"),
}
"""The columns that a row's checksum covers, in this order. The checksum is the last column of every table."""
_TITLES = {
    "facts": "the fact {0!r}",
    "groups": "group {0} (id {1!r})",
    "samples": "sample {1} of group {0}",
    "takes": "position {0} (group {1})",
    "events": "event {0}",
}
MAX_SHOWN = 20
"""Rows of one table that are named; the rest is counted."""


def seal(*values: object) -> int:
    """Return the checksum of a row, as a signed 64-bit integer."""
    digest = xxhash.xxh3_64()
    for value in values:
        is_bytes = isinstance(value, bytes)
        data = value if isinstance(value, bytes) else repr(value).encode()
        digest.update(b"%c%d:" % (b"b" if is_bytes else b"r", len(data)))
        digest.update(data)
    return digest.intdigest() - (1 << 63)


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of the journal after its last transaction, in a file of its own."""

    at: int = 0
    """Number of the last event."""
    chain: int = 0
    """Checksum of the last event."""
    num_groups: int = 0
    position: int = 0
    """Last position taken."""

    LAYOUT: ClassVar = struct.Struct("<8sQqQQq")
    NAME: ClassVar = b"slipmark"

    def to_bytes(self) -> bytes:
        return self.LAYOUT.pack(self.NAME, *astuple(self), seal(*astuple(self)))

    @classmethod
    def read(cls, path: Path) -> Mark | None:
        """Return None if the file is missing or damaged."""
        try:
            name, *fields, checksum = cls.LAYOUT.unpack(path.read_bytes())
        except (FileNotFoundError, struct.error):
            return None
        return cls(*fields) if name == cls.NAME and seal(*fields) == checksum else None


def mark_path(journal: Path) -> Path:
    return journal.with_name(f"{journal.name}-mark")


@contextlib.contextmanager
def open_for_reading(journal: Path) -> Iterator[sqlite3.Connection]:
    """Open the file without changing it: a connection that may write would, when closed, empty the write-ahead log and with it
    what is left behind a damaged place."""
    with contextlib.closing(sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True, timeout=10.0)) as db:
        # Text that is no longer UTF-8 is a damaged row, not an error of the query.
        db.text_factory = lambda data: data.decode(errors="surrogateescape")
        yield db


def find_damage(db: sqlite3.Connection, mark: Mark | None, history: bool = False) -> list[str]:
    """Return what is damaged or missing, in words; empty if the journal is whole. With `history`, also check every event."""
    problems: list[str] = []
    try:
        db.execute("BEGIN")  # one state of the file for all queries, also while a gateway writes
        problems += [
            f"the file's structure is damaged: {text.strip()}"
            for (text,) in db.execute(f"PRAGMA integrity_check({MAX_SHOWN})")
            if text != "ok"
        ]
        rows = {table: _intact(db, table, problems) for table in COLUMNS if table != "events"}
        if not problems:
            problems += _contradictions(rows, mark or Mark())
        problems += _end(db, mark)
        if history:
            _intact(db, "events", problems)
    except sqlite3.Error as error:
        problems.append(f"the file cannot be read: {error}")
    return problems


def checked_rows(table: str, rows: Iterable[Sequence[Any]]) -> Iterator[tuple[list[Any], bool]]:
    """Yield the values of each row, and whether its checksum, which is the last of them, matches the others."""
    previous = 0
    for *values, checksum in rows:
        covered = (previous, *values) if table == "events" else values
        yield values, seal(*covered) == checksum
        previous = checksum


def _intact(db: sqlite3.Connection, table: str, problems: list[str]) -> list[tuple[Any, ...]]:
    """Return a table's rows, with sizes in place of blobs, and add the damaged ones to `problems`."""
    columns, title = COLUMNS[table], _TITLES[table]
    rows: list[tuple[Any, ...]] = []
    num_damaged = 0
    try:
        query = f"SELECT {', '.join(columns)}, checksum FROM {table} ORDER BY 1, 2"
        for values, is_intact in checked_rows(table, db.execute(query)):
            num_damaged += not is_intact
            if not is_intact and num_damaged <= MAX_SHOWN:
                problems.append(f"{title.format(*values)} does not match its checksum")
            if table != "events":
                rows.append(tuple(len(value) if isinstance(value, bytes) else value for value in values))
    except sqlite3.Error as error:
        problems.append(f"table {table} cannot be read behind row {len(rows)}: {error}")
    if num_damaged > MAX_SHOWN:
        problems.append(f"{num_damaged - MAX_SHOWN} more rows of table {table} do not match their checksums")
    return rows


def _contradictions(rows: dict[str, list[tuple[Any, ...]]], mark: Mark) -> Iterator[str]:
    """Yield what rows that are intact say about rows that are missing."""
    facts = dict(rows["facts"])
    if "format" not in facts:
        yield "the fact 'format' is missing"
    base, forgotten = int(facts.get("base", 0)), int(facts.get("forgotten", 0))
    groups = {row[0]: row for row in rows["groups"]}
    takes = {position: number for position, number, *_ in rows["takes"]}
    samples: dict[int, int] = {}
    for number, *_ in rows["samples"]:
        samples[number] = samples.get(number, 0) + 1
    yield from _gaps("group", groups, 1, max([mark.num_groups, *groups]))
    yield from _gaps("position", takes, base + 1, max([mark.position, *takes]))
    taken_at = {number: position for position, number in takes.items()}
    for number, id, _, num_samples, _, state, error in groups.values():
        if (state == "taken") != (number in taken_at):
            yield f"group {number} (id {id!r}) is {state}, and its position is {taken_at.get(number, 'missing')}"
        is_kept = error is None and (state == "finished" or taken_at.get(number, 0) > forgotten)
        if is_kept and samples.get(number, 0) != num_samples:
            yield f"group {number} (id {id!r}) has {samples.get(number, 0)} of its {num_samples} samples"


def _gaps(what: str, present: Iterable[int], first: int, last: int) -> Iterator[str]:
    missing = sorted(set(range(first, last + 1)) - set(present))
    if missing:
        shown = ", ".join(map(str, missing[:MAX_SHOWN])) + (" …" if len(missing) > MAX_SHOWN else "")
        yield f"{what} {shown} missing ({len(missing)} of {last - first + 1})"


def _end(db: sqlite3.Connection, mark: Mark | None) -> Iterator[str]:
    """Yield whether the last records are missing."""
    last = db.execute("SELECT coalesce(max(at), 0) FROM events").fetchone()[0]
    if mark is None:
        if last:  # the first mark is written after the tables are created
            yield "the mark beside the file is missing or damaged: whether the last records are missing is unknown"
    elif last < mark.at:
        yield f"the last {mark.at - last} events, from {last + 1} to {mark.at}, are missing"
    elif mark.at and db.execute("SELECT checksum FROM events WHERE at = ?", (mark.at,)).fetchone() != (mark.chain,):
        yield f"event {mark.at} is not the one that was written"
