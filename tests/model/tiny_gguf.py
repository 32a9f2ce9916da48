"""GGUF files of tiny models, written with the `gguf` package, and their expected contents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slipstream.model.config import LinearRopeScaling, ModelConfig
from slipstream.model.tree import flatten
from tests.tiny import random_params, tiny_config

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
TEXT = "the cat sat on the mat and the hat, 123 45 6; it's the cat's hat. The end of the matter!\n" * 3
_MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


@dataclass
class Written:
    path: Path
    config: ModelConfig
    params: dict[str, np.ndarray]
    """Parameters by HF name, quantized as in the file."""
    tokenizer: Tokenizer


def gguf_config(family: str = "llama", **over: Any) -> ModelConfig:
    """Return a config with rows in multiples of 32, as quantized types require."""
    shape = dict(vocab_size=320, intermediate_size=64, eos_token_ids=(2,), bos_token_id=1, pad_token_id=0)
    return tiny_config(family, **(shape | over))


def trained_tokenizer(pre_tokenizer: Any = None) -> Tokenizer:
    """Return a byte-level BPE tokenizer with some merges and about 310 tokens, special ones first."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=310, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def write_gguf(
    path: Path,
    config: ModelConfig | None = None,
    *,
    types: Mapping[str, str] | None = None,
    fields: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    extra: Mapping[str, np.ndarray] | None = None,
    architecture: str = "",
    pre: str = "smollm",
) -> Written:
    """Write a GGUF file. `types` maps the end of a tensor's name in the file to a quantized type; others are F32. `fields`
    replaces or adds metadata; `without` omits fields and tensors."""
    config = config or gguf_config()
    name, tokenizer = architecture or config.family, trained_tokenizer()
    metadata = {**_shape(config, name), **_vocabulary(tokenizer, config, pre), **(fields or {})}
    writer = gguf.GGUFWriter(str(path), name)
    for key, value in metadata.items():
        if key not in without:
            _add(writer, key, value)
    params, stored = {}, {}
    for hf_name, values in flatten(random_params(config)).items():
        in_file, values = _name(hf_name), np.asarray(values)
        kind = next((t for end, t in (types or {}).items() if in_file.endswith(end)), "F32")
        kind = gguf.GGMLQuantizationType[kind]
        raw = gguf.quantize(values, kind)
        params[hf_name] = gguf.dequantize(raw, kind).astype(np.float32)
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(in_file.split(".")[-2])
        stored[in_file] = (_side_by_side(raw, heads) if heads and config.family == "llama" else raw, kind)
    for in_file, (raw, kind) in stored.items():
        if in_file not in without:
            writer.add_tensor(in_file, raw, raw_dtype=None if raw.dtype == np.float32 else kind)
    for in_file, values in (extra or {}).items():
        writer.add_tensor(in_file, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(path, config, params, tokenizer)


def _side_by_side(rows: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the halves of each head's rows, as converters of Llama to GGUF do."""
    size = len(rows) // heads
    order = [
        head * size + i + half * (size // 2) for head in range(heads) for i in range(size // 2) for half in range(2)
    ]
    return np.ascontiguousarray(rows[order])


def _name(hf_name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, kind = hf_name.rpartition(".")
    if module in top:
        return f"{top[module]}.{kind}"
    return f"blk.{module.split('.')[2]}.{_MODULES[module.split('.')[-1]]}.{kind}"


def _shape(config: ModelConfig, name: str) -> dict[str, Any]:
    fields = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "rope.freq_base": config.rope_theta,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
    }
    if config.head_dim * config.num_heads != config.hidden_size:
        fields |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if isinstance(config.rope_scaling, LinearRopeScaling):
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_scaling.factor}
    return {f"{name}.{key}": value for key, value in fields.items()}


def _vocabulary(tokenizer: Tokenizer, config: ModelConfig, pre: str) -> dict[str, Any]:
    import json

    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [3 if token in SPECIAL else 1 for token in tokens]
    unused = range(len(tokens), config.vocab_size)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{i}]" for i in unused)],
        "tokenizer.ggml.token_type": [*kinds, *(5 for _ in unused)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_ids[0],
        "tokenizer.ggml.padding_token_id": config.pad_token_id,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
