"""The cost of recording a run, and of looking at it.

    python benchmarks/recorder.py                     all parts; the result goes to benchmarks/results/recorder.json
    python benchmarks/recorder.py --part step         one part: step, bytes, sample, browser or run

`step` trains the demo's model with an engine process. Recording alternates: a few steps on, as many off, in one run. A shared
machine changes its speed by more than the recorder costs, so each block of steps is compared with the one after it; the median
of these differences is reported with its standard error, and the CPU time of the recorder's thread. `run` makes a record of
10,000 steps of 512 completions, of which the recorder has written the first 64 and the others are copies, and asks for the
first page in a process of its own. `browser` clicks on a completion of 36,000 tokens in Chromium and waits for its first
tokens; it needs Debian's `chromium` and the test extra."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from slipstream.config import EmbeddedConfig, RecordConfig
from slipstream.observe.recorder.background import BackgroundWriter, Job
from slipstream.observe.recorder.files import RUN_FILE, rollout_file, rollout_files
from slipstream.observe.recorder.rollout_store import STEPS_PER_FILE
from slipstream.observe.recorder.rollouts import StepRollouts, TrainedTokens
from slipstream.observe.recorder.run_recorder import Phase, RecordedStep, RunRecorder
from slipstream.types import Completion, RolloutGroup, SyncReport, VersionSpan

RESULT = Path(__file__).parent / "results" / "recorder.json"
BLOCK = 4
"""Steps with recording on, then as many with it off."""
LONG = 36_000
GROUP = 8
HEADERS = {"Authorization": "Bearer x"}
FIRST_PAGE = ("", "/steps?points=1000", "/rollouts?limit=50", "/fleet", "/timeline")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("step", "bytes", "sample", "browser", "run", "page"))
    parser.add_argument("--steps", type=int, default=1000, help="training steps of `step`")
    parser.add_argument("--long-steps", type=int, default=10_000, help="steps of `run`")
    parser.add_argument("--completions", type=int, default=512, help="completions per step of `run`")
    parser.add_argument(
        "--directory", type=Path, help="where `run` writes its record; a temporary directory by default"
    )
    arguments = parser.parse_args()
    if arguments.part == "page":  # the process that `run` starts
        print(json.dumps(first_page(arguments.directory)))
        return
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "step": lambda: step_cost(arguments.steps),
        "bytes": bytes_per_rollout,
        "sample": open_long_sample,
        "browser": click_long_sample,
        "run": lambda: long_run(arguments.long_steps, arguments.completions, arguments.directory),
    }
    found = {name: measure() for name, measure in parts.items() if arguments.part in (None, name)}
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    RESULT.write_text(json.dumps({**known, "machine": machine, **found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


# --- a step -----------------------------------------------------------------------------------------------------------


def step_cost(num_steps: int) -> dict[str, Any]:
    from slipstream.rl.config import TrainConfig
    from slipstream.rl.reporting.records import StepRecord
    from slipstream.rl.trainer.recording import Recording
    from slipstream.rl.trainer.session import TrainSession

    cpu: list[float] = []
    submit, record = BackgroundWriter.submit, Recording.step

    def timed(writer: BackgroundWriter, job: Job, is_large: bool = False) -> bool:
        def run() -> None:
            start = time.thread_time()
            job()
            cpu.append(time.thread_time() - start)

        return submit(writer, run if is_large else job, is_large)

    is_on = was_on = True

    def switched(recording: Recording, *arguments: Any) -> None:
        if is_on:
            record(recording, *arguments)

    blocks: list[tuple[bool, list[float]]] = []
    """Whether they were recorded, and the seconds of their steps."""
    with (
        tempfile.TemporaryDirectory() as directory,
        patch.object(BackgroundWriter, "submit", timed),
        patch.object(Recording, "step", switched),
    ):
        config = TrainConfig(
            run_dir=directory,
            steps=num_steps,
            eval_every=num_steps,
            eval_prompts=4,
            save_every=0,
            diagnose_every=0,
            engine=EmbeddedConfig(max_num_seqs=256, max_model_len=32),
        )
        with TrainSession(config) as session:
            for made in session.records():
                if not isinstance(made, StepRecord):
                    continue
                if not blocks or blocks[-1][0] != was_on:
                    blocks.append((was_on, []))
                blocks[-1][1].append(made.seconds.total)
                was_on = is_on  # the record of this step is written during the next one
                if made.step % BLOCK == 0:
                    is_on = not is_on
    blocks = blocks[2:-1]  # without the steps that compile, and without one that may be shorter
    ratios = [
        statistics.median(recorded) / statistics.median(plain) - 1
        for (_, recorded), (_, plain) in zip(blocks[::2], blocks[1::2])
    ]
    off = statistics.median(second for is_recorded, seconds in blocks for second in seconds if not is_recorded)
    return {
        "completions_per_step": config.algorithm.prompts * config.algorithm.group,
        "median_ms": 1e3 * off,
        "pairs_of_blocks": len(ratios),
        "steps_per_block": BLOCK,
        "difference": statistics.median(ratios),
        "standard_error": 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5,
        "recorder_cpu_ms": 1e3 * statistics.median(cpu),
    }


# --- completions that were never sampled ------------------------------------------------------------------------------


def rollouts(num_groups: int, lengths: np.ndarray, seed: int = 0) -> StepRollouts:
    """Groups of `GROUP` completions, with logprobs of both sides that differ as bfloat16 makes them differ."""
    rng = np.random.default_rng(seed)
    longest, prompt = int(lengths.max()), 64
    tokens = rng.integers(3, 30_000, (len(lengths), prompt + longest)).astype(np.int32)
    mask = (np.arange(prompt + longest - 1) >= prompt - 1) & (
        np.arange(prompt + longest - 1) < prompt - 1 + lengths[:, None]
    )
    logprobs = (-rng.exponential(0.5, mask.shape) * mask).astype(np.float32)
    trainer = logprobs + (rng.normal(0, 0.01, mask.shape) * mask).astype(np.float32)
    text = "".join(map(chr, rng.integers(97, 123, 4 * longest)))
    groups = []
    for group in range(num_groups):
        completions = []
        for sample in range(GROUP):
            row = group * GROUP + sample
            length = int(lengths[row])
            own = slice(prompt - 1, prompt - 1 + length)
            values = tuple(logprobs[row, own].tolist())
            ids = tuple(tokens[row, prompt : prompt + length].tolist())
            given = tuple(tokens[row, :prompt].tolist())
            spans = (VersionSpan(0, 0, length),)
            completions.append(
                Completion(
                    f"{group}", sample, given, ids, text[: 4 * length], values, values, "stop", spans, "engine-0"
                )
            )
        groups.append(RolloutGroup(f"{group}", group, 0, 0, tuple(completions)))
    rewards = rng.integers(0, 2, (num_groups, GROUP)).astype(np.float32)
    advantages = np.repeat(rewards.reshape(-1, 1) - rewards.mean(), mask.shape[1], axis=1) * mask
    trained = TrainedTokens(
        tokens, mask.astype(np.float32), logprobs, advantages, np.zeros(mask.shape, np.int32), lambda: trainer
    )
    rows = list(range(0, len(lengths), GROUP))
    return StepRollouts(groups, ["a prompt of the task " * 3] * num_groups, rewards, (), rows, trained)


def write(directory: Path, steps: Iterator[tuple[int, StepRollouts]]) -> None:
    with RunRecorder(directory, RecordConfig(max_bytes=1 << 40), 0, {"steps": 1}) as recorder:
        for step, taken in steps:
            at = 1.7e9 + step
            phases = [
                Phase(name, at + n / 8, at + (n + 1) / 8)
                for n, name in enumerate(("generate", "reward", "train", "sync"))
            ]
            sync = SyncReport(step, 10**9, 0.001, 0.002, 0.001, 0.001, 0.005, (), started=at)
            scalars = {f"train_metric_{n}": step / (n + 1) for n in range(30)} | {"rollout_reward": step % 97 / 97}
            record = RecordedStep(step, at, scalars, phases, sync, taken)
            while not recorder._writer.submit(lambda record=record: recorder._write_step(record), is_large=True):  # type: ignore[misc]
                assert not recorder.stopped, recorder.stopped
                time.sleep(0.001)


def bytes_per_rollout() -> dict[str, Any]:
    found = {}
    for length, num_groups, num_steps in ((8, 32, 64), (1024, 8, 4), (LONG, 1, 1)):
        with tempfile.TemporaryDirectory() as directory:
            made = (
                (step, rollouts(num_groups, np.full(num_groups * GROUP, length), step))
                for step in range(1, num_steps + 1)
            )
            write(Path(directory), made)
            size = sum(path.stat().st_size for path in rollout_files(Path(directory) / "record").values())
            found[f"{length} tokens"] = {"bytes": size / (num_groups * GROUP * num_steps)}
            found[f"{length} tokens"]["bytes_per_token"] = found[f"{length} tokens"]["bytes"] / length
    return found


# --- reading ----------------------------------------------------------------------------------------------------------


def dashboard_app(directory: Path) -> Any:
    """The dashboard of one run, which takes any token."""
    from slipstream.observe.dashboard.access import Access
    from slipstream.observe.dashboard.local_server import create_local_app

    return create_local_app([directory], Access(lambda token: "viewer", "127.0.0.1"))


def get(directory: Path) -> Callable[[str], Any]:
    """The dashboard's API in this process, with all that a request passes through but the socket."""
    from starlette.testclient import TestClient

    client = TestClient(dashboard_app(directory), base_url="http://127.0.0.1:1", headers=HEADERS)
    run = client.get("/dashboard/api/runs").json()["runs"][0]["id"]

    def call(path: str) -> Any:
        response = client.get(f"/dashboard/api/runs/{run}{path}")
        assert response.status_code == 200, response.text
        return response

    return call


def open_long_sample() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), iter([(1, rollouts(1, np.full(GROUP, LONG)))]))
        call = get(Path(directory))
        seconds, cpu_seconds, response = [], [], None
        for sample in range(GROUP):
            start, cpu = time.perf_counter(), time.process_time()
            response = call(f"/rollouts/1.0.{sample}")
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu)
    assert response is not None
    return {
        "tokens": response.json()["count"],
        "answer_bytes": len(response.content),
        "first_ms": 1e3 * seconds[0],
        "median_ms": 1e3 * statistics.median(seconds),
        "median_cpu_ms": 1e3 * statistics.median(cpu_seconds),
        "load": os.getloadavg()[0],
    }


CLICK = """
async (number) => {
  document.querySelectorAll(".tokens span").forEach((token) => token.remove());
  const row = [...document.querySelectorAll("tr")].filter((row) => row.textContent.includes("36,000"))[number];
  const start = performance.now();
  (row.querySelector("button, a") ?? row).click();
  while (document.querySelectorAll(".tokens span").length < 100) await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  return performance.now() - start;
}
"""
"""Click on a completion; return the milliseconds until a frame with its first tokens is painted."""


def click_long_sample() -> dict[str, Any]:
    import threading

    import uvicorn
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        write(Path(directory), iter([(1, rollouts(1, np.full(GROUP, LONG)))]))
        server = uvicorn.Server(uvicorn.Config(dashboard_app(Path(directory)), port=0, log_level="critical"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.05)
            port = server.servers[0].sockets[0].getsockname()[1]
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
            page = browser.new_context(extra_http_headers=HEADERS).new_page()
            page.goto(f"http://127.0.0.1:{port}/dashboard/rollouts")
            page.get_by_role("heading", name="Completion, 36,000 tokens").wait_for()
            ms = []
            for number in range(1, GROUP):
                page.wait_for_timeout(500)  # the rest of the completion before has been drawn
                ms.append(page.evaluate(CLICK, number))
            version = browser.version
            browser.close()
        finally:
            server.should_exit = True
            thread.join()
    load = os.getloadavg()[0]
    return {
        "chromium": version,
        "first_ms": ms[0],
        "median_ms": statistics.median(ms),
        "longest_ms": max(ms),
        "load": load,
    }


def long_run(num_steps: int, num_completions: int, directory: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        directory = directory or Path(temporary)
        variants = [rollouts(num_completions // GROUP, np.full(num_completions, 16), seed) for seed in range(4)]
        start = time.perf_counter()
        written = min(num_steps, STEPS_PER_FILE)
        write(directory, ((step, variants[step % 4]) for step in range(1, written + 1)))
        seconds = (time.perf_counter() - start) / written
        for first in range(1 + written, num_steps + 1, STEPS_PER_FILE):
            repeat(directory / "record", first)
        size = sum(path.stat().st_size for path in (directory / "record").iterdir())
        command = [sys.executable, __file__, "--part", "page", "--directory", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    page = json.loads(done.stdout)
    return {
        "steps": num_steps,
        "completions": num_steps * num_completions,
        "bytes": size,
        "write_ms_per_step": 1e3 * seconds,
        **page,
    }


def repeat(record: Path, first: int) -> None:
    """Copy the steps of the first file as those from `first` on."""
    more = first - 1
    path = record / rollout_file(first)
    shutil.copyfile(record / rollout_file(1), path)
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA journal_mode = OFF")
        for table in ("groups", "samples", "chunks"):
            db.execute(f"UPDATE {table} SET step = step + ?", (more,))
    shifted = {"step", "version", "at", "start", "end"}
    with contextlib.closing(sqlite3.connect(record / RUN_FILE)) as db, db:
        for table in ("steps", "spans", "syncs", "mismatch", "worst_tokens"):
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            values = ", ".join(f'"{name}" + {more}' if name in shifted else f'"{name}"' for name in columns)
            db.execute(f"INSERT INTO {table} SELECT {values} FROM {table} WHERE step <= ?", (STEPS_PER_FILE,))


def first_page(directory: Path) -> dict[str, Any]:
    """What a browser asks for when it opens a run, and the memory that the answers take."""
    call = get(directory)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, cpu = {}, time.process_time()
    for path in FIRST_PAGE:
        start = time.perf_counter()
        call(path)
        seconds[path or "/"] = time.perf_counter() - start
    cpu = time.process_time() - cpu
    start = time.perf_counter()
    searched = call("/rollouts?view=samples&from=1&sort=reward&max_reward=0.5").json()
    search = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "first_page_ms": 1e3 * sum(seconds.values()),
        "first_page_cpu_ms": 1e3 * cpu,
        "load": os.getloadavg()[0],
        "requests_ms": {path: 1e3 * value for path, value in seconds.items()},
        "search_all_steps_ms": 1e3 * search,
        "search_covers_steps": [searched["scanned"]["from"], searched["scanned"]["to"]],
        "memory_added_mb": (after - before) / 1024,
    }


if __name__ == "__main__":
    main()
