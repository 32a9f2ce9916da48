"""What a run leaves behind, also when its disk is full, and when it is killed."""

import contextlib
import dataclasses
import errno
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import weakref
import zlib
from pathlib import Path

import numpy as np
import pytest

from slipstream.config import RecordConfig
from slipstream.observe.dashboard.recorded_run import RecordedRun
from slipstream.observe.recorder.background import MAX_LARGE_JOBS
from slipstream.observe.recorder.files import RUN_FILE, RUN_TABLES, open_for_writing, rollout_files
from slipstream.observe.recorder.fleet_recorder import FleetRecorder
from slipstream.observe.recorder.mismatch import HISTOGRAM_EDGES
from slipstream.observe.recorder.run_recorder import RunRecorder
from tests.observe.recorded import SETTINGS, drain, recorded_step, rollouts, write_fleet, write_run


def rows(path, query, *values):
    with sqlite3.connect(path) as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute(query, values)]


def steps_in(run_dir):
    of_run = [row["step"] for row in rows(run_dir / "record/run.sqlite", "SELECT step FROM steps ORDER BY step")]
    of_files = [
        row["step"]
        for path in rollout_files(run_dir / "record").values()
        for row in rows(path, "SELECT DISTINCT step FROM samples ORDER BY step")
    ]
    return of_run, of_files


def read_sample(path, step, group, sample):
    """As docs/recorder.md says."""
    (row,) = rows(path, "SELECT * FROM samples WHERE step = ? AND grp = ? AND sample = ?", step, group, sample)
    (chunk,) = rows(path, "SELECT * FROM chunks WHERE step = ? AND chunk = ?", step, row["chunk"])

    def array(name, dtype):
        part = slice(row["first"], row["first"] + row["length"])
        return None if chunk[name] is None else np.frombuffer(zlib.decompress(chunk[name]), dtype)[part]

    return row, {
        "tokens": array("tokens", "<u4"),
        "engine": array("engine_logprobs", "<f4"),
        "raw": array("raw_logprobs", "<f4"),
        "gaps": array("gaps", "<f2"),
        "advantages": array("advantages", "<f4"),
        "mask": array("mask", "u1"),
    }


def test_every_completion_is_read_back(tmp_path):
    write_run(tmp_path, steps=1, parts=True, left_out=(1,))
    taken = rollouts(1, parts=True, left_out=(1,))
    trainer = taken.trained.trainer_logprobs()
    path = tmp_path / "record/rollouts-00000001.sqlite"
    for number, group in enumerate(taken.groups):
        for sample, c in enumerate(group.completions):
            row, arrays = read_sample(path, 1, number, sample)
            assert tuple(arrays["tokens"]) == c.token_ids
            np.testing.assert_array_equal(arrays["engine"], np.array(c.logprobs, np.float32))
            assert (row["head"], row["finish"], row["engine"]) == (c.text, c.finish_reason, c.engine)
            assert row["reward"] == taken.rewards[number, sample]
            assert json.loads(row["parts"]) == taken.parts[number * 3 + sample]
            spans = json.loads(row["spans"]) if row["spans"] else [[row["version"], 0, row["length"]]]
            assert spans == [[s.version, s.start, s.stop] for s in c.spans]
            assert row["staleness"] == 1 and row["used"] == (number == 0)
            if number == 0:
                place = slice(len(c.prompt_token_ids) - 1, len(c.prompt_token_ids) - 1 + len(c.token_ids))
                gap = trainer[sample, place] - taken.trained.logprobs[sample, place]
                np.testing.assert_allclose(arrays["gaps"], gap, rtol=1e-3, atol=1e-6)
                assert row["advantage"] == sample / 4
                np.testing.assert_allclose(
                    [row["gap"], row["gap_max"]], [np.abs(gap).mean(), np.abs(gap).max()], rtol=1e-5
                )
            else:
                assert np.isnan(arrays["gaps"]).all() and row["gap"] is None
    prompts = rows(path, "SELECT * FROM groups ORDER BY grp")
    assert [p["prompt"] for p in prompts] == list(taken.prompts)
    assert [p["zero_variance"] for p in prompts] == [0, 1]


def test_tokens_that_nobody_drew_or_learns_from_count_in_no_mean(tmp_path):
    """Text of an environment, whose engine logprob is 0; and an episode that failed, which is the first of its group."""
    taken = rollouts(1, left_out=(1,))
    (c, *_), trained, trainer = taken.groups[0].completions, taken.trained, taken.trained.trainer_logprobs()
    first = len(c.prompt_token_ids) - 1
    for array in (trained.mask, trained.logprobs, trained.advantages):
        array[0, first + 1 : first + 3] = 0
    trained.advantages[0, first] = trained.advantages[0, first + 3 :] = 0.5
    failed = dataclasses.replace(
        taken.groups[1].completions[0],
        **dict.fromkeys(("token_ids", "logprobs", "raw_logprobs", "spans"), ()),
        prompt_token_ids=(0,),
        text="",
    )
    others = taken.groups[1].completions[1:]
    groups = [taken.groups[0], dataclasses.replace(taken.groups[1], completions=(failed, *others))]
    with RunRecorder(tmp_path, RecordConfig(), 0, SETTINGS) as recorder:
        recorder.step(recorded_step(1, dataclasses.replace(taken, groups=groups)))
    path = tmp_path / "record/rollouts-00000001.sqlite"
    row, arrays = read_sample(path, 1, 0, 0)
    drawn = np.array([0, 3, 4])
    gap = np.abs(trainer - trained.logprobs)[0, first + drawn]
    np.testing.assert_allclose([row["gap"], row["gap_max"]], [gap.mean(), gap.max()], rtol=1e-5)
    assert np.isnan(arrays["gaps"][1:3]).all() and np.isfinite(arrays["gaps"][drawn]).all()
    assert row["advantage"] == 0.5
    row, arrays = read_sample(path, 1, 1, 0)
    assert row["length"] == 0 and row["advantage"] is None and row["gap"] is None
    (group,) = rows(path, "SELECT * FROM groups WHERE grp = 1")
    prompt = others[0].prompt_token_ids
    assert np.frombuffer(group["prompt_tokens"], "<u4").tolist() == list(prompt) and group["prompt_length"] == len(
        prompt
    )


def test_long_samples_have_chunks_of_their_own_and_their_whole_text(tmp_path):
    texts = [["a" * 150_000, "short", "b" * 300]]
    write_run(tmp_path, steps=1, lengths=((40_000, 5, 70_000),), texts=texts)
    path = tmp_path / "record/rollouts-00000001.sqlite"
    chunks = rows(path, "SELECT num_tokens, texts FROM chunks")
    assert [chunk["num_tokens"] for chunk in chunks] == [40_005, 70_000]
    found = [text for chunk in chunks for text in json.loads(zlib.decompress(chunk["texts"]))]
    assert found == texts[0]
    _, arrays = read_sample(path, 1, 0, 2)
    assert tuple(arrays["tokens"]) == rollouts(1, lengths=((40_000, 5, 70_000),)).groups[0].completions[2].token_ids


def test_differences_of_logprobs_are_counted_by_their_causes(tmp_path):
    write_run(tmp_path, steps=1)
    taken = rollouts(1)
    trained, trainer = taken.trained, taken.trained.trainer_logprobs()
    distance = np.abs(trainer - trained.logprobs)[trained.mask > 0]
    path = tmp_path / "record/run.sqlite"
    (step,) = rows(path, "SELECT * FROM steps")
    np.testing.assert_allclose(step["mismatch_mean"], distance.mean(), rtol=1e-4)
    quantiles = [step[f"mismatch_{name}"] for name in ("p50", "p99", "max")]
    np.testing.assert_allclose(quantiles, np.quantile(distance, [0.5, 0.99, 1]), rtol=1e-4)
    np.testing.assert_allclose(
        step["mismatch_signed"], (trainer - trained.logprobs)[trained.mask > 0].mean(), rtol=1e-4
    )
    assert step["mismatch_tokens"] == len(distance)
    counted = {
        kind: {
            row["key"]: (row["tokens"], row["total"])
            for row in rows(path, "SELECT * FROM mismatch WHERE kind = ?", kind)
        }
        for kind in ("engine", "staleness", "position", "histogram")
    }
    for found in counted.values():
        assert sum(tokens for tokens, _ in found.values()) == len(distance)
        np.testing.assert_allclose(sum(total for _, total in found.values()), distance.sum(), rtol=1e-4)
    ages = trained.ages[trained.mask > 0]
    assert {key: tokens for key, (tokens, _) in counted["staleness"].items()} == {
        "0": (ages == 0).sum(),
        "1": (ages == 1).sum(),
    }
    counts, _ = np.histogram(distance, [*HISTOGRAM_EDGES, np.inf])
    assert {float(key): tokens for key, (tokens, _) in counted["histogram"].items()} == {
        edge: count for edge, count in zip(HISTOGRAM_EDGES, counts) if count
    }
    worst = rows(path, "SELECT * FROM worst_tokens ORDER BY abs(gap) DESC")
    np.testing.assert_allclose([abs(row["gap"]) for row in worst], np.sort(distance)[::-1][:3], rtol=1e-3)
    for row in worst:
        c = taken.groups[row["grp"]].completions[row["sample"]]
        assert c.token_ids[row["position"]] == row["token"] and c.engine == row["engine"]


def test_a_resumed_run_shows_no_step_twice(tmp_path):
    write_run(tmp_path, steps=5, finish=False)
    assert steps_in(tmp_path) == ([1, 2, 3, 4, 5],) * 2
    write_run(tmp_path, steps=6, after=3, seed=1)
    assert steps_in(tmp_path) == ([1, 2, 3, 4, 5, 6],) * 2
    files = rollout_files(tmp_path / "record")
    assert list(files) == [1, 4]
    _, arrays = read_sample(files[4], 5, 0, 0)
    assert tuple(arrays["tokens"]) == rollouts(5, seed=1).groups[0].completions[0].token_ids
    starts = rows(tmp_path / "record/run.sqlite", "SELECT step FROM processes ORDER BY started")
    assert [row["step"] for row in starts] == [0, 3]


def test_a_run_that_starts_again_forgets_all(tmp_path):
    write_run(tmp_path, steps=5, finish=False)
    write_run(tmp_path, steps=2)
    assert steps_in(tmp_path) == ([1, 2],) * 2


def test_a_record_that_is_just_being_created_is_empty(tmp_path):
    """A dashboard may look at it before the process that writes it is known."""
    open_for_writing(tmp_path / "record" / RUN_FILE, RUN_TABLES).close()
    assert RecordedRun(tmp_path).summary()["state"] == "empty"


def test_old_completions_are_dropped_and_metrics_are_kept(tmp_path):
    write_run(tmp_path, steps=20, config=RecordConfig(keep_steps=4))
    of_run, of_files = steps_in(tmp_path)
    assert of_run == list(range(1, 21))
    assert set(range(17, 21)) <= set(of_files) and min(of_files) >= 14


def test_the_size_of_the_completions_is_bounded(tmp_path):
    write_run(tmp_path, steps=40, config=RecordConfig(max_bytes=1 << 20), lengths=((3000,) * 8,))
    files = rollout_files(tmp_path / "record")
    assert min(files) > 1 and sum(path.stat().st_size for path in files.values()) <= 1 << 20
    assert steps_in(tmp_path)[1][-1] == 40


@pytest.mark.parametrize("share, kept", [(0.0, []), (0.25, [3, 7]), (1.0, list(range(8)))])
def test_a_share_of_the_prompts_is_recorded(share, kept, tmp_path):
    write_run(tmp_path, steps=1, config=RecordConfig(share=share), lengths=((2, 1),) * 8)
    found = rows(tmp_path / "record/rollouts-00000001.sqlite", "SELECT DISTINCT grp FROM samples ORDER BY grp")
    assert [row["grp"] for row in found] == kept


def test_hostile_text_is_stored_as_it_is(tmp_path):
    texts = [["<script>alert(1)</script>", "\u202eevil\x00\x1b[2J", "lone \ud800 surrogate"]]
    write_run(tmp_path, steps=1, lengths=((1, 1, 1),), texts=texts)
    found = [row["head"] for row in rows(tmp_path / "record/rollouts-00000001.sqlite", "SELECT head FROM samples")]
    assert found == [*texts[0][:2], "lone ? surrogate"]


# --- disks ------------------------------------------------------------------------------------------------------------


def test_a_full_disk_stops_the_recorder_and_not_the_run(tmp_path):
    """In a process whose files may not grow beyond a limit, which fails as a full disk does."""
    script = f"""
import logging, resource, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from slipstream.config import RecordConfig
from slipstream.observe.recorder.run_recorder import RunRecorder
from tests.observe.recorded import SETTINGS, drain, recorded_step, rollouts
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
with RunRecorder(Path({str(tmp_path)!r}), RecordConfig(), 0, SETTINGS) as recorder:
    for step in range(1, 9):
        recorder.step(recorded_step(step, rollouts(step, lengths=((4000,) * 4,))))
        drain(recorder)
    assert recorder.stopped, "it was not full"
print("the run went on")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "the run went on\n", done.stderr
    assert done.stderr.count("the recorder stopped, and the run goes on without it") == 1
    of_run, of_files = steps_in(tmp_path)
    assert 1 <= len(of_files) < 8 and set(of_run) == set(of_files)  # what was written before is whole


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a file system that is read-only or small")
@pytest.mark.parametrize("options", ["ro", "size=300k"])
def test_a_file_system_that_cannot_be_written_to(options, tmp_path, caplog):
    (tmp_path / "record").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", tmp_path / "record"], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.decode()}")
    try:
        with RunRecorder(tmp_path, RecordConfig(), 0, SETTINGS) as recorder:
            for step in range(1, 6):
                recorder.step(recorded_step(step, rollouts(step, lengths=((4000,) * 4,))))
                drain(recorder)
            assert recorder.stopped
        assert caplog.text.count("the recorder stopped") == 1
    finally:
        subprocess.run(["umount", "-l", tmp_path / "record"], check=True)


def test_a_record_directory_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / "record").write_text("not a directory")
    with RunRecorder(tmp_path, RecordConfig(), 0, SETTINGS) as recorder:
        recorder.step(recorded_step(1, rollouts(1)))
    assert "record" in recorder.stopped and caplog.text.count("the recorder stopped") == 1


def test_a_disk_that_hangs_holds_few_steps_in_memory_and_nobody_up(tmp_path):
    """Steps beyond these few lose their completions, not their metrics; how many is counted over all processes of a run."""
    for process in (0, 1):
        resume, held = threading.Event(), []
        with RunRecorder(tmp_path, RecordConfig(), 8 * process, SETTINGS) as recorder:
            recorder._writer.submit(resume.wait)
            for step in range(8 * process + 1, 8 * process + MAX_LARGE_JOBS + 3):
                taken = rollouts(step)
                held.append(weakref.ref(taken.rewards))
                recorder.step(recorded_step(step, taken))
                del taken
            assert [array() is not None for array in held] == [True] * MAX_LARGE_JOBS + [False] * 2
            resume.set()
        assert not recorder.stopped
    steps, with_completions = steps_in(tmp_path)
    assert steps == [1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 14] and with_completions == [1, 2, 3, 4, 9, 10, 11, 12]
    last = rows(tmp_path / "record/run.sqlite", "SELECT * FROM steps")[-1]
    assert last["rollout_reward"] == 1.4 and last["rollout_length_max"] == 7 and last["mismatch_mean"] is None
    assert rows(tmp_path / "record/run.sqlite", "SELECT value FROM facts WHERE name = 'dropped'") == [{"value": "4"}]


def test_a_run_that_outlives_its_recorder_is_shown_as_finished(tmp_path, monkeypatch):
    with RunRecorder(tmp_path, RecordConfig(), 0, SETTINGS) as recorder:
        drain(recorder)
        monkeypatch.setattr(recorder._store, "add", raises_disk_full)
        recorder.step(recorded_step(1, rollouts(1)))
    summary = RecordedRun(tmp_path).summary()
    assert summary["state"] == "finished" and summary["ended"] is not None and "No space left" in summary["stopped"]


def raises_disk_full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_gateway_records_again_after_a_full_disk(tmp_path):
    write_fleet(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "record/fleet.sqlite")) as db, db:
        db.execute("INSERT INTO facts VALUES ('stopped', 'No space left on device')")
    recorder = FleetRecorder(tmp_path)
    recorder.committed(2, "engine-0")
    recorder.close()
    path = tmp_path / "record/fleet.sqlite"
    assert RecordedRun(tmp_path).summary()["stopped"] == ""
    first, *more = rows(path, "SELECT at FROM commits WHERE version = 2 AND engine = 'engine-0'")
    assert not more and first["at"] < rows(path, "SELECT max(started) AS at FROM processes")[0]["at"], (
        "a repair is no commit"
    )


def test_a_run_killed_in_the_middle_of_a_write_can_be_read_and_continued(tmp_path):
    script = f"""
import os, sys, threading
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from slipstream.config import RecordConfig
from slipstream.observe.recorder import rollout_store
from slipstream.observe.recorder.run_recorder import RunRecorder
from tests.observe.recorded import SETTINGS, drain, recorded_step, rollouts
recorder = RunRecorder(Path({str(tmp_path)!r}), RecordConfig(), 0, SETTINGS)
for step in (1, 2):
    recorder.step(recorded_step(step, rollouts(step)))
    drain(recorder)
insert = rollout_store.insert
def insert_and_die(db, table, rows):
    insert(db, table, rows)
    if table == "chunks":
        os.kill(os.getpid(), {int(signal.SIGKILL)})
rollout_store.insert = insert_and_die
recorder.step(recorded_step(3, rollouts(3)))
threading.Event().wait(60)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert steps_in(tmp_path) == ([1, 2], [1, 2])
    write_run(tmp_path, steps=4, after=1)
    assert steps_in(tmp_path) == ([1, 2, 3, 4],) * 2
