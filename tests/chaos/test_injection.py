"""Faults in a real training run: gateway, two engines, trainer. The run completes and its history keeps every promise.

SLIPSTREAM_CHAOS_FAULTS=30 python -m pytest -s tests/chaos       # more faults; the seed is fixed, the timing is not"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from slipstream.chaos.history import read_history
from slipstream.chaos.injection import ChaosRun, Injection, drawn, exhaustive
from slipstream.rl.reporting.records import StepRecord, read_records
from slipstream.rl.trainer import resume
from slipstream.runtime.failpoints import STEPS

FAULTS = int(os.environ.get("SLIPSTREAM_CHAOS_FAULTS", "0"))
MUST = [
    Injection("gateway.taken", "kill"),
    Injection("engine.staged", "kill"),
    Injection("gateway.committed", "kill"),
    Injection("train.updated", "kill"),
    Injection("engine.commit", "freeze"),
]
PROMPTS, BOUND = 8, 2
STEPS_OF_RUN = 24 + 12 * FAULTS

CONFIG = f"""
steps = {STEPS_OF_RUN}
warmup_steps = 5
eval_every = {STEPS_OF_RUN}
eval_prompts = 4
save_every = 4
mode = "async"
max_staleness = {BOUND}
diagnose_every = 0
patience = 90.0
engines = 2

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


@pytest.mark.timeout(300 + 60 * FAULTS)
def test_a_run_under_faults_keeps_every_promise(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    run = ChaosRun(tmp_path / "run.toml", tmp_path / "chaos", seed=0)
    try:
        done = run.run([*MUST, *drawn(FAULTS, seed=0)], print)
        assert run.finish(time.monotonic() + 150), (tmp_path / "chaos" / "train.log").read_text()[-6000:]
    finally:
        run.close()
    assert run.problems(BOUND) == []
    assert {i.outcome for i in done} <= {"recovered", "not reached"}, done
    assert sum(i.outcome == "recovered" for i in done) >= len(MUST) - 1, done
    steps = [r for r in read_records(tmp_path / "chaos" / "run" / resume.LOG) if isinstance(r, StepRecord)]
    assert [record.step for record in steps] == list(range(1, STEPS_OF_RUN + 1))
    groups = [g["id"] for e in read_history(tmp_path / "chaos").of("rollout.taken") for g in e.facts["groups"]]
    assert set(groups) == {f"{step}/{i}" for step in range(1, STEPS_OF_RUN + 1) for i in range(PROMPTS)}
    for process in psutil.process_iter(["cmdline"]):
        assert str(tmp_path) not in " ".join(process.info["cmdline"] or ()), process


def test_every_step_is_reached(tmp_path: Path) -> None:
    """By a training run without faults, so that every one of them can be injected."""
    (tmp_path / "run.toml").write_text(CONFIG.replace(f"steps = {STEPS_OF_RUN}", "steps = 5"))
    run = ChaosRun(tmp_path / "run.toml", tmp_path / "chaos", seed=0)
    try:
        assert run.finish(time.monotonic() + 150), (tmp_path / "chaos" / "train.log").read_text()[-6000:]
    finally:
        run.close()
    assert {event.step for event in read_history(tmp_path / "chaos")} == set(STEPS.split())
    assert {i.step for i in exhaustive()} == set(STEPS.split())
    assert drawn(50, seed=7) == drawn(50, seed=7) != drawn(50, seed=8)
