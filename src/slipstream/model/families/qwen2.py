"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.model.config import ModelConfig
from slipstream.model.families import llama
from slipstream.model.families.family import Family, FamilyTensor


def tensors(config: ModelConfig) -> Iterator[FamilyTensor]:
    yield from llama.tensors(config)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
    for i in range(config.num_layers):
        for name, units in heads.items():
            shape = (units * config.head_dim,)
            yield FamilyTensor(f"model.layers.{i}.self_attn.{name}.bias", shape, split_dim=0, units=units)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", tensors, settings=frozenset({"attention_bias"}))
