"""Llama and models with the same architecture (SmolLM). The other families are built from these functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slipstream.model.config import ModelConfig
from slipstream.model.families.family import Family, FamilyTensor, Mlp

NAMES = Mlp()


def tensors(config: ModelConfig) -> Iterator[FamilyTensor]:
    yield from decoder(config, lambda at, _: mlp(at + "mlp.", config.hidden_size, config.intermediate_size))


def decoder(config: ModelConfig, feed_forward: Callable[[str, int], Iterator[FamilyTensor]]) -> Iterator[FamilyTensor]:
    """Yield the tensors of a Llama with another feed-forward part: `feed_forward("model.layers.3.", 3)`."""
    vocab, hidden = config.vocab_size, config.hidden_size
    yield FamilyTensor("model.embed_tokens.weight", (vocab, hidden), split_dim=0, units=vocab)
    for i in range(config.num_layers):
        at = f"model.layers.{i}."
        yield FamilyTensor(at + "input_layernorm.weight", (hidden,))
        yield from attention(config, at)
        yield FamilyTensor(at + "post_attention_layernorm.weight", (hidden,))
        yield from feed_forward(at, i)
    yield FamilyTensor("model.norm.weight", (hidden,))
    if config.num_labels:
        yield FamilyTensor("score.weight", (config.num_labels, hidden))
    elif not config.tie_word_embeddings:
        yield FamilyTensor("lm_head.weight", (vocab, hidden), split_dim=0, units=vocab)


def attention(config: ModelConfig, at: str) -> Iterator[FamilyTensor]:
    hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
    q, kv = heads * config.head_dim, kv_heads * config.head_dim
    yield FamilyTensor(at + "self_attn.q_proj.weight", (q, hidden), split_dim=0, units=heads)
    yield FamilyTensor(at + "self_attn.k_proj.weight", (kv, hidden), split_dim=0, units=kv_heads)
    yield FamilyTensor(at + "self_attn.v_proj.weight", (kv, hidden), split_dim=0, units=kv_heads)
    yield FamilyTensor(at + "self_attn.o_proj.weight", (hidden, q), split_dim=1, units=heads)


def qk_norms(config: ModelConfig, at: str) -> Iterator[FamilyTensor]:
    """Yield the norms on the heads of q and k."""
    for name in ("q_norm", "k_norm"):
        yield FamilyTensor(f"{at}self_attn.{name}.weight", (config.head_dim,))


def mlp(at: str, hidden: int, inner: int, names: Mlp = NAMES) -> Iterator[FamilyTensor]:
    """Yield the three matrices of an MLP or of one expert."""
    yield FamilyTensor(f"{at}{names.gate}.weight", (inner, hidden), split_dim=0, units=inner)
    yield FamilyTensor(f"{at}{names.up}.weight", (inner, hidden), split_dim=0, units=inner)
    yield FamilyTensor(f"{at}{names.down}.weight", (hidden, inner), split_dim=1, units=inner)


def experts(config: ModelConfig, at: str, names: Mlp = NAMES) -> Iterator[FamilyTensor]:
    """Yield a replicated router, and experts that are each sharded like a dense MLP."""
    assert config.moe is not None, "family_of refuses a config without experts"
    yield FamilyTensor(f"{at}{names.block}.gate.weight", (config.moe.num_experts, config.hidden_size))
    for expert in range(config.moe.num_experts):
        yield from mlp(f"{at}{names.block}.experts.{expert}.", config.hidden_size, config.moe.intermediate_size, names)


FAMILY = Family("llama", "LlamaForCausalLM", tensors)
