"""Qwen3-MoE: Qwen3 with experts in all layers except those that the config makes dense."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.model.config import ModelConfig
from slipstream.model.families import llama
from slipstream.model.families.family import Family, FamilyTensor


def tensors(config: ModelConfig) -> Iterator[FamilyTensor]:
    def feed_forward(at: str, layer: int) -> Iterator[FamilyTensor]:
        if config.moe is not None and layer in config.moe.dense_layers:
            return llama.mlp(at + "mlp.", config.hidden_size, config.intermediate_size)
        return llama.experts(config, at)

    yield from llama.decoder(config, feed_forward)
    for i in range(config.num_layers):
        yield from llama.qk_norms(config, f"model.layers.{i}.")


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    tensors,
    has_experts=True,
    settings=frozenset({"norm_topk_prob", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step"}),
    defaults={"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8},
)
