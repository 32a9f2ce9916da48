"""Attention over a paged KV cache.

The keys and values of a layer lie in pages of a few tokens; a sequence's page table says which pages are its own, in
order. The token at position `p` is in page `table[p // page_size]`, at `p % page_size`. Queries come in blocks of
neighbouring positions of one sequence (a decode step is blocks of one). A position of -1 is padding: it is written
nowhere, and what comes out for it means nothing."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from slipstream.model.attention import attend, visible
from slipstream.model.config import LayerAttention
from slipstream.model.layers import PRECISION, row_sum

CacheLayer: TypeAlias = tuple[jax.Array, jax.Array]
Shape: TypeAlias = tuple[int, ...]

State: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
"""Of a running softmax: the highest score, the sum of the weights, the weighted sum of the values."""

_LOWEST = -1e30
"""A score that nothing reaches. Finite, so that a row without any key does not become NaN."""
_MOST_ROWS = 48
"""Multiplied at once. From 51 rows on, XLA multiplies with 32 columns (a page of that many tokens, or heads of that many
dimensions) in another order on CPU."""


class Shared(NamedTuple):
    """Rows whose sequences begin with the same pages, as the samples of a prompt do: they can look at those together."""

    rows: Any
    """`[groups, members]`: row numbers; a number past the last row where there is none. No row is in two groups."""
    num_pages: Any
    """`[groups]`: how many leading pages the members have in common."""


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
        self,
        q: jax.Array,
        layer: CacheLayer,
        tables: jax.Array,
        positions: jax.Array,
        how: LayerAttention,
        shared: Shared | None = None,
    ) -> jax.Array:
        """`[blocks, time, heads, head_dim]`: what the queries see of their own sequence, up to their own position.
        `shared` is a hint, for blocks of one: it changes no result."""
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
        page, offset = _places(tables, positions, values.shape)
        return _put(keys.at[page, :, offset], k), _put(values.at[page, :, offset], v)

    def attend(
        self,
        q: jax.Array,
        layer: CacheLayer,
        tables: jax.Array,
        positions: jax.Array,
        how: LayerAttention,
        shared: Shared | None = None,
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
        page, offset = _places(tables, positions, values.shape)
        return _put(keys.at[page, :, :, offset], k), _put(values.at[page, :, offset], v)

    def attend(
        self,
        q: jax.Array,
        layer: CacheLayer,
        tables: jax.Array,
        positions: jax.Array,
        how: LayerAttention,
        shared: Shared | None = None,
    ) -> jax.Array:
        blocks, time, heads, head_dim = q.shape
        kv_heads = layer[1].shape[1]
        state, first = None, jnp.zeros(blocks, jnp.int32)
        rows, own = _by_head(q, kv_heads), _of_rows(positions, heads // kv_heads)
        if shared is not None:
            state, first = jax.lax.cond(
                shared.num_pages.any(),
                lambda: self._see_shared(q, layer, tables, positions, how, shared),
                lambda: (_nothing_seen(rows), first),
            )
        num_pages = jnp.max(positions, axis=1) // layer[1].shape[2] + 1
        _, total, out = _see(rows, own, layer, tables, first, num_pages - first, how, state)
        out = (out / jnp.maximum(total, 1e-30)).astype(q.dtype)[:, :, : time * heads // kv_heads]
        out = out.reshape(blocks, kv_heads, time, heads // kv_heads, head_dim).swapaxes(1, 2)
        return out.reshape(q.shape)

    def _see_shared(
        self,
        q: jax.Array,
        layer: CacheLayer,
        tables: jax.Array,
        positions: jax.Array,
        how: LayerAttention,
        shared: Shared,
    ) -> tuple[State, jax.Array]:
        """What each row has seen after the pages that it shares, and how many they are. Row by row it is the arithmetic that
        it would be alone; but each page is gathered once for all."""
        (num_rows, _, heads, _), (groups, members) = q.shape, shared.rows.shape
        kv_heads, group = layer[1].shape[1], heads // layer[1].shape[1]
        rows = _by_head(q.at[shared.rows, 0].get(mode="clip"), kv_heads)
        own = _of_rows(positions.at[shared.rows, 0].get(mode="clip"), group)
        table = tables.at[shared.rows[:, 0]].get(mode="clip")
        seen = _see(rows, own, layer, table, jnp.zeros(groups, jnp.int32), shared.num_pages, how, None)

        def to_rows(of_groups: jax.Array, of_rows: jax.Array) -> jax.Array:
            each = of_groups.reshape(groups, kv_heads, members, group, -1).swapaxes(1, 2)
            each = jnp.broadcast_to(each, (*each.shape[:3], of_rows.shape[2], each.shape[4]))
            return of_rows.at[shared.rows].set(each, mode="drop")

        state = tuple(to_rows(g, r) for g, r in zip(seen, _nothing_seen(_by_head(q, kv_heads))))
        first = jnp.zeros(num_rows, jnp.int32).at[shared.rows].set(shared.num_pages[:, None], mode="drop")
        return state, first  # type: ignore[return-value]


def _by_head(q: jax.Array, kv_heads: int) -> jax.Array:
    """`[blocks, kv_heads, rows, head_dim]`, a row for each position and head of the group; two at least, because a single one
    would be multiplied in another order than the rows of a block."""
    blocks, time, heads, head_dim = q.shape
    rows = q.reshape(blocks, time, kv_heads, heads // kv_heads, head_dim).swapaxes(1, 2)
    rows = rows.reshape(blocks, kv_heads, -1, head_dim)
    return rows if rows.shape[2] > 1 else jnp.repeat(rows, 2, axis=2)


def _of_rows(positions: jax.Array, group: int) -> jax.Array:
    """The position of each of those rows, `[blocks, 1, rows, 1]`."""
    own = jnp.repeat(positions, group, axis=1)
    return (own if own.shape[1] > 1 else jnp.repeat(own, 2, axis=1))[:, None, :, None]


def _nothing_seen(rows: jax.Array) -> State:
    zero = jnp.zeros((*rows.shape[:3], 1), jnp.float32)
    return zero + _LOWEST, zero, jnp.zeros(rows.shape, jnp.float32)


def _see(
    rows: jax.Array,
    own: jax.Array,
    layer: CacheLayer,
    tables: jax.Array,
    first: jax.Array,
    count: jax.Array,
    how: LayerAttention,
    state: State | None,
) -> State:
    """Goes on from `state` over `count` pages of each block, beginning with number `first` of its table."""
    keys, values = layer
    page_size = values.shape[2]

    def page(step: jax.Array, state: State) -> State:
        highest, total, out = state
        index = first + step
        ids = jnp.take_along_axis(tables, index[:, None], axis=1, mode="clip")[:, 0]
        k, v = (pages.at[ids].get(mode="promise_in_bounds") for pages in (keys, values))
        scores = _product("bkrd,bkds->bkrs", rows, k) * how.scale
        if how.softcap is not None:
            scores = how.softcap * jnp.tanh(scores / how.softcap)
        scores = _rounded(scores, _LOWEST)
        at = (index[:, None] * page_size + jnp.arange(page_size))[:, None, None]
        seen = (at <= own) & (step < count)[:, None, None, None]
        if how.window is not None:
            seen &= at > own - how.window
        new_highest = jnp.maximum(highest, jnp.where(seen, scores, _LOWEST).max(-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - new_highest), 0.0)
        shrink = jnp.exp(highest - new_highest)
        part = _product("bkrs,bksd->bkrd", weights.astype(v.dtype), v)
        return new_highest, _rounded(total * shrink, 0.0) + row_sum(weights), out * shrink + part

    return jax.lax.fori_loop(0, count.max(), page, _nothing_seen(rows) if state is None else state)


def _rounded(product: jax.Array, lowest: float) -> jax.Array:
    """A product as it is, being never below `lowest`. Without this, XLA rounds a product and the sum it goes into at once
    where both are in one loop, and one after the other where they are not, which depends on the shapes."""
    return jnp.maximum(product, lowest)


def _product(equation: str, rows: jax.Array, by: jax.Array) -> jax.Array:
    """Row by row the same bits, however many rows there are (from two on)."""
    parts = jnp.array_split(rows, -(-rows.shape[2] // _MOST_ROWS), axis=2)
    products = (
        jnp.einsum(equation, part, by, precision=PRECISION, preferred_element_type=jnp.float32) for part in parts
    )
    return jnp.concatenate(list(products), axis=2)


def _places(tables: jax.Array, positions: jax.Array, pages: Shape) -> tuple[jax.Array, jax.Array]:
    """Page and offset of each position, flat; a page that does not exist for padding."""
    num_pages, _, page_size, _ = pages
    page = jnp.take_along_axis(tables, jnp.maximum(positions, 0) // page_size, axis=1)
    page = jnp.where(positions < 0, num_pages, page)
    return page.reshape(-1), (positions % page_size).reshape(-1)


def _put(slots: Any, tokens: jax.Array) -> jax.Array:
    """Pages with `tokens [blocks, time, ...]` in the `slots` that `_places` found."""
    return slots.set(tokens.reshape(-1, *tokens.shape[2:]), mode="drop")
