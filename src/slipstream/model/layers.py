"""The parts of a layer that look at one token at a time: linear maps, norms, MLP, experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from slipstream.model.config import ModelConfig, MoeConfig

Params: TypeAlias = dict[str, Any]
"""Nested dicts (lists for layers and experts); joining a leaf's path with dots gives its HF name."""

# Accelerators multiply float32 matrices in TF32 or bfloat16 unless told otherwise, and then trainer and engine differ
# by more than a policy ratio can bear. For bfloat16 inputs this changes nothing.
PRECISION = jax.lax.Precision.HIGHEST

_FEW = 32
_LANES = 8
"""Columns of ones: with a single one it would be a product of matrix and vector, which is computed in another way."""

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def row_sum(x: jax.Array) -> jax.Array:
    """`[..., 1]`: the sum over the last dimension of a float32 array.

    On CPU as a product with ones, or written out where there are few. There XLA adds in an order that depends on how many
    rows there are, but multiplies matrices row by row: so a token gets the same bits alone and in any batch."""

    def by_product(x: jax.Array) -> jax.Array:
        if x.shape[-1] < _FEW:  # XLA would turn so small a product into a sum again
            return functools.reduce(jnp.add, (x[..., i : i + 1] for i in range(x.shape[-1])))
        return jnp.einsum("...i,io->...o", x, jnp.ones((x.shape[-1], _LANES), x.dtype), precision=PRECISION)[..., :1]

    return jax.lax.platform_dependent(x, cpu=by_product, default=lambda x: x.sum(axis=-1, keepdims=True))


def linear(x: jax.Array, layer: Params) -> jax.Array:
    y = jnp.einsum("...i,oi->...o", x, layer["weight"], precision=PRECISION)
    return y + layer["bias"] if "bias" in layer else y


def rms_norm(x: jax.Array, layer: Params, config: ModelConfig) -> jax.Array:
    """Families that add an offset to the weights multiply in float32, the others after rounding to the dtype of `x`."""
    wide, offset = x.astype(jnp.float32), config.definition.norm_offset
    mean = row_sum(jnp.square(wide)) / wide.shape[-1]
    wide = wide * jax.lax.rsqrt(mean + config.rms_norm_eps)
    if offset:
        return (wide * (offset + layer["weight"].astype(jnp.float32))).astype(x.dtype)
    return wide.astype(x.dtype) * layer["weight"]


def feed_forward(layer: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    """The MLP of a layer, or its experts."""
    block = layer[config.definition.mlp.block]
    if "experts" not in block:
        return _mlp(block, config, x)
    assert config.moe is not None, "ModelConfig refuses experts without moe"
    # Every expert sees every token, and most outputs are multiplied by zero: exact, no token is ever dropped, and shapes
    # do not depend on the routing. The price is num_experts / experts_per_token times the arithmetic, and a program
    # that grows with the number of experts.
    shares = route(linear(x, block["gate"]), config.moe).astype(x.dtype)
    parts = (shares[..., i, None] * _mlp(expert, config, x) for i, expert in enumerate(block["experts"]))
    return functools.reduce(jnp.add, parts)


def route(logits: jax.Array, moe: MoeConfig) -> jax.Array:
    """What each expert contributes to each token, `[..., num_experts]` in float32: zero for all but the chosen."""
    logits = logits.astype(jnp.float32)
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
    shares, chosen = jax.lax.top_k(weights / row_sum(weights), moe.experts_per_token)
    if moe.normalise:
        shares = shares / row_sum(shares)
    return (shares[..., None] * jax.nn.one_hot(chosen, moe.num_experts)).sum(axis=-2)


def _mlp(mlp: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    names, activation = config.definition.mlp, _ACTIVATIONS[config.definition.activation]
    return linear(activation(linear(x, mlp[names.gate])) * linear(x, mlp[names.up]), mlp[names.down])
