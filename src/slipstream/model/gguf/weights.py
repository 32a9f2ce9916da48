"""A GGUF's decoder in Hugging Face terms: its `ModelConfig`, and its tensors by HF name, in HF's order of rows."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from slipstream.errors import ConfigError
from slipstream.model.config import LinearRopeScaling, ModelConfig
from slipstream.model.gguf.file import GgufFile

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
"""By `general.architecture`, which is also our family's name: whether rows of q and k were reordered for a rotary
embedding that turns neighbours instead of halves."""


def model_config(file: GgufFile) -> ModelConfig:
    """Checked against the shapes of the tensors by `named_tensors`, not here."""
    name = file.string("general.architecture")
    if name not in _ARCHITECTURES:
        raise file.error(
            f"field general.architecture is {name!r}; convertible: {', '.join(_ARCHITECTURES)}. Others need an HF directory"
        )
    _refuse_what_would_be_wrong(file, name)
    if EMBEDDING not in file.tensors:
        raise file.error(f"tensor {EMBEDDING} is missing")
    hidden, heads = file.integer(f"{name}.embedding_length"), file.integer(f"{name}.attention.head_count")
    head_dim = file.integer(f"{name}.attention.key_length", max(hidden // heads, 1))
    for field in ("attention.value_length", "rope.dimension_count"):
        if (found := file.integer(f"{name}.{field}", head_dim)) != head_dim:
            raise file.error(f"field {name}.{field} is {found}, but heads have {head_dim}; they must be the same here")
    num_layers = file.integer(f"{name}.block_count")
    if num_layers > len(file.tensors):
        raise file.error(f"field {name}.block_count is {num_layers}, but there are {len(file.tensors)} tensors in all")
    vocabulary = file.tensors[EMBEDDING].shape[0]
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
        raise file.error(f"its fields do not make a {name} model: {error}") from None


def token_id(file: GgufFile, key: str, vocabulary: int) -> int | None:
    """Of a special token: `token_id(file, "eos", 49152)`."""
    field = f"tokenizer.ggml.{key}_token_id"
    if not file.has(field):
        return None
    found = file.integer(field, least=0)
    if found >= vocabulary:
        raise file.error(f"field {field} is {found}, but tokens are 0 to {vocabulary - 1}")
    return found


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor under both names. `heads` is not 0 where its rows must be brought back into HF's order."""

    name: str
    stored: str
    heads: int = 0

    def read(self, file: GgufFile) -> np.ndarray:
        values = file.read(self.stored)
        return halves(values, self.heads) if self.heads else values


def named_tensors(file: GgufFile, config: ModelConfig) -> list[Named]:
    """All tensors of the model; each is there with its shape, and the file holds no others."""
    found: list[Named] = []
    for tensor in config.definition.tensors(config):
        stored = gguf_name(tensor.name)
        if stored not in file.tensors:
            raise file.error(f"tensor {stored} is missing, which a {config.family} model of its fields needs")
        if (shape := file.tensors[stored].shape) != tensor.shape:
            raise file.error(f"tensor {stored} is {shape}, expected {tensor.shape} from the file's fields")
        turned = _ARCHITECTURES[config.family] and re.search(r"\.[qk]_proj\.", tensor.name)
        found.append(Named(tensor.name, stored, tensor.units if turned else 0))
    if extra := set(file.tensors) - {tensor.stored for tensor in found}:
        some = ", ".join(sorted(extra)[:4])
        raise file.error(f"{len(extra)} tensor(s) have no place in a {config.family} model of its fields: {some}")
    return found


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER[module]}.{kind}"


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """From the order of a GGUF, where the two rows of a head that are rotated together lie side by side, to HF's, where
    row `i` is rotated with row `i + head_dim / 2`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _rope_scaling(file: GgufFile, name: str) -> LinearRopeScaling | None:
    kind = file.string(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise file.error(f"field {name}.rope.scaling.type is {kind!r}; supported: none, linear")
    return LinearRopeScaling(file.number(f"{name}.rope.scaling.factor"))


def _refuse_what_would_be_wrong(file: GgufFile, name: str) -> None:
    """What we would compute differently is an error, not a surprise in the logits."""
    if (parts := file.integer("split.count", 1, least=0)) > 1:
        raise file.error(f"it is one of {parts} parts; merge them first (llama-gguf-split --merge)")
    if file.integer(f"{name}.expert_count", 0, least=0):
        raise file.error(f"field {name}.expert_count is set; models with experts are not convertible")
    if "rope_freqs.weight" in file.tensors:
        raise file.error("tensor rope_freqs.weight scales rotary frequencies one by one, which is not supported here")
