"""Tiny random models for tests, made on the spot: configs for our own decoder, and the same as HF directories."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.model.config import ModelConfig, RopeScaling

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


def hf_model(config: ModelConfig, seed: int = 0) -> Any:
    """A random `transformers` model of this config, float32, in eval mode. Biases and norms are random too: left at
    zero and one, a decoder that forgets them would pass."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    hf = config.to_hf()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(hf.pop("model_type"), **hf)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(0.2 * noise)
    return model


def hf_directory(path: Path, name: str = "llama", seed: int = 0, tokenizer: bool = False, **over: Any) -> Path:
    """A directory as `transformers` saves it, for one of `VARIANTS`."""
    hf_model(variant(name, **over), seed).save_pretrained(path)
    if tokenizer:
        write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> Path:
    """A `tokenizer.json` over single characters: `<pad>` 0, `<eos>` 1, `<bos>` 2, then `a` to `z`, digits and a space."""
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
