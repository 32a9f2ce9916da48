"""LoRA in the decoder against transformers, and adapters in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slipstream.errors import ConfigError, MappingError
from slipstream.model.checkpoints.peft import CONFIG, WEIGHTS, load_adapter, save_adapter
from slipstream.model.families import tensors
from slipstream.model.lora import targets
from slipstream.model.transformer import decoder
from slipstream.model.transformer.adapters import init_adapter, merged, with_adapter
from slipstream.model.tree import flatten
from slipstream.types import Lora
from tests.adapters import adapted, random_adapter
from tests.model.test_decoder import forward, hf_logits, random_tokens
from tests.tiny import hf_model, random_params, tiny_config, variant

MODEL = tiny_config()
LORA = Lora("math", 4, 6.0, ("q_proj", "v_proj", "down_proj"))


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "qwen3_moe-dense-layer"])
def test_logits_equal_transformers(name: str) -> None:
    """In all projections outside of experts: with biases, with norms on heads, with experts."""
    config = variant(name)
    lora = Lora("all", 3, 6.0, targets(tensors(config)))
    params, tokens = random_params(config), random_tokens(config, 2, 20)
    adapter: Any = jax.tree.map(jnp.asarray, random_adapter(config, lora, seed=1, size=0.2))
    module = hf_model(config)
    plain = hf_logits(module, tokens)
    with adapted(module, adapter, lora):
        expected = hf_logits(module, tokens)
    assert np.abs(expected - plain).max() > 0.1
    np.testing.assert_allclose(forward(with_adapter(params, adapter, lora), config, tokens), expected, atol=2e-4)
    np.testing.assert_allclose(forward(merged(params, adapter, lora), config, tokens), expected, atol=2e-4)


def test_a_new_adapter_changes_nothing() -> None:
    params, tokens = random_params(MODEL), random_tokens(MODEL, 1, 8)
    adapter = init_adapter(MODEL, LORA, jax.random.key(0))
    assert {float(jnp.abs(leaf).max()) > 0 for name, leaf in flatten(adapter).items() if "lora_A" in name} == {True}
    found = decoder.forward(with_adapter(params, adapter, LORA), MODEL, jnp.asarray(tokens))
    np.testing.assert_array_equal(found, decoder.forward(params, MODEL, jnp.asarray(tokens)))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    adapter = random_adapter(MODEL, LORA, seed=2)
    save_adapter(tmp_path / "math", adapter, LORA, "my-model")
    loaded, lora = load_adapter(tmp_path / "math", MODEL)
    assert lora == LORA and sorted(file.name for file in (tmp_path / "math").iterdir()) == [CONFIG, WEIGHTS]
    jax.tree.map(np.testing.assert_array_equal, loaded, adapter)
    stored = load_file(tmp_path / "math" / WEIGHTS)
    assert stored["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (4, 32)
    config = json.loads((tmp_path / "math" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6.0, "my-model")

    # Layers that it does not change; and rank-stabilized LoRA, whose scale is alpha / √rank.
    kept = {name: array for name, array in stored.items() if ".layers.1." in name}
    save_file(kept, tmp_path / "math" / WEIGHTS)
    (tmp_path / "math" / CONFIG).write_text(json.dumps(config | {"use_rslora": True}))
    loaded, lora = load_adapter(tmp_path / "math", MODEL, name="other")
    assert lora == Lora("other", 4, 12.0, LORA.targets)
    assert {float(np.abs(leaf).max()) for name, leaf in flatten(loaded).items() if ".layers.0." in name} == {0.0}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"use_dora": True}, ConfigError, "use_dora is True; supported: False"),
        ({"rank_pattern": {"q_proj": 2}}, ConfigError, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, ConfigError, "modules_to_save"),
        ({"peft_type": "IA3"}, ConfigError, "peft_type is 'IA3'"),
        ({"r": "4"}, ConfigError, "not the config of a LoRA adapter.*r is '4'"),
        ({"r": 8}, MappingError, r"lora_A.weight has shape \[4, .*rank 8 for this model has \[8"),
    ],
)
def test_what_cannot_be_computed_is_refused(change: Any, error: Any, text: str, tmp_path: Path) -> None:
    save_adapter(tmp_path, random_adapter(MODEL, LORA, seed=2), LORA, "my-model")
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(error, match=text):
        load_adapter(tmp_path, MODEL)
    with pytest.raises(ConfigError, match=r"not the config of a LoRA adapter"):
        load_adapter(tmp_path / "nowhere", MODEL)
