"""Attention over a paged KV cache.

The keys and values of a layer lie in pages of a few tokens; a sequence's page table says which pages are its own, in
order. The token at position `p` is in page `table[p // page_size]`, at `p % page_size`. Queries come in blocks of
neighbouring positions of one sequence (a decode step is blocks of one). A position of -1 is padding: it is written
nowhere, and what comes out for it means nothing."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp

from slipstream.model.attention import attend, visible
from slipstream.model.config import LayerAttention
from slipstream.model.layers import PRECISION, row_sum

CacheLayer: TypeAlias = tuple[jax.Array, jax.Array]
Shape: TypeAlias = tuple[int, ...]

_LOWEST = -1e30
"""A score that nothing reaches. Finite, so that a row without any key does not become NaN."""


class PagedAttention(Protocol):
    """One way to lay out pages and to look at them. Pages are the first dimension, kv heads the second."""

    def layer_shapes(self, num_pages: int, kv_heads: int, page_size: int, head_dim: int) -> tuple[Shape, Shape]:
        """Of keys and of values."""
        ...

    def write(
        self, layer: CacheLayer, k: jax.Array, v: jax.Array, tables: jax.Array, positions: jax.Array
    ) -> CacheLayer:
        """Puts k and v `[blocks, time, kv_heads, head_dim]` at `positions` `[blocks, time]` of the sequences whose page
        tables are `tables` `[blocks, pages]`."""
        ...

    def attend(
        self, q: jax.Array, layer: CacheLayer, tables: jax.Array, positions: jax.Array, how: LayerAttention
    ) -> jax.Array:
        """`[blocks, time, heads, head_dim]`: what the queries see of their own sequence, up to their own position."""
        ...


class NaiveAttention:
    """The reference: gathers each block's whole sequence and attends as if it had never been paged."""

    def layer_shapes(self, num_pages: int, kv_heads: int, page_size: int, head_dim: int) -> tuple[Shape, Shape]:
        shape = (num_pages, kv_heads, page_size, head_dim)
        return shape, shape

    def write(
        self, layer: CacheLayer, k: jax.Array, v: jax.Array, tables: jax.Array, positions: jax.Array
    ) -> CacheLayer:
        keys, values = layer
        page, offset = places(tables, positions, *keys.shape[0:3:2])
        return (
            keys.at[page, :, offset].set(_rows(k), mode="drop"),
            values.at[page, :, offset].set(_rows(v), mode="drop"),
        )

    def attend(
        self, q: jax.Array, layer: CacheLayer, tables: jax.Array, positions: jax.Array, how: LayerAttention
    ) -> jax.Array:
        def whole(pages: jax.Array) -> jax.Array:
            gathered = pages[tables].swapaxes(2, 3)  # [blocks, pages, page_size, kv_heads, head_dim]
            return gathered.reshape(len(tables), -1, *gathered.shape[3:])

        keys, values = (whole(pages) for pages in layer)
        return attend(q, keys, values, visible(positions, keys.shape[1], how.window), how)


class BlockwiseAttention:
    """Page by page with a running softmax, so that only a page per sequence is gathered at a time and the loop ends with
    the longest sequence there is: no shape depends on lengths.

    A page that a row may not see changes nothing in it, not a bit: what a row gets depends on its own sequence alone.
    Keys lie transposed in their page, which makes the product with them three times as fast on CPU."""

    def layer_shapes(self, num_pages: int, kv_heads: int, page_size: int, head_dim: int) -> tuple[Shape, Shape]:
        return (num_pages, kv_heads, head_dim, page_size), (num_pages, kv_heads, page_size, head_dim)

    def write(
        self, layer: CacheLayer, k: jax.Array, v: jax.Array, tables: jax.Array, positions: jax.Array
    ) -> CacheLayer:
        keys, values = layer
        page, offset = places(tables, positions, *values.shape[0:3:2])
        return (
            keys.at[page, :, :, offset].set(_rows(k), mode="drop"),
            values.at[page, :, offset].set(_rows(v), mode="drop"),
        )

    def attend(
        self, q: jax.Array, layer: CacheLayer, tables: jax.Array, positions: jax.Array, how: LayerAttention
    ) -> jax.Array:
        keys, values = layer
        blocks, time, heads, head_dim = q.shape
        kv_heads, page_size = values.shape[1:3]
        group = heads // kv_heads
        rows = q.reshape(blocks, time, kv_heads, group, head_dim).swapaxes(1, 2)
        rows = rows.reshape(blocks, kv_heads, time * group, head_dim)
        own = jnp.repeat(positions, group, axis=1)[:, None, :, None]  # the position of each row
        if time * group == 1:  # a single row would be multiplied in another order than the rows of a block
            rows, own = jnp.repeat(rows, 2, axis=2), jnp.repeat(own, 2, axis=2)

        def page(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            highest, total, out = state
            ids = jax.lax.dynamic_index_in_dim(tables, index, axis=1, keepdims=False)
            k, v = (pages.at[ids].get(mode="promise_in_bounds") for pages in (keys, values))
            scores = jnp.einsum("bkrd,bkds->bkrs", rows, k, precision=PRECISION, preferred_element_type=jnp.float32)
            scores = scores * how.scale
            if how.softcap is not None:
                scores = how.softcap * jnp.tanh(scores / how.softcap)
            at = index * page_size + jnp.arange(page_size)
            seen = at <= own
            if how.window is not None:
                seen &= at > own - how.window
            new_highest = jnp.maximum(highest, jnp.where(seen, scores, _LOWEST).max(-1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new_highest), 0.0)
            shrink = jnp.exp(highest - new_highest)
            part = jnp.einsum(
                "bkrs,bksd->bkrd",
                weights.astype(v.dtype),
                v,
                precision=PRECISION,
                preferred_element_type=jnp.float32,
            )
            return new_highest, total * shrink + row_sum(weights), out * shrink + part

        zero = jnp.zeros((*rows.shape[:3], 1), jnp.float32)
        start = (zero + _LOWEST, zero, jnp.zeros(rows.shape, jnp.float32))
        num_pages = positions.max() // page_size + 1
        _, total, out = jax.lax.fori_loop(0, num_pages, page, start)
        out = (out / jnp.maximum(total, 1e-30)).astype(q.dtype)[:, :, : time * group]
        out = out.reshape(blocks, kv_heads, time, group, head_dim).swapaxes(1, 2)
        return out.reshape(q.shape)


def places(tables: jax.Array, positions: jax.Array, num_pages: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Page and offset of each position, flat; a page that does not exist for padding."""
    page = jnp.take_along_axis(tables, jnp.maximum(positions, 0) // page_size, axis=1)
    page = jnp.where(positions < 0, num_pages, page)
    return page.reshape(-1), (positions % page_size).reshape(-1)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])
