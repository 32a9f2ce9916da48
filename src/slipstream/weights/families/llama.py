"""Llama, and what looks like it (SmolLM, Mistral). The other dense families add to it."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.model.config import ModelConfig
from slipstream.weights.families.base import FamilyTensor


def tensors(config: ModelConfig) -> Iterator[FamilyTensor]:
    vocab, hidden = config.vocab_size, config.hidden_size
    yield FamilyTensor("model.embed_tokens.weight", (vocab, hidden), split_dim=0, units=vocab)
    for i in range(config.num_layers):
        yield from layer(config, f"model.layers.{i}.")
    yield FamilyTensor("model.norm.weight", (hidden,))
    if not config.tie_word_embeddings:
        yield FamilyTensor("lm_head.weight", (vocab, hidden), split_dim=0, units=vocab)


def layer(config: ModelConfig, at: str) -> Iterator[FamilyTensor]:
    hidden, inner, heads, kv_heads = config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads
    q, kv = heads * config.head_dim, kv_heads * config.head_dim
    yield FamilyTensor(at + "input_layernorm.weight", (hidden,))
    yield FamilyTensor(at + "self_attn.q_proj.weight", (q, hidden), split_dim=0, units=heads)
    yield FamilyTensor(at + "self_attn.k_proj.weight", (kv, hidden), split_dim=0, units=kv_heads)
    yield FamilyTensor(at + "self_attn.v_proj.weight", (kv, hidden), split_dim=0, units=kv_heads)
    yield FamilyTensor(at + "self_attn.o_proj.weight", (hidden, q), split_dim=1, units=heads)
    yield FamilyTensor(at + "post_attention_layernorm.weight", (hidden,))
    yield FamilyTensor(at + "mlp.gate_proj.weight", (inner, hidden), split_dim=0, units=inner)
    yield FamilyTensor(at + "mlp.up_proj.weight", (inner, hidden), split_dim=0, units=inner)
    yield FamilyTensor(at + "mlp.down_proj.weight", (hidden, inner), split_dim=1, units=inner)
