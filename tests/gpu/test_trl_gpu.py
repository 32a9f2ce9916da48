"""TRL's GRPOTrainer, unmodified, with weights over NCCL into vLLM engines behind the gateway. It was not yet seen to pass.

Needs trl and vLLM in one environment, named by SLIPSTREAM_VLLM_PYTHON: TRL's client imports vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import slipstream
from slipstream.config import HttpConfig
from tests.gpu.vllm import PYTHON, engine_options, needs_vllm
from tests.http.served import make_model

pytestmark = [pytest.mark.gpu, needs_vllm]

STEPS = 20
SCRIPT = """
import json, sys
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

model, url, steps, out = sys.argv[1:]

def reward(completions, **_):
    return [completion.count("a") / 16 for completion in completions]

args = GRPOConfig(
    output_dir=out, per_device_train_batch_size=16, num_generations=8, max_completion_length=16, max_steps=int(steps),
    learning_rate=1e-2, temperature=0.8, logging_steps=1, report_to=[], save_strategy="no", bf16=False,
    use_vllm=True, vllm_mode="server", vllm_server_base_url=url,
)
dataset = Dataset.from_dict({"prompt": ["abc", "hello", "x y", "12"] * 16})
trainer = GRPOTrainer(model, reward, args, dataset)
trainer.train()
print(json.dumps(trainer.state.log_history))
"""


def test_trl_trains_unmodified_over_nccl(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny", hidden_size=128, head_dim=32)  # which vLLM has quick kernels for
    weights = Path("/dev/shm") / f"slipstream-trl-{os.getpid()}"
    weights.mkdir()
    try:
        http = HttpConfig(weights=str(weights), nccl_python=PYTHON)
        env = os.environ | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # trainer and receiver may share the only GPU
        with slipstream.launch(
            model, engine=engine_options(), engines=1, http=http, run_dir=tmp_path / "run", start_timeout=400
        ) as bridge:
            token = (tmp_path / "run" / "token").read_text()
            url = bridge.http_url.replace("://", f"://trainer:{token}@")
            command = [PYTHON, "-c", SCRIPT, str(model), url, str(STEPS), str(tmp_path / "out")]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=500, check=False)
            assert done.returncode == 0, "TRL's errors are above"
            assert bridge.status().version == STEPS
    finally:
        os.environ.pop("NCCL_MULTI_RANK_GPU_ENABLE", None)
        for file in weights.iterdir():
            file.unlink()
        weights.rmdir()
    rows = [row for row in json.loads(done.stdout.splitlines()[-1]) if "reward" in row]
    rewards = [row["reward"] for row in rows]
    print("  rewards:", rewards)
    assert sum(rewards[-5:]) > sum(rewards[:5])
    assert max(row["sampling/sampling_logp_difference/mean"] for row in rows) < 0.05
