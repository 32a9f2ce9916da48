"""Attention masks, grouped-query attention, rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.model.config import LayerAttention, LinearRopeScaling, ModelConfig
from slipstream.model.transformer.layers import PRECISION, wide_einsum

Attention: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array, Any, LayerAttention], tuple[jax.Array, Any]]
"""`attention(q, k, v, cache_layer, layer) -> (out, cache_layer)`. q and out are `[batch, time, heads, head_dim]`; k and v
have `kv_heads`. Called once per layer, with that layer's cache and attention settings."""


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, layer: LayerAttention) -> jax.Array:
    """Compute grouped-query attention, with softmax in float32.

    `mask` is `[batch or 1, time, keys]`, True where a query attends to a key; it includes the window (`visible`)."""
    batch, time, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, time, kv_heads, heads // kv_heads, head_dim)
    scores = wide_einsum("btkgd,bskd->bkgts", grouped, k) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * jnp.tanh(scores / layer.softcap)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v, precision=PRECISION).reshape(q.shape)


def visible(positions: jax.Array, num_keys: int, window: int | None) -> jax.Array:
    """Return the causal mask `[batch, time, keys]` of queries at `positions` and keys at 0, 1, 2 …, in the window."""
    keys, queries = jnp.arange(num_keys), positions[..., None]
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, cache_layer: None, layer: LayerAttention
) -> tuple[jax.Array, None]:
    """Causal attention over whole sequences, without a cache."""
    time = q.shape[1]
    return attend(q, k, v, visible(jnp.arange(time)[None], time, layer.window), layer), cache_layer


def packed_attention(segments: jax.Array) -> Attention:
    """Return causal attention for packed rows: a token attends only to its own segment.

    `segments` `[batch, time]` numbers the sequences in a row. Windows need no positions: within a segment, n columns are n
    positions."""
    same = segments[:, :, None] == segments[:, None, :]

    def attention(
        q: jax.Array, k: jax.Array, v: jax.Array, cache_layer: None, layer: LayerAttention
    ) -> tuple[jax.Array, None]:
        time = q.shape[1]
        return attend(q, k, v, same & visible(jnp.arange(time)[None], time, layer.window), layer), cache_layer

    return attention


def rotary_angles(config: ModelConfig, positions: jax.Array, local: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine `[batch, time, 1, head_dim / 2]` in float32, which broadcast over heads."""
    angles = positions[..., None].astype(jnp.float32) * rotary_frequencies(config, local)
    return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def rotary_frequencies(config: ModelConfig, local: bool = False) -> np.ndarray:
    """Return radians per position for each pair of dimensions; `local` selects the rotary base of local layers.

    Llama 3 scaling slows frequencies whose wavelength exceeds the original context, keeps high frequencies, and interpolates
    in between. Linear scaling slows all."""
    theta = config.rope_local_theta if local and config.rope_local_theta else config.rope_theta
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequencies = (1.0 / theta**exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None or local:
        return frequencies
    if isinstance(scaling, LinearRopeScaling):
        return (frequencies / scaling.factor).astype(np.float32)
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * frequencies / scaling.factor + blend * frequencies).astype(np.float32)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply rotary embeddings in HF's layout: dimension i is paired with dimension i + head_dim / 2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)
