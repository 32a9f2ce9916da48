"""The GPU kernels, interpreted on CPU, against a plain float32 reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.assembly import attention_for
from slipstream.engines.embedded.compute.attention import BlockwiseAttention
from slipstream.engines.embedded.compute.attention_gpu import PallasAttention, Tile
from slipstream.errors import ConfigError


class AttentionSpec(NamedTuple):
    scale: float = 0.3
    window: int | None = None
    softcap: float | None = None


class Case(NamedTuple):
    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    tables: np.ndarray
    positions: np.ndarray


DEFAULT = AttentionSpec()
SMALL = Tile(rows=32, keys=16)
PLAIN = PallasAttention(interpret=True, decode=Tile(rows=16, keys=16))
FAST = PallasAttention(interpret=True, deterministic=False, decode=Tile(rows=16, keys=16), prefill=SMALL, splits=1)
SPLIT = PallasAttention(interpret=True, deterministic=False, decode=Tile(rows=16, keys=16), prefill=SMALL, splits=4)


def case(
    positions: list[list[int]],
    *,
    group: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    page_size: int = 8,
    seed: int = 0,
) -> Case:
    """Random keys on random pages; slots that no sequence has written are NaN."""
    rng = np.random.default_rng(seed)
    where = np.array(positions, np.int32)
    num_blocks, num_queries = where.shape
    width = max(1, -(-(int(where.max()) + 1) // page_size) + 1)
    num_pages = num_blocks * width + 3
    tables = rng.permutation(num_pages)[: num_blocks * width].reshape(num_blocks, width).astype(np.int32)
    keys = np.full((num_pages, kv_heads, page_size, head_dim), np.nan, np.float32)
    values = keys.copy()
    for table, row in zip(tables, where):
        for position in range(int(row.max()) + 1):
            for pages in (keys, values):
                pages[table[position // page_size], :, position % page_size] = rng.normal(size=(kv_heads, head_dim))
    q = rng.normal(size=(num_blocks, num_queries, kv_heads * group, head_dim)).astype(np.float32)
    return Case(q, keys, values, tables, where)


def reference(case: Case, spec: AttentionSpec) -> np.ndarray:
    """Plain attention row by row; padding is zero."""
    out = np.zeros_like(case.q)
    page_size = case.keys.shape[2]
    group = case.q.shape[2] // case.keys.shape[1]
    for block, row in enumerate(case.positions):
        for i, position in enumerate(row):
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            seen = np.arange(first, position + 1)
            if position < 0:
                continue
            pages, offsets = case.tables[block, seen // page_size], seen % page_size
            for head in range(case.q.shape[2]):
                k, v = (part[pages, head // group, offsets] for part in (case.keys, case.values))
                logits = k @ case.q[block, i, head] * spec.scale
                if spec.softcap is not None:
                    logits = spec.softcap * np.tanh(logits / spec.softcap)
                weights = np.exp(logits - logits.max())
                out[block, i, head] = weights @ v / weights.sum()
    return out


def attend(attention: PallasAttention, case: Case, spec: AttentionSpec) -> np.ndarray:
    run = jax.jit(attention.attend, static_argnums=4)
    return np.asarray(run(case.q, (case.keys, case.values), case.tables, case.positions, spec), np.float32)


def check(attention: PallasAttention, given: Case, spec: AttentionSpec = DEFAULT) -> None:
    out = attend(attention, given, spec)
    assert np.isfinite(out).all()
    live = given.positions >= 0
    np.testing.assert_allclose(out[live], reference(given, spec)[live], rtol=2e-5, atol=2e-5)


RAGGED = [[0], [37], [-1], [7], [8], [15], [16], [60]]
BLOCKS = [[*range(3, 11)], [*range(11, 19)], [0, 1, 2, 3, -1, -1, -1, -1], [-1] * 8, [*range(40, 48)]]


@pytest.mark.parametrize("attention", [PLAIN, FAST, SPLIT], ids=["plain", "fast", "split"])
@pytest.mark.parametrize("positions", [RAGGED, BLOCKS], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    "spec", [AttentionSpec(), AttentionSpec(window=9, softcap=2.0)], ids=["plain", "window and cap"]
)
def test_ragged_positions_and_padding(
    attention: PallasAttention, positions: list[list[int]], spec: AttentionSpec
) -> None:
    check(attention, case(positions), spec)


@pytest.mark.parametrize("spec", [AttentionSpec(window=20), AttentionSpec(softcap=2.0)], ids=["window", "cap"])
def test_window_or_cap_alone(spec: AttentionSpec) -> None:
    check(FAST, case(BLOCKS), spec)


DECODE, PREFILL = [[5], [33]], [[*range(20, 25)]]


@pytest.mark.parametrize(
    ("positions", "group", "head_dim", "page_size"),
    [
        (DECODE, 1, 64, 16),
        (PREFILL, 1, 32, 32),
        (DECODE, 3, 32, 16),
        (PREFILL, 3, 64, 8),
        (DECODE, 4, 128, 32),
        (PREFILL, 4, 64, 16),
        (DECODE, 8, 64, 32),
        (PREFILL, 8, 128, 8),
    ],
)
def test_shapes(positions: list[list[int]], group: int, head_dim: int, page_size: int) -> None:
    check(FAST, case(positions, group=group, head_dim=head_dim, page_size=page_size))


def test_the_first_token_alone() -> None:
    check(SPLIT, case([[0]]))


def test_tiles_wider_than_the_sequence() -> None:
    check(PallasAttention(interpret=True), case([[3], [70]], page_size=16))
    check(PallasAttention(interpret=True, deterministic=False), case([[*range(64)], [*range(64, 128)]], page_size=16))


def test_bfloat16() -> None:
    given = case(RAGGED, head_dim=64, page_size=16)
    rounded = Case(*(part.astype(jnp.bfloat16) for part in given[:3]), *given[3:])
    out = attend(PLAIN, rounded, AttentionSpec(scale=0.125))
    wanted = reference(Case(*(part.astype(np.float32) for part in rounded[:3]), *given[3:]), AttentionSpec(scale=0.125))
    live = given.positions >= 0
    np.testing.assert_allclose(out[live], wanted[live], rtol=2e-2, atol=2e-2)


def test_deterministic_rows_do_not_depend_on_their_block() -> None:
    """A query has the same bits in a decode step and anywhere in a prefill block."""
    given = case([[*range(20, 36)], [*range(30, 46)]], head_dim=64, page_size=16)
    spec = AttentionSpec(window=17)
    together = attend(PLAIN, given, spec)
    for i in (0, 3, 15):
        alone = given._replace(q=given.q[:, i : i + 1], positions=given.positions[:, i : i + 1])
        np.testing.assert_array_equal(attend(PLAIN, alone, spec)[:, 0], together[:, i])


@pytest.mark.parametrize("kv_heads", [2, 3])
def test_write(kv_heads: int) -> None:
    positions = np.array([[8, 9, 10], [0, -1, -1], [-1, -1, -1], [15, 16, 17]], np.int32)
    tables = np.array([[4, 2, 9], [1, -1, -1], [-1, -1, -1], [6, 0, 3]], np.int32)
    rng = np.random.default_rng(1)
    shapes = PallasAttention.layer_shapes(10, kv_heads, 8, 32)
    layer = tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)
    new = [rng.normal(size=(4, 3, kv_heads, 32)).astype(np.float32) for _ in layer]
    attention = PallasAttention(interpret=True)
    written = jax.jit(attention.write)(layer, *new, tables, positions)
    for before, tokens, after in zip(layer, new, written):
        wanted = before.copy()
        for (block, i), position in np.ndenumerate(positions):
            if position >= 0:
                wanted[tables[block, position // 8], :, position % 8] = tokens[block, i]
        np.testing.assert_array_equal(np.asarray(after), wanted)


def test_kernels_lower_to_triton() -> None:
    """Checked without a GPU: the kernels lower for one, at the shapes of a 1B model."""
    if tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11) and jax.default_backend() != "gpu":
        pytest.skip("this JAX translates Triton kernels only where a GPU is present")

    def step(attention: PallasAttention, q, k, v, layer, tables, positions, spec):
        layer = attention.write(layer, k, v, tables, positions)
        return attention.attend(q, layer, tables, positions, spec), layer

    page, other = PallasAttention.layer_shapes(1000, 8, 16, 64)
    layer = (jax.ShapeDtypeStruct(page, jnp.bfloat16), jax.ShapeDtypeStruct(other, jnp.bfloat16))
    for deterministic, batch, queries in [(True, 64, 1), (True, 16, 32), (False, 4, 1), (False, 16, 32)]:
        attention = PallasAttention(deterministic=deterministic)
        q = jax.ShapeDtypeStruct((batch, queries, 32, 64), jnp.bfloat16)
        kv = jax.ShapeDtypeStruct((batch, queries, 8, 64), jnp.bfloat16)
        tables = jax.ShapeDtypeStruct((batch, 256), jnp.int32)
        positions = jax.ShapeDtypeStruct((batch, queries), jnp.int32)
        for spec in (AttentionSpec(), AttentionSpec(window=512, softcap=30.0)):
            traced = jax.jit(step, static_argnums=(0, 7)).trace(attention, q, kv, kv, layer, tables, positions, spec)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert "triton" in text


def test_unsupported_shapes_are_rejected() -> None:
    with pytest.raises(ValueError, match="head_dim=80"):
        PallasAttention.layer_shapes(10, 2, 16, 80)


def test_an_unsupported_model_falls_back_to_blockwise_attention() -> None:
    auto = EmbeddedConfig()
    assert isinstance(attention_for(auto, 64, 16, "gpu"), PallasAttention)
    assert isinstance(attention_for(auto, 80, 16, "gpu"), BlockwiseAttention)
    assert isinstance(attention_for(auto, 64, 16, "cpu"), BlockwiseAttention)


@pytest.mark.parametrize(
    ("asked", "named"), [({"attention": "pallas"}, "attention='pallas'"), ({"deterministic": True}, "deterministic")]
)
def test_options_that_need_the_kernels_are_rejected_for_such_a_model(asked: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"{named}.* does not support this model: .* got head_dim=80, block_size=16"):
        attention_for(EmbeddedConfig(**asked), 80, 16, "gpu")
