"""Fully sharded data parallelism (FSDP): parameters, optimizer state and batch rows are sharded over the devices.

The compiler gathers a layer's weights where they are needed and scatters its gradients back (ZeRO, Rajbhandari et al. 2019,
arXiv:1910.02054)."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slipstream.errors import ConfigError
from slipstream.model.transformer.layers import Params
from slipstream.model.transformer.stacked_layers import StackedLayers
from slipstream.rl.algorithm.batch import Batch

AXIS = "fsdp"
T = TypeVar("T")


def mesh_over(num_devices: int) -> Mesh | None:
    """A mesh over the first `num_devices` devices of this process, 0 for all; None for a single device."""
    local = jax.local_devices()
    if num_devices > len(local):
        raise ConfigError(
            f"devices is {num_devices}, but JAX has {len(local)} ({local[0].platform}); set at most that many, or 0 for all. "
            "On CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N virtual devices"
        )
    chosen = local[: num_devices or len(local)]
    return Mesh(np.array(chosen), (AXIS,)) if len(chosen) > 1 else None


def automatic(mesh: Mesh) -> Mesh:
    """The same devices with axes that the compiler shards over automatically. `ConfigError` without our axis."""
    if AXIS not in mesh.shape:
        raise ConfigError(
            f"the mesh has axes {list(mesh.shape)}, none of them named {AXIS!r}; create it with "
            f"jax.make_mesh((jax.device_count(),), ({AXIS!r},))"
        )
    return Mesh(mesh.devices, mesh.axis_names)


def leaf_spec(shape: tuple[int, ...], num_devices: int) -> PartitionSpec:
    """Shard the largest dimension that is divisible by the devices, the first of equals; replicate if there is none."""
    divisible = [dim for dim, size in enumerate(shape) if size and size % num_devices == 0]
    if not divisible or num_devices == 1:
        return PartitionSpec()
    largest = max(divisible, key=lambda dim: (shape[dim], -dim))
    return PartitionSpec(*(AXIS if dim == largest else None for dim in range(largest + 1)))


def shardings(tree: Any, mesh: Mesh) -> Any:
    """A tree of the same structure with the sharding of each array."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, leaf_spec(leaf.shape, mesh.shape[AXIS])), tree)


def shard(tree: T, mesh: Mesh) -> T:
    """Shard the arrays of a tree; inside a compiled program, as a sharding constraint."""
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
    place = jax.lax.with_sharding_constraint if is_traced else jax.device_put
    return place(tree, shardings(tree, mesh))


def shard_prepared(policy: Params, mesh: Mesh) -> Params:
    """Shard a prepared policy (`compute.prepare`) in a compiled program. Layers stay sharded, and each is gathered when its
    turn comes; embedding and head, which are used again for every chunk of logits, are gathered once."""
    whole = NamedSharding(mesh, PartitionSpec())
    sharded = {name: jax.lax.with_sharding_constraint(tree, whole) for name, tree in policy.items() if name != "model"}
    layers = policy["model"]["layers"]
    rest = {name: tree for name, tree in policy["model"].items() if name != "layers"}
    rest = jax.lax.with_sharding_constraint(rest, whole)
    if not isinstance(layers, StackedLayers):
        return {**sharded, "model": {**rest, "layers": shard(layers, mesh)}}

    def place(leaf: jax.Array, repeats: int) -> jax.Array:
        lead = (None,) if repeats > 1 else ()
        spec = PartitionSpec(*lead, *leaf_spec(leaf.shape[len(lead) :], mesh.shape[AXIS]))
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    parts = [
        [jax.tree.map(partial(place, repeats=group.repeats), part) for part in parts]
        for group, parts in zip(layers.groups, layers.parts)
    ]
    return {**sharded, "model": {**rest, "layers": dataclasses.replace(layers, parts=parts)}}


def shard_rows(batch: Batch, mesh: Mesh, parts: int = 1) -> Batch:
    """Shard the rows over the devices. Each of the `parts` of a step must divide evenly."""
    num_rows, divisor = len(batch.tokens), mesh.shape[AXIS] * parts
    if num_rows % divisor:
        raise ConfigError(
            f"{num_rows} rows do not divide by {mesh.shape[AXIS]} devices × {parts} micro-batches; make prompts × group a "
            f"multiple of {divisor}, or pack with rows_multiple={divisor}"
        )
    placed: Batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(AXIS)))
    return placed
