"""Paged attention: blockwise compared with the naive reference, and bitwise equal in any batch."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
import pytest

from slipstream.engines.embedded.compute.attention import (
    BlockwiseAttention,
    CacheLayer,
    NaiveAttention,
    SharedPrefixes,
)
from slipstream.engines.embedded.compute.programs import PagedAttention
from slipstream.model.config import LayerAttention

BLOCKWISE, NAIVE = BlockwiseAttention(), NaiveAttention()
PLAIN = LayerAttention(scale=0.3, window=None, softcap=None)


class Batch(NamedTuple):
    """Whole sequences `[blocks, time, kv_heads, head_dim]`, and the queries."""

    k: np.ndarray
    v: np.ndarray
    tables: np.ndarray
    q: np.ndarray
    positions: np.ndarray

    def only(self, blocks: slice | list[int]) -> Batch:
        return Batch(*(part[blocks] for part in self))


def batch(
    positions: list[list[int]],
    group: int = 1,
    page_size: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    num_tables: int | None = None,
) -> Batch:
    """Sequences on random pages: one per block, or `num_tables`, assigned to blocks in turn."""
    rng = np.random.default_rng(0)
    where = np.array(positions, np.int32)
    blocks, time = where.shape
    own = np.arange(blocks) % (num_tables or blocks)
    width = int(where.max()) // page_size + 2
    tables = rng.permutation((own.max() + 1) * width).reshape(-1, width).astype(np.int32)[own]
    k, v = rng.normal(size=(2, own.max() + 1, width * page_size, kv_heads, head_dim)).astype(np.float32)[:, own]
    q = rng.normal(size=(blocks, time, kv_heads * group, head_dim)).astype(np.float32)
    return Batch(k, v, tables, q, where)


def layer_of(attention: PagedAttention, given: Batch, page_size: int) -> CacheLayer:
    """Pages with the sequences up to each block's last position; the rest holds leftovers."""
    rng = np.random.default_rng(99)
    kv_heads, head_dim = given.k.shape[2:]
    shapes = attention.layer_shapes(int(given.tables.max()) + 3, kv_heads, page_size, head_dim)
    layer = tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)
    where = np.broadcast_to(np.arange(given.k.shape[1], dtype=np.int32), given.k.shape[:2])
    where = np.where(where <= given.positions.max(axis=1, keepdims=True), where, -1)
    return write(attention, layer, given.k, given.v, given.tables, where)


write = jax.jit(lambda attention, *args: attention.write(*args), static_argnums=0)
attend = jax.jit(lambda attention, *args: attention.attend(*args), static_argnums=(0, 5))


def look(
    attention: PagedAttention,
    given: Batch,
    layer: CacheLayer,
    spec: LayerAttention = PLAIN,
    shared: SharedPrefixes | None = None,
) -> np.ndarray:
    return np.asarray(attend(attention, given.q, layer, given.tables, given.positions, spec, shared))


def both(given: Batch, spec: LayerAttention, page_size: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Blockwise and naive results, without padding."""
    live = given.positions >= 0
    outs = [look(attention, given, layer_of(attention, given, page_size), spec) for attention in (BLOCKWISE, NAIVE)]
    assert np.isfinite(outs[0]).all()
    return outs[0][live], outs[1][live]


DECODE = [[0], [37], [-1], [7], [8], [15], [16], [60]]
PREFILL = [[*range(3, 19)], [*range(35, 51)], [*range(9), *[-1] * 7], [-1] * 16, [*range(16, 32)], [0, *[-1] * 15]]


WINDOW_AND_CAP = LayerAttention(0.5, window=6, softcap=2.0)


@pytest.mark.parametrize(
    ("group", "page_size", "spec"),
    [(1, 4, PLAIN), (3, 16, PLAIN), (3, 16, WINDOW_AND_CAP), (4, 4, WINDOW_AND_CAP)],
)
@pytest.mark.parametrize("positions", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_blockwise_equals_naive(positions: list[list[int]], spec: LayerAttention, group: int, page_size: int) -> None:
    out, expected = both(batch(positions, group, page_size), spec, page_size)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("spec", [LayerAttention(0.3, 1, None), LayerAttention(0.3, None, 1.5)], ids=["itself", "cap"])
def test_window_and_cap_alone(spec: LayerAttention) -> None:
    given = batch(DECODE, group=3)
    out, expected = both(given, spec)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)
    if spec.window == 1:  # a token that attends only to itself gets its own value
        rows = np.flatnonzero(given.positions[:, 0] >= 0)
        own = given.v[rows, given.positions[rows, 0]]
        np.testing.assert_allclose(out, np.repeat(own, 3, axis=1), rtol=1e-6)


def test_all_padding_is_finite() -> None:
    given = batch([[3]] * 8)
    layer = layer_of(BLOCKWISE, given, 4)
    assert np.isfinite(look(BLOCKWISE, given._replace(positions=np.full((8, 1), -1, np.int32)), layer)).all()


@pytest.mark.parametrize("attention", [BLOCKWISE, NAIVE], ids=["blockwise", "naive"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_write_puts_tokens_into_their_pages_and_touches_nothing_else(attention: PagedAttention, page_size: int) -> None:
    positions = np.array([[6, 7, 8], [0, -1, -1], [-1, -1, -1], [14, 15, 16]], np.int32)
    tables = np.random.default_rng(0).permutation(24)[:20].reshape(4, 5).astype(np.int32)
    rng = np.random.default_rng(1)
    shapes = attention.layer_shapes(24, 2, page_size, 16)
    layer = tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)
    k, v = rng.normal(size=(2, 4, 3, 2, 16)).astype(np.float32)
    keys, values = (np.asarray(x) for x in write(attention, layer, k, v, tables, positions))
    wanted_keys, wanted_values = (x.copy() for x in layer)
    for (block, i), position in np.ndenumerate(positions):
        if position >= 0:
            page, offset = tables[block, position // page_size], position % page_size
            if attention is BLOCKWISE:
                wanted_keys[page, :, :, offset] = k[block, i]
            else:
                wanted_keys[page, :, offset] = k[block, i]
            wanted_values[page, :, offset] = v[block, i]
    np.testing.assert_array_equal(keys, wanted_keys)
    np.testing.assert_array_equal(values, wanted_values)


# --- bits ---

# kv heads, query heads of each, head_dim, page_size. How XLA multiplies on CPU depends on these and on the rows:
# one row or several, more rows than fifty with 32 columns, a single kv head.
SIZES = [(2, 1, 16, 4), (2, 3, 64, 16), (1, 8, 32, 32)]
sizes = pytest.mark.parametrize(("kv_heads", "group", "head_dim", "page_size"), SIZES)
CAPPED = LayerAttention(0.3, window=9, softcap=2.0)


@sizes
def test_a_row_has_the_same_bits_in_any_batch(kv_heads: int, group: int, head_dim: int, page_size: int) -> None:
    """Among more or fewer rows, in another place, next to a longer sequence, or alone with padding."""
    given = batch([[(i * 13) % 61] for i in range(31)] + [[150]], group, page_size, kv_heads, head_dim)
    layer = layer_of(BLOCKWISE, given, page_size)
    together = look(BLOCKWISE, given, layer)
    eight = [20, 3, 0, 7, 30, 11, 9, 2]
    np.testing.assert_array_equal(look(BLOCKWISE, given.only(eight), layer), together[eight])
    for row in (5, 14):
        alone = given.only([0, 0, 0, row, 0, 0, 0, 0])
        alone.positions[[0, 1, 2, 4, 5, 6, 7]] = -1
        np.testing.assert_array_equal(look(BLOCKWISE, alone, layer)[3], together[row])


@sizes
def test_a_block_has_the_bits_of_its_single_rows(kv_heads: int, group: int, head_dim: int, page_size: int) -> None:
    """Prefill in blocks of 16, verification and single-token decode give the same bits."""
    blocks = batch([[*range(start, start + 16)] for start in (0, 5, 22, 80)], group, page_size, kv_heads, head_dim)
    layer = layer_of(BLOCKWISE, blocks, page_size)
    spec = CAPPED if page_size < 32 else PLAIN
    together = look(BLOCKWISE, blocks, layer, spec)
    np.testing.assert_array_equal(look(BLOCKWISE, blocks.only([3]), layer, spec), together[[3]])
    for block, time in [(0, 1), (2, 1), (3, 1), (3, 2)]:
        rows = blocks.only([block] * (16 // time))
        parts = (x[block].reshape(16 // time, time, *x.shape[2:]) for x in (blocks.q, blocks.positions))
        out = look(BLOCKWISE, Batch(*rows[:3], *parts), layer, spec)
        np.testing.assert_array_equal(out.reshape(together[block].shape), together[block])


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "page_size", "spec"),
    [(*SIZES[0], PLAIN), (*SIZES[1], CAPPED), (*SIZES[2], PLAIN), (*SIZES[2], CAPPED)],
)
def test_sequences_of_a_single_page_have_the_same_bits_in_any_batch(
    kv_heads: int, group: int, head_dim: int, page_size: int, spec: LayerAttention
) -> None:
    """With tables of one page and a single block, XLA hoists the scores out of the loop over pages."""
    given = batch([[*range(page_size)]] * 16, group, page_size, kv_heads, head_dim)
    given = given._replace(tables=given.tables[:, :1])
    layer = layer_of(BLOCKWISE, given, page_size)
    together = look(BLOCKWISE, given, layer, spec)
    for blocks in (1, 2, 4):
        np.testing.assert_array_equal(look(BLOCKWISE, given.only(slice(blocks)), layer, spec), together[:blocks])
    rows = given.only([5] * page_size)._replace(q=given.q[5][:, None], positions=given.positions[5][:, None])
    np.testing.assert_array_equal(look(BLOCKWISE, rows, layer, spec)[:, 0], together[5])


@sizes
def test_shared_prefixes_do_not_change_bits(kv_heads: int, group: int, head_dim: int, page_size: int) -> None:
    """Rows 0, 2, 4 … start with the same pages, and so do rows 1, 3, 5 …; the last row is in no group."""
    lengths = [[page_size * 2 + (7 * i) % 40] for i in range(32)]
    given = batch(lengths, group, page_size, kv_heads, head_dim, num_tables=2)
    layer = layer_of(BLOCKWISE, given, page_size)
    rows = np.full((8, 16), 32, np.int32)
    rows[0], rows[5, :15] = np.arange(0, 32, 2), np.arange(1, 31, 2)
    num_pages = np.array([2, 0, 0, 0, 0, 1, 0, 0], np.int32)
    together = look(BLOCKWISE, given, layer, shared=SharedPrefixes(rows, num_pages))
    np.testing.assert_array_equal(together, look(BLOCKWISE, given, layer))
