"""Paged attention: grouped-query attention over a paged KV cache.

Keys and values of a layer are stored in pages of a few tokens. A sequence's page table lists its pages in order: the token at
position `p` is in page `table[p // page_size]` at offset `p % page_size`. Queries come in blocks of consecutive positions of
one sequence; a decode step has blocks of one. Position -1 is padding: nothing is written for it and its output is undefined."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from slipstream.model.config import LayerAttention
from slipstream.model.transformer.attention import attend, visible
from slipstream.model.transformer.layers import PRECISION, row_sum

CacheLayer: TypeAlias = tuple[jax.Array, jax.Array]
Shape: TypeAlias = tuple[int, ...]

SoftmaxState: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
"""State of an online softmax: highest score, sum of weights, weighted sum of values."""

_MASKED = -1e30
"""Score of a masked key. Finite, so that a row without any key does not become NaN."""
_MAX_ROWS = 48
"""Rows multiplied at once. On CPU, XLA multiplies 51 rows or more by 32 columns (a page of 32 tokens, or 32-dimensional heads)
in another order."""


class SharedPrefixes(NamedTuple):
    """Groups of rows whose sequences start with the same pages, as the samples of a prompt do. A group can attend to those
    pages together."""

    rows: Any
    """`[groups, members]`: row numbers, padded with a number past the last row. No row is in two groups."""
    num_pages: Any
    """`[groups]`: leading pages that the members have in common."""


class NaiveAttention:
    """Reference implementation of the interface: a page layout, in which dimension 0 is pages and dimension 1 is kv heads, and
    attention over it. This one gathers each block's whole sequence and attends without pages."""

    def layer_shapes(self, num_pages: int, kv_heads: int, page_size: int, head_dim: int) -> tuple[Shape, Shape]:
        """Shapes of a layer's keys and values."""
        shape = (num_pages, kv_heads, page_size, head_dim)
        return shape, shape

    def write(
        self, layer: CacheLayer, k: jax.Array, v: jax.Array, tables: jax.Array, positions: jax.Array
    ) -> CacheLayer:
        """Write k and v `[blocks, time, kv_heads, head_dim]` at `positions` `[blocks, time]` of the sequences with page
        tables `tables` `[blocks, pages]`."""
        keys, values = layer
        page, offset = places(tables, positions, len(values), values.shape[2])
        return _put(keys.at[page, :, offset], k), _put(values.at[page, :, offset], v)

    def attend(
        self,
        q: jax.Array,
        layer: CacheLayer,
        tables: jax.Array,
        positions: jax.Array,
        spec: LayerAttention,
        shared: SharedPrefixes | None = None,
    ) -> jax.Array:
        """Causal attention of each query to its own sequence, `[blocks, time, heads, head_dim]`. `shared` is an optimization
        hint for blocks of one and changes no result."""

        def gather(pages: jax.Array) -> jax.Array:
            gathered = pages[tables].swapaxes(2, 3)  # [blocks, pages, page_size, kv_heads, head_dim]
            return gathered.reshape(len(tables), -1, *gathered.shape[3:])

        keys, values = (gather(pages) for pages in layer)
        return attend(q, keys, values, visible(positions, keys.shape[1], spec.window), spec)


class BlockwiseAttention:
    """Online softmax page by page. Gathers one page per sequence at a time, and the loop ends with the longest sequence, so no
    shape depends on lengths.

    A masked page does not change a row by a bit: a row's result depends on its own sequence only. Keys are stored transposed
    in their page, which makes the product with them three times as fast on CPU."""

    def layer_shapes(self, num_pages: int, kv_heads: int, page_size: int, head_dim: int) -> tuple[Shape, Shape]:
        return (num_pages, kv_heads, head_dim, page_size), (num_pages, kv_heads, page_size, head_dim)

    def write(
        self, layer: CacheLayer, k: jax.Array, v: jax.Array, tables: jax.Array, positions: jax.Array
    ) -> CacheLayer:
        keys, values = layer
        page, offset = places(tables, positions, len(values), values.shape[2])
        return _put(keys.at[page, :, :, offset], k), _put(values.at[page, :, offset], v)

    def attend(
        self,
        q: jax.Array,
        layer: CacheLayer,
        tables: jax.Array,
        positions: jax.Array,
        spec: LayerAttention,
        shared: SharedPrefixes | None = None,
    ) -> jax.Array:
        blocks, time, heads, head_dim = q.shape
        kv_heads = layer[1].shape[1]
        state, first = None, jnp.zeros(blocks, jnp.int32)
        rows, row_positions = _rows_by_head(q, kv_heads), _row_positions(positions, heads // kv_heads)
        if shared is not None:
            state, first = jax.lax.cond(
                shared.num_pages.any(),
                lambda: self._attend_shared(q, layer, tables, positions, spec, shared),
                lambda: (_initial_state(rows), first),
            )
        num_pages = jnp.max(positions, axis=1) // layer[1].shape[2] + 1
        _, total, out = _attend_pages(rows, row_positions, layer, tables, first, num_pages - first, spec, state)
        out = (out / jnp.maximum(total, 1e-30)).astype(q.dtype)[:, :, : time * heads // kv_heads]
        out = out.reshape(blocks, kv_heads, time, heads // kv_heads, head_dim).swapaxes(1, 2)
        return out.reshape(q.shape)

    def _attend_shared(
        self,
        q: jax.Array,
        layer: CacheLayer,
        tables: jax.Array,
        positions: jax.Array,
        spec: LayerAttention,
        shared: SharedPrefixes,
    ) -> tuple[SoftmaxState, jax.Array]:
        """Attend to the shared pages, gathering each page once per group. Returns each row's softmax state and the number of
        its shared pages. The arithmetic per row is the same as without sharing."""
        (num_rows, _, heads, _), (groups, members) = q.shape, shared.rows.shape
        kv_heads, group = layer[1].shape[1], heads // layer[1].shape[1]
        rows = _rows_by_head(q.at[shared.rows, 0].get(mode="clip"), kv_heads)
        row_positions = _row_positions(positions.at[shared.rows, 0].get(mode="clip"), group)
        table, first_page = tables.at[shared.rows[:, 0]].get(mode="clip"), jnp.zeros(groups, jnp.int32)
        group_state = _attend_pages(rows, row_positions, layer, table, first_page, shared.num_pages, spec, None)

        def to_rows(of_groups: jax.Array, of_rows: jax.Array) -> jax.Array:
            members_first = of_groups.reshape(groups, kv_heads, members, group, -1).swapaxes(1, 2)
            shape = (*members_first.shape[:3], of_rows.shape[2], members_first.shape[4])
            return of_rows.at[shared.rows].set(jnp.broadcast_to(members_first, shape), mode="drop")

        state = tuple(to_rows(g, r) for g, r in zip(group_state, _initial_state(_rows_by_head(q, kv_heads))))
        first = jnp.zeros(num_rows, jnp.int32).at[shared.rows].set(shared.num_pages[:, None], mode="drop")
        return state, first  # type: ignore[return-value]


def _rows_by_head(q: jax.Array, kv_heads: int) -> jax.Array:
    """`[blocks, kv_heads, rows, head_dim]`, with a row per position and query head of the group. A single row is duplicated,
    because XLA would multiply it in another order than the rows of a larger block."""
    blocks, time, heads, head_dim = q.shape
    rows = q.reshape(blocks, time, kv_heads, heads // kv_heads, head_dim).swapaxes(1, 2)
    rows = rows.reshape(blocks, kv_heads, -1, head_dim)
    return rows if rows.shape[2] > 1 else jnp.repeat(rows, 2, axis=2)


def _row_positions(positions: jax.Array, group: int) -> jax.Array:
    """The position of each row of `_rows_by_head`, `[blocks, 1, rows, 1]`."""
    repeated = jnp.repeat(positions, group, axis=1)
    return (repeated if repeated.shape[1] > 1 else jnp.repeat(repeated, 2, axis=1))[:, None, :, None]


def _initial_state(rows: jax.Array) -> SoftmaxState:
    zero = jnp.zeros((*rows.shape[:3], 1), jnp.float32)
    return zero + _MASKED, zero, jnp.zeros(rows.shape, jnp.float32)


def _attend_pages(
    rows: jax.Array,
    row_positions: jax.Array,
    layer: CacheLayer,
    tables: jax.Array,
    first: jax.Array,
    count: jax.Array,
    spec: LayerAttention,
    state: SoftmaxState | None,
) -> SoftmaxState:
    """Continue from `state` over `count` pages of each block, starting with entry `first` of its page table."""
    keys, values = layer
    page_size = values.shape[2]

    def attend_page(step: jax.Array, state: SoftmaxState) -> SoftmaxState:
        highest, total, out = state
        index = first + step
        ids = jnp.take_along_axis(tables, index[:, None], axis=1, mode="clip")[:, 0]
        k, v = (pages.at[ids].get(mode="promise_in_bounds") for pages in (keys, values))
        scores = _product("bkrd,bkds->bkrs", rows, k) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * jnp.tanh(scores / spec.softcap)
        scores = _rounded(scores, _MASKED)
        key_positions = (index[:, None] * page_size + jnp.arange(page_size))[:, None, None]
        mask = (key_positions <= row_positions) & (step < count)[:, None, None, None]
        if spec.window is not None:
            mask &= key_positions > row_positions - spec.window
        new_highest = jnp.maximum(highest, jnp.where(mask, scores, _MASKED).max(-1, keepdims=True))
        weights = jnp.where(mask, jnp.exp(scores - new_highest), 0.0)
        shrink = jnp.exp(highest - new_highest)
        part = _product("bkrs,bksd->bkrd", weights.astype(v.dtype), v)
        return new_highest, _rounded(total * shrink, 0.0) + row_sum(weights), out * shrink + part

    return jax.lax.fori_loop(0, count.max(), attend_page, _initial_state(rows) if state is None else state)


def _rounded(product: jax.Array, lowest: float) -> jax.Array:
    """The product unchanged; it is never below `lowest`. Keeps XLA from fusing the product and the following addition into one
    rounding, which it does depending on the shapes."""
    return jnp.maximum(product, lowest)


def _product(equation: str, rows: jax.Array, by: jax.Array) -> jax.Array:
    """A product whose rows have the same bits for any number of rows from two up."""
    parts = jnp.array_split(rows, -(-rows.shape[2] // _MAX_ROWS), axis=2)
    products = (
        jnp.einsum(equation, part, by, precision=PRECISION, preferred_element_type=jnp.float32) for part in parts
    )
    return jnp.concatenate(list(products), axis=2)


def places(tables: jax.Array, positions: jax.Array, num_pages: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Page and offset of each position, flattened; padding gets a page past the last."""
    page = jnp.take_along_axis(tables, jnp.maximum(positions, 0) // page_size, axis=1)
    page = jnp.where(positions < 0, num_pages, page)
    return page.reshape(-1), (positions % page_size).reshape(-1)


def _put(slots: Any, tokens: jax.Array) -> jax.Array:
    """Write `tokens [blocks, time, ...]` to the `slots` found by `places`."""
    return slots.set(tokens.reshape(-1, *tokens.shape[2:]), mode="drop")
