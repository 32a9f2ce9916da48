"""Mappings of known trainers' trees, made from a `ModelConfig`: the path and the layout of every leaf.

D is the hidden size, F the MLP's, V the vocabulary's, H (or KV) the number of heads, K the head's, L the layers' number.
A library may change its names between versions; a tree that does not fit is refused by leaf, before anything is sent."""

from __future__ import annotations

import math

from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.weights import families
from slipstream.weights.transforms import Merge, Permute, Rotary, Scale, Step, Take, Unstack
from slipstream.weights.trees import Rule, Target, TreeMapping

_MAXTEXT = ("llama", "qwen2", "qwen3")
_TUNIX_GEMMA = ("gemma2", "gemma3_text")
_TUNIX = ("llama", "qwen2", "qwen3", "qwen3_moe", *_TUNIX_GEMMA)
_FLIP = (Permute((1, 0)),)  # [in, out] → [out, in]
_HEADS_OUT = (Permute((1, 2, 0)), Merge(0))  # [D, H, K] → [H * K, D]
_HEADS_IN = (Merge(0), Permute((1, 0)))  # [H, K, D] → [D, H * K]
_LAYER = "model.layers.{layer}."


def identity(config: ModelConfig) -> TreeMapping:
    """A tree that mirrors the checkpoint, as Slipstream's own decoder has it."""
    expected = families.tensors(config)
    return TreeMapping(tuple(Rule(spec.name, Target(spec.name)) for spec in expected), expected)


def tunix(config: ModelConfig) -> TreeMapping:
    """Google Tunix (`tunix.models`; Flax NNX), as its own loaders map safetensors: einsum kernels `w` with a dimension for the
    heads, linear `kernel`s of `[in, out]`. Its Llama, Qwen2 and Qwen3 have a kernel for each of q, k and v, its Gemmas
    k and v in one (q as well, where there are as many of them). Pass `nnx.state(model, nnx.Param)`."""
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
    """Kernels of q, k and v are `[D, H, K]`, o_proj's `[H, K, D]`, biases flat; experts are stacked in front: `[E, D, F]`."""
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
    """The kernel of q is `[H, D, K]`, that of k and v `[2, KV, D, K]`; of all three, where H is KV, `[3, H, D, K]`."""
    at = "layers.{layer}."
    heads: tuple[Step, ...] = (Permute((0, 2, 1)), Merge(0))  # [H, D, K] → [H * K, D]
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
    """MaxText, as its checkpoint converter maps it. Scanned (`scan_layers=True`, `param_scan_axis=1`) every layer's leaf is
    a stack on dimension 1: query `[D, L, H, K]`, out `[H, L, K, D]`, wi_0 `[D, L, F]`, norms `[D, L]`; otherwise each layer
    is `layers_{n}`. For Llama its rotary embedding is interleaved and the query kernel holds `1 / sqrt(K)`; for Qwen
    neither. Qwen2's biases are taken to be `[H, L, K]` like the kernels, which is not checked against MaxText itself.
    The embedding and the head may have rows of padding beyond the vocabulary, which are left out.

    `prefix` is `params.` for Linen's variables and `base.` for the NNX model that MaxText hands to Tunix."""
    if config.family not in _MAXTEXT:
        raise _no_mapping(config, "maxtext", _MAXTEXT)
    at = prefix + ("decoder.layers." if scanned else "decoder.layers_{layer}.")
    first: tuple[Step, ...] = (Unstack(1, "layer"),) if scanned else ()
    turn: tuple[Step, ...] = (Rotary(2, config.head_dim),) if config.family == "llama" else ()
    scale: tuple[Step, ...] = (Scale(math.sqrt(config.head_dim)),) if config.family == "llama" else ()
    vocabulary = Take(0, 0, config.vocab_size)
    layer: dict[str, tuple[str, tuple[Step, ...]]] = {
        "self_attention.query.kernel": ("self_attn.q_proj.weight", (*scale, *turn, *_HEADS_OUT)),
        "self_attention.key.kernel": ("self_attn.k_proj.weight", (*turn, *_HEADS_OUT)),
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
        *(Rule(at + leaf, Target(_LAYER + name, (*first, *steps))) for leaf, (name, steps) in layer.items()),
    ]
    return TreeMapping(tuple(rules), families.tensors(config))


def _no_mapping(config: ModelConfig, library: str, known: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        f"there is no {library} mapping for {config.family} models yet (there is for {', '.join(known)}); declare one "
        "with slipstream.weights.trees.TreeMapping"
    )
