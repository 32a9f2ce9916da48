"""Engines of several ranks, and several engines, on one GPU: launched, synced, and compared with the trainer's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import slipstream
from slipstream.types import SamplingParams
from tests.conformance.engines import Subject, greedy_reference
from tests.gpu.vllm import engine_options, needs_vllm
from tests.tiny import random_params, tiny_config, write_config

pytestmark = [pytest.mark.gpu, needs_vllm]

PROMPTS = [(5, 6, 7), (40, 41, 42, 43, 44), (9,)]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        ([[0, 0]], {"tensor_parallel_size": 2}),
        ([[0, 0]], {"vllm": {"pipeline_parallel_size": 2}}),
        ([[0], [0]], {}),
    ],
    ids=["tp=2", "pp=2", "engines=2"],
)
def test_several_ranks_share_a_gpu(tmp_path: Path, devices: Any, settings: dict[str, Any]) -> None:
    config = tiny_config("qwen3", hidden_size=128, head_dim=32, num_layers=3)
    directory, engine = write_config(tmp_path / "model", config), engine_options(dtype="float32", **settings)
    placed = dict(engines=len(devices), devices=devices, share_gpus=True)
    with slipstream.launch(directory, engine=engine, run_dir=tmp_path / "run", start_timeout=400, **placed) as fleet:
        names = [status.info.name for status in fleet.status().engines]
        for seed, transport in enumerate(("cuda", "nccl", "shm")):
            params = jax.tree.map(jnp.asarray, random_params(config, seed))
            with slipstream.connect(fleet.run_dir, transport=transport) as bridge:
                assert {sync.transport for sync in bridge.sync(params).engines} == {transport}
                verified = bridge.verify(params)
                assert verified.is_same and not verified.unchecked
                for name in names:
                    for completion, prompt in zip(bridge.generate(PROMPTS, GREEDY, engine=name), PROMPTS):
                        wanted = greedy_reference(Subject(None, config, params), prompt, 10)  # type: ignore[arg-type]
                        assert completion.token_ids == wanted, (name, transport, prompt)
