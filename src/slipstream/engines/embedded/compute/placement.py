"""Placement of weights and KV cache: sharded over the devices of a mesh axis `tp`, which may be a single device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slipstream.errors import ConfigError, MappingError, Unsupported
from slipstream.model.checkpoints.hf_weights import check_shapes
from slipstream.model.config import ModelConfig
from slipstream.model.families import shard_dims, tensors
from slipstream.model.transformer.decoder import Params
from slipstream.model.tree import flatten, unflatten
from slipstream.tensors.dlpack import DLPackView


class Placement:
    def __init__(self, config: ModelConfig, tp: int, dtype: str) -> None:
        devices = jax.devices()
        if len(devices) < tp:
            raise ConfigError(
                f"tensor_parallel_size={tp} needs {tp} devices, but JAX sees {len(devices)} ({devices[0].platform}). On CPU, "
                f"start the process with XLA_FLAGS=--xla_force_host_platform_device_count={tp}; elsewhere lower "
                "tensor_parallel_size or make more devices visible"
            )
        self._config = config
        self.dtype = jnp.dtype(dtype)
        self._mesh = Mesh(np.array(devices[:tp]), ("tp",))
        self._adopted: dict[tuple[str, tuple[int, ...]], jax.Array] = {}
        """Arrays over the memory that updates are received into, by name and addresses."""
        self._shapes = {spec.name: spec.shape for spec in tensors(config)}
        self.replicated = NamedSharding(self._mesh, PartitionSpec())
        self.shardings = {name: self.sharding(dim) for name, dim in shard_dims(config, tp).items()}
        """By tensor."""
        heads = "tp" if config.num_kv_heads % tp == 0 else None
        self.cache = NamedSharding(self._mesh, PartitionSpec(None, heads))
        """Sharding of pages `[pages, kv_heads, …]`."""

    def sharding(self, dim: int | None) -> NamedSharding:
        """Return the sharding of arrays whose dimension `dim` is divided among the ranks; None replicates them."""
        return self.replicated if dim is None else NamedSharding(self._mesh, PartitionSpec(*[None] * dim, "tp"))

    def place(self, params: Mapping[str, Any], copy: bool = True) -> Params:
        """Copy a whole tree to the devices, cast and sharded. The copy is complete on return, since a trainer may donate its
        arrays to its next step or write to memory that it shared. Without `copy`, leaves that need no change are kept."""
        check_shapes({name: leaf.shape for name, leaf in flatten(params).items()}, self._config, "the parameters")
        leaves = {
            name: jax.device_put(leaf.astype(self.dtype), self.shardings[name], may_alias=not copy)
            for name, leaf in flatten(params).items()
        }
        return unflatten(jax.block_until_ready(leaves))

    def to_devices(self, params: Params) -> Params:
        """Move leaves in host memory to the devices; leaves on the devices are kept as they are."""
        if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params)):
            return params  # the common case, and the engine does not step meanwhile
        leaves = {}
        for name, leaf in flatten(params).items():
            leaves[name] = leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf, self.shardings[name])
        return unflatten(jax.block_until_ready(leaves))

    @property
    def platform(self) -> str:
        """Platform of the devices: `cpu`, `gpu`, …"""
        return self._mesh.devices.flat[0].platform

    @property
    def devices(self) -> list[jax.Device]:
        """The devices of the ranks, in order."""
        return list(self._mesh.devices.flat)

    def bytes_in_use(self) -> int:
        """Bytes in use on all devices as the runtime reports them; on CPU, where it does not, the bytes of all live arrays."""
        stats = [device.memory_stats() for device in self._mesh.devices.flat]
        if all(stats):
            return sum(s["bytes_in_use"] for s in stats if s)
        return sum(array.nbytes for array in jax.live_arrays())

    def assemble(self, ranks: Mapping[str, Sequence[np.ndarray | jax.Array]], serving: Params | None) -> Params:
        """Build a tree from each rank's local arrays, without a copy if they are on its device. Tensors that were not sent are
        shared with the tree `serving`. Blocks until everything is on the devices."""
        if not ranks and serving is not None:
            return serving
        kept = {} if serving is None else {n: x for n, x in flatten(serving).items() if n not in ranks}
        if missing := self._shapes.keys() - ranks.keys() - kept.keys():
            raise MappingError(
                f"no weights were sent for {sorted(missing)[0]} and {len(missing) - 1} more, and the engine has none yet"
            )
        on_host: dict[str, Any] = {n: a for n, a in ranks.items() if isinstance(a[0], np.ndarray)}
        adopted = {name: self._adopted.get((name, _addresses(arrays))) for name, arrays in on_host.items()}
        leaves = kept | {name: leaf for name, leaf in adopted.items() if leaf is not None}
        leaves |= self._put({name: on_host[name] for name, leaf in adopted.items() if leaf is None})
        leaves |= {name: self._join(name, arrays) for name, arrays in ranks.items() if name not in on_host}
        return unflatten({name: leaves[name] for name in self._shapes})

    def _join(self, name: str, shards: Sequence[Any]) -> jax.Array:
        if len(shards) == 1 and shards[0].sharding == self.shardings[name]:
            return shards[0]
        return jax.make_array_from_single_device_arrays(self._shapes[name], self.shardings[name], list(shards))

    def adopt(self, arrays: Mapping[str, DLPackView]) -> Params:
        """Build a tree over a trainer's memory on the single device, without a copy."""
        if missing := self._shapes.keys() - arrays.keys():
            raise MappingError(f"{sorted(missing)[0]} and {len(missing) - 1} more are not in the shared memory")
        (device,) = self._mesh.devices.flat
        leaves = {}
        for name in self._shapes:
            leaf = jax.dlpack.from_dlpack(arrays[name])
            if leaf.device != device:
                raise Unsupported(f"the shared memory is on {leaf.device}, the engine on {device}")
            if leaf.unsafe_buffer_pointer() != arrays[name].address:
                raise Unsupported(f"this JAX release copies the memory of {name} instead of aliasing it")
            leaves[name] = self._join(name, [leaf])
        return unflatten(leaves)

    def _put(self, ranks: Mapping[str, Sequence[np.ndarray]]) -> dict[str, jax.Array]:
        """Put arrays on the devices. On CPU, JAX aliases aligned host memory instead of copying it. An aliasing array shows
        whatever is received into that memory later, so it is reused for the next version received there: recreating the
        arrays would dominate a small sync. No step reads it meanwhile, since a slot is written only while the other serves."""
        devices = self.devices
        # A single call: for small arrays the call is the cost.
        shards = iter(jax.device_put([a for arrays in ranks.values() for a in arrays], devices * len(ranks)))
        leaves = {}
        for name, arrays in ranks.items():
            local = [next(shards) for _ in devices]
            leaves[name] = self._join(name, local)
            if tuple(shard.unsafe_buffer_pointer() for shard in local) == _addresses(arrays):
                self._adopt(name, _addresses(arrays), leaves[name])
        return jax.block_until_ready(leaves)

    def _adopt(self, name: str, addresses: tuple[int, ...], leaf: jax.Array) -> None:
        """Keep at most two arrays per name, one per slot: the memory of any other is no longer written to."""
        others = [key for key in self._adopted if key[0] == name]
        for key in others[: max(0, len(others) - 1)]:
            del self._adopted[key]
        self._adopted[name, addresses] = leaf

    def release_buffers(self) -> None:
        """Drop the arrays over receive buffers: updates are received elsewhere from now on."""
        self._adopted.clear()

    def shard(self, leaf: jax.Array, rank: int) -> np.ndarray:
        """Copy one rank's shard to host memory. Reads through a temporary array over the same data, since JAX caches the host
        copy of an array for as long as the array lives."""
        device = self.devices[rank]
        (data,) = (shard.data for shard in leaf.addressable_shards if shard.device == device)
        return np.asarray(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]))


def is_backed_by(params: Params | None, addresses: Mapping[str, int]) -> bool:
    """Whether the leaves, each on one device, are views of the memory at `addresses` rather than copies of it."""
    leaves = {} if params is None else flatten(params)
    return leaves.keys() == addresses.keys() and all(
        isinstance(leaf, jax.Array) and leaf.unsafe_buffer_pointer() == addresses[name] for name, leaf in leaves.items()
    )


def _addresses(arrays: Sequence[np.ndarray]) -> tuple[int, ...]:
    return tuple(array.ctypes.data for array in arrays)
