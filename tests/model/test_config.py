"""Reading and writing HF configs, and refusing what would be computed wrongly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from tests.tiny import VARIANTS, tiny_config, variant


def written(path: Path, hf: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(hf))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.mark.parametrize("name", VARIANTS)
def test_to_hf_and_back_is_the_same(name: str, tmp_path: Path) -> None:
    config = variant(name)
    assert ModelConfig.read(written(tmp_path, config.to_hf())) == config


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_reads_what_we_write_and_we_what_it_writes(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = variant(name)
    AutoConfig.from_pretrained(written(tmp_path, config.to_hf())).save_pretrained(tmp_path / "theirs")
    assert ModelConfig.read(tmp_path / "theirs") == config


def test_old_configs_leave_much_out() -> None:
    """As Llama 2 wrote it: no head_dim, no key-value heads, rope_theta on the top level."""
    hf = tiny_config(num_kv_heads=4).to_hf()
    for name in ("head_dim", "num_key_value_heads", "rope_parameters", "rope_scaling", "bos_token_id", "pad_token_id"):
        del hf[name]
    config = ModelConfig.from_hf(hf | {"rope_theta": 123.0})
    assert config == tiny_config(num_kv_heads=4, rope_theta=123.0, bos_token_id=None, pad_token_id=None)


def test_generation_config_adds_end_of_sequence_tokens(tmp_path: Path) -> None:
    hf = tiny_config(eos_token_ids=(7,)).to_hf()
    assert ModelConfig.read(written(tmp_path, hf, {"eos_token_id": [9, 7]})).eos_token_ids == (7, 9)
    assert ModelConfig.read(written(tmp_path, hf, {"eos_token_id": 9})).eos_token_ids == (7, 9)
    assert ModelConfig.read(written(tmp_path, hf, {})).eos_token_ids == (7,)


def test_fingerprint_tells_weights_apart_and_nothing_else() -> None:
    config = tiny_config()
    assert config.fingerprint() == replace(config, eos_token_ids=(5, 6), max_position_embeddings=7).fingerprint()
    for change in ({"hidden_size": 64}, {"rope_theta": 7.0}, {"tie_word_embeddings": True}, {"family": "qwen2"}):
        assert replace(config, **change).fingerprint() != config.fingerprint()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 64}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads"),
        ({"head_dim": 7}, "even"),
        ({"vocab_size": 0}, "vocab_size must be positive"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ModelConfig.from_hf(tiny_config().to_hf() | change)


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        ModelConfig.read(tmp_path)
    hf = tiny_config().to_hf()
    del hf["hidden_size"]
    with pytest.raises(ConfigError, match="lacks 'hidden_size'"):
        ModelConfig.read(written(tmp_path, hf))
