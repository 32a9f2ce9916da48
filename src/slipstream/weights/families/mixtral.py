"""Mixtral: Mistral with experts, under names of its own, in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slipstream.weights.families import llama
from slipstream.weights.families.base import Family, FamilyTensor, Mlp

if TYPE_CHECKING:
    from slipstream.model.config import ModelConfig

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
