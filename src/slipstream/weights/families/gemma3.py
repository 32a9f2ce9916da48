"""Gemma 3, text: Gemma 2 with norms on q and k instead of the soft cap on attention, mostly local layers, and a rotary
base of its own for these. The decoder inside a `gemma3` (text and images) is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slipstream.weights.families import gemma2, llama
from slipstream.weights.families.base import Family, FamilyTensor

if TYPE_CHECKING:
    from slipstream.model.config import ModelConfig


def tensors(config: ModelConfig) -> Iterator[FamilyTensor]:
    yield from gemma2.tensors(config)
    for i in range(config.num_layers):
        yield from llama.qk_norms(config, f"model.layers.{i}.")


def stored_name(name: str) -> str | None:
    """A checkpoint of the whole `gemma3` holds the decoder below `language_model.`, beside the parts for images."""
    if name.startswith(("vision_tower.", "multi_modal_projector.")):
        return None
    return name.removeprefix("language_model.")


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    tensors,
    activation="gelu_tanh",
    norms=gemma2.NORMS,
    norm_offset=1.0,
    scale_embedding=True,
    settings=frozenset(
        {"sliding_window", "layer_types", "query_pre_attn_scalar", "final_logit_softcapping", "rope_local_base_freq"}
    ),
    # All of them: the text_config of a published `gemma3` leaves out whatever equals a default.
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "max_position_embeddings": 131_072,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    stored_name=stored_name,
)
