"""One decoder for Llama, Qwen2 and Qwen3, as pure functions over a tree of parameters.

Trainer and engine run the same layers: they differ only in the `attention` they pass in (causal over a whole
sequence, or over a KV cache). The tree mirrors Hugging Face names, matrices in HF orientation (`[out, in]`):
`params["model"]["layers"][0]["self_attn"]["q_proj"]["weight"]`. The loop over layers is unrolled, so that every tensor
is an array of its own and a new version of it is swapped in by reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.model.config import ModelConfig
from slipstream.model.tree import unflatten
from slipstream.weights.families import tensors

if TYPE_CHECKING:
    from jax.typing import DTypeLike

Params: TypeAlias = dict[str, Any]
"""Nested dicts (a list for the layers); joining a leaf's path with dots gives its HF name."""

Attention: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""`attention(q, k, v, cache_layer) -> (out, cache_layer)`; q and out are `[batch, time, heads, head_dim]`, k and v have
`kv_heads`. Called once per layer, with that layer's entry of the cache."""

# Accelerators multiply float32 matrices in TF32 or bfloat16 unless told otherwise, and then trainer and engine differ
# by more than a policy ratio can bear. For bfloat16 inputs this changes nothing.
_PRECISION = jax.lax.Precision.HIGHEST


def init(config: ModelConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random weights: matrices normal with deviation 0.02, norms one, biases zero. Equal keys give equal weights."""
    leaves: dict[str, jax.Array] = {}
    for index, spec in enumerate(tensors(config)):
        if spec.name.endswith("bias"):
            leaves[spec.name] = jnp.zeros(spec.shape, dtype)
        elif len(spec.shape) == 1:
            leaves[spec.name] = jnp.ones(spec.shape, dtype)
        else:
            normal = jax.random.normal(jax.random.fold_in(key, index), spec.shape, jnp.float32)
            leaves[spec.name] = (0.02 * normal).astype(dtype)
    return unflatten(leaves)


def forward(params: Params, config: ModelConfig, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
    """Causal logits `[batch, time, vocab]` in float32. Padding on the right changes nothing to its left."""
    if positions is None:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    hidden, _ = apply_layers(params, config, tokens, positions, causal_attention, None)
    return unembed(params, config, hidden)


def logprobs(params: Params, config: ModelConfig, tokens: jax.Array, temperature: float = 1.0) -> jax.Array:
    """`[batch, time - 1]`: the log-probability of each next token, `[:, i]` that of `tokens[:, i + 1]`."""
    logits = forward(params, config, tokens[:, :-1]) / temperature
    return token_logprobs(logits, tokens[:, 1:])


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-probability of `tokens[...]` under `logits[..., vocab]`."""
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def apply_layers(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    attention: Attention,
    cache: Sequence[Any] | None,
) -> tuple[jax.Array, list[Any]]:
    """Final hidden states `[batch, time, hidden]` (normalised, ready for `unembed`) and the new cache, one per layer.

    `positions` is `[batch, time]` or `[1, time]`; it only turns q and k, who may look at whom is up to `attention`."""
    model = params["model"]
    x = model["embed_tokens"]["weight"][tokens]
    cos, sin = rotary_angles(config, positions)
    new_cache = []
    for index, layer in enumerate(model["layers"]):
        q, k, v = _project_qkv(layer["self_attn"], config, _rms_norm(x, layer["input_layernorm"], config))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out, entry = attention(q, k, v, cache[index] if cache is not None else None)
        new_cache.append(entry)
        x = x + _linear(out.reshape(*out.shape[:2], -1), layer["self_attn"]["o_proj"])
        x = x + _mlp(layer["mlp"], _rms_norm(x, layer["post_attention_layernorm"], config))
    return _rms_norm(x, model["norm"], config), new_cache


def unembed(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits in float32 whatever the dtype of the weights."""
    head = params["model"]["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return jnp.einsum("...i,vi->...v", hidden, head["weight"], precision=_PRECISION, preferred_element_type=jnp.float32)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query attention, softmax in float32. `mask` is `[batch or 1, time, keys]`; True may be looked at."""
    batch, time, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, time, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, precision=_PRECISION, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores / math.sqrt(head_dim), jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v, precision=_PRECISION).reshape(q.shape)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, cache_layer: None) -> tuple[jax.Array, None]:
    """Each token sees itself and what is to its left."""
    time = q.shape[1]
    return attend(q, k, v, jnp.tril(jnp.ones((1, time, time), bool))), cache_layer


def rotary_angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine `[batch, time, 1, head_dim / 2]` in float32, to broadcast over heads."""
    angles = positions[..., None].astype(jnp.float32) * rotary_frequencies(config)
    return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each pair of dimensions. Llama 3 scaling slows those whose wavelength exceeds the context
    that the model was first trained on, leaves the fast ones alone, and blends in between."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequencies = (1.0 / config.rope_theta**exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * frequencies / scaling.factor + blend * frequencies).astype(np.float32)


def _project_qkv(attn: Params, config: ModelConfig, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    def heads(name: str) -> jax.Array:
        return _linear(x, attn[name]).reshape(*x.shape[:2], -1, config.head_dim)

    q, k, v = heads("q_proj"), heads("k_proj"), heads("v_proj")
    if "q_norm" in attn:
        q, k = _rms_norm(q, attn["q_norm"], config), _rms_norm(k, attn["k_norm"], config)
    return q, k, v


def _mlp(mlp: Params, x: jax.Array) -> jax.Array:
    return _linear(jax.nn.silu(_linear(x, mlp["gate_proj"])) * _linear(x, mlp["up_proj"]), mlp["down_proj"])


def _linear(x: jax.Array, layer: Params) -> jax.Array:
    y = jnp.einsum("...i,oi->...o", x, layer["weight"], precision=_PRECISION)
    return y + layer["bias"] if "bias" in layer else y


def _rms_norm(x: jax.Array, layer: Params, config: ModelConfig) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + config.rms_norm_eps)
    return wide.astype(x.dtype) * layer["weight"]


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """HF's rotate_half: dimension i turns with dimension i + head_dim / 2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)
