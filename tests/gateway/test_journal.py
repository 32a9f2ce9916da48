"""The journal's file: damage is noticed and named, the rest is saved, and a full disk loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.errors import DeadlineExceeded, JournalDamaged, JournalError, JournalUnavailable
from slipstream.gateway import journal_recovery
from slipstream.gateway.client import GatewayFleet
from slipstream.gateway.journal import Journal
from slipstream.gateway.journal_integrity import COLUMNS, mark_path
from slipstream.gateway.staleness import RolloutBound
from slipstream.runtime import event_loop
from slipstream.types import Request, SamplingParams
from tests.gateway.history import check, events
from tests.gateway.scripted import ScriptedEngine, attached
from tests.gateway.test_gateway import update
from tests.gateway.test_process import gateway as gateway
from tests.gateway.test_rollout_queue import stored

FILES = ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-mark")


def write(directory: Path, killed: bool = True, count: int = 40) -> Path:
    """A journal with groups in every state. A killed gateway leaves part of it in the write-ahead log."""
    live, copy = directory / "live", directory / "copy"
    for path in (live, copy):
        path.mkdir(parents=True)
    journal = Journal(live / FILES[0])
    for i in range(count):
        (group,) = journal.accept({f"prompt-{i}": (b"tokens %d " % i * 9, 2)})
        journal.started(group, 0)
        if i % 8 < 6:
            journal.finish(group, {k: stored(b"text %d/%d " % (i, k) * 30, i // 8, "ab"[k]) for k in (0, 1)})
        elif i % 8 == 6:
            journal.fail(group, b"too long")
        if i % 8 < 4:
            journal.take([group.number], i // 8)
        if i % 8 == 7:
            journal.synced(i // 8 + 1)
        if i == count * 3 // 4:
            journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if not killed:
        journal.close()
    for name in FILES:
        if (live / name).exists():
            shutil.copy(live / name, copy / name)
    journal.close()
    return copy


def content(path: Path) -> dict[str, list[Any]]:
    """All that a journal says, read without our code."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return {table: db.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in COLUMNS}


@pytest.mark.parametrize("killed", [True, False])
def test_damage_never_goes_unnoticed(tmp_path: Path, killed: bool) -> None:
    """A bit flips, a piece is zeroed or the end is cut off, in any of the files. Either the journal says the same as before, or
    it is refused and checking it tells why."""
    whole = write(tmp_path, killed)
    assert journal_recovery.check(whole) == []
    expected = content(shutil.copytree(whole, tmp_path / "reference") / FILES[0])
    num_refused = 0
    for seed in range(60):
        random_ = random.Random(seed)
        damaged = shutil.copytree(whole, tmp_path / str(seed))
        file = damaged / random_.choice([name for name in FILES if killed or "wal" not in name])
        data = bytearray(file.read_bytes())
        at = random_.randrange(len(data))
        match seed % 4:
            case 0:
                del data[at:]
            case 1:
                data[at : at + 64] = bytes(len(data[at : at + 64]))
            case _:
                data[at] ^= 1 << random_.randrange(8)
        file.write_bytes(data)
        problems = journal_recovery.check(damaged)
        try:
            Journal(damaged / FILES[0]).close()
        except JournalError:
            num_refused += 1
            assert problems, (seed, file.name, at)
        else:
            assert problems or content(damaged / FILES[0]) == expected, (seed, file.name, at)
        shutil.rmtree(damaged)
    assert num_refused > 20


def damage(run_dir: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(run_dir / FILES[0])) as db, db:
        for statement in statements:
            db.execute(statement)


def test_what_is_intact_is_saved_and_what_is_lost_is_named(tmp_path: Path) -> None:
    run_dir = write(tmp_path, killed=False)
    before = content(run_dir / FILES[0])
    damage(
        run_dir,
        "UPDATE samples SET completion = x'00' WHERE number = 5 AND sample = 1",  # finished, not taken
        "UPDATE samples SET completion = x'00' WHERE number = 9 AND sample = 0",  # taken at position 5
        "UPDATE groups SET request = x'00' WHERE number = 8",  # accepted
        "DELETE FROM takes WHERE position = 7",
    )
    with pytest.raises(JournalDamaged, match=r"group 8 .* does not match its checksum.*--repair"):
        Journal(run_dir / FILES[0])
    assert len(journal_recovery.check(run_dir)) == 3  # the missing row shows once the rest is whole
    saved = journal_recovery.repair(run_dir)
    assert (saved.num_groups, saved.num_taken, len(saved.losses)) == (40, 20, 3) and (saved.damaged / FILES[0]).exists()
    assert "group 8 is lost" in saved.losses[0]
    assert "position 5 are lost" in saved.losses[1] and "(id 'prompt-4') are lost; it is generated" in saved.losses[2]
    assert journal_recovery.check(run_dir) == []
    journal = Journal(run_dir / FILES[0])
    assert [(g.id, g.attempt) for g in journal.waiting()] == [
        ("prompt-4", 1),
        *((f"prompt-{i}", 0) for i in (15, 23, 31, 39)),
    ]
    after = content(run_dir / FILES[0])
    assert [row[:2] for row in after["takes"]] == [row[:2] for row in before["takes"]] and check(journal) == []
    with pytest.raises(JournalError, match="continues from position 4"):
        journal.taken(4, 1)
    assert [group.id for group in journal.taken(5, 3)] == ["prompt-9", "prompt-10", "prompt-11"]
    assert journal.accept({"prompt-7": (b"again", 2)})[0].number == 41, "a trainer may submit what was lost"
    journal.close()


def test_a_journal_that_is_gone_or_no_journal_is_refused(tmp_path: Path) -> None:
    run_dir = write(tmp_path, killed=False)
    (run_dir / FILES[0]).unlink()
    with pytest.raises(JournalDamaged, match="it is empty, and had 40 prompts, of which 20 were taken"):
        Journal(run_dir / FILES[0])
    (run_dir / FILES[0]).write_bytes(b"not a database, but long enough to be read as one" * 99)
    with pytest.raises(JournalDamaged, match="is not a rollout journal"):
        Journal(run_dir / FILES[0])
    with pytest.raises(JournalDamaged, match=r"nothing of .* can be read"):
        journal_recovery.repair(run_dir)
    mark_path(run_dir / FILES[0]).unlink()
    (run_dir / FILES[0]).unlink()
    Journal(run_dir / FILES[0]).close()


@contextlib.contextmanager
def full_disk(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """No file of the process may grow, which is what it sees of a full disk."""
    limited = psutil.Process(process.pid)
    limited.rlimit(resource.RLIMIT_FSIZE, (1, -1))
    yield
    limited.rlimit(resource.RLIMIT_FSIZE, (-1, -1))


def test_a_full_disk_delays_rollouts_and_syncs_and_loses_nothing(gateway: tuple[Any, Path]) -> None:
    process, run_dir = gateway
    address, token = json.loads((run_dir / "gateway.json").read_text())["address"], (run_dir / "token").read_text()
    bound, engine = RolloutBound(1, 2), ScriptedEngine("e")

    def requests(*ids: str) -> list[Request]:
        return [Request(id, (1, 2), SamplingParams(n=2, seed=7)) for id in ids]

    async def main() -> None:
        fleet = GatewayFleet(address, token, timeout=60.0, max_message_bytes=1 << 20)
        async with attached(engine, address, token):
            await fleet.refresh()
            await fleet.submit(bound, requests("a", "b"))
            first = await fleet.take(bound, 0, 2, 60.0)
            await fleet.submit(bound, requests("c", "d", "e"))
            engine.gate.clear()
            with full_disk(process):
                engine.gate.set()
                with pytest.raises(JournalUnavailable, match="is the disk full"):
                    await fleet.submit(bound, requests("f"))
                await update(fleet, 1, ["e"])
                assert (await fleet.status()).version == 1 == engine.version, "the sync is what the engines did"
                with pytest.raises((JournalUnavailable, DeadlineExceeded)):
                    await fleet.take(bound, 2, 2, 0.5, version=1)
            assert await fleet.submit(bound, requests("f")) == 1
            second = await fleet.take(bound, 2, 2, 60.0, version=1)
            await update(fleet, 2, ["e"])
            third = await fleet.take(bound, 4, 2, 60.0, version=2)
            groups = [*first, *second, *third]
            assert [group.position for group in groups] == [1, 2, 3, 4, 5, 6]
            assert sorted(group.id for group in groups) == ["a", "b", "c", "d", "e", "f"]
        await fleet.close()

    event_loop.run(asyncio.wait_for(main(), 300))
    process.terminate()
    process.wait()
    journal = Journal(run_dir / FILES[0])
    assert check(journal, 1) == [] and [e[4] for e in events(journal) if e[0] == "sync"] == [1, 2]
    journal.close()
