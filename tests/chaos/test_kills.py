"""Chaos test: kill -9 of random processes (engine, gateway, trainer) at random times of a training run. The run
completes, every prompt is trained on once, and no sample exceeds the staleness limit.

    SLIPSTREAM_KILLS=30 python -m pytest -s tests/chaos       # more kills; the seed is fixed, the timing is not"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from slipstream.gateway.journal import Journal
from slipstream.rl.reporting.records import StepRecord, read_records
from slipstream.rl.trainer import resume
from slipstream.rl.trainer.checkpoint import latest
from tests.gateway.history import check

KILLS = int(os.environ.get("SLIPSTREAM_KILLS", "3"))
SECONDS_PER_KILL = 60.0
STEPS, PROMPTS, BOUND = max(40, 4 * KILLS), 8, 2

CONFIG = f"""
steps = {STEPS}
warmup_steps = 10
eval_every = {STEPS}
save_every = 4
mode = "async"
max_staleness = {BOUND}
diagnose_every = 0
patience = 90.0

[task]
digits = 2

[algorithm]
prompts = {PROMPTS}
group = 4
max_tokens = 4

[engine]
max_num_seqs = 64
max_model_len = 16
"""


class Run:
    """`slipstream train`, started again whenever it has been killed."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory / "run"
        self._config, self._log = directory / "train.toml", directory / "train.log"
        self._config.write_text(CONFIG)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "slipstream.cli", "train", str(self._config), f"run_dir={self.run_dir}"]
        with self._log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def pid_of(self, victim: str) -> int | None:
        """None while it is not up."""
        if victim == "trainer":
            return self.process.pid
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                words = child.cmdline()
                if "slipstream.cli" in words and words[words.index("slipstream.cli") + 1] == victim:
                    return child.pid
        except psutil.NoSuchProcess:
            pass
        return None

    def is_over(self) -> bool:
        """A trainer that was killed is started again; one that ended by itself has finished, or has failed."""
        code = self.process.poll()
        if code == -signal.SIGKILL:
            self.process = self._start()
            return False
        if code is not None:
            assert code == 0, self._log.read_text()[-6000:]
        return code is not None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.timeout(120 + SECONDS_PER_KILL * KILLS)
def test_whoever_is_killed_every_prompt_is_trained_on_once(tmp_path: Path) -> None:
    random_, run, killed = random.Random(0), Run(tmp_path), Counter[str]()
    deadline = time.monotonic() + 100 + SECONDS_PER_KILL * KILLS
    try:
        while not run.is_over():
            assert time.monotonic() < deadline, killed
            if killed.total() < KILLS and (run.run_dir / "metrics.jsonl").exists():
                victim = random_.choice(("engine", "gateway", "trainer"))
                time.sleep(random_.uniform(0.5, 4.0))
                if run.process.poll() is None and (pid := run.pid_of(victim)) is not None:
                    os.kill(pid, signal.SIGKILL)
                    killed[victim] += 1
            time.sleep(0.1)
    finally:
        run.end()
    print(f"  killed: {dict(killed)}")
    assert killed.total() >= KILLS - 1, "the run was over too soon"
    journal = Journal(run.run_dir / "journal.sqlite")
    assert check(journal, BOUND) == []
    rows = sqlite3.connect(run.run_dir / "journal.sqlite").execute("SELECT id FROM takes JOIN groups USING (number)")
    taken = [id for (id,) in rows]
    assert sorted(taken) == sorted(f"{step}/{i}" for step in range(1, STEPS + 1) for i in range(PROMPTS))
    steps = [r for r in read_records(run.run_dir / resume.LOG) if isinstance(r, StepRecord)]
    assert [record.step for record in steps] == list(range(1, STEPS + 1))
    assert max(int(age) for record in steps for age in record.staleness) <= BOUND
    assert latest(run.run_dir) is not None and (run.run_dir / "checkpoint" / "config.json").exists()
    for process in psutil.process_iter(["cmdline"]):
        assert str(run.run_dir) not in " ".join(process.info["cmdline"] or ()), process
