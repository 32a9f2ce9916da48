"""A trainer's parameters as named tensors that can be read box by box.

A leaf is named by its path: keys, indices and attributes joined by dots. `named_tensors` accepts:

- pytrees: dicts, lists, tuples, named tuples, registered dataclasses, Equinox modules (attribute paths; remove leaves
  that are not arrays with `eqx.filter(model, eqx.is_array)`);
- dataclasses that are not registered as pytrees, by their fields;
- a Flax NNX `State` or module. Its variables are pytree nodes with a single child, `GetAttrKey("value")`, which is not
  part of the name: the leaf at `layers.0.attn.q_proj.w.value` is named `layers.0.attn.q_proj.w`;
- a PyTorch state dict: a flat mapping, read in place; of a `DTensor`, the shard of this process;
- the path of a safetensors directory, read lazily from disk;
- a flat mapping from names to any of these tensors, used unchanged.

Leaves are JAX, numpy or torch arrays, or `BoxReader`s. Of a sharded JAX array only this process's addressable shards
are listed and read; nothing is gathered."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np

from slipstream.errors import MappingError
from slipstream.tensors.boxes import full_box, intersect, shape_of, shift, slices, volume
from slipstream.tensors.safetensors_dir import HEAD, stored_tensors
from slipstream.types import Box
from slipstream.weights.plan import SourceTensor
from slipstream.weights.sources.torch_shards import (
    TorchShards,
    dtensor_shards,
    is_dtensor_type,
    is_torch,
    local_tensor,
    torch_array,
)


class Tensor(Protocol):
    """The array interface that a leaf must have."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __array__(self) -> np.ndarray: ...


class BoxReader(Protocol):
    """A tensor that is not an array but reads boxes on demand."""

    def boxes(self) -> tuple[Box, ...]: ...

    def read_box(self, box: Box) -> np.ndarray: ...


def named_tensors(params: Any) -> dict[str, Tensor]:
    """Return the leaves by name. Nothing is read or copied yet."""
    if isinstance(params, (str, Path)):
        return dict(stored_tensors(params))
    if isinstance(params, Mapping) and params and _are_named_arrays(params):
        return _without_tied(_with_local_shards(params))
    import jax

    leaves, structure = jax.tree.flatten(params)
    if (names := _names.get(structure)) is not None and all(isinstance(leaf, jax.Array) for leaf in leaves):
        return dict(zip(names, leaves))
    tensors: dict[str, Tensor] = {}
    for name, leaf in _leaves(params):
        if not _is_array(leaf):
            raise MappingError(
                f"{name or 'the tree'}: leaves must be arrays, found {type(leaf).__name__}; remove leaves that are not arrays "
                "(for Equinox, pass eqx.filter(model, eqx.is_array))"
            )
        if name in tensors:
            raise MappingError(f"two leaves of the tree are named {name!r}")
        tensors[name] = leaf
    if not tensors:
        raise MappingError("the tree has no leaves; pass the model's parameters")
    if len(leaves) == len(tensors) and all(a is b for a, b in zip(leaves, tensors.values())):
        if len(_names) > 16:
            _names.clear()
        _names[structure] = tuple(tensors)
    return tensors


def _with_local_shards(params: Mapping[str, Any]) -> dict[str, Any]:
    if not any(map(is_dtensor_type, set(map(type, params.values())))):
        return dict(params)
    return {name: dtensor_shards(name, t) if is_dtensor_type(type(t)) else t for name, t in params.items()}


def _are_named_arrays(params: Mapping[Any, Any]) -> bool:
    if set(map(type, params)) == {str} and set(map(type, params.values())) <= _array_types:
        return True
    return all(isinstance(name, str) and _is_array(leaf) for name, leaf in params.items())


_names: dict[Any, tuple[str, ...]] = {}
"""Leaf names of trees of JAX arrays, by tree structure. A trainer syncs the same structure again and again."""


_aval_and_sharding = operator.attrgetter("aval", "sharding")
"""Identical objects for the outputs of a compiled step, call after call; comparing shapes takes five times as long."""


class DescriptionCache:
    """`describe` with a cache, for a tree that is synced repeatedly with new values."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._last: tuple[list[str], list[tuple[Any, Any]], dict[str, SourceTensor]] = [], [], {}
        """Names, avals and shardings of the last tree, and its descriptions."""

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, SourceTensor]:
        """Return the descriptions; the same dict object as last time if nothing changed."""
        try:
            names, layouts = list(tensors), list(map(_aval_and_sharding, tensors.values()))
        except AttributeError:  # not all are JAX arrays
            return describe(tensors, self._rank)
        if (names, layouts) != self._last[:2]:
            self._last = names, layouts, describe(tensors, self._rank)
        return self._last[2]


def describe(tensors: Mapping[str, Tensor], rank: int = 0) -> dict[str, SourceTensor]:
    """Return shapes, dtypes and boxes for the planner. The sharding of a JAX array over several processes is known in
    each of them, so all make the same plan. All other tensors belong to trainer process `rank`."""
    return {name: _source(leaf, rank) for name, leaf in tensors.items()}


def _source(leaf: Any, rank: int) -> SourceTensor:
    if is_jax_array(leaf):
        return _jax_source(tuple(leaf.shape), np.dtype(leaf.dtype).name, leaf.sharding, rank)
    if isinstance(leaf, TorchShards):
        return SourceTensor(leaf.shape, dtype_name(leaf), leaf.holders)
    return SourceTensor(tuple(leaf.shape), dtype_name(leaf), tuple((rank, box) for box in boxes(leaf)))


@lru_cache(4096)
def _jax_source(shape: tuple[int, ...], dtype: str, sharding: Any, rank: int) -> SourceTensor:
    devices = sharding.devices_indices_map(shape)
    several = len({device.process_index for device in devices}) > 1
    holders = dict.fromkeys(
        (device.process_index if several else rank, tuple(s.indices(n)[:2] for s, n in zip(index, shape)))
        for device, index in devices.items()
    )
    return SourceTensor(shape, dtype, tuple(sorted(holders)))


def boxes(tensor: Tensor) -> tuple[Box, ...]:
    """Return the distinct boxes that this process can read. They cover the tensor unless other processes hold parts."""
    if _is_reader(tensor):
        return tensor.boxes()
    if _is_sharded(tensor):
        return tuple(_shards(tensor))
    return (full_box(tuple(tensor.shape)),)


def read(tensor: Tensor, box: Box) -> np.ndarray:
    """Return a box: a view if the array is in host memory, else a copy. Wait until the array is computed. Raise
    `MappingError` if this process cannot read the complete box."""
    if _is_reader(tensor):
        return tensor.read_box(box)
    if _is_sharded(tensor):
        return assemble(box, ((part, partial(np.asarray, data)) for part, data in _shards(tensor).items()))
    return (torch_array(tensor) if is_torch(tensor) else np.asarray(tensor))[slices(box)]


def assemble(box: Box, parts: Iterable[tuple[Box, Callable[[], np.ndarray]]]) -> np.ndarray:
    """Return `box` from disjoint parts and functions that read them: a view if one part contains it, else a copy."""
    overlaps = [(part, common, read_part) for part, read_part in parts if (common := intersect(part, box)) is not None]
    if missing := volume(box) - sum(volume(common) for _, common, _ in overlaps):
        raise MappingError(f"{missing} of the {volume(box)} elements of {box} are not in this process")
    assembled: np.ndarray | None = None
    for part, common, read_part in overlaps:
        piece = read_part()[slices(shift(common, part))]
        if common == box:
            return piece
        if assembled is None:
            assembled = np.empty(shape_of(box), piece.dtype)
        assembled[slices(shift(common, box))] = piece
    assert assembled is not None
    return assembled


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.") if is_torch(tensor) else np.dtype(tensor.dtype).name


def _leaves(params: Any) -> Iterator[tuple[str, Any]]:
    from jax.tree_util import GetAttrKey, tree_flatten_with_path

    flat = tree_flatten_with_path(params)[0]
    nodes = Counter(path[:end] for path, _ in flat for end in range(len(path)))
    for path, leaf in flat:
        # Drop `value` only if it is its node's sole child; beside others it is an ordinary attribute.
        if len(path) > 1 and path[-1] == GetAttrKey("value") and nodes[path[:-1]] == 1:
            path = path[:-1]
        name = ".".join(_step(key) for key in path)
        if not dataclasses.is_dataclass(leaf) or _is_array(leaf):
            yield name, leaf
            continue
        for field in dataclasses.fields(leaf):
            child = getattr(leaf, field.name)
            if child is not None and not callable(child) and not isinstance(child, (str, int, float)):  # skip settings
                yield from ((".".join(filter(None, (name, field.name, n))), x) for n, x in _leaves(child))


def _step(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _is_array(leaf: Any) -> bool:
    kind = type(leaf)
    if kind in _array_types:  # fast path: a model has hundreds of tensors and is synced often
        return True
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and hasattr(leaf, "__array__"):
        if all(hasattr(kind, name) for name in ("shape", "dtype", "__array__")):
            _array_types.add(kind)
        return True
    return False


_array_types: set[type] = set()
"""Types whose instances are all arrays."""


def _is_reader(tensor: Any) -> TypeGuard[BoxReader]:
    return hasattr(tensor, "read_box")  # isinstance with a protocol costs 20 µs per tensor and sync


def is_jax_array(tensor: Any) -> bool:
    return _is_jax_type(type(tensor))  # type: ignore[arg-type]


@cache
def _is_jax_type(kind: Any) -> bool:
    """Ask the type: on an instance, `addressable_shards` builds a list."""
    return hasattr(kind, "addressable_shards")


def is_deleted(tensor: Any) -> bool:
    """Whether a JAX array that the tensor consists of was donated or deleted."""
    if is_jax_array(tensor):
        return bool(tensor.is_deleted())
    return _is_reader(tensor) and any(map(is_deleted, getattr(tensor, "leaves", ())))


def check_not_deleted(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if is_deleted(tensor):
            raise MappingError(f"{name} was donated or deleted before the sync; sync the arrays that the step returned")


def _is_sharded(tensor: Any) -> bool:
    """Whether devices hold only parts of a JAX array. A fully replicated one is read like a plain array."""
    return is_jax_array(tensor) and not tensor.is_fully_replicated


def _shards(tensor: Any) -> dict[Box, Any]:
    """Return this process's shards by box, one per set of replicas."""
    shards: dict[Box, Any] = {}
    for box, shard in zip(shard_boxes(tensor), tensor.addressable_shards):
        shards.setdefault(box, shard.data)
    return shards


def shard_boxes(array: Any) -> list[Box]:
    """Return the boxes of a JAX array's addressable shards, in their order."""
    return [
        tuple(s.indices(size)[:2] for s, size in zip(shard.index, array.shape, strict=True))
        for shard in array.addressable_shards
    ]


def _without_tied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop a tied head: PyTorch state dicts list it under both names, checkpoints and engines have it as the embedding."""
    if not all(is_torch(local_tensor(tensor)) for tensor in tensors.values()):  # at the first of a JAX tree
        return tensors
    first: dict[tuple[object, ...], str] = {}
    for name in sorted(tensors, key=lambda name: name == HEAD):  # the head comes last
        local = local_tensor(tensors[name])
        # Shards without elements have no memory that could tell them apart.
        memory = (local.data_ptr(), tuple(tensors[name].shape), local.stride()) if local.numel() else (name,)
        first.setdefault(memory, name)
    return {name: tensors[name] for name in first.values()}
