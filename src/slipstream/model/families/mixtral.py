"""Mixtral: Mistral with experts in every layer, under different names."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.model.config import ModelConfig
from slipstream.model.families import llama
from slipstream.model.families.family import Family, FamilyTensor, Mlp

NAMES = Mlp("block_sparse_moe", gate="w1", up="w3", down="w2")


def tensors(config: ModelConfig) -> Iterator[FamilyTensor]:
    yield from llama.decoder(config, lambda at, _: llama.experts(config, at, NAMES))


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    tensors,
    mlp=NAMES,
    has_experts=True,
    settings=frozenset({"sliding_window"}),
    defaults={
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    },
)
