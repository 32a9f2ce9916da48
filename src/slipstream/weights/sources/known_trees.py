"""Tree mappings for known trainers, built from a `ModelConfig`: the path and layout of every leaf.

D is the hidden size, F the MLP size, V the vocabulary size, H (or KV) the number of heads, K the head size, L the
number of layers. Libraries may rename leaves between versions; a tree that does not match is refused, naming the leaf,
before anything is sent."""

from __future__ import annotations

import math

from slipstream.errors import ConfigError
from slipstream.model import families
from slipstream.model.config import ModelConfig
from slipstream.weights.sources.transforms import Merge, Permute, Rotary, Scale, Take, Transform, Unstack
from slipstream.weights.sources.tree_mapping import Rule, Target, TreeMapping

_MAXTEXT = ("llama", "qwen2", "qwen3")
_TUNIX_GEMMA = ("gemma2", "gemma3_text")
_TUNIX = ("llama", "qwen2", "qwen3", "qwen3_moe", *_TUNIX_GEMMA)
_FLIP = (Permute((1, 0)),)  # [in, out] → [out, in]
_HEADS_OUT = (Permute((1, 2, 0)), Merge(0))  # [D, H, K] → [H * K, D]
_HEADS_IN = (Merge(0), Permute((1, 0)))  # [H, K, D] → [D, H * K]
_LAYER = "model.layers.{layer}."


def identity(config: ModelConfig) -> TreeMapping:
    """Slipstream's own decoder: the tree mirrors the checkpoint."""
    expected = families.tensors(config)
    return TreeMapping(tuple(Rule(spec.name, Target(spec.name)) for spec in expected), expected)


def tunix(config: ModelConfig) -> TreeMapping:
    """Google Tunix (`tunix.models`; Flax NNX), following its safetensors loaders: einsum kernels `w` have a dimension
    for the heads, linear `kernel`s are `[in, out]`. Llama, Qwen2 and Qwen3 have separate q, k and v kernels. Gemmas
    fuse k and v, and q as well if it has as many heads. Pass `nnx.state(model, nnx.Param)`."""
    if config.family not in _TUNIX:
        raise _no_mapping(config, "tunix", _TUNIX)
    rules = _tunix_gemma(config.family) if config.family in _TUNIX_GEMMA else _tunix_llama()
    at = "layers.{layer}."
    rules += [
        Rule("embedder.input_embedding", Target("model.embed_tokens.weight")),
        *(
            Rule(f"{at}mlp.{x}_proj.kernel", Target(f"{_LAYER}mlp.{x}_proj.weight", _FLIP))
            for x in ("gate", "up", "down")
        ),
    ]
    return TreeMapping(tuple(rules), families.tensors(config))


def _tunix_llama() -> list[Rule]:
    """q, k and v are `[D, H, K]`, o_proj is `[H, K, D]`, biases are flat, experts are stacked first: `[E, D, F]`."""
    at = "layers.{layer}."
    experts = _LAYER + "mlp.experts.{expert}."
    return [
        Rule("final_norm.w", Target("model.norm.weight")),
        Rule("lm_head.w", Target("lm_head.weight", _FLIP)),
        Rule(at + "attn.o_proj.w", Target(_LAYER + "self_attn.o_proj.weight", _HEADS_IN)),
        *(Rule(f"{at}attn.{x}_proj.w", Target(f"{_LAYER}self_attn.{x}_proj.weight", _HEADS_OUT)) for x in "qkv"),
        *(Rule(f"{at}attn.{x}_bias", Target(f"{_LAYER}self_attn.{x}_proj.bias")) for x in "qkv"),
        *(Rule(f"{at}attn.{x}_norm.w", Target(f"{_LAYER}self_attn.{x}_norm.weight")) for x in "qk"),
        *(Rule(f"{at}{x}_layernorm.w", Target(f"{_LAYER}{x}_layernorm.weight")) for x in ("input", "post_attention")),
        Rule(at + "mlp.router.kernel", Target(_LAYER + "mlp.gate.weight", _FLIP)),
        *(
            Rule(f"{at}mlp.{x}_proj", Target(f"{experts}{x}_proj.weight", (Unstack(0, "expert"), *_FLIP)))
            for x in ("gate", "up", "down")
        ),
    ]


def _tunix_gemma(family: str) -> list[Rule]:
    """q is `[H, D, K]`, k and v together `[2, KV, D, K]`; with H == KV all three are `[3, H, D, K]`."""
    at = "layers.{layer}."
    heads: tuple[Transform, ...] = (Permute((0, 2, 1)), Merge(0))  # [H, D, K] → [H * K, D]
    norms = {
        "pre_attention_norm": "input_layernorm",
        "post_attn_norm" if family == "gemma2" else "post_attention_norm": "post_attention_layernorm",
        "pre_ffw_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn._query_norm": "self_attn.q_norm",
        "attn._key_norm": "self_attn.k_norm",
    }

    def fused(parts: str) -> Rule:
        return Rule(
            f"{at}attn.{parts}_einsum.w",
            *(
                Target(f"{_LAYER}self_attn.{x}_proj.weight", (Take(0, i, i + 1), Merge(0), *heads))
                for i, x in enumerate(parts)
            ),
        )

    return [
        Rule("final_norm.scale", Target("model.norm.weight")),
        Rule(at + "attn.attn_vec_einsum.w", Target(_LAYER + "self_attn.o_proj.weight", _HEADS_IN)),
        Rule(at + "attn.q_einsum.w", Target(_LAYER + "self_attn.q_proj.weight", heads)),
        fused("kv"),
        fused("qkv"),
        *(Rule(f"{at}{ours}.scale", Target(f"{_LAYER}{theirs}.weight")) for ours, theirs in norms.items()),
    ]


def maxtext(config: ModelConfig, scanned: bool = True, prefix: str = "params.") -> TreeMapping:
    """MaxText, following its checkpoint converter. With `scanned` (`scan_layers=True`, `param_scan_axis=1`) layer
    leaves are stacked on dimension 1: query `[D, L, H, K]`, out `[H, L, K, D]`, wi_0 `[D, L, F]`, norms `[D, L]`;
    otherwise each layer is `layers_{n}`. For Llama the rotary embedding is interleaved and the query kernel includes `1
    / sqrt(K)`; for Qwen neither holds. Qwen2 biases are assumed to be `[H, L, K]` like the kernels; this is not
    verified against MaxText. Padding rows of the embedding and the head beyond the vocabulary are dropped.

    `prefix` is `params.` for Linen variables and `base.` for the NNX model that MaxText passes to Tunix."""
    if config.family not in _MAXTEXT:
        raise _no_mapping(config, "maxtext", _MAXTEXT)
    at = prefix + ("decoder.layers." if scanned else "decoder.layers_{layer}.")
    unstack: tuple[Transform, ...] = (Unstack(1, "layer"),) if scanned else ()
    rotary: tuple[Transform, ...] = (Rotary(2, config.head_dim),) if config.family == "llama" else ()
    scale: tuple[Transform, ...] = (Scale(math.sqrt(config.head_dim)),) if config.family == "llama" else ()
    vocabulary = Take(0, 0, config.vocab_size)
    layer: dict[str, tuple[str, tuple[Transform, ...]]] = {
        "self_attention.query.kernel": ("self_attn.q_proj.weight", (*scale, *rotary, *_HEADS_OUT)),
        "self_attention.key.kernel": ("self_attn.k_proj.weight", (*rotary, *_HEADS_OUT)),
        "self_attention.value.kernel": ("self_attn.v_proj.weight", _HEADS_OUT),
        "self_attention.out.kernel": ("self_attn.o_proj.weight", _HEADS_IN),
        "self_attention.query.bias": ("self_attn.q_proj.bias", (Merge(0),)),
        "self_attention.key.bias": ("self_attn.k_proj.bias", (Merge(0),)),
        "self_attention.value.bias": ("self_attn.v_proj.bias", (Merge(0),)),
        "self_attention.query_norm.scale": ("self_attn.q_norm.weight", ()),
        "self_attention.key_norm.scale": ("self_attn.k_norm.weight", ()),
        "mlp.wi_0.kernel": ("mlp.gate_proj.weight", _FLIP),
        "mlp.wi_1.kernel": ("mlp.up_proj.weight", _FLIP),
        "mlp.wo.kernel": ("mlp.down_proj.weight", _FLIP),
        "pre_self_attention_layer_norm.scale": ("input_layernorm.weight", ()),
        "post_self_attention_layer_norm.scale": ("post_attention_layernorm.weight", ()),
    }
    rules = [
        Rule(prefix + "token_embedder.embedding", Target("model.embed_tokens.weight", (vocabulary,))),
        Rule(prefix + "decoder.decoder_norm.scale", Target("model.norm.weight")),
        Rule(prefix + "decoder.logits_dense.kernel", Target("lm_head.weight", (*_FLIP, vocabulary))),
        *(Rule(at + leaf, Target(_LAYER + name, (*unstack, *rest))) for leaf, (name, rest) in layer.items()),
    ]
    return TreeMapping(tuple(rules), families.tensors(config))


def _no_mapping(config: ModelConfig, library: str, known: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        f"no {library} mapping for {config.family} models (supported: {', '.join(known)}); declare one with "
        "slipstream.weights.sources.tree_mapping.TreeMapping"
    )
