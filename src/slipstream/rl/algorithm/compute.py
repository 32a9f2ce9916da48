"""How a forward pass is computed: `ComputeConfig` with "auto" resolved by platform and size. Pure, but for `platform`.

On CPU, a model whose activations and logits are small is computed in the plainest way, in the dtype of its weights, so that its
results do not change in the last bit from one release to the next."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from slipstream.model.config import ModelConfig
from slipstream.model.transformer.layers import Params
from slipstream.model.transformer.stacked_layers import Remat, StackedLayers, stack, unstack
from slipstream.rl.algorithm import sharding
from slipstream.rl.config import ComputeConfig, Dtype

T = TypeVar("T")

AUTO = ComputeConfig()
WHOLE_BYTES = 1 << 30
"""Logits or attention scores of a micro-batch larger than this are computed in chunks."""
CHUNK_BYTES = 1 << 29
"""Size of the logits or attention scores of a chunk, at most."""
ACTIVATION_BYTES = 8 << 30
"""Activations kept for the backward pass: with more than this, `remat = "auto"` computes some of them again."""


class ComputePlan(NamedTuple):
    """How to compute one micro-batch."""

    remat: Remat
    attention: Literal["whole", "chunked", "cudnn"]
    query_chunk: int
    """Queries at a time, where attention is chunked."""
    logits_chunk: int
    """Positions of each row that are projected at a time; 0 projects all at once."""


def platform() -> str:
    return jax.default_backend()


def compute_dtype(config: ComputeConfig, platform: str) -> Dtype | None:
    """Data type of matrix products and activations; None leaves that of the weights."""
    if config.dtype == "auto":
        return None if platform == "cpu" else "bfloat16"
    return config.dtype


def param_dtype(config: ComputeConfig, platform: str) -> Dtype | None:
    """Data type of weights and optimizer state; None leaves that of the checkpoint."""
    if config.param_dtype == "auto":
        return None if platform == "cpu" else "float32"
    return config.param_dtype


def scans_layers(config: ComputeConfig, platform: str) -> bool:
    return platform != "cpu" if config.scan_layers is None else config.scan_layers


def make_plan(config: ComputeConfig, model: ModelConfig, rows: int, time: int, item_size: int) -> ComputePlan:
    """The plan for `rows` rows of `time` tokens, with `item_size` bytes per activation."""
    score_bytes = 4 * rows * model.num_heads * time * time
    remat = config.remat
    if remat == "auto":
        kept = activation_bytes(model, rows * time, item_size)
        fits: list[Remat] = [how for how in ("none", "selective") if kept[how] <= ACTIVATION_BYTES]
        if score_bytes * model.num_layers > ACTIVATION_BYTES and "none" in fits:
            fits.remove("none")
        remat = fits[0] if fits else "full"
    attention: Literal["whole", "chunked", "cudnn"] = "whole" if score_bytes <= WHOLE_BYTES else "chunked"
    if config.attention == "cudnn":
        attention = "cudnn"
    position_bytes = 4 * rows * model.vocab_size
    logits_chunk = config.logits_chunk
    if not logits_chunk and position_bytes * time > WHOLE_BYTES:
        logits_chunk = _chunk(position_bytes)
    return ComputePlan(remat, attention, _chunk(score_bytes // time), min(logits_chunk, time))


def activation_bytes(model: ModelConfig, tokens: int, item_size: int) -> dict[Remat, int]:
    """Approximate bytes of activations that are kept for the backward pass, without logits and attention scores."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    inner = model.intermediate_size if model.moe is None else model.moe.num_experts * model.moe.intermediate_size
    products = 2 * q + 2 * kv + 2 * model.hidden_size + 2 * inner  # q, k, v, attention, o, gate, up, down
    kept = {"full": model.hidden_size, "selective": model.hidden_size + products, "none": 3 * products}
    return {how: tokens * model.num_layers * item_size * size for how, size in kept.items()}  # type: ignore[misc]


def prepare(policy: Params, model: ModelConfig, config: ComputeConfig, mesh: Mesh | None = None) -> Params:
    """The policy as the forward pass takes it: layers cast to the compute dtype and stacked. Embedding and head are cast where
    they are used, so that their gradients are summed in the dtype of the weights."""
    tree, dtype, scans = policy["model"], compute_dtype(config, platform()), scans_layers(config, platform())
    if isinstance(tree["layers"], StackedLayers) or (dtype is None and not scans):
        return policy
    layers = cast(tree["layers"], dtype)
    prepared = {**policy, "model": {**tree, "layers": stack(layers, model) if scans else layers}}
    return prepared if mesh is None else sharding.shard_prepared(prepared, mesh)


def restore(gradient: Params) -> Params:
    """The gradient by a prepared policy as a tree like the policy's."""
    layers = gradient["model"]["layers"]
    if not isinstance(layers, StackedLayers):
        return gradient
    return {**gradient, "model": {**gradient["model"], "layers": unstack(layers)}}


def cast(tree: T, dtype: Dtype | None) -> T:
    """The tree in a dtype, or as it is if None."""
    if dtype is None:
        return tree
    converted: T = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(dtype), tree)
    return converted


def _chunk(bytes_each: int) -> int:
    """The largest power of two of items of this size that fit into a chunk; at least one."""
    return 1 << max(0, (CHUNK_BYTES // max(1, bytes_each)).bit_length() - 1)
