"""Models that our decoder does not know, described by the tensors of their checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import slipstream
from slipstream.errors import ConfigError, UnknownArchitecture
from slipstream.model import families
from slipstream.model.checkpoints.served_model import served_model
from tests.tiny import tiny_config, write_config

CONFIG: dict[str, Any] = {"model_type": "gpt_neox", "vocab_size": 48, "eos_token_id": 3}


def write(at: Path, tensors: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    (at / "config.json").write_text(json.dumps(CONFIG | config))
    if tensors is not None:
        save_file(tensors, at / "model.safetensors")
    return at


def test_the_tensors_are_those_of_the_checkpoint_without_masks(tmp_path: Path) -> None:
    layer = "gpt_neox.layers.0.attention."
    tensors = {
        "gpt_neox.embed_in.weight": np.zeros((48, 8), ml_dtypes.bfloat16),
        f"{layer}dense.bias": np.zeros(8, ml_dtypes.bfloat16),
        f"{layer}bias": np.zeros((1, 1, 4, 4), bool),
        f"{layer}masked_bias": np.zeros((), np.float32),
        f"{layer}rotary_emb.inv_freq": np.zeros(4, np.float32),
    }
    write(tmp_path, tensors)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    model = served_model(tmp_path)
    shapes = {"gpt_neox.embed_in.weight": (48, 8), f"{layer}dense.bias": (8,)}
    assert {t.name: t.shape for t in model.tensors} == shapes
    assert (model.vocab_size, model.eos_token_ids, model.dtype, model.config) == (48, (3, 5), "bfloat16", None)
    other = served_model(write(tmp_path, {**tensors, "gpt_neox.embed_in.weight": np.zeros((48, 9), np.float32)}))
    assert model.fingerprint().startswith("gpt_neox-") and model.fingerprint() != other.fingerprint()


def test_settings_may_be_those_of_the_text_part(tmp_path: Path) -> None:
    text = {"vocab_size": 7, "dtype": "bfloat16"}
    write(tmp_path, {"a.weight": np.zeros(3, np.float32)}, model_type="llava", vocab_size=None, text_config=text)
    model = served_model(tmp_path)
    assert (model.vocab_size, model.dtype, model.kind) == (7, "bfloat16", "llava")


def test_a_known_family_with_a_setting_that_the_decoder_lacks_is_described_by_its_tensors(tmp_path: Path) -> None:
    path = write_config(tmp_path, tiny_config("llama")) / "config.json"
    known = served_model(tmp_path)
    assert known.config == tiny_config("llama") and known.tensors == families.tensors(tiny_config("llama"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_bias": True}))
    save_file({"model.norm.weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    assert served_model(tmp_path).config is None and len(served_model(tmp_path).tensors) == 1


def test_what_cannot_be_served_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="quantized checkpoints are not supported"):
        served_model(write(tmp_path, {"a": np.zeros(2, np.float32)}, quantization_config={"quant_method": "fp8"}))
    (tmp_path / "model.safetensors").unlink()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ConfigError, match=r"'gpt_neox' is not supported.*has no weights, and transformers is not instal"
    ):
        served_model(write(tmp_path))
    with pytest.raises(UnknownArchitecture, match="Engines of kind 'vllm' serve every model that vLLM does"):
        slipstream.launch(tmp_path)
