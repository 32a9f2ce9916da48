"""Token-wise parts of a layer: linear maps, norms, MLP, experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from slipstream.model.config import ModelConfig, MoeConfig
from slipstream.model.families import family_of

Params: TypeAlias = dict[str, Any]
"""Nested dicts, with lists for layers and experts. A leaf's path joined with dots is its HF name."""

# By default, accelerators multiply float32 matrices in TF32 or bfloat16; trainer and engine would then differ too much for
# policy ratios. No effect on bfloat16 inputs.
PRECISION = jax.lax.Precision.HIGHEST

_FEW = 32
_LANES = 8
"""Columns of ones. With one column, XLA would use its matrix-vector product, which adds in another order."""

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def row_sum(x: jax.Array) -> jax.Array:
    """Sum a float32 array over the last dimension; the result is `[..., 1]`.

    On CPU this is a product with ones, or an explicit sum of few elements. XLA's reduction on CPU adds in an order that depends
    on the number of rows, but its matrix product does not. So a token's result has the same bits alone and in any batch."""

    def by_product(x: jax.Array) -> jax.Array:
        if x.shape[-1] < _FEW:  # XLA would turn such a small product back into a reduction
            return functools.reduce(jnp.add, (x[..., i : i + 1] for i in range(x.shape[-1])))
        return jnp.einsum("...i,io->...o", x, jnp.ones((x.shape[-1], _LANES), x.dtype), precision=PRECISION)[..., :1]

    return jax.lax.platform_dependent(x, cpu=by_product, default=lambda x: x.sum(axis=-1, keepdims=True))


def linear(x: jax.Array, layer: Params) -> jax.Array:
    y = jnp.einsum("...i,oi->...o", x, layer["weight"], precision=PRECISION)
    return y + layer["bias"] if "bias" in layer else y


def rms_norm(x: jax.Array, layer: Params, config: ModelConfig) -> jax.Array:
    """RMS norm. Families with a norm offset multiply by the weights in float32, others in the dtype of `x`."""
    wide, offset = x.astype(jnp.float32), family_of(config).norm_offset
    mean = row_sum(jnp.square(wide)) / wide.shape[-1]
    wide = wide * jax.lax.rsqrt(mean + config.rms_norm_eps)
    if offset:
        return (wide * (offset + layer["weight"].astype(jnp.float32))).astype(x.dtype)
    return wide.astype(x.dtype) * layer["weight"]


def feed_forward(layer: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Apply the MLP of a layer, or its experts."""
    block = layer[family_of(config).mlp.block]
    if "experts" not in block:
        return _mlp(block, config, x)
    assert config.moe is not None, "family_of refuses experts without moe"
    # Every expert computes every token, and most outputs are multiplied by zero. This is exact, never drops tokens, and shapes
    # do not depend on routing. It costs num_experts / experts_per_token times the arithmetic, and the program grows with the
    # number of experts.
    shares = route(linear(x, block["gate"]), config.moe).astype(x.dtype)
    parts = (shares[..., i, None] * _mlp(expert, config, x) for i, expert in enumerate(block["experts"]))
    return functools.reduce(jnp.add, parts)


def route(logits: jax.Array, moe: MoeConfig) -> jax.Array:
    """Return the weight of each expert for each token, `[..., num_experts]` in float32; zero unless chosen."""
    logits = logits.astype(jnp.float32)
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
    shares, chosen = jax.lax.top_k(weights / row_sum(weights), moe.experts_per_token)
    if moe.normalize:
        shares = shares / row_sum(shares)
    return (shares[..., None] * jax.nn.one_hot(chosen, moe.num_experts)).sum(axis=-2)


def _mlp(mlp: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    names, activation = family_of(config).mlp, _ACTIVATIONS[family_of(config).activation]
    return linear(activation(linear(x, mlp[names.gate])) * linear(x, mlp[names.up]), mlp[names.down])
