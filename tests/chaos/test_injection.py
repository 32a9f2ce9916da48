"""Faults in a real training run: gateway, two engines, trainer. The run completes and its history keeps every promise.

SLIPSTREAM_CHAOS_FAULTS=30 python -m pytest -s tests/chaos       # more faults; the seed is fixed, the timing is not"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.chaos.history import read_history
from slipstream.chaos.injection import ChaosRun, Injection, drawn, exhaustive
from slipstream.cli.main import app
from slipstream.errors import ConfigError
from slipstream.rl.reporting.records import StepRecord, read_records
from slipstream.rl.trainer import resume
from slipstream.runtime.failpoints import STEPS

FAULTS = int(os.environ.get("SLIPSTREAM_CHAOS_FAULTS", "0"))
MUST = [
    Injection("gateway.start", "clock jump"),
    Injection("train.save", "delay"),
    Injection("train.saved", "delay"),
    Injection("engine.stage", "delay"),  # finds a commit before all have staged; needs a few quiet syncs before it
    Injection("gateway.committed", "error"),  # finds a version that is made twice
    Injection("engine.verify", "corrupt"),
    Injection("rollout.taken", "kill gateway"),  # finds a take that is acknowledged before it is on disk
    Injection("engine.allocate", "shm full"),
    Injection("train.update", "kill"),  # finds a staleness bound that is off by one
    Injection("engine.sample", "partition"),
]
PROMPTS, BOUND = 8, 2
STEPS_OF_RUN = 40 + 12 * FAULTS

CONFIG = f"""
steps = {STEPS_OF_RUN}
warmup_steps = 5
eval_every = {STEPS_OF_RUN}
eval_prompts = 4
save_every = 2
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
entropy_weight = 0.01  # every update changes the weights, whatever the rewards are

[engine]
max_num_seqs = 64
max_model_len = 16
"""


@pytest.mark.timeout(900 + 60 * FAULTS)
def test_a_run_under_faults_keeps_every_promise(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    run = ChaosRun(tmp_path / "run.toml", tmp_path / "chaos", seed=0)
    try:
        done = run.run([*MUST, *drawn(FAULTS, seed=0)], print)
        assert run.finish(time.monotonic() + 600), (tmp_path / "chaos" / "train.log").read_text()[-6000:]
    finally:
        run.close()
    assert run.problems(BOUND) == []
    assert [(i.step, i.outcome) for i in done[: len(MUST)]] == [(i.step, "recovered") for i in MUST]
    steps = [r for r in read_records(tmp_path / "chaos" / "run" / resume.LOG) if isinstance(r, StepRecord)]
    assert [record.step for record in steps] == list(range(1, STEPS_OF_RUN + 1))
    history = read_history(tmp_path / "chaos")
    groups = [group["id"] for event in history.of("rollout.taken") for group in event.facts["groups"]]
    assert set(groups) == {f"{step}/{i}" for step in range(1, STEPS_OF_RUN + 1) for i in range(PROMPTS)}
    assert len({event.facts["digest"] for event in history.of("engine.committed")}) >= STEPS_OF_RUN
    assert {event.step for event in history} == set(STEPS.split())  # so faults can be injected at each of them


def test_which_faults_are_injected() -> None:
    assert {injection.step for injection in exhaustive()} == set(STEPS.split())
    assert drawn(50, seed=7) == drawn(50, seed=7) != drawn(50, seed=8)
    assert {"corrupt", "shm full", "disk full", "clock jump", "partition", "out of memory", "slow", "kill gateway"} <= {
        injection.kind for injection in drawn(1000, seed=0)
    }


def test_faults_that_do_not_exist_are_refused_before_a_run_starts(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    out = tmp_path / "chaos"
    refused = CliRunner().invoke(app, ["chaos", str(tmp_path / "run.toml"), "--kind", "kil", "--out", str(out)])
    assert isinstance(refused.exception, ConfigError) and not out.exists()
    assert "no fault of kind 'kil'" in str(refused.exception) and "kill, kill engine" in str(refused.exception)
