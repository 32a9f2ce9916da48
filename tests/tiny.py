"""Tiny random models for tests: configs for our decoder, and the same models as HF directories."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.model.checkpoints.hf_config import to_hf
from slipstream.model.config import FULL, SLIDING, LinearRopeScaling, ModelConfig, MoeConfig, RopeScaling
from slipstream.model.families import tensors
from slipstream.model.tree import unflatten

VARIANTS = (
    "llama",
    "llama-tied",
    "llama-llama3-rope",
    "llama-linear-rope",
    "mistral",
    "mistral-no-window",
    "qwen2",
    "qwen3",
    "mixtral",
    "mixtral-window",
    "qwen3_moe",
    "qwen3_moe-dense-layer",
    "gemma2",
    "gemma3_text",
    "gemma3_text-linear-rope",
)
"""What `variant` and `hf_directory` know: every family, and the switches that change a forward pass. Windows are shorter
than the sequences of the tests."""

_ROPE = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
_FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 6},
    "mixtral": {"moe": MoeConfig(4, 2, 48), "rms_norm_eps": 1e-5},
    "qwen3_moe": {"moe": MoeConfig(5, 2, 24, normalize=False), "head_dim": 16},
    "gemma2": {
        "tie_word_embeddings": True,
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": (SLIDING, FULL),
        "query_pre_attn_scalar": 24.0,
        "attn_softcap": 3.0,
        "final_softcap": 4.0,
    },
    "gemma3_text": {
        "tie_word_embeddings": True,
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": (SLIDING, FULL),
        "query_pre_attn_scalar": 24.0,
        "rope_theta": 5000.0,
        "rope_local_theta": 100.0,
    },
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "llama-tied": {"tie_word_embeddings": True},
    "llama-llama3-rope": {"rope_scaling": _ROPE, "rope_theta": 500.0},
    "llama-linear-rope": {"rope_scaling": LinearRopeScaling(4.0)},
    "mistral-no-window": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "rope_theta": 1e6},
    "mixtral-window": {"sliding_window": 6},
    "qwen3_moe-dense-layer": {"moe": MoeConfig(4, 3, 24, dense_layers=(0,))},
    "gemma3_text-linear-rope": {"rope_scaling": LinearRopeScaling(8.0), "final_softcap": 4.0},
}


def tiny_config(family: str = "llama", **over: Any) -> ModelConfig:
    """A decoder of some 20,000 parameters; `over` replaces any field."""
    shape: dict[str, Any] = dict(
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
    return ModelConfig(family=family, **(shape | _FAMILIES.get(family, {}) | over))


def variant(name: str, **over: Any) -> ModelConfig:
    """The config of one of `VARIANTS`."""
    return replace(tiny_config(name.split("-")[0]), **(_VARIANTS.get(name, {}) | over))


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
    from transformers import AutoModelForCausalLM

    from slipstream.model.checkpoints import hf_weights

    with tempfile.TemporaryDirectory() as directory:
        hf_weights.save(directory, random_params(config, seed), config)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True, local_files_only=True
        )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loaded[problem], f"{problem}: {loaded[problem]}"
    return model.eval()


def hf_greedy(module: Any, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """What transformers itself generates, wherever the module is."""
    import torch

    ids = torch.tensor([list(prompt)], device=module.device)
    found = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(found[0, len(prompt) :].tolist())


def served(bridge: Any, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """What engines generate greedily. One prompt at a time: in a batch on a GPU, rounding depends on the others."""
    from slipstream.types import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return [bridge.generate([tuple(prompt)], greedy)[0].token_ids for prompt in prompts]


def hf_directory(path: Path, name: str = "llama", seed: int = 0, tokenizer: bool = False, **over: Any) -> Path:
    """A directory as `transformers` saves it, for one of `VARIANTS`."""
    hf_model(variant(name, **over), seed).save_pretrained(path)
    if tokenizer:
        write_tokenizer(path)
    return path


def write_config(path: Path, config: ModelConfig) -> Path:
    """A directory without weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(to_hf(config)))
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
