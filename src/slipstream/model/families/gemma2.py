"""Gemma 2: norms before and after attention and MLP, soft caps, a sliding window in every other layer."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.model.config import ModelConfig
from slipstream.model.families import llama
from slipstream.model.families.family import Family, FamilyTensor, Norms


def tensors(config: ModelConfig) -> Iterator[FamilyTensor]:
    yield from llama.tensors(config)
    for i in range(config.num_layers):
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            yield FamilyTensor(f"model.layers.{i}.{name}.weight", (config.hidden_size,))


FAMILY = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    tensors,
    activation="gelu_tanh",
    norms=Norms(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    norm_offset=1.0,
    scale_embedding=True,
    settings=frozenset({"sliding_window", "layer_types", "query_pre_attn_scalar"})
    | {"attn_logit_softcapping", "final_logit_softcapping"},
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
    },
)
