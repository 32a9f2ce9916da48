"""Tiny random models for tests, made on the spot: configs for our own decoder, and the same as HF directories."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.model.config import ModelConfig, RopeScaling
from slipstream.model.tree import flatten, unflatten
from slipstream.weights.families import tensors

VARIANTS = ("llama", "llama-tied", "llama3-rope", "qwen2", "qwen3")
"""What `variant` and `hf_directory` know: every family, and the switches that change a forward pass."""

_ROPE = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
_OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama3-rope": {"rope_scaling": _ROPE, "rope_theta": 500.0},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "rope_theta": 1e6},
}


def tiny_config(family: str = "llama", **over: Any) -> ModelConfig:
    """A decoder of some 20,000 parameters; `over` replaces any field."""
    config = ModelConfig(
        family=family,
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        eos_token_ids=(1,),
        bos_token_id=2,
        pad_token_id=0,
    )
    return replace(config, **over)


def variant(name: str, **over: Any) -> ModelConfig:
    """The config of one of `VARIANTS`."""
    family = name.split("-")[0].replace("llama3", "llama")
    return tiny_config(family, **(_OVERRIDES[name] | over))


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Weights large enough that logits differ, with random biases and norms: left at zero and one, code that forgets
    them would pass."""
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)
    leaves = {}
    for spec in tensors(config):
        center, scale = (0.0, 0.2) if len(spec.shape) > 1 else (0.0, 0.5) if spec.name.endswith("bias") else (1.0, 0.3)
        leaves[spec.name] = jnp.asarray(center + scale * rng.standard_normal(spec.shape), jnp.float32)
    return unflatten(leaves)


def hf_model(config: ModelConfig, seed: int = 0) -> Any:
    """A `transformers` model of this config with the same `random_params`, float32, in eval mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = config.to_hf()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(hf.pop("model_type"), **hf)).eval()
    leaves = {name: np.array(leaf) for name, leaf in flatten(random_params(config, seed)).items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(leaves.pop(name)))
    assert not leaves, f"transformers has no {list(leaves)}"
    return model


def hf_directory(path: Path, name: str = "llama", seed: int = 0, tokenizer: bool = False, **over: Any) -> Path:
    """A directory as `transformers` saves it, for one of `VARIANTS`."""
    hf_model(variant(name, **over), seed).save_pretrained(path)
    if tokenizer:
        write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> Path:
    """A `tokenizer.json` over characters: `<pad>` 0, `<eos>` 1, `<bos>` 2, `<unk>` 3, then a to z, digits, a space."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = "abcdefghijklmnopqrstuvwxyz0123456789 "
    vocab = {token: i for i, token in enumerate(("<pad>", "<eos>", "<bos>", "<unk>", *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>"])
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str())))
    return path
