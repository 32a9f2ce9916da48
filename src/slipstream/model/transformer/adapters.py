"""LoRA adapters in the forward pass (Hu et al. 2021, arXiv:2106.09685): trees of their weights, beside the tree of the model.

The tree of an adapter mirrors the model's: `adapter["model"]["layers"][0]["self_attn"]["q_proj"]["lora_A"]["weight"]`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from slipstream.model.config import ModelConfig
from slipstream.model.families import tensors
from slipstream.model.lora import A, adapter_tensors
from slipstream.model.transformer.layers import PRECISION, LowRank, Params
from slipstream.model.tree import unflatten

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from slipstream.types import Lora


def init_adapter(config: ModelConfig, lora: Lora, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Return new weights of an adapter, which change nothing yet: A is uniform as in PEFT (Kaiming with a = √5), B is zero."""
    leaves: dict[str, jax.Array] = {}
    for index, spec in enumerate(adapter_tensors(tensors(config), lora)):
        if spec.name.endswith(A):
            bound = 1 / math.sqrt(spec.shape[1])
            leaves[spec.name] = jax.random.uniform(jax.random.fold_in(key, index), spec.shape, dtype, -bound, bound)
        else:
            leaves[spec.name] = jnp.zeros(spec.shape, dtype)
    return unflatten(leaves)


def with_adapter(params: Params, adapter: Params, lora: Lora) -> Params:
    """Return a tree for the forward pass of the model with an adapter. Nothing is computed or copied."""
    return _zipped(params, adapter, lambda node, a, b: {**node, "lora": LowRank(a, b, lora.scale)})


def merged(params: Params, adapter: Params, lora: Lora) -> Params:
    """Return the weights of the model with the adapter added to them: `W + scale * B @ A`, in the dtype of W."""

    def add(node: Params, a: jax.Array, b: jax.Array) -> Params:
        change = lora.scale * jnp.matmul(b.astype(jnp.float32), a.astype(jnp.float32), precision=PRECISION)
        return {**node, "weight": (node["weight"].astype(jnp.float32) + change).astype(node["weight"].dtype)}

    return _zipped(params, adapter, add)


def _zipped(params: Any, adapter: Any, change: Any) -> Any:
    if isinstance(adapter, list):
        return [_zipped(own, other, change) for own, other in zip(params, adapter, strict=True)]
    if "lora_A" in adapter:
        return change(params, adapter["lora_A"]["weight"], adapter["lora_B"]["weight"])
    return {**params, **{name: _zipped(params[name], part, change) for name, part in adapter.items()}}
