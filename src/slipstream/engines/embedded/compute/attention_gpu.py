"""Paged attention for NVIDIA GPUs: one Pallas (Triton) kernel for decode steps and prefill blocks.

A program of the kernel handles a tile of queries that share a kv head: some positions times the query heads of its group. It
loops over the keys of its own sequence only. The trip count comes from the tile's last position and the addresses from the
page table, so the cost follows the actual context length, not the table's width. Online softmax in float32 with base-2
exponentials. A decode tile has one position, padded to 16 rows, the tensor cores' minimum.

Pages are [num_pages, kv_heads, page_size, head_dim]. Kernels and writes see them as rows [-1, head_dim], a free reshape,
because XLA keeps a scatter in place only if it indexes the leading dimension.

The naive reference is `tests/engines/test_attention_gpu.py::reference`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

if TYPE_CHECKING:  # benchmarks/attention_gpu.py loads this module without the package
    from slipstream.engines.embedded.compute.attention import CacheLayer
    from slipstream.model.config import LayerAttention

LOG2_E = math.log2(math.e)
MASKED = -1e30
"""Logit of a masked key. Finite, so that a row without any key does not become NaN."""
MIN_ROWS = 16
"""Smallest tile: the tensor cores' smallest matrix."""
WAVE = 2 * 132
"""Programs that fill an H100 or H200. With fewer, splitting a sequence pays off."""
SPLIT_KEYS = 256
"""Smallest number of keys worth a program of their own."""


@dataclass(frozen=True)
class Tile:
    """The work of one program: `rows` queries against `keys` keys at a time. Powers of two, at least 16."""

    rows: int
    keys: int = 64
    num_warps: int = 4
    num_stages: int = 3


DECODE = Tile(rows=16, keys=64, num_warps=4, num_stages=3)
PREFILL = Tile(rows=64, keys=64, num_warps=4, num_stages=3)


def unsupported_reason(head_dim: int, page_size: int) -> str:
    """Why the kernels do not support a model; empty if they do."""
    if head_dim & (head_dim - 1) or head_dim < 16 or page_size & (page_size - 1):
        return (
            "the GPU kernels need a head_dim that is a power of two of at least 16 and a block_size that is a power of two; "
            f"got head_dim={head_dim}, block_size={page_size}"
        )
    return ""


@dataclass(frozen=True)
class PallasAttention:
    """See `attention.NaiveAttention`.

    `deterministic` gives a query the same arithmetic in any batch, block or chunk: always the decode tile (a row's result does
    not depend on the tile's other rows), and no sequence is split over programs. Without it, prefill uses larger tiles, and a
    few long sequences are split to fill the GPU.
    `interpret` runs the kernels as plain XLA on any device, for tests."""

    deterministic: bool = True
    decode: Tile = DECODE
    prefill: Tile = PREFILL
    splits: int | None = None  # None: depends on the number of programs
    interpret: bool = False

    @staticmethod
    def layer_shapes(
        num_pages: int, kv_heads: int, page_size: int, head_dim: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a layer's keys and values."""
        if reason := unsupported_reason(head_dim, page_size):
            raise ValueError(reason)
        pages = (num_pages, kv_heads, page_size, head_dim)
        return pages, pages

    def attend(
        self,
        q: jax.Array,
        layer: CacheLayer,
        tables: jax.Array,
        positions: jax.Array,
        spec: LayerAttention,
        shared: object = None,
    ) -> jax.Array:
        """Causal attention of each query to its sequence's pages.

        q [B, Q, heads, head_dim], tables [B, P], positions [B, Q] ascending or -1 (padding, finite output)
        -> [B, Q, heads, head_dim]. Keys and values of the queries' own tokens must have been written before."""
        pages, _ = layer
        num_blocks, num_queries, heads, head_dim = q.shape
        _, kv_heads, page_size, _ = pages.shape
        group = _power_of_two(heads // kv_heads)
        tile = self._tile(num_queries, group)
        tiles = -(-num_queries * group // tile.rows)
        splits = self._splits(num_blocks * kv_heads * tiles, tables.shape[1] * page_size)
        shape = _Shape(num_queries, heads, kv_heads, group, page_size, tables.shape[1], splits)
        num_rows = num_blocks * num_queries * heads
        if splits == 1:
            outs: Any = jax.ShapeDtypeStruct((num_rows, head_dim), q.dtype)
        else:
            partial = jax.ShapeDtypeStruct((num_rows * splits, head_dim), jnp.float32)
            per_row = jax.ShapeDtypeStruct((num_rows * splits,), jnp.float32)
            outs = (partial, per_row, per_row)
        call = pl.pallas_call(
            functools.partial(_attend_kernel, shape=shape, tile=tile, spec=spec),
            out_shape=outs,
            grid=(num_blocks, kv_heads, tiles * splits),
            interpret=self.interpret,
            compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        )
        out = call(q.reshape(num_rows, head_dim), *map(_as_rows, layer), tables.reshape(-1), positions.reshape(-1))
        return (out if splits == 1 else _combine(*out, splits=splits).astype(q.dtype)).reshape(q.shape)

    def write(
        self, layer: CacheLayer, k: jax.Array, v: jax.Array, tables: jax.Array, positions: jax.Array
    ) -> CacheLayer:
        """Write k and v [B, Q, kv_heads, head_dim] at positions [B, Q]; -1 writes nothing.

        In place if the caller donates the layer or carries it through a loop."""
        keys, values = layer
        rows = _rows_of(positions, tables, keys.shape)
        return _scatter(keys, rows, k), _scatter(values, rows, v)

    def _tile(self, num_queries: int, group: int) -> Tile:
        needed = _power_of_two(num_queries * group)
        tile = self.decode if self.deterministic or needed <= self.decode.rows else self.prefill
        rows = tile.rows if self.deterministic else min(tile.rows, needed)
        rows = max(rows, group, MIN_ROWS)
        return Tile(rows, tile.keys, tile.num_warps, tile.num_stages)

    def _splits(self, num_programs: int, max_keys: int) -> int:
        if self.deterministic:
            return 1
        if self.splits is not None:
            return self.splits
        return max(1, min(_power_of_two(-(-WAVE // num_programs)), max_keys // SPLIT_KEYS, 16))


@dataclass(frozen=True)
class _Shape:
    num_queries: int  # of a block
    heads: int
    kv_heads: int
    group: int  # heads per kv head, padded to a power of two
    page_size: int
    num_pages: int  # of a table
    splits: int


def _attend_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    position_ref: Any,
    out_ref: Any,
    *partial_refs: Any,
    shape: _Shape,
    tile: Tile,
    spec: LayerAttention,
) -> None:
    """One tile of queries, one kv head, one split of the sequence. All refs are whole arrays, seen as rows."""
    block, kv_head = pl.program_id(0), pl.program_id(1)
    part, split = _divide(pl.program_id(2), shape.splits)
    true_group, window, softcap = shape.heads // shape.kv_heads, spec.window, spec.softcap

    index, member = _divide(part * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32), shape.group)
    alive = (index < shape.num_queries) & (member < true_group)
    query = block * shape.num_queries + jnp.where(alive, index, 0)
    # Rows without a query point past the end, because the interpreter writes masked rows back unchanged.
    rows = jnp.where(alive, query * shape.heads + kv_head * true_group + member, q_ref.shape[0])
    position = plt.load(position_ref.at[query], mask=alive, other=-1)
    q = _load_rows(q_ref, rows, alive)

    last = jnp.max(position)
    first = jnp.int32(0)
    if window is not None:
        first = jnp.maximum(jnp.min(jnp.where(position >= 0, position, last)) - (window - 1), 0)
    begin, _ = _divide(first, tile.keys)
    end, _ = _divide(last + tile.keys, tile.keys)
    if shape.splits > 1:
        share, _ = _divide(end - begin + (shape.splits - 1), shape.splits)
        begin = begin + split * share
        end = jnp.minimum(begin + share, end)

    def step(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total, peak, out = carry
        start = number * tile.keys
        token = start + jnp.arange(tile.keys, dtype=jnp.int32)
        # Keys that no query of the tile may see are not read: pages past the end may contain NaN.
        present = (token <= last) & (token >= first)
        base = block * shape.num_pages
        if shape.page_size % tile.keys == 0:
            page = table_ref[base + _divide(start, shape.page_size)[0]]
        else:
            page = plt.load(table_ref.at[base + _divide(token, shape.page_size)[0]], mask=present, other=0)
        cache_rows = (page * shape.kv_heads + kv_head) * shape.page_size + _divide(token, shape.page_size)[1]
        k = _load_rows(k_ref, cache_rows, present)
        v = _load_rows(v_ref, cache_rows, present)

        # The default for float32 is TF32, with which engine and trainer would differ in the third digit.
        logits = plt.dot(q, k, trans_b=True, allow_tf32=False)
        if softcap is None:
            logits = logits * (spec.scale * LOG2_E)
        else:
            logits = _tanh(logits * (spec.scale / softcap)) * (softcap * LOG2_E)
        seen = token[None, :] <= position[:, None]
        if window is not None:
            seen &= token[None, :] > position[:, None] - window
        logits = jnp.where(seen, logits, MASKED)

        new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
        decay = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(logits - new_peak[:, None])
        total = total * decay + jnp.sum(weights, axis=1)
        out = out * decay[:, None] + plt.dot(weights.astype(v.dtype), v, allow_tf32=False)
        return total, new_peak, out

    zeros = jnp.zeros((tile.rows,), jnp.float32)
    total, peak, out = lax.fori_loop(
        begin, end, step, (zeros, zeros + MASKED, jnp.zeros((tile.rows, q_ref.shape[1]), jnp.float32))
    )
    if not partial_refs:
        out = out / jnp.where(total > 0, total, 1.0)[:, None]
        _store_rows(out_ref, rows, out.astype(out_ref.dtype), alive)
        return
    total_ref, peak_ref = partial_refs
    rows = rows * shape.splits + split
    _store_rows(out_ref, rows, out, alive)
    plt.store(total_ref.at[rows], total, mask=alive)
    plt.store(peak_ref.at[rows], peak, mask=alive)


def _combine(out: jax.Array, total: jax.Array, peak: jax.Array, *, splits: int) -> jax.Array:
    """Combine the partial results of the splits, each relative to its own peak."""
    out, total, peak = out.reshape(-1, splits, out.shape[-1]), total.reshape(-1, splits), peak.reshape(-1, splits)
    weight = jnp.exp2(peak - jnp.max(peak, axis=1, keepdims=True))
    sums = jnp.sum(total * weight, axis=1)
    return jnp.sum(out * weight[:, :, None], axis=1) / jnp.where(sums > 0, sums, 1.0)[:, None]


def _rows_of(positions: jax.Array, tables: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The row of each token's key per kv head, with the pages seen as rows: [B, Q, kv_heads].

    Padding gets rows past the end, all different, because the scatter promises unique indices."""
    num_pages, kv_heads, page_size, _ = shape
    place = jnp.maximum(positions, 0) // page_size
    page = jnp.take_along_axis(tables, place, axis=1)
    past = num_pages + jnp.arange(positions.size, dtype=jnp.int32).reshape(positions.shape)
    page = jnp.where(positions >= 0, page, past)
    head = jnp.arange(kv_heads, dtype=jnp.int32)
    return (page[..., None] * kv_heads + head) * page_size + (jnp.maximum(positions, 0) % page_size)[..., None]


def _scatter(pages: jax.Array, rows: jax.Array, new: jax.Array) -> jax.Array:
    flat = _as_rows(pages).at[rows].set(new.astype(pages.dtype), mode="drop", unique_indices=True)
    return flat.reshape(pages.shape)


def _as_rows(pages: jax.Array) -> jax.Array:
    return pages.reshape(-1, pages.shape[-1])


def _load_rows(ref: Any, rows: jax.Array, mask: jax.Array) -> jax.Array:
    tile, mask = _tile_of(ref, rows, mask)
    return plt.load(tile, mask=mask, other=0)


def _store_rows(ref: Any, rows: jax.Array, new: jax.Array, mask: jax.Array) -> None:
    tile, mask = _tile_of(ref, rows, mask)
    plt.store(tile, new, mask=mask)


def _tile_of(ref: Any, rows: jax.Array, mask: jax.Array) -> tuple[Any, jax.Array]:
    """Whole rows of a ref [n, width]. Both indices are arrays, since the interpreter does not support mixing in slices."""
    shape = (rows.shape[0], ref.shape[1])
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    return ref.at[jnp.broadcast_to(rows[:, None], shape), columns], jnp.broadcast_to(mask[:, None], shape)


def _divide(number: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of non-negative numbers; `//` would add branches for negative ones."""
    if by == 1:
        return number, jnp.zeros_like(number)
    divisor = jnp.full_like(number, by)
    return lax.div(number, divisor), lax.rem(number, divisor)


def _tanh(x: jax.Array) -> jax.Array:
    return 1.0 - 2.0 / (jnp.exp2(x * (2 * LOG2_E)) + 1.0)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()
