"""Settings of vLLM engines on a GPU: float16, results that do not depend on the batch, and a draft model."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import slipstream
from slipstream.config import VllmConfig
from slipstream.errors import NonFiniteWeights
from slipstream.types import SamplingParams
from tests.gpu.vllm import PYTHON, engine_options, needs_vllm
from tests.tiny import random_params, tiny_config, write_config
from tests.vllm.draft_syncs import check_syncs, speculation
from tests.vllm.random_models import GROUPED

pytestmark = [pytest.mark.gpu, needs_vllm]


def test_float16_and_what_does_not_fit_into_it(tmp_path: Path) -> None:
    config = tiny_config("qwen3", hidden_size=128, head_dim=32)
    directory, engine = write_config(tmp_path / "model", config), engine_options(dtype="float16")
    params = jax.tree.map(jnp.asarray, random_params(config))
    with slipstream.launch(directory, engine=engine, run_dir=tmp_path / "run", start_timeout=300) as bridge:
        bridge.sync(params)
        verified = bridge.verify(params)
        assert verified.is_same and not verified.unchecked
        norm = {"weight": params["model"]["norm"]["weight"] * 1e6}
        with pytest.raises(NonFiniteWeights, match=r"model\.norm\.weight"):
            bridge.sync({**params, "model": {**params["model"], "norm": norm}})
        assert bridge.verify(params).is_same


def test_results_do_not_depend_on_the_batch_bit_for_bit(tmp_path: Path) -> None:
    config = tiny_config("qwen3", hidden_size=1024, head_dim=64, num_heads=16, num_kv_heads=8, intermediate_size=2048)
    directory = write_config(tmp_path / "model", config)
    engine = engine_options(dtype="bfloat16", deterministic=True, max_num_seqs=32, kv_cache_tokens=8192)
    prompts = [tuple((5 + 7 * i + j) % 90 + 3 for j in range(3 + i)) for i in range(24)]
    sampling = SamplingParams(max_tokens=32, seed=11, ignore_eos=True)
    with slipstream.launch(directory, engine=engine, run_dir=tmp_path / "run", start_timeout=300) as bridge:
        bridge.sync(jax.tree.map(jnp.asarray, random_params(config)))
        together = bridge.generate(prompts, sampling)
        for prompt, completion in list(zip(prompts, together))[::5]:
            (alone,) = bridge.generate([prompt], sampling)
            assert (alone.token_ids, alone.logprobs) == (completion.token_ids, completion.logprobs)


def test_syncs_update_a_draft_model_with_the_policy(tmp_path: Path) -> None:
    import transformers

    config = transformers.Qwen3Config(**GROUPED, head_dim=32, architectures=["Qwen3ForCausalLM"])

    def start(policy: Path, draft: Path) -> slipstream.Bridge:
        settings = {"max_num_seqs": 2, "max_model_len": 64, "enforce_eager": True, "kv_cache_tokens": 4096}
        engine = VllmConfig(python=PYTHON, dtype="float32", vllm=speculation(draft), **settings)
        return slipstream.launch(policy, engine=engine, run_dir=tmp_path / "run", start_timeout=200)

    check_syncs(start, tmp_path, config)
