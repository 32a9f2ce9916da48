"""The feed-forward part of a layer: an MLP, or experts that a router chooses for each token.

Two ways compute the same. With every expert, all tokens pass all experts, and most outputs are multiplied by zero. Grouped,
tokens are sorted by expert, and each expert computes tiles of its own tokens: with 8 of 64 experts an eighth of the arithmetic,
and weights of experts without a token are not read. No token is dropped, and a token's result does not depend on the others."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from slipstream.model.config import ModelConfig, MoeConfig
from slipstream.model.families import family_of
from slipstream.model.transformer.layers import Params, linear, mlp, row_max, row_sum

MIN_TILE, MAX_TILE = 8, 32
"""Rows of a tile. With fewer than 8 rows, and in some products with more than 50, XLA on CPU adds in another order."""

_Saved: TypeAlias = tuple[Sequence[Params], jax.Array, jax.Array]


def feed_forward(
    layer: Params, config: ModelConfig, x: jax.Array, routes: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Apply the MLP of a layer, or its experts. Also return the experts that the router chooses for each token,
    `[..., experts_per_token]`; None without experts.

    `routes`, of the same shape, are used instead of the router's choice, except where they are no number of an expert."""
    block = layer[family_of(config).mlp.block]
    if "experts" not in block:
        return mlp(block, config, x), None
    assert config.moe is not None, "family_of refuses experts without moe"
    probabilities = _softmax(linear(x, block["gate"]))
    own = jax.lax.top_k(probabilities, config.moe.experts_per_token)[1]
    chosen = own if routes is None else jnp.where(routes < config.moe.num_experts, routes, own)
    shares = shares_of(probabilities, chosen, config.moe).astype(x.dtype)
    compute = grouped if is_grouped(config.moe) else every_expert
    return compute(block["experts"], config, x, chosen, shares), own


def shares_of(probabilities: jax.Array, chosen: jax.Array, moe: MoeConfig) -> jax.Array:
    """Return the weight of each chosen expert, `[..., experts_per_token]` in float32."""
    shares = jnp.take_along_axis(probabilities, chosen, axis=-1)
    return shares / row_sum(shares) if moe.normalize else shares


def is_grouped(moe: MoeConfig) -> bool:
    """Whether grouping is faster: on CPU at all sizes that were measured, with 8 of 64 experts (benchmarks/experts.py).
    Accelerators compute with every expert: there it was not measured."""
    return jax.default_backend() == "cpu" and moe.num_experts >= 2 * moe.experts_per_token


def every_expert(
    experts: Sequence[Params], config: ModelConfig, x: jax.Array, chosen: jax.Array, shares: jax.Array
) -> jax.Array:
    """Return the weighted sum of the chosen experts' outputs. The program grows with the number of experts."""
    weights = (shares[..., None] * jax.nn.one_hot(chosen, len(experts), dtype=shares.dtype)).sum(axis=-2)
    return functools.reduce(jnp.add, (weights[..., i, None] * mlp(e, config, x) for i, e in enumerate(experts)))


def grouped(
    experts: Sequence[Params], config: ModelConfig, x: jax.Array, chosen: jax.Array, shares: jax.Array
) -> jax.Array:
    """As `every_expert`, with the same order of summation."""
    order = jnp.argsort(chosen, axis=-1)
    chosen, shares = (jnp.take_along_axis(a, order, axis=-1) for a in (chosen, shares))
    flat, num_chosen = x.reshape(-1, x.shape[-1]), chosen.shape[-1]
    out = _expert_rows(config, experts, flat, chosen.reshape(-1, num_chosen)).reshape(*chosen.shape, -1)
    return functools.reduce(jnp.add, (shares[..., i, None] * out[..., i, :] for i in range(num_chosen)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_rows(config: ModelConfig, experts: Sequence[Params], x: jax.Array, chosen: jax.Array) -> jax.Array:
    """Return the output of each token `x[t]` in each of its experts `chosen[t]`, `[tokens, experts_per_token, hidden]`."""
    groups = _Groups(chosen, len(experts))
    compute = [functools.partial(mlp, expert, config) for expert in experts]

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        number, at = groups.tile_at(i)
        return _put(out, jax.lax.switch(number, compute, x[groups.tokens(at)]), at)

    out = jnp.zeros((groups.num_padded, x.shape[-1]), x.dtype)
    return groups.unsorted(jax.lax.fori_loop(0, groups.num_tiles, tile, out))


def _expert_rows_forward(
    config: ModelConfig, experts: Sequence[Params], x: jax.Array, chosen: jax.Array
) -> tuple[jax.Array, _Saved]:
    return _expert_rows(config, experts, x, chosen), (experts, x, chosen)


def _expert_rows_backward(
    config: ModelConfig, saved: _Saved, gradient: jax.Array
) -> tuple[Sequence[Params], jax.Array, None]:
    """The tiles are computed again. An expert's gradients are added in float32."""
    experts, x, chosen = saved
    groups = _Groups(chosen, len(experts))
    d_out = groups.sorted(gradient)

    def pull(expert: Params, rows: jax.Array, d_tile: jax.Array) -> tuple[Params, jax.Array]:
        pulled: tuple[Params, jax.Array] = jax.vjp(lambda e, r: mlp(e, config, r), expert, rows)[1](d_tile)
        return pulled

    compute = [functools.partial(pull, expert) for expert in experts]

    def tile(i: jax.Array, sums: tuple[Params, jax.Array]) -> tuple[Params, jax.Array]:
        number, at = groups.tile_at(i)
        d_tile = jnp.where(groups.is_own(number, at)[:, None], _part(d_out, at, groups.tile), 0)
        d_expert, d_rows = jax.lax.switch(number, compute, x[groups.tokens(at)], d_tile)
        added = jax.tree.map(lambda a, b: a.at[number].add(b.astype(a.dtype)), sums[0], d_expert)
        return added, _put(sums[1], d_rows, at)

    zeros = jax.tree.map(lambda leaf: jnp.zeros((len(experts), *leaf.shape), jnp.float32), experts[0])
    d_experts, d_rows = jax.lax.fori_loop(0, groups.num_tiles, tile, (zeros, jnp.zeros_like(d_out)))
    each = [jax.tree.map(lambda d, leaf, i=i: d[i].astype(leaf.dtype), d_experts, e) for i, e in enumerate(experts)]
    return each, groups.unsorted(d_rows).sum(axis=1), None


_expert_rows.defvjp(_expert_rows_forward, _expert_rows_backward)


class _Groups:
    """Pairs of a token and an expert, sorted by expert. An expert's last tile extends over rows of the next expert, which are
    computed afterwards; behind the last row there is room for it."""

    def __init__(self, chosen: jax.Array, num_experts: int) -> None:
        self._chosen_shape, pairs = chosen.shape, chosen.size
        # Twice the mean, so that most experts have one tile: each reads the weights again.
        self.tile = min(max(1 << (2 * pairs // num_experts).bit_length(), MIN_TILE), MAX_TILE)
        self.num_padded = pairs + self.tile
        self._order = jnp.argsort(chosen.reshape(-1), stable=True)
        self._tokens = jnp.pad(self._order // chosen.shape[1], (0, self.tile))
        counts = (chosen.reshape(-1, 1) == jnp.arange(num_experts)).sum(axis=0, dtype=jnp.int32)
        self._stops = jnp.cumsum(counts, dtype=jnp.int32)
        num_tiles = -(-counts // self.tile)
        self._last_tiles = jnp.cumsum(num_tiles, dtype=jnp.int32)
        self._starts = self._stops - counts - self.tile * (self._last_tiles - num_tiles)
        self.num_tiles = self._last_tiles[-1]

    def tile_at(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The expert of tile `i`, and the tile's first row."""
        number = (self._last_tiles <= i).sum(dtype=jnp.int32)
        return number, self._starts[number] + i * self.tile

    def tokens(self, at: jax.Array) -> jax.Array:
        """The tokens of a tile."""
        return _part(self._tokens, at, self.tile)

    def is_own(self, number: jax.Array, at: jax.Array) -> jax.Array:
        """Which rows of a tile are of its expert."""
        return at + jnp.arange(self.tile) < self._stops[number]

    def sorted(self, rows: jax.Array) -> jax.Array:
        """From `[tokens, experts_per_token, …]`."""
        rows = rows.reshape(-1, rows.shape[-1])[self._order]
        return jnp.pad(rows, ((0, self.tile), (0, 0)))

    def unsorted(self, rows: jax.Array) -> jax.Array:
        """Invert `sorted`."""
        place = jnp.zeros_like(self._order).at[self._order].set(jnp.arange(len(self._order)))
        return rows[place].reshape(*self._chosen_shape, -1)


def _softmax(logits: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    weights = jnp.exp(logits - jax.lax.stop_gradient(row_max(logits)))
    return weights / row_sum(weights)


def _part(array: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, start, size, 0)


def _put(array: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, part, start, 0)
