"""Gemma 3 (text): Gemma 2 with q/k norms instead of the attention soft cap, and mostly local layers with a separate rotary
base. The decoder inside a `gemma3` model (text and images) is the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from slipstream.model.config import ModelConfig
from slipstream.model.families import gemma2, llama
from slipstream.model.families.family import FamilyTensor


def tensors(config: ModelConfig) -> Iterator[FamilyTensor]:
    yield from gemma2.tensors(config)
    for i in range(config.num_layers):
        yield from llama.qk_norms(config, f"model.layers.{i}.")


def stored_name(name: str) -> str | None:
    """Map names of a `gemma3` checkpoint, where the decoder is below `language_model.`; drop the vision parts."""
    if name.startswith(("vision_tower.", "multi_modal_projector.")):
        return None
    return name.removeprefix("language_model.")


FAMILY = dataclasses.replace(
    gemma2.FAMILY,
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    tensors=tensors,
    settings=gemma2.FAMILY.settings - {"attn_logit_softcapping"} | {"rope_local_base_freq"},
    # Complete, because the text_config of a published `gemma3` omits whatever equals a default.
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
