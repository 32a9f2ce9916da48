"""Token-wise parts of a layer: linear maps, norms, the MLP. Experts are in `experts.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from slipstream.model.config import ModelConfig
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


def row_max(x: jax.Array) -> jax.Array:
    """Maximum over the last dimension; the result is `[..., 1]`.

    On CPU in pairs: with many rows, XLA gives a reduction and the exponential after it to a library (YNNPACK) whose exponential
    differs in the last bit."""

    def in_pairs(x: jax.Array) -> jax.Array:
        while x.shape[-1] > 1:
            half = (x.shape[-1] + 1) // 2
            x = jnp.maximum(x[..., :half], x[..., -half:])
        return x

    return jax.lax.platform_dependent(x, cpu=in_pairs, default=lambda x: x.max(axis=-1, keepdims=True))


def wide_einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Einsum with a result in float32. The gradient's products are in the dtype of the operands: JAX's own would multiply the
    float32 gradient with them, which on GPUs takes many times as long."""
    if a.dtype == jnp.float32:
        return jnp.einsum(subscripts, a, b, precision=PRECISION, preferred_element_type=jnp.float32)
    return _wide_einsum(subscripts, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wide_einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=PRECISION, preferred_element_type=jnp.float32)


def _wide_einsum_forward(subscripts: str, a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _wide_einsum(subscripts, a, b), (a, b)


def _wide_einsum_backward(
    subscripts: str, operands: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    _, pullback = jax.vjp(functools.partial(jnp.einsum, subscripts, precision=PRECISION), *operands)
    return pullback(gradient.astype(operands[0].dtype))


_wide_einsum.defvjp(_wide_einsum_forward, _wide_einsum_backward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of a projection by a LoRA adapter, `scale * b @ a`: the entry "lora" of its part of the tree."""

    a: Any
    """`[rank, in]`; or transposed, with another one for each row of the batch: `[rows, in, rank]`."""
    b: Any
    """`[out, rank]`, or `[rows, rank, out]`."""
    scale: float = field(default=1.0, metadata={"static": True})


def linear(x: jax.Array, layer: Params) -> jax.Array:
    y = jnp.einsum("...i,oi->...o", x, layer["weight"], precision=PRECISION)
    if "lora" in layer:
        y = y + low_rank(x, layer["lora"])
    return y + layer["bias"] if "bias" in layer else y


def low_rank(x: jax.Array, change: LowRank) -> jax.Array:
    """Return what an adapter adds to a projection of `x` `[rows, time, in]`.

    Where each row has its own matrices, one token is computed as several equal ones: XLA on CPU would use its matrix-vector
    product, which adds in another order."""
    if change.a.ndim == 2:
        down = jnp.einsum("...i,ri->...r", x, change.a, precision=PRECISION)
        return jnp.einsum("...r,or->...o", down, change.b, precision=PRECISION) * change.scale
    time = x.shape[1]
    x = jnp.broadcast_to(x, (x.shape[0], _LANES, x.shape[2])) if time == 1 else x
    down = jnp.einsum("bti,bir->btr", x, change.a, precision=PRECISION)
    return jnp.einsum("btr,bro->bto", down, change.b, precision=PRECISION)[:, :time] * change.scale


def rms_norm(x: jax.Array, layer: Params, config: ModelConfig) -> jax.Array:
    """RMS norm. Families with a norm offset multiply by the weights in float32, others in the dtype of `x`."""
    wide, offset = x.astype(jnp.float32), family_of(config).norm_offset
    mean = row_sum(jnp.square(wide)) / wide.shape[-1]
    wide = wide * jax.lax.rsqrt(mean + config.rms_norm_eps)
    if offset:
        return (wide * (offset + layer["weight"].astype(jnp.float32))).astype(x.dtype)
    return wide.astype(x.dtype) * layer["weight"]


def mlp(block: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    names, activation = family_of(config).mlp, _ACTIVATIONS[family_of(config).activation]
    return linear(activation(linear(x, block[names.gate])) * linear(x, block[names.up]), block[names.down])
