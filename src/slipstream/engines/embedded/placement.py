"""Where arrays live: weights and KV cache split over the devices of a mesh axis `tp`. One device is the same code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slipstream.errors import ConfigError, MappingError, Unsupported
from slipstream.model.checkpoint import check_shapes
from slipstream.model.config import ModelConfig
from slipstream.model.decoder import Params
from slipstream.model.tree import flatten, unflatten
from slipstream.weights.dlpack import Foreign
from slipstream.weights.families import shard_dims, tensors


class Placement:
    def __init__(self, config: ModelConfig, tp: int, dtype: str) -> None:
        devices = jax.devices()
        if len(devices) < tp:
            raise ConfigError(
                f"tp={tp} needs {tp} devices, but JAX sees {len(devices)} ({devices[0].platform}). On CPU, start the "
                f"process with XLA_FLAGS=--xla_force_host_platform_device_count={tp}; elsewhere lower tp or make more "
                "devices visible"
            )
        self._config = config
        self.dtype = jnp.dtype(dtype)
        self._mesh = Mesh(np.array(devices[:tp]), ("tp",))
        self._adopted: dict[tuple[str, tuple[int, ...]], jax.Array] = {}
        """Arrays over the memory in which versions land, by name and addresses."""
        self._shapes = {spec.name: spec.shape for spec in tensors(config)}
        self.replicated = NamedSharding(self._mesh, PartitionSpec())
        self._shardings = {name: self._sharding(dim) for name, dim in shard_dims(config, tp).items()}
        heads = "tp" if config.num_kv_heads % tp == 0 else None
        self.cache = NamedSharding(self._mesh, PartitionSpec(None, heads))
        """Of pages: `[pages, kv_heads, …]`."""

    def _sharding(self, dim: int | None) -> NamedSharding:
        return self.replicated if dim is None else NamedSharding(self._mesh, PartitionSpec(*[None] * dim, "tp"))

    def place(self, params: Mapping[str, Any]) -> Params:
        """A copy of a whole tree, cast and split. Always a copy, and made when this returns: a trainer may donate its arrays to
        its next step, or write to memory that it shared."""
        check_shapes({name: leaf.shape for name, leaf in flatten(params).items()}, self._config, "the parameters")
        leaves = {
            name: jax.device_put(leaf.astype(self.dtype), self._shardings[name], may_alias=False)
            for name, leaf in flatten(params).items()
        }
        return unflatten(jax.block_until_ready(leaves))

    def to_devices(self, params: Params) -> Params:
        """As it is where it is on the devices already; what is in host memory is put there."""
        if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params)):
            return params  # by far the most common: engines stop for this
        leaves = {}
        for name, leaf in flatten(params).items():
            leaves[name] = leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf, self._shardings[name])
        return unflatten(jax.block_until_ready(leaves))

    @property
    def platform(self) -> str:
        """Of all devices: `cpu`, `gpu`, …"""
        return self._mesh.devices.flat[0].platform

    def bytes_in_use(self) -> int:
        """As the runtime counts them, over all devices; where it does not count (on CPU), of all live arrays."""
        stats = [device.memory_stats() for device in self._mesh.devices.flat]
        if all(stats):
            return sum(s["bytes_in_use"] for s in stats if s)
        return sum(array.nbytes for array in jax.live_arrays())

    def assemble(self, ranks: Mapping[str, Sequence[np.ndarray]], serving: Params | None) -> Params:
        """A tree from each rank's local arrays, which it takes over without a copy where the device is the host. What did
        not come is shared with the tree that serves. Blocks until all is on the devices."""
        if not ranks and serving is not None:
            return serving
        kept = {} if serving is None else {n: x for n, x in flatten(serving).items() if n not in ranks}
        if missing := self._shapes.keys() - ranks.keys() - kept.keys():
            raise MappingError(
                f"no weights came for {sorted(missing)[0]} and {len(missing) - 1} more, and there are none yet"
            )
        adopted = {name: self._adopted.get((name, _addresses(arrays))) for name, arrays in ranks.items()}
        leaves = kept | {name: leaf for name, leaf in adopted.items() if leaf is not None}
        leaves |= self._put({name: ranks[name] for name, leaf in adopted.items() if leaf is None})
        return unflatten({name: leaves[name] for name in self._shapes})

    def adopt(self, arrays: Mapping[str, Foreign]) -> Params:
        """A whole tree over memory that is a trainer's, on the one device that there is. Nothing is copied."""
        if missing := self._shapes.keys() - arrays.keys():
            raise MappingError(f"{sorted(missing)[0]} and {len(missing) - 1} more are not in the memory that is shared")
        (device,) = self._mesh.devices.flat
        leaves = {}
        for name, shape in self._shapes.items():
            leaf = jax.dlpack.from_dlpack(arrays[name])
            if leaf.device != device:
                raise Unsupported(f"the memory that is shared is on {leaf.device}, the engine on {device}")
            if leaf.unsafe_buffer_pointer() != arrays[name].address:
                raise Unsupported(f"this release of JAX copies the memory of {name} instead of adopting it")
            leaves[name] = jax.make_array_from_single_device_arrays(shape, self._shardings[name], [leaf])
        return unflatten(leaves)

    def _put(self, ranks: Mapping[str, Sequence[np.ndarray]]) -> dict[str, jax.Array]:
        """On the host, JAX adopts aligned memory instead of copying it. An array that does so shows whatever lands in that
        memory, so it is kept for the next version that lands there: making it anew is the cost of a small sync. (No
        step reads it in between: a slot is written only while the other one serves.)"""
        devices = list(self._mesh.devices.flat)
        # One call for all: the cost of a transfer of small arrays is the call.
        shards = iter(jax.device_put([a for arrays in ranks.values() for a in arrays], devices * len(ranks)))
        leaves = {}
        for name, arrays in ranks.items():
            local = [next(shards) for _ in devices]
            leaves[name] = jax.make_array_from_single_device_arrays(self._shapes[name], self._shardings[name], local)
            if tuple(shard.unsafe_buffer_pointer() for shard in local) == _addresses(arrays):
                self._adopt(name, _addresses(arrays), leaves[name])
        return jax.block_until_ready(leaves)

    def _adopt(self, name: str, addresses: tuple[int, ...], leaf: jax.Array) -> None:
        """Two of a name at most: when there are others, their memory was left for good."""
        others = [key for key in self._adopted if key[0] == name]
        for key in others[: max(0, len(others) - 1)]:
            del self._adopted[key]
        self._adopted[name, addresses] = leaf

    def leave_landings(self) -> None:
        """Versions land elsewhere from now on: the memory of those before need not be kept."""
        self._adopted.clear()

    def shard(self, leaf: jax.Array, rank: int) -> np.ndarray:
        """What one rank's device holds, in host memory. Read through another array over the same data: one that was read
        keeps its copy in host memory for as long as it lives."""
        device = list(self._mesh.devices.flat)[rank]
        (data,) = (shard.data for shard in leaf.addressable_shards if shard.device == device)
        return np.asarray(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]))


def to_host(params: Params | None) -> Params | None:
    """The whole tree in host memory, off the devices. (On CPU that is the same memory, and nothing moves.)"""
    return None if params is None else unflatten(jax.device_get(flatten(params)))


def lies_at(params: Params | None, places: Mapping[str, int]) -> bool:
    """Whether the leaves, each on one device, are these places in memory, and not copies of what is there."""
    leaves = {} if params is None else flatten(params)
    return leaves.keys() == places.keys() and all(
        isinstance(leaf, jax.Array) and leaf.unsafe_buffer_pointer() == places[name] for name, leaf in leaves.items()
    )


def _addresses(arrays: Sequence[np.ndarray]) -> tuple[int, ...]:
    return tuple(array.ctypes.data for array in arrays)
