"""What can be done about a damaged journal: say what is damaged, and write a new journal of the records that are intact.

    prompt unreadable                   lost: a trainer that submits it again gets it generated
    finished, and a sample unreadable   generated again
    taken, and a sample unreadable      stays taken: no trainer can continue from before that position

So nothing is given to a trainer twice, and every loss is named."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from slipstream.errors import ConfigError, JournalDamaged
from slipstream.gateway.journal import Journal
from slipstream.gateway.journal_integrity import COLUMNS, Mark, checked_rows, find_damage, mark_path, open_for_reading

FILE = "journal.sqlite"

_Row: TypeAlias = tuple[Any, ...]
"""The values of a row, without its checksum."""


class Salvage(NamedTuple):
    """A journal that was replaced by its intact records."""

    damaged: Path
    """Directory of the damaged files."""
    num_groups: int
    num_taken: int
    losses: list[str]


def check(run_dir: Path) -> list[str]:
    """Return what is damaged or missing in a run's journal, its history included; empty if it is whole."""
    path = _existing(run_dir)
    try:
        with open_for_reading(path) as db:
            return find_damage(db, Mark.read(mark_path(path)), history=True)
    except sqlite3.Error as error:
        return [f"the file cannot be read: {error}"]


def repair(run_dir: Path) -> Salvage:
    """Replace a run's journal by its intact records. No gateway may be running there."""
    path = _existing(run_dir)
    mark = Mark.read(mark_path(path)) or Mark()
    with open_for_reading(path) as db:
        rows = {table: list(_intact_rows(db, table)) for table in COLUMNS}
    if not any(rows.values()):
        raise JournalDamaged(f"nothing of {path} can be read; move {FILE}* away to start a new journal")
    damaged = run_dir / f"damaged-journal-{time.strftime('%Y%m%d-%H%M%S')}"
    damaged.mkdir(mode=0o700)
    for file in run_dir.glob(f"{FILE}*"):
        file.rename(damaged / file.name)
    losses = _without_gaps(rows, mark)
    journal = Journal(path)
    try:
        journal.restore(rows, "; ".join(losses))
        return Salvage(damaged, len(rows["groups"]), len(rows["takes"]), losses)
    finally:
        journal.close()


def _existing(run_dir: Path) -> Path:
    path = run_dir / FILE
    if not path.exists():
        raise ConfigError(f"{run_dir} has no {FILE}; give the directory of a run that used bridge.rollouts")
    return path


def _intact_rows(db: sqlite3.Connection, table: str) -> Iterator[_Row]:
    """Yield the rows that match their checksums, in order. A page that cannot be read hides those on it: rows are read from
    the first one on and from the last one back."""
    columns = ", ".join(COLUMNS[table])
    found: dict[int, _Row] = {}
    for order in ("", "DESC"):
        try:
            for rowid, *row in db.execute(f"SELECT rowid, {columns}, checksum FROM {table} ORDER BY rowid {order}"):
                found[rowid] = tuple(row)
        except sqlite3.Error:
            continue
    for values, is_intact in checked_rows(table, (found[rowid] for rowid in sorted(found))):
        if is_intact:
            yield tuple(values)


def _without_gaps(rows: dict[str, list[_Row]], mark: Mark) -> list[str]:
    """Make the rows consistent with each other: what is missing gets a row that says so. Return what is lost."""
    losses: list[str] = []
    facts: dict[str, str] = dict(rows["facts"])
    base, forgotten = int(facts.get("base", 0)), int(facts.get("forgotten", 0))
    groups = {row[0]: row for row in rows["groups"]}
    samples: dict[int, list[_Row]] = {}
    for row in rows["samples"]:
        samples.setdefault(row[0], []).append(row)
    takes = _takes(rows, base, mark)
    taken = {number for _, number, *_ in takes}
    for number in set(range(1, max([mark.num_groups, *groups, *taken]) + 1)) - groups.keys():
        groups[number] = (number, f"lost-{number}", b"", 0, 0, "lost", None)
        samples.pop(number, None)
        if number not in taken:
            losses.append(f"group {number} is lost, prompt and all; submit its prompt again")
    last_gone = forgotten
    for position, number, *_ in takes:
        num_samples, error = groups[number][3::3] if number in groups else (-1, None)
        if position > forgotten and error is None and len(samples.get(number, ())) != (num_samples or -1):
            losses.append(f"the completions of position {position} are lost; no trainer can continue from before it")
            last_gone = position
    for number, (_, id, request, num_samples, attempt, state, error) in groups.items():
        if number in taken:
            state = "taken"
        elif state == "finished" and len(samples.get(number, ())) != num_samples:
            losses.append(f"samples of group {number} (id {id!r}) are lost; it is generated again")
            state, attempt, samples[number] = "accepted", attempt + 1, []
        groups[number] = (number, id, request, num_samples, attempt, state, error)
    newest = max([row[5] for row in rows["events"]], default=-1)
    facts |= {"version": facts.get("version", str(newest)), "forgotten": str(last_gone)}
    rows["facts"] = [(name, value) for name, value in facts.items() if name != "format"]
    rows["groups"], rows["takes"] = list(groups.values()), takes
    rows["samples"] = [row for group in samples.values() for row in group]
    return losses


def _takes(rows: dict[str, list[_Row]], base: int, mark: Mark) -> list[_Row]:
    """Return a row for every position: the intact ones; those that the history tells; then, for groups that were taken at an
    unknown position, the positions that are left, where only their number matters."""
    takes = {row[0]: row for row in rows["takes"]}
    for _, kind, number, position, _, version, _ in rows["events"]:
        if kind == "take":
            takes.setdefault(position, (position, number, version, 0))
    known = {row[1] for row in takes.values()}
    unplaced = [row[0] for row in rows["groups"] if row[5] == "taken" and row[0] not in known]
    last = max([mark.position, base, *takes])
    for position in range(base + 1, last + 1):
        if position not in takes:
            takes[position] = (position, unplaced.pop(0) if unplaced else -position, -1, 0)
    for position, number in enumerate(unplaced, last + 1):
        takes[position] = (position, number, -1, 0)
    return [takes[position] for position in sorted(takes)]
