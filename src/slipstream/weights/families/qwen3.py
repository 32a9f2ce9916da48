"""Qwen3: Llama with an RMS norm on each head of q and k."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.model.config import ModelConfig
from slipstream.weights.families import llama
from slipstream.weights.families.base import FamilyTensor


def tensors(config: ModelConfig) -> Iterator[FamilyTensor]:
    yield from llama.tensors(config)
    for i in range(config.num_layers):
        for name in ("q_norm", "k_norm"):
            yield FamilyTensor(f"model.layers.{i}.self_attn.{name}.weight", (config.head_dim,))
