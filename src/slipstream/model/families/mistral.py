"""Mistral: Llama with an optional sliding window in all layers."""

from __future__ import annotations

from slipstream.model.families import llama
from slipstream.model.families.family import Family

FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    llama.tensors,
    settings=frozenset({"sliding_window"}),
    defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
)
