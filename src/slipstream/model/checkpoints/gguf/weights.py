"""Convert a GGUF file's metadata to a `ModelConfig`, and its tensors to HF names and row order."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from slipstream.errors import ConfigError
from slipstream.model.checkpoints.gguf.file import GgufFile
from slipstream.model.config import LinearRopeScaling, ModelConfig
from slipstream.model.families import family_of

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_TOP = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": "output_norm.weight", "lm_head.weight": HEAD}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
"""Supported values of `general.architecture`, which are also names of our families. True if rows of q and k are permuted for
rotary embeddings that pair neighbors instead of halves."""


def model_config(file: GgufFile) -> ModelConfig:
    """Return the config. `named_tensors` checks it against the shapes of the tensors."""
    name = file.string("general.architecture")
    if name not in _ARCHITECTURES:
        raise file.error(
            f"field general.architecture is {name!r}; supported: {', '.join(_ARCHITECTURES)}. For others, use an HF directory"
        )
    _check_supported(file, name)
    if EMBEDDING not in file.tensors:
        raise file.error(f"tensor {EMBEDDING} is missing")
    hidden, heads = file.integer(f"{name}.embedding_length"), file.integer(f"{name}.attention.head_count")
    head_dim = file.integer(f"{name}.attention.key_length", max(hidden // heads, 1))
    for field in ("attention.value_length", "rope.dimension_count"):
        if (found := file.integer(f"{name}.{field}", head_dim)) != head_dim:
            raise file.error(f"field {name}.{field} is {found}, but the head size is {head_dim}; they must be equal")
    num_layers = file.integer(f"{name}.block_count")
    if num_layers > len(file.tensors):
        raise file.error(f"field {name}.block_count is {num_layers}, but the file has only {len(file.tensors)} tensors")
    vocabulary = file.shape(EMBEDDING)[0]
    tokens = {key: token_id(file, key, vocabulary) for key in ("bos", "eos", "eot", "padding")}
    ends = (token for token in (tokens["eos"], tokens["eot"]) if token is not None)
    try:
        return ModelConfig(
            family=name,
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=file.integer(f"{name}.feed_forward_length"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=file.integer(f"{name}.attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=file.integer(f"{name}.context_length"),
            rope_theta=file.number(f"{name}.rope.freq_base", 10_000.0),
            rope_scaling=_rope_scaling(file, name),
            rms_norm_eps=file.number(f"{name}.attention.layer_norm_rms_epsilon"),
            tie_word_embeddings=HEAD not in file.tensors,
            eos_token_ids=tuple(dict.fromkeys(ends)),
            bos_token_id=tokens["bos"],
            pad_token_id=tokens["padding"],
        )
    except ConfigError as error:
        if str(file.path) in str(error):
            raise
        raise file.error(f"its fields are not valid for a {name} model: {error}") from None


def token_id(file: GgufFile, key: str, vocabulary: int) -> int | None:
    """Return the id of a special token: `token_id(file, "eos", 49152)`."""
    field = f"tokenizer.ggml.{key}_token_id"
    if not file.has(field):
        return None
    found = file.integer(field, minimum=0)
    if found >= vocabulary:
        raise file.error(f"field {field} is {found}, but token ids are 0 to {vocabulary - 1}")
    return found


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's HF name and its name in the file. If `heads` is not 0, its rows must be permuted to HF's order."""

    name: str
    stored: str
    heads: int = 0

    def read(self, file: GgufFile) -> np.ndarray:
        values = file.read(self.stored)
        return to_hf_rows(values, self.heads) if self.heads else values


def named_tensors(file: GgufFile, config: ModelConfig) -> list[GgufTensor]:
    """Return all tensors of the model. Raise unless the file has exactly these, with their shapes."""
    named: list[GgufTensor] = []
    for tensor in family_of(config).tensors(config):
        stored = gguf_name(tensor.name)
        if stored not in file.tensors:
            raise file.error(f"tensor {stored} is missing, which its fields require")
        if (shape := file.shape(stored)) != tensor.shape:
            raise file.error(f"tensor {stored} is {shape}, expected {tensor.shape} from the file's fields")
        is_permuted = _ARCHITECTURES[config.family] and re.search(r"\.[qk]_proj\.", tensor.name)
        named.append(GgufTensor(tensor.name, stored, tensor.units if is_permuted else 0))
    if extra := set(file.tensors) - {tensor.stored for tensor in named}:
        some = ", ".join(sorted(extra)[:4])
        raise file.error(f"{len(extra)} tensor(s) are unexpected for a {config.family} model with its fields: {some}")
    return named


def gguf_name(name: str) -> str:
    """Convert an HF name: `model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER[module]}.{kind}"


def to_hf_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Permute rows from GGUF's order, rotated pairs adjacent, to HF's, where they are `head_dim / 2` rows apart."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _rope_scaling(file: GgufFile, name: str) -> LinearRopeScaling | None:
    kind = file.string(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise file.error(f"field {name}.rope.scaling.type is {kind!r}; supported: none, linear")
    return LinearRopeScaling(file.number(f"{name}.rope.scaling.factor"))


def _check_supported(file: GgufFile, name: str) -> None:
    """Raise for features that the decoder would silently ignore, which would give wrong logits."""
    if (parts := file.integer("split.count", 1, minimum=0)) > 1:
        raise file.error(f"it is one of {parts} parts; merge them first (llama-gguf-split --merge)")
    if file.integer(f"{name}.expert_count", 0, minimum=0):
        raise file.error(f"field {name}.expert_count is set; models with experts are not supported")
    if "rope_freqs.weight" in file.tensors:
        raise file.error("tensor rope_freqs.weight (a scale per rotary frequency) is not supported")
