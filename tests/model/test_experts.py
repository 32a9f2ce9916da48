"""Experts: grouped and with every expert, against a naive loop over tokens; gradients; routes given from outside."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.model.config import MoeConfig
from slipstream.model.transformer import experts
from slipstream.model.transformer.layers import mlp
from tests.tiny import random_params, variant

CONFIG = replace(variant("qwen3_moe"), num_layers=1, moe=MoeConfig(6, 3, 24))
LAYER = random_params(CONFIG)["model"]["layers"][0]
EXPERTS = LAYER["mlp"]["experts"]


def routed(num_tokens: int, kind: str, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Activations, experts, shares. `uneven`: two experts have none."""
    rng = np.random.default_rng(num_tokens)
    among = 6 if kind == "even" else 4
    chosen = np.stack([rng.permutation(among)[:3] for _ in range(num_tokens)])
    shares = rng.dirichlet(np.ones(3), num_tokens)
    x = rng.standard_normal((num_tokens, CONFIG.hidden_size))
    return jnp.asarray(x, dtype), jnp.asarray(chosen, jnp.int32), jnp.asarray(shares, dtype)


def naive(x: jax.Array, chosen: jax.Array, shares: jax.Array) -> np.ndarray:
    outputs = np.stack([np.asarray(mlp(expert, CONFIG, x), np.float64) for expert in EXPERTS])
    return np.array(
        [sum(s * outputs[e, t] for e, s in zip(chosen[t], np.asarray(shares[t]))) for t in range(len(chosen))]
    )


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_allow_excess_precision": False})
def computed(way: Any, weights: Any, x: jax.Array, chosen: jax.Array, shares: jax.Array) -> jax.Array:
    result: jax.Array = way(weights, CONFIG, x, chosen, shares)
    return result


def test_grouped_is_the_naive_sum_and_does_not_depend_on_the_batch() -> None:
    arguments = routed(200, "uneven")
    found = computed(experts.grouped, EXPERTS, *arguments)
    np.testing.assert_allclose(found, naive(*arguments), rtol=1e-4, atol=1e-5)
    few = [a[:8] for a in arguments]
    np.testing.assert_array_equal(computed(experts.grouped, EXPERTS, *few), found[:8])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_both_ways_are_equal_to_the_bit(dtype: Any) -> None:
    weights = jax.tree.map(lambda leaf: leaf.astype(dtype), EXPERTS)
    arguments = routed(40, "even", dtype)
    every, grouped = (computed(way, weights, *arguments) for way in (experts.every_expert, experts.grouped))
    np.testing.assert_array_equal(np.asarray(grouped, np.float32), np.asarray(every, np.float32))


def test_gradients_are_those_of_every_expert() -> None:
    x, chosen, shares = routed(50, "uneven")
    weight = jnp.asarray(np.random.default_rng(0).standard_normal(x.shape), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(way: Any) -> Any:
        return jax.grad(lambda e, x, s: jnp.sum(way(e, CONFIG, x, chosen, s) * weight), (0, 1, 2))(EXPERTS, x, shares)

    found, expected = gradient(experts.grouped), gradient(experts.every_expert)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert not np.asarray(jax.tree.leaves(found[0][5])[0]).any(), "no token was sent there"


feed_forward = jax.jit(experts.feed_forward, static_argnums=1)


def test_routes_from_outside_replace_the_routers_choice() -> None:
    x = routed(16, "even")[0]
    plain, own = feed_forward(LAYER, CONFIG, x)
    other = jnp.asarray((np.asarray(own) + 1) % 6)
    assert own is not None
    moved, still_own = feed_forward(LAYER, CONFIG, x, other.astype(jnp.uint8))
    np.testing.assert_array_equal(still_own, own)
    probabilities = np.asarray(jax.nn.softmax(x @ LAYER["mlp"]["gate"]["weight"].T))
    shares = np.take_along_axis(probabilities, np.asarray(other), axis=-1)
    np.testing.assert_allclose(
        moved, naive(x, other, shares / shares.sum(axis=-1, keepdims=True)), rtol=1e-4, atol=1e-5
    )

    unknown = other.at[8:].set(255).astype(jnp.uint8)
    half, _ = feed_forward(LAYER, CONFIG, x, unknown)
    np.testing.assert_array_equal(half[:8], moved[:8])
    np.testing.assert_array_equal(half[8:], plain[8:])

    def loss(gate: jax.Array) -> jax.Array:
        layer = {"mlp": {"gate": {"weight": gate}, "experts": EXPERTS}}
        return jnp.sum(feed_forward(layer, CONFIG, x, other.astype(jnp.uint8))[0] ** 2)

    per_expert = np.abs(jax.grad(loss)(LAYER["mlp"]["gate"]["weight"])).sum(axis=1)
    assert (per_expert > 0).sum() == len(np.unique(other)), "the router learns through the given experts"
