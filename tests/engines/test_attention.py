"""Paged attention: page by page beside the whole sequence at once, and the same bits whatever else is in the batch."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
import pytest

from slipstream.engines.embedded.attention import BlockwiseAttention, CacheLayer, NaiveAttention, PagedAttention
from slipstream.model.config import LayerAttention

BLOCKWISE, NAIVE = BlockwiseAttention(), NaiveAttention()
PLAIN = LayerAttention(scale=0.3, window=None, softcap=None)
HEAD_DIM, KV_HEADS = 16, 2


class Batch(NamedTuple):
    """Sequences `[sequences, time, heads, head_dim]`, all computed but for the queries' own tokens, and who asks."""

    k: np.ndarray
    v: np.ndarray
    tables: np.ndarray
    q: np.ndarray
    positions: np.ndarray

    def only(self, blocks: slice | list[int]) -> Batch:
        return Batch(*(part[blocks] for part in self))

    @property
    def num_pages(self) -> int:
        return int(self.tables.max()) + 3


def batch(positions: list[list[int]], group: int = 1, page_size: int = 4, seed: int = 0) -> Batch:
    """A sequence for each block of positions, in pages dealt out at random."""
    rng = np.random.default_rng(seed)
    where = np.array(positions, np.int32)
    blocks, time = where.shape
    width = int(where.max()) // page_size + 2
    tables = rng.permutation(blocks * width).reshape(blocks, width).astype(np.int32)
    k, v = rng.normal(size=(2, blocks, width * page_size, KV_HEADS, HEAD_DIM)).astype(np.float32)
    q = rng.normal(size=(blocks, time, KV_HEADS * group, HEAD_DIM)).astype(np.float32)
    return Batch(k, v, tables, q, where)


def run(
    attention: PagedAttention, given: Batch, how: LayerAttention = PLAIN, page_size: int = 4, num_pages: int = 0
) -> np.ndarray:
    """Writes what comes before the queries, then their own tokens as the engine does, and attends."""
    rng = np.random.default_rng(99)
    num_pages = num_pages or given.num_pages
    shapes = attention.layer_shapes(num_pages, KV_HEADS, page_size, HEAD_DIM)
    keys, values = (rng.normal(size=shape).astype(np.float32) for shape in shapes)  # what others left behind
    own = np.maximum(given.positions, 0)[:, :, None, None]
    new_k, new_v = (np.take_along_axis(x, own, axis=1) for x in (given.k, given.v))
    before = np.broadcast_to(np.arange(given.k.shape[1], dtype=np.int32), given.k.shape[:2])
    first = np.where(given.positions < 0, 1 << 30, given.positions).min(axis=1, keepdims=True)
    before = np.where((before < first) & (given.positions.max(axis=1, keepdims=True) >= 0), before, -1)

    @jax.jit
    def step(layer: CacheLayer, given: Batch) -> jax.Array:
        layer = attention.write(layer, given.k, given.v, given.tables, before)
        layer = attention.write(layer, new_k, new_v, given.tables, given.positions)
        return attention.attend(given.q, layer, given.tables, given.positions, how)

    return np.asarray(step((keys, values), given))


DECODE = [[0], [37], [-1], [7], [8], [15], [16], [60]]
PREFILL = [[*range(3, 19)], [*range(35, 51)], [*range(9), *[-1] * 7], [-1] * 16, [*range(16, 32)], [0, *[-1] * 15]]


@pytest.mark.parametrize("how", [PLAIN, LayerAttention(0.5, window=6, softcap=2.0)], ids=["plain", "window and cap"])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("positions", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_page_by_page_is_the_whole_at_once(
    positions: list[list[int]], page_size: int, group: int, how: LayerAttention
) -> None:
    given = batch(positions, group, page_size)
    out, expected = (run(attention, given, how, page_size) for attention in (BLOCKWISE, NAIVE))
    assert np.isfinite(out).all()
    live = given.positions >= 0
    np.testing.assert_allclose(out[live], expected[live], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("how", [LayerAttention(0.3, 1, None), LayerAttention(0.3, None, 1.5)], ids=["itself", "cap"])
def test_window_and_cap_alone(how: LayerAttention) -> None:
    given = batch(DECODE, group=3)
    out, expected = (run(attention, given, how) for attention in (BLOCKWISE, NAIVE))
    live = given.positions >= 0
    np.testing.assert_allclose(out[live], expected[live], rtol=2e-5, atol=2e-6)
    if how.window == 1:  # a token that sees itself alone gets its own value
        rows = np.flatnonzero(live[:, 0])
        own = given.v[rows, given.positions[rows, 0]]
        np.testing.assert_allclose(out[rows, 0], np.repeat(own, 3, axis=1), rtol=1e-6)


def test_all_padding_is_finite() -> None:
    given = batch([[3]] * 8)._replace(positions=np.full((8, 1), -1, np.int32))
    assert np.isfinite(run(BLOCKWISE, given)).all()


@pytest.mark.parametrize("attention", [BLOCKWISE, NAIVE], ids=["blockwise", "naive"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_write_puts_tokens_into_their_pages_and_touches_nothing_else(attention: PagedAttention, page_size: int) -> None:
    positions = np.array([[6, 7, 8], [0, -1, -1], [-1, -1, -1], [14, 15, 16]], np.int32)
    tables = np.random.default_rng(0).permutation(24)[:20].reshape(4, 5).astype(np.int32)
    rng = np.random.default_rng(1)
    shapes = attention.layer_shapes(24, KV_HEADS, page_size, HEAD_DIM)
    layer = tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)
    k, v = rng.normal(size=(2, 4, 3, KV_HEADS, HEAD_DIM)).astype(np.float32)
    keys, values = (np.asarray(x) for x in jax.jit(attention.write)(layer, k, v, tables, positions))
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

HOWS = pytest.mark.parametrize("how", [PLAIN, LayerAttention(0.3, window=9, softcap=2.0)], ids=["plain", "window and cap"])


@HOWS
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_row_has_the_same_bits_in_any_batch(page_size: int, group: int, how: LayerAttention) -> None:
    """Beside other rows, among more of them, at another place, next to a longer sequence, or alone with padding."""
    given = batch([[(i * 13) % 61] for i in range(31)] + [[150]], group, page_size)
    pages = given.num_pages
    together = run(BLOCKWISE, given, how, page_size)
    eight = [20, 3, 0, 7, 30, 11, 9, 2]
    np.testing.assert_array_equal(run(BLOCKWISE, given.only(eight), how, page_size, pages), together[eight])
    for row in (5, 14):
        alone = given.only([0, 0, 0, row, 0, 0, 0, 0])
        alone.positions[[0, 1, 2, 4, 5, 6, 7]] = -1
        np.testing.assert_array_equal(run(BLOCKWISE, alone, how, page_size, pages)[3], together[row])


@HOWS
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_block_has_the_bits_of_its_rows_one_by_one(page_size: int, group: int, how: LayerAttention) -> None:
    """Prefill in a block of 16 and decode in steps of one are the same computation; and so is a block with others."""
    blocks = batch([[*range(start, start + 16)] for start in (0, 5, 22, 40)], group, page_size)
    together = run(BLOCKWISE, blocks, how, page_size)
    np.testing.assert_array_equal(
        run(BLOCKWISE, blocks.only(slice(1, 2)), how, page_size, blocks.num_pages), together[1:2]
    )
    for block in range(4):
        # The same sequence sixteen times, each asking at one position: the pages are written alike by all.
        rows = blocks.only([block] * 16)
        rows = rows._replace(q=blocks.q[block][:, None], positions=blocks.positions[block][:, None])
        np.testing.assert_array_equal(run(BLOCKWISE, rows, how, page_size, blocks.num_pages)[:, 0], together[block])
