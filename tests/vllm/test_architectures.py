"""Models that our decoder does not know, in real vLLM: weights go through vLLM's own loader, in the same transaction."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jax.numpy as jnp
import pytest

import slipstream
from slipstream.config import VllmConfig
from slipstream.errors import NotReady
from tests.tiny import hf_greedy, served
from tests.vllm.random_models import GROUPED, PROMPT, new_weights
from tests.vllm.real import PYTHON, needs_vllm

pytestmark = needs_vllm

ROOT = Path(__file__).parents[2]
FAMILIES = ["phi3", "olmo2", "granite", "stablelm", "gpt_neox", "cohere"]


def test_ten_syncs_of_six_architectures_generate_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Also: a load that fails halfway leaves the old version, and trees that do not fit are refused."""
    done = subprocess.run(
        [PYTHON, "-m", "tests.vllm.architectures", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [answer["architecture"] for answer in found] == FAMILIES
    for family, answer in zip(FAMILIES, found):
        assert answer["tokens"] == answer["expected"], family  # of a checkpoint, of ten syncs, of a directory
        assert len({tuple(tokens) for tokens in answer["tokens"]}) == 12, family  # other weights, other tokens
        assert answer["model"].startswith(family) and answer["same_tensors"], family
        assert all(answer["kept"]) and len(answer["kept"]) == (20 if family == "granite" else 1), family
        for error in answer["errors"]:
            assert error.startswith(
                "EngineFailure: engine 'engine' failed loading version 11: MemoryError: no room for"
            )
        first = answer["first"]
        assert f"missing: {first} [" in answer["refused"]["missing"], family
        assert "not in the model: extra.weight [3]" in answer["refused"]["unknown"], family
        assert f"{first}: the engine expects shape" in answer["refused"]["shape"], family


def test_a_launched_engine_serves_an_unknown_architecture(tmp_path: Path) -> None:
    """Without weights at first: transformers knows the tensors. The trainer's tree is a flat dict of HF names."""
    import transformers

    config = transformers.StableLmConfig(**GROUPED, architectures=["StableLmForCausalLM"])
    config.save_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    options = VllmConfig(python=PYTHON, max_num_seqs=2, max_model_len=64)
    with slipstream.launch(tmp_path / "model", engine=options, run_dir=tmp_path / "run", start_timeout=200) as bridge:
        with pytest.raises(NotReady):
            bridge.generate([PROMPT])
        for seed in (1, 2):
            new_weights(model, seed)
            tree = {name: jnp.asarray(tensor.numpy()) for name, tensor in model.state_dict().items()}
            report = bridge.sync(tree)
            assert report.num_bytes == sum(leaf.nbytes for leaf in tree.values()) and report.engines[0].checksummed
            assert served(bridge, [PROMPT], 8) == [hf_greedy(model, PROMPT, 8)]
        model.model.norm.weight.data *= -1
        norm = {"model.norm.weight": jnp.asarray(model.model.norm.weight.detach().numpy())}
        assert bridge.sync(norm, partial=True).num_bytes == norm["model.norm.weight"].nbytes
        assert served(bridge, [PROMPT], 8) == [hf_greedy(model, PROMPT, 8)]
        (engine,) = bridge.status().engines
        assert engine.info.vocab_size == 96 and engine.info.model.startswith("stablelm-")
