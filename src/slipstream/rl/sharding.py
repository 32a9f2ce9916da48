"""Fully sharded data parallelism: parameters and optimiser state cut over the devices, and so is the batch.

Every device holds a part of every large array and a part of the rows. The compiler gathers a layer's weights where they
are needed and scatters its gradients back (ZeRO, Rajbhandari et al. 2019, arXiv:1910.02054)."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slipstream.errors import ConfigError
from slipstream.rl.batch import Batch

AXIS = "fsdp"
T = TypeVar("T")


def mesh_over(num_devices: int) -> Mesh | None:
    """Over the first devices of this process, or all of them (0); None for a single one, which needs no mesh."""
    local = jax.local_devices()
    if num_devices > len(local):
        raise ConfigError(
            f"devices is {num_devices}, and JAX sees {len(local)} here ({local[0].platform}); say at most that many, or 0 for "
            "all. On CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N of one"
        )
    chosen = local[: num_devices or len(local)]
    return Mesh(np.array(chosen), (AXIS,)) if len(chosen) > 1 else None


def automatic(mesh: Mesh) -> Mesh:
    """The same devices, with axes of which the compiler decides what is sharded in between; checked to have ours."""
    if AXIS not in mesh.shape:
        raise ConfigError(
            f"the mesh has axes {list(mesh.shape)}, but none named {AXIS!r}; make one with "
            f"jax.make_mesh((jax.device_count(),), ({AXIS!r},))"
        )
    return Mesh(mesh.devices, mesh.axis_names)


def leaf_spec(shape: tuple[int, ...], num_devices: int) -> PartitionSpec:
    """The largest dimension that the devices divide is cut, the first of equals; an array without one is on all of them."""
    divisible = [dim for dim, size in enumerate(shape) if size and size % num_devices == 0]
    if not divisible or num_devices == 1:
        return PartitionSpec()
    cut = max(divisible, key=lambda dim: (shape[dim], -dim))
    return PartitionSpec(*(AXIS if dim == cut else None for dim in range(cut + 1)))


def shardings(tree: Any, mesh: Mesh) -> Any:
    """A tree of the same form, each leaf the sharding of the array there."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, leaf_spec(leaf.shape, mesh.shape[AXIS])), tree)


def shard(tree: T, mesh: Mesh) -> T:
    """The tree's arrays, each device with its part. Inside a compiled program: the same as a constraint."""
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh)) if _traced(tree) else _put(tree, mesh)


def shard_rows(batch: Batch, mesh: Mesh, parts: int = 1) -> Batch:
    """Each device gets its share of the rows, which must be a whole number for each of the `parts` of a step."""
    num_rows, each = len(batch.tokens), mesh.shape[AXIS] * parts
    if num_rows % each:
        raise ConfigError(
            f"{num_rows} rows cannot be shared evenly by {mesh.shape[AXIS]} devices in {parts} micro-batches; make prompts × "
            f"group a multiple of {each}, or pack with rows_multiple={each}"
        )
    placed: Batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(AXIS)))
    return placed


def _put(tree: T, mesh: Mesh) -> T:
    placed: T = jax.device_put(tree, shardings(tree, mesh))
    return placed


def _traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
