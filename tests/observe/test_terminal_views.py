"""What `slipstream top`, `status`, `runs` and `logs` read and draw, without a terminal."""

import fcntl
import json
import os
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.errors import ConfigError
from slipstream.observe.terminal import columns, log_reader, run_list
from slipstream.observe.terminal.fleet_table import Throughput, describe
from slipstream.observe.terminal.run_files import RunRecords, is_run, run_state
from slipstream.observe.terminal.run_view import RunView
from slipstream.runtime.log_lines import parse, tail
from slipstream.types import (
    Decision,
    EngineStatus,
    FleetStatus,
    RolloutStatus,
    UpdatePhases,
    UpdateRecord,
)
from tests.gateway.test_registry import info
from tests.observe.run_directory import step_record, write_run


def run(*arguments, **more):
    return CliRunner().invoke(app, [str(a) for a in arguments], **more)


def fleet(count=3):
    engines = [
        EngineStatus(
            info(f"engine-{i}"), "ready", 17, 0.3, looked_up_tokens=10, hit_tokens=5, num_tokens=12_345, kv_use=0.5
        )
        for i in range(count)
    ]
    engines[0] = replace(engines[0], state="quarantined", note="it returned " + 30 * "nonsense ")
    engines[-1] = replace(engines[-1], activity="compiling decode 64", circuit="half-open")
    updates = tuple(UpdateRecord(v, 2, 10**6, UpdatePhases(0.01, pause=0.001), 9.0) for v in (3, 4))
    updates = (*updates, UpdateRecord(5, 0, 0, UpdatePhases(0.1), 1.0, "engine 'engine-1' did not stage \x1b[2J it"))
    rollouts = RolloutStatus(5, 4, 3, 2, 1, 1, 2, 8, (3, 1))
    decisions = (Decision("quarantine", "engine-0", "it returned nonsense", 12, 60.0),)
    return FleetStatus(4, 3600.0, 123_456, tuple(engines), 3, decisions, rollouts, updates)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_status_fits_and_says_everything(width):
    text = "\n".join(line.plain for line in describe(fleet(), width))
    assert max(map(len, text.splitlines())) <= width and "\x1b" not in text
    said = " ".join(text.split())
    for part in ("policy version 4", "engine-0", "compiling decode 64", "5 waiting, 4 running", "60 s ago", "retried"):
        assert part in said, (part, text)
    if width >= 80:
        assert said.count("nonsense") == 31 and "50%" in said and "half-open" in said


@given(st.lists(st.floats(allow_nan=True, width=32), max_size=300), st.integers(0, 200))
def test_a_sparkline_has_a_bar_per_column(values, width):
    line = columns.sparkline(values, width)
    finite = [value for value in values if value - value == 0]
    assert len(line) == (min(width, len(finite)) if width else 0) and set(line) <= set(columns.BARS)


def test_tokens_per_second_come_from_two_statuses_and_survive_a_restart():
    throughput, (engine, *_) = Throughput(), fleet().engines
    rates = [
        throughput.see(at, FleetStatus(0, 1.0, 0, (replace(engine, num_tokens=count),)))
        for at, count in ((10.0, 100), (12.0, 300), (13.0, 40))
    ]
    assert rates == [{}, {"engine-0": 100.0}, {}]


def test_the_state_of_a_run(tmp_path):
    assert run_state(tmp_path) == "empty" and not is_run(tmp_path)
    assert run_state(write_run(tmp_path / "finished", [0.5], is_finished=True)) == "finished"
    dead = write_run(tmp_path / "dead", [0.5])
    assert run_state(dead) == "dead"
    with (dead / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_state(dead) == "live"
    (dead / "gateway.json").write_text(json.dumps({"address": "node07:4711", "pid": 2**22 + 1}))
    assert run_state(dead) == "elsewhere"
    (dead / "gateway.json").write_text(json.dumps({"address": "127.0.0.1:4711", "pid": os.getpid()}))
    assert run_state(dead) == "live"


def test_records_are_read_as_they_grow_and_after_a_resume(tmp_path):
    file, records = write_run(tmp_path / "run", [0.25, 0.5]) / "metrics.jsonl", RunRecords(tmp_path / "run")
    records.read()
    assert records.rewards == [0.25, 0.5] and records.step == 2 and records.evaluation["step"] == 0
    assert records.step_seconds == pytest.approx(0.54)
    lines = file.read_text().splitlines(keepends=True)
    with file.open("a") as log:
        log.write("not json\n{}\n[]\n" + lines[-1].replace("0.5", "1.0")[:100])
        log.flush()
        records.read()
        assert records.rewards == [0.25, 0.5], "neither garbage nor half a record counts"
        log.write(lines[-1].replace("0.5", "1.0")[100:])
    records.read()
    assert records.rewards == [0.25, 0.5, 1.0]
    (tmp_path / "new").write_text("".join(lines[:2]))
    (tmp_path / "new").replace(file)
    records.read()
    assert records.rewards == [0.25] and len(records.steps) == 1


HOSTILE = [
    '{"kind": "StepRecord"}\n',
    "\0" * 50,
    '{"kind": "StepRecord", "step": "\x1b[2J", "sync": 3}\n',
    '{"kind": "Saved"',
]


@pytest.mark.parametrize("size", [(80, 24), (160, 50), (30, 8)])
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_run_that_ended_is_drawn_from_its_files(tmp_path, size, is_finished):
    directory = write_run(tmp_path / "run", [step / 60 for step in range(60)], is_finished)
    with (directory / "metrics.jsonl").open("a") as log:
        log.writelines(HOSTILE if not is_finished else [])
    view = RunView(directory, lambda: pytest.fail("its gateway is gone"))
    lines = view.draw(*size)
    text = "\n".join(line.plain for line in lines)
    assert len(lines) <= size[1] and max(line.cell_len for line in lines) <= size[0] and "\x1b" not in text
    if size[0] >= 80:
        assert ("finished" if is_finished else "dead") in text and "step 60/400" in text and "reward 0.983" in text
        assert "▁" in text and "█" in text and "20.0 ms" in text and "staleness 0: 73%, 1: 27%" in text
        assert "engine-0, engine-1" in text and "lost: its connection broke" in text
    for _ in range(3):
        view.next_log()
    assert view._log == "engine-1" and "compiled �[31mdecode 64" in "\n".join(line.plain for line in view.draw(160, 50))


def test_the_end_of_a_log_is_read_without_the_rest(tmp_path):
    file = tmp_path / "engine-0.log"
    file.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert tail(file, 3) == ["line 99997", "line 99998", "line 99999"] and tail(file, 0) == []
    assert len(tail(file, 10**9)) == 100_000 and tail(tmp_path / "none", 3) == []
    assert parse("Traceback (most recent call last):") == ("", "", "Traceback (most recent call last):")
    assert parse('{"time": 3}').message == '{"time": 3}'


def test_logs_are_listed_shown_filtered_and_followed(tmp_path):
    directory = write_run(tmp_path / "run", [0.5])
    listed = run("logs", directory, "--list").output
    assert [line.split()[0] for line in listed.splitlines()] == ["process", "gateway", "engine-0", "engine-1"]
    shown = run("logs", directory, "-n", "1", "--grep", "lost|compiled").output.splitlines()
    assert [line.split()[0] for line in shown] == ["gateway", "engine-0", "engine-1"] and "\x1b" not in shown[1]
    assert run("logs", directory, "gateway", "-n", 1).output.startswith("2026-05-01 12:00:09,100 WARNING")
    assert "Traceback" not in run("logs", directory, "--follow").output, "of a run that has ended, it ends at once"
    for wrong in (
        ("logs", tmp_path),
        ("logs", directory, "engine-7"),
        ("logs", directory, "--grep", "("),
        ("top", tmp_path),
    ):
        assert isinstance(run(*wrong).exception, ConfigError), wrong
    found = log_reader.follow(lambda: {p.stem: p for p in directory.glob("*.log")}, lambda line: "x" in line)
    first = log_reader._Followed(directory / "gateway.log", 0, 0).new_lines()
    assert len(first) == 2
    steps = iter(found)
    # The generator notes the ends of the files when it is first advanced, so another log, which is new, ends the wait.
    (directory / "engine-9.log").unlink(missing_ok=True)

    def write(path):
        with path.open("a") as log:
            log.write("half")
            log.flush()
            log.write(" x line\n")

    import threading

    threading.Timer(0.3, write, [directory / "engine-9.log"]).start()
    assert next(steps) == ("engine-9", "half x line")
    (directory / "gateway.log").write_text("x anew\n")  # truncated by a restart
    assert next(steps) == ("gateway", "x anew")


def aged(directory, seconds):
    """A run that wrote its files so long ago."""
    for path in directory.iterdir():
        os.utime(path, (time.time() - seconds,) * 2)
    return directory


def test_runs_are_listed_and_pruned_but_never_live_ones(tmp_path):
    runs = {f"run-{n}": aged(write_run(tmp_path / "runs" / f"run-{n}", [0.5], n == 3), 86400 * n) for n in range(1, 5)}
    fresh = write_run(tmp_path / "runs" / "fresh", [0.25])
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "link").symlink_to(runs["run-1"])
    entries = run_list.find_runs([tmp_path / "runs"], time.time())
    assert [entry.directory.name for entry in entries] == ["fresh", "run-1", "run-2", "run-3", "run-4"]
    assert [entry.state for entry in entries] == ["dead", "dead", "dead", "finished", "dead"]
    with (runs["run-4"] / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        old = time.time() - 4 * 86400
        os.utime(runs["run-4"] / ".lock", (old, old))
        prune = ("runs", tmp_path / "runs", "--prune", "--older-than", "36h")
        dry = run(*prune, "--dry-run")
        assert "2 of 5 runs would be deleted" in dry.output and all(path.exists() for path in runs.values())
        assert "run-4" not in dry.output and "run-2" in dry.output
        run(*prune, input="n\n")
        assert runs["run-2"].exists()
        assert "deleted 2 runs" in run(*prune, input="y\n").output
        run("runs", tmp_path / "runs", "--prune", "--keep", "0", "--yes")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"fresh", "run-4", "notes", "link"}, (
        "run-1 was last"
    )
    assert fresh.exists(), "it has written a moment ago"
    for wrong in (("--prune",), ("--keep", 1), ("--prune", "--older-than", "soon"), ("--prune", "--max-size", "3 X")):
        assert isinstance(run("runs", tmp_path / "runs", *wrong).exception, ConfigError), wrong
    assert "no runs in" in run("runs", tmp_path / "runs" / "notes").output
    assert isinstance(run("runs", tmp_path / "none").exception, ConfigError)


def test_a_size_keeps_the_latest_runs():
    entries = [run_list.RunEntry(f"run-{n}", "dead", 1, None, 1000.0 * n, 40) for n in (1, 2, 3)]
    assert run_list.to_delete(entries, run_list.Retention(num_bytes=80)) == entries[2:]
    assert run_list.to_delete(entries, run_list.Retention(count=1, seconds=10**6)) == entries[1:]
    assert run_list.to_delete([replace(entries[2], state="elsewhere")], run_list.Retention(count=0)) == []


def test_records_have_what_the_views_read():
    """A field that is renamed must be renamed there, too."""
    assert {"total_seconds", "num_bytes"} <= {*step_record(1, 0.0).sync.__slots__}


def test_the_version():
    assert run("--version").output.startswith("slipstream 0.")
