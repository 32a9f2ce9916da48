"""Qwen3: Llama with an RMS norm on each head of q and k."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.model.config import ModelConfig
from slipstream.model.families import llama
from slipstream.model.families.family import Family, FamilyTensor


def tensors(config: ModelConfig) -> Iterator[FamilyTensor]:
    yield from llama.tensors(config)
    for i in range(config.num_layers):
        yield from llama.qk_norms(config, f"model.layers.{i}.")


FAMILY = Family("qwen3", "Qwen3ForCausalLM", tensors, defaults={"head_dim": 128})
