"""Reading and writing HF configs, and refusing unsupported settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.model import families
from slipstream.model.checkpoints.hf_config import from_hf, read_config, to_hf
from slipstream.model.config import LinearRopeScaling, MoeConfig
from tests.tiny import VARIANTS, tiny_config, variant


def written(path: Path, hf: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(hf))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.mark.parametrize("name", VARIANTS)
def test_to_hf_and_back_is_the_same(name: str, tmp_path: Path) -> None:
    config = variant(name)
    assert read_config(written(tmp_path, to_hf(config))) == config


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_reads_what_we_write_and_we_what_it_writes(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = variant(name)
    AutoConfig.from_pretrained(written(tmp_path, to_hf(config))).save_pretrained(tmp_path / "theirs")
    assert read_config(tmp_path / "theirs") == config


def test_old_configs_leave_much_out() -> None:
    """A config like Llama 2's: no head_dim, no key-value heads, rope_theta at the top level."""
    hf = to_hf(tiny_config(num_kv_heads=4))
    for name in ("head_dim", "num_key_value_heads", "rope_parameters", "rope_scaling", "bos_token_id", "pad_token_id"):
        del hf[name]
    config = from_hf(hf | {"rope_theta": 123.0})
    assert config == tiny_config(num_kv_heads=4, rope_theta=123.0, bos_token_id=None, pad_token_id=None)


def test_generation_config_adds_end_of_sequence_tokens(tmp_path: Path) -> None:
    hf = to_hf(tiny_config(eos_token_ids=(7,)))
    assert read_config(written(tmp_path, hf, {"eos_token_id": [9, 7]})).eos_token_ids == (7, 9)
    assert read_config(written(tmp_path, hf, {"eos_token_id": 9})).eos_token_ids == (7, 9)
    assert read_config(written(tmp_path, hf, {})).eos_token_ids == (7,)


def test_the_dtype_in_either_spelling() -> None:
    hf = to_hf(tiny_config(dtype="bfloat16"))
    assert hf["torch_dtype"] == "bfloat16"
    del hf["torch_dtype"]
    assert from_hf(hf).dtype == "float32"
    assert from_hf(hf | {"torch_dtype": "float16"}).dtype == "float16"
    assert from_hf(hf | {"dtype": "bfloat16"}).dtype == "bfloat16"
    text = to_hf(variant("gemma3_text")) | {"torch_dtype": "float32"}
    assert from_hf({"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"}).dtype == "bfloat16"


def test_fingerprint_tells_weights_apart_and_nothing_else() -> None:
    config = tiny_config()
    assert (
        config.fingerprint()
        == replace(config, eos_token_ids=(5, 6), max_position_embeddings=7, dtype="bfloat16").fingerprint()
    )
    for change in ({"hidden_size": 64}, {"rope_theta": 7.0}, {"tie_word_embeddings": True}, {"family": "qwen2"}):
        assert replace(config, **change).fingerprint() != config.fingerprint()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 64}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads"),
        ({"head_dim": 7}, "even"),
        ({"vocab_size": 0}, "vocab_size must be positive"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        from_hf(to_hf(tiny_config()) | change)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0 .*not supported for llama models"),
        ("llama", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar"),
        ("llama", {"layer_types": ["sliding_attention", "full_attention"]}, "must have the same type"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "must have the same type"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_moe", {"num_experts_per_tok": 6}, r"experts_per_token \(6\) must be at most"),
        ("mixtral", {"num_experts": 0}, "num_experts must be positive"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "both directions"),
        ("gemma2", {"attention_bias": True}, "attention_bias"),
        ("gemma2", {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ("gemma2", {"layer_types": ["full_attention"]}, "has 1 entries"),
        ("gemma2", {"sliding_window": None}, "sliding_window is not set"),
        ("gemma2", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "one dict for all layers"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 5.0}}, "one dict each"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}}},
            "scales sliding_attention",
        ),
    ],
)
def test_what_a_family_does_not_have_is_refused(name: str, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        from_hf(to_hf(variant(name)) | change)


@pytest.mark.parametrize(
    ("family", "over", "text"),
    [
        ("llama", {"moe": MoeConfig(4, 2, 8)}, "cannot have experts"),
        ("mixtral", {"moe": None}, "needs experts"),
        ("llama", {"final_softcap": 3.0}, "have no final_logit_softcapping"),
        ("gemma3_text", {"rope_local_theta": None}, "needs rope_local_theta"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be positive"),
        ("gpt2", {}, r"unknown model family .*; known: llama, .*register"),
    ],
)
def test_configs_that_make_no_sense_are_refused(family: str, over: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        families.family_of(tiny_config(family, **over))


def test_gemma3_as_transformers_4_wrote_it() -> None:
    """The text_config has only non-default values; rotary scaling applies to global layers only."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = from_hf({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert (config.family, config.vocab_size, config.num_heads, config.num_kv_heads) == ("gemma3_text", 262208, 8, 4)
    assert (config.head_dim, config.tie_word_embeddings, config.eos_token_ids) == (256, True, (1, 106))
    assert (config.rope_theta, config.rope_local_theta, config.rope_scaling) == (1e6, 1e4, LinearRopeScaling(8.0))
    assert [i for i in range(34) if not config.slides(i)] == [5, 11, 17, 23, 29]
    assert config.attention(0).window == 1024 and config.attention(5).window is None
    with pytest.raises(ConfigError, match="text_config"):
        from_hf({"model_type": "gemma3"})


def test_gemma2_as_transformers_4_wrote_it() -> None:
    hf = to_hf(variant("gemma2"))
    for name in ("layer_types", "rope_parameters", "tie_word_embeddings"):
        del hf[name]
    assert from_hf(hf) == variant("gemma2")


def test_moe_layers_by_step_and_list() -> None:
    hf = to_hf(tiny_config("qwen3_moe", num_layers=6)) | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    del hf["num_local_experts"]  # transformers 4 writes num_experts, 5 the other
    moe = from_hf(hf).moe
    assert moe == MoeConfig(5, 2, 24, normalize=False, dense_layers=(0, 2, 3, 4))


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        read_config(tmp_path)
    hf = to_hf(tiny_config())
    del hf["hidden_size"]
    with pytest.raises(ConfigError, match="has no 'hidden_size'"):
        read_config(written(tmp_path, hf))
