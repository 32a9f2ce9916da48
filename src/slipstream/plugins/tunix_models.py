"""Tunix's models: their configs as a `ModelConfig`, and LoRA adapters merged into kernels.

The config is taken from Tunix's model, not from its checkpoint, so that engines compute exactly what Tunix computes: Tunix's
Llama, for example, ignores the rotary scaling in the `config.json` of Llama 3.1. Neither Tunix nor Flax is imported here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from slipstream.errors import ConfigError
from slipstream.model.checkpoints.hf_config import from_hf, to_hf
from slipstream.model.config import FULL, SLIDING, LinearRopeScaling, ModelConfig, MoeConfig

_LORA_A, _LORA_B = "_lora_a", "_lora_b"
_GEMMA3_PERIOD = 6
"""The last of this many layers has full attention."""


def model_config(model: Any, max_length: int) -> ModelConfig:
    """Return the config of a Tunix model. Raise `ConfigError` for unknown models and unsupported features."""
    theirs: Any = getattr(model, "config", None)
    kind = type(theirs).__module__.removeprefix("tunix.models.").removesuffix(".model")
    if kind not in _KINDS:
        raise ConfigError(
            f"the actor is a {type(model).__name__} with a config of {type(theirs).__module__}.{type(theirs).__qualname__}; "
            f"supported are Tunix's {', '.join(_KINDS)}. For another model pass model=, a directory with its HF config.json, "
            "and mapping=, a slipstream.weights.sources.tree_mapping.TreeMapping"
        )
    shape = dict(
        hidden_size=theirs.embed_dim,
        intermediate_size=theirs.hidden_dim,
        num_layers=theirs.num_layers,
        num_heads=theirs.num_heads,
        num_kv_heads=theirs.num_kv_heads,
        head_dim=theirs.head_dim,
        max_position_embeddings=max_length,
    )
    # A round trip, so that the result equals what is read from a config.json.
    return from_hf(to_hf(ModelConfig(**shape, **_KINDS[kind](model))))


def _llama(model: Any) -> dict[str, Any]:
    return _plain(model, "llama", model.config.weight_tying)


def _qwen2(model: Any) -> dict[str, Any]:
    return _plain(model, "qwen2", model.config.use_tied_embedding)


def _qwen3(model: Any) -> dict[str, Any]:
    theirs = model.config
    if theirs.num_experts is None:
        return _plain(model, "qwen3", theirs.use_tied_embedding)
    moe = MoeConfig(theirs.num_experts, theirs.num_experts_per_tok, theirs.hidden_dim)
    return _plain(model, "qwen3_moe", theirs.use_tied_embedding) | {"moe": moe}


def _plain(model: Any, family: str, tied: bool) -> dict[str, Any]:
    return dict(
        family=family,
        vocab_size=model.config.vocab_size,
        rope_theta=float(_rotary_base(model)),
        rms_norm_eps=model.config.norm_eps,
        tie_word_embeddings=tied,
    )


def _rotary_base(model: Any) -> Any:
    """Return the rotary base. Up to Tunix 0.1.7, Llama and Qwen3 ignore the config and use the default of `apply_rope`."""
    attention = type(model.layers[0].attn).block
    rope = attention.__globals__.get("apply_rope")
    if rope is None or "rope_theta" in attention.__code__.co_names:
        return model.config.rope_theta
    return inspect.signature(rope).parameters["rope_theta"].default


def _gemma2(model: Any) -> dict[str, Any]:
    theirs = model.config
    if not (theirs.use_post_attn_norm and theirs.use_post_ffw_norm):
        raise ConfigError("the actor is a first-generation Gemma; only Gemma 2 and 3 are supported")
    local = [kind.name == "LOCAL_SLIDING" for kind in theirs.attention_types]
    return _gemma("gemma2", theirs, local) | dict(
        attn_softcap=theirs.attn_logits_soft_cap, final_softcap=theirs.final_logit_softcap
    )


def _gemma3(model: Any) -> dict[str, Any]:
    theirs = model.config
    if theirs.vision_config is not None:
        raise ConfigError("the actor has a vision encoder, which engines do not support; create it with text_only=True")
    if theirs.local_scale_factor != 1:
        raise ConfigError(
            f"local_scale_factor is {theirs.local_scale_factor}; engines support scaling of global layers only"
        )
    by_head = theirs.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_HEAD_DIM"
    scaled = theirs.global_scale_factor != 1
    return _gemma("gemma3_text", theirs, [(i + 1) % _GEMMA3_PERIOD != 0 for i in range(theirs.num_layers)]) | dict(
        query_pre_attn_scalar=float(theirs.head_dim if by_head else theirs.embed_dim // theirs.num_heads),
        rope_theta=float(theirs.global_base_frequency),
        rope_scaling=LinearRopeScaling(theirs.global_scale_factor) if scaled else None,
        rope_local_theta=float(theirs.local_base_frequency),
    )


def _gemma(family: str, theirs: Any, local: list[bool]) -> dict[str, Any]:
    return dict(
        family=family,
        vocab_size=theirs.num_embed,
        tie_word_embeddings=True,
        sliding_window=theirs.sliding_window_size,
        layer_types=tuple(SLIDING if slides else FULL for slides in local),
    )


_KINDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama3": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma2,
    "gemma3": _gemma3,
}


def with_adapters(model: Any, leaves: Mapping[str, Any], alpha: float | None) -> dict[str, Any]:
    """Return the leaves with LoRA adapters merged into their kernels: `w + alpha / rank · a·b`, as `qwix.LoraProvider` applies
    them. `model` determines which dimensions of a kernel they span."""
    plain = {name: leaf for name, leaf in leaves.items() if not name.endswith((_LORA_A, _LORA_B))}
    for name in leaves:
        if not name.endswith(_LORA_A):
            continue
        if alpha is None:
            raise ConfigError(
                f"the actor has LoRA adapters ({name}, …); pass lora_alpha=, the alpha of its LoraProvider"
            )
        kernel = name.removesuffix(_LORA_A)
        a, b = leaves[name], leaves[kernel + _LORA_B]
        plain[kernel] = _merged(plain[kernel], a, b, alpha / a.shape[-1], _equation(model, kernel))
    return plain


@functools.partial(jax.jit, static_argnums=(3, 4))
def _merged(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float, equation: str) -> jax.Array:
    delta = jnp.einsum(equation, a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
    return (kernel.astype(jnp.float32) + scale * delta).astype(kernel.dtype)


def _equation(model: Any, kernel: str) -> str:
    """Return the einsum that makes a kernel from `a` and `b`: `Dr,rNH->NDH` for `BTD,NDH->BTNH`."""
    module = model
    for part in kernel.split(".")[:-1]:
        module = module[int(part)] if part.isdigit() else getattr(module, part)
    # Linear layers are `[in, out]`.
    inputs, weights = getattr(module, "einsum_str", "bi,io->bo").partition("->")[0].split(",")
    contracted = "".join(dim for dim in weights if dim in inputs)
    kept = "".join(dim for dim in weights if dim not in inputs)
    return f"{contracted}r,r{kept}->{weights}"
