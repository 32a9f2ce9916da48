"""Families: tensors compared with `transformers`, sharding, and registering a family."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from slipstream.errors import ConfigError, MappingError
from slipstream.model import families
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.hf_config import read_config, to_hf
from slipstream.model.transformer import decoder
from tests.conformance.engines import Subject, greedy_reference
from tests.tiny import random_params, tiny_config, variant

forward = jax.jit(decoder.forward, static_argnums=1)

SHAPE = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=1,
)
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 4},
    "gemma2": {"sliding_window": 7},
    "gemma3_text": {"sliding_window": 7, "sliding_window_pattern": 2},
}
"""Settings of tiny models in `transformers`; others have the default of the config class."""


@pytest.mark.parametrize("family", OWN)
def test_a_model_made_by_transformers_alone(family: str, tmp_path: Path) -> None:
    """Config and tensors are read as saved, and give the same logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SHAPE | OWN[family]))).float().eval()
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    stored = {name: array.shape for name, array in load_file(tmp_path / "model.safetensors").items()}
    assert {t.name: t.shape for t in families.tensors(config)} == stored
    tokens = np.random.default_rng(0).integers(3, 96, (2, 30))
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)).logits.numpy()
    assert np.abs(theirs).max() > 0.5
    np.testing.assert_allclose(forward(hf_weights.load(tmp_path), config, tokens), theirs, atol=2e-4, rtol=0)


def test_every_family_is_tested() -> None:
    assert set(families.names()) == set(OWN)


def test_the_decoder_inside_a_gemma3_with_images(tmp_path: Path) -> None:
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = SHAPE | OWN["gemma3_text"]
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    whole = Gemma3Config(
        text_config=text,
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=95,
    )
    model = Gemma3ForConditionalGeneration(whole).eval()
    model.save_pretrained(tmp_path / "whole")
    config, params = read_config(tmp_path / "whole"), hf_weights.load(tmp_path / "whole")
    tokens = np.random.default_rng(0).integers(3, 90, (1, 20))
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(forward(params, config, tokens), theirs, atol=2e-4, rtol=0)
    hf_weights.save(tmp_path / "text", params, config)
    assert read_config(tmp_path / "text") == config


def test_experts_are_split_inside_and_routers_are_whole() -> None:
    for name, at in (("mixtral", "block_sparse_moe"), ("qwen3_moe", "mlp")):
        config = variant(name)
        w1, w3, w2 = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        dims = families.shard_dims(config, 2)
        at = f"model.layers.1.{at}"
        assert dims[f"{at}.gate.weight"] is None
        expert = [dims[f"{at}.experts.3.{matrix}.weight"] for matrix in (w1, w3, w2)]
        assert expert == [0, 0, 1]


def test_norms_are_whole_on_every_rank() -> None:
    dims = families.shard_dims(variant("gemma3_text"), 2)
    assert {dim for name, dim in dims.items() if "norm" in name} == {None}


def test_a_tp_that_would_cut_an_expert_unevenly_is_refused() -> None:
    config = variant("qwen3_moe", intermediate_size=64, num_heads=16, num_kv_heads=16)
    with pytest.raises(ConfigError, match=r"tp=16 does not divide .*moe\.intermediate_size \(24\)"):
        families.shard_dims(config, 16)


# --- a family from outside ---


PAGE = (Path(__file__).parents[2] / "docs" / "add-a-family.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def biased_llama() -> Iterator[str]:
    """Run the code in docs/add-a-family.md, and remove the family afterwards."""
    exec(compile(CODE, "docs/add-a-family.md", "exec"), {})
    yield "biased_llama"
    del families._FAMILIES["biased_llama"]


def test_the_page_adds_a_family_that_computes_what_it_says(biased_llama: str, tmp_path: Path) -> None:
    """In transformers the same model is a Llama with attention_bias, under other names."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = tiny_config(biased_llama)
    params = random_params(config)
    hf_weights.save(tmp_path, params, config)
    assert read_config(tmp_path) == config
    named = hf_weights.flatten(hf_weights.load(tmp_path))

    hf = to_hf(tiny_config()) | {"attention_bias": True}
    model = LlamaForCausalLM(LlamaConfig(**hf)).eval()
    ours = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for theirs_name, our_name in ours.items():
                name = name.replace(theirs_name, our_name)
            parameter.copy_(torch.from_numpy(np.array(named.pop(name))))
    assert not named
    tokens = np.random.default_rng(0).integers(3, 96, (2, 20))
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(forward(params, config, tokens), theirs, atol=2e-4, rtol=0)


def test_an_added_family_refuses_the_tensors_of_another(biased_llama: str, tmp_path: Path) -> None:
    with pytest.raises(MappingError, match=r"q_proj\.bias"):
        hf_weights.save(tmp_path, random_params(tiny_config()), tiny_config(biased_llama))


def test_a_name_is_registered_once() -> None:
    families.register(families.family_named("llama"))  # no effect
    with pytest.raises(ConfigError, match="'llama' is already registered"):
        families.register(families.Family("llama", "MyLlama", families.llama.tensors))
    assert families.family_named("llama").architecture == "LlamaForCausalLM"


LAUNCH = """
import sys, slipstream
from slipstream.config import EmbeddedConfig
from slipstream.model.checkpoints import hf_weights

model, other, run_dir, plugin = sys.argv[1:]
greedy = slipstream.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
config = EmbeddedConfig(max_num_seqs=4, tensor_parallel_size=2, plugins=[plugin])
with slipstream.launch(model, engine=config, run_dir=run_dir) as bridge:
    print(bridge.generate([(1, 2, 3)], greedy)[0].token_ids)
    bridge.sync(hf_weights.load(other))
    print(bridge.generate([(1, 2, 3)], greedy)[0].token_ids)
"""


@pytest.mark.parametrize("plugin", ["marks", "other_families"])
def test_launched_engines_serve_a_family_of_an_installed_package(
    biased_llama: str, tmp_path: Path, plugin: str
) -> None:
    """By its entry point, on two devices each, and again after an update. A plugin that is named is imported as well."""
    (tmp_path / "own_families.py").write_text(CODE)
    (tmp_path / "own-1.0.dist-info").mkdir()
    (tmp_path / "own-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    entries = f"[{families.ENTRY_POINTS}]\nbiased_llama = own_families\n"
    (tmp_path / "own-1.0.dist-info" / "entry_points.txt").write_text(entries)
    seen = tmp_path / "seen"
    (tmp_path / "marks.py").write_text(f"import os\nopen({str(seen)!r}, 'a').write(f'{{os.getpid()}}\\n')\n")
    config = tiny_config(biased_llama, num_layers=1)
    models = [random_params(config, seed) for seed in (0, 9)]
    for seed, params in enumerate(models):
        hf_weights.save(tmp_path / str(seed), params, config)
    arguments = [str(tmp_path / name) for name in ("0", "1", "run")]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *arguments, plugin],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if plugin == "other_families":
        assert "ConfigError: the plugin 'other_families' cannot be imported: No module named" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(set(seen.read_text().split())) == 2, "the trainer and the engine"
    subject = Subject(None, config, models[0])  # type: ignore[arg-type]
    expected = [str(greedy_reference(subject, (1, 2, 3), 4, params)) for params in models]
    assert done.stdout.splitlines() == expected and len(set(expected)) == 2
