"""Mistral: Llama whose layers, where the config sets a window, all look back no further than that."""

from __future__ import annotations

from slipstream.weights.families import llama
from slipstream.weights.families.base import Family

FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    llama.tensors,
    settings=frozenset({"sliding_window"}),
    defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
)
