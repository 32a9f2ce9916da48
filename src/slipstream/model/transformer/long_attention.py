"""Causal attention over whole sequences without the matrix of all queries and keys, for training.

`chunked_attention` runs anywhere and computes what `attend` computes, for some queries at a time. `fused_attention` is cuDNN's
kernel. Packed rows pass `segments`, as in `packed_attention`."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from slipstream.model.config import LayerAttention
from slipstream.model.transformer.attention import Attention, attend

_TILE = 64
"""The kernel gets sequences padded to a multiple of this: with a mask it takes even lengths only."""


def chunked_attention(segments: jax.Array | None, chunk: int) -> Attention:
    """Attention for `chunk` queries at a time, whose scores the backward pass computes again. A layer with a window looks at
    the keys in reach of the chunk only; others at all keys, with a mask."""

    def attention(
        q: jax.Array, k: jax.Array, v: jax.Array, cache_layer: None, layer: LayerAttention
    ) -> tuple[jax.Array, None]:
        batch, time, heads, head_dim = q.shape
        num_chunks = -(-time // chunk)
        reach = time if layer.window is None else min(time, layer.window - 1 + chunk)
        # Chunks add their gradients of k and v in float32.
        wide_k, wide_v = k.astype(jnp.float32), v.astype(jnp.float32)

        def attend_chunk(index: jax.Array, queries: jax.Array) -> jax.Array:
            rows = index * chunk + jnp.arange(chunk)
            start = jnp.clip((index + 1) * chunk - reach, 0, time - reach)
            columns = start + jnp.arange(reach)
            keys, values = (jax.lax.dynamic_slice_in_dim(a, start, reach, 1).astype(q.dtype) for a in (wide_k, wide_v))
            mask = columns <= rows[:, None]
            if layer.window is not None:
                mask &= columns > rows[:, None] - layer.window
            mask = mask[None]
            if segments is not None:
                own = jnp.take(segments, rows, axis=1, mode="clip")
                mask &= own[:, :, None] == jnp.take(segments, columns, axis=1)[:, None, :]
            return attend(queries, keys, values, mask, layer)

        padded = jnp.pad(q, ((0, 0), (0, num_chunks * chunk - time), (0, 0), (0, 0)))
        queries = jnp.moveaxis(padded.reshape(batch, num_chunks, chunk, heads, head_dim), 1, 0)
        step = jax.checkpoint(attend_chunk, prevent_cse=False)
        out = jax.lax.map(lambda each: step(*each), (jnp.arange(num_chunks), queries))
        return jnp.moveaxis(out, 0, 1).reshape(padded.shape)[:, :time], cache_layer

    return attention


def fused_attention(
    segments: jax.Array | None, otherwise: Attention, implementation: Literal["cudnn", "xla"] = "cudnn"
) -> Attention:
    """cuDNN's flash attention, for float16 and bfloat16; `otherwise` for what it cannot compute: soft caps, other dtypes, other
    head sizes. With `implementation` "xla", the same call computed naively, as a reference."""

    def attention(
        q: jax.Array, k: jax.Array, v: jax.Array, cache_layer: None, layer: LayerAttention
    ) -> tuple[jax.Array, None]:
        time, head_dim = q.shape[1], q.shape[3]
        if layer.softcap is not None or q.dtype == jnp.float32 or head_dim % 8 or head_dim > 256:
            return otherwise(q, k, v, cache_layer, layer)
        tail = -time % _TILE
        q, k, v = (jnp.pad(a, ((0, 0), (0, tail), (0, 0), (0, 0))) for a in (q, k, v))
        mask = None
        if segments is not None:
            padded = jnp.pad(segments, ((0, 0), (0, tail)))
            mask = (padded[:, :, None] == padded[:, None, :])[:, None]
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            scale=layer.scale,
            is_causal=True,
            local_window_size=None if layer.window is None else (layer.window - 1, 0),
            implementation=implementation,
        )
        return out[:, :time], cache_layer

    return attention
