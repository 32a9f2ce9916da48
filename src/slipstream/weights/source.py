"""Sources: a trainer's parameters as named tensors that can be read box by box.

A leaf is named by its path: keys, indices and attributes joined by dots. What `named_tensors` takes:

- pytrees: dicts, lists, tuples, named tuples, registered dataclasses, Equinox modules (attribute paths; leave out what is
  no array with `eqx.filter(model, eqx.is_array)`);
- plain dataclasses that nobody registered, by their fields;
- a Flax NNX `State` or module. Its variables are pytree nodes with one child, `GetAttrKey("value")`, which is no part of
  the name: the leaf at `layers.0.attn.q_proj.w.value` is named `layers.0.attn.q_proj.w`;
- a PyTorch state dict: a flat mapping, read where it lies in host memory;
- a directory of safetensors (a path), read lazily from disk;
- a flat mapping from names to any of these tensors, which is taken as it is.

Leaves are JAX, numpy or torch arrays, or readers of boxes (`Reader`). Of a sharded JAX array only the shards that this
process can address are listed and read; nothing is gathered."""

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
from slipstream.types import Box
from slipstream.weights.layout import intersect, shape_of, shift, slices, volume, whole
from slipstream.weights.plan import Source

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Tensor(Protocol):
    """What a leaf must offer."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __array__(self) -> np.ndarray: ...


class Reader(Protocol):
    """A tensor that is no array: it knows which boxes it can read, and reads them when asked."""

    def boxes(self) -> tuple[Box, ...]: ...

    def read_box(self, box: Box) -> np.ndarray: ...


def named_tensors(params: Any) -> dict[str, Tensor]:
    """Leaves by name. Nothing is read or copied yet."""
    if isinstance(params, (str, Path)):
        from slipstream.weights.stored import stored_tensors

        return dict(stored_tensors(params))
    if isinstance(params, Mapping) and params and _are_named_arrays(params):
        return _without_tied_head(dict(params))
    if (known := _named_before(params)) is not None:
        return known
    found: dict[str, Tensor] = {}
    for name, leaf in _leaves(params):
        if not _is_array(leaf):
            raise MappingError(
                f"{name or 'the tree'}: leaves must be arrays, found {type(leaf).__name__}; leave out what is no array "
                "(for Equinox, pass eqx.filter(model, eqx.is_array))"
            )
        if name in found:
            raise MappingError(f"two leaves of the tree are named {name!r}")
        found[name] = leaf
    if not found:
        raise MappingError("the tree has no leaves; pass the model's parameters")
    _remember_names(params, found)
    return found


def _are_named_arrays(params: Mapping[Any, Any]) -> bool:
    if set(map(type, params)) == {str} and set(map(type, params.values())) <= _array_types:
        return True
    return all(isinstance(name, str) and _is_array(leaf) for name, leaf in params.items())


_names: dict[Any, tuple[str, ...]] = {}
"""Names of the leaves of trees of JAX arrays, by structure: a trainer syncs the same tree again and again."""


def _named_before(params: Any) -> dict[str, Tensor] | None:
    import jax

    leaves, structure = jax.tree.flatten(params)
    names = _names.get(structure)
    if names is None or not all(isinstance(leaf, jax.Array) for leaf in leaves):
        return None
    return dict(zip(names, leaves))


def _remember_names(params: Any, found: Mapping[str, Tensor]) -> None:
    import jax

    leaves, structure = jax.tree.flatten(params)
    if len(leaves) == len(found) and all(a is b for a, b in zip(leaves, found.values())):
        if len(_names) > 16:
            _names.clear()
        _names[structure] = tuple(found)


_make_of = operator.attrgetter("aval", "sharding")
"""The outputs of a compiled step have the very same of both each time; to compare shapes takes five times as long."""


class Descriptions:
    """`describe`, of the tensors of a tree that comes again and again, with other values."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._known: dict[str, tuple[tuple[Any, ...], Source]] = {}
        self._last: tuple[list[str], list[tuple[Any, Any]], dict[str, Source]] = [], [], {}
        """The names of the last tree, how its arrays were made, and what was said of them."""

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Source]:
        """The very same as last time if nothing differs."""
        try:
            names, makes = list(tensors), list(map(_make_of, tensors.values()))
        except AttributeError:  # some are no arrays of JAX's
            return {name: self._one(name, tensor) for name, tensor in tensors.items()}
        if (names, makes) != self._last[:2]:
            self._last = names, makes, {name: self._one(name, tensor) for name, tensor in tensors.items()}
        return self._last[2]

    def _one(self, name: str, tensor: Tensor) -> Source:
        make = _make_of(tensor) if is_jax_array(tensor) else ()
        known = self._known.get(name)
        if known is None or not make or known[0] != make:
            known = self._known[name] = (make, _source(tensor, self._rank))
        return known[1]


def describe(tensors: Mapping[str, Tensor], rank: int = 0) -> dict[str, Source]:
    """Shapes, dtypes and boxes for the planner. Of a JAX array that is spread over several processes, who holds what is
    known in each of them, so that all make the same plan; anything else is held by the trainer's process `rank`."""
    return {name: _source(leaf, rank) for name, leaf in tensors.items()}


def _source(leaf: Any, rank: int) -> Source:
    if is_jax_array(leaf):
        return _jax_source(tuple(leaf.shape), np.dtype(leaf.dtype).name, leaf.sharding, rank)
    return Source(tuple(leaf.shape), dtype_name(leaf), tuple((rank, box) for box in boxes(leaf)))


@lru_cache(4096)
def _jax_source(shape: tuple[int, ...], dtype: str, sharding: Any, rank: int) -> Source:
    devices = sharding.devices_indices_map(shape)
    several = len({device.process_index for device in devices}) > 1
    holders = dict.fromkeys(
        (device.process_index if several else rank, tuple(s.indices(n)[:2] for s, n in zip(index, shape)))
        for device, index in devices.items()
    )
    return Source(shape, dtype, tuple(sorted(holders)))


def boxes(tensor: Tensor) -> tuple[Box, ...]:
    """The boxes that this process can read, each once; together all of the tensor, unless other processes hold a part."""
    if _is_reader(tensor):
        return tensor.boxes()
    if _is_sharded(tensor):
        return tuple(_shards(tensor))
    return (whole(tuple(tensor.shape)),)


def read(tensor: Tensor, box: Box) -> np.ndarray:
    """A view where the array is in host memory, else a copy. Waits until the array is computed. `MappingError` when this
    process cannot read all of the box."""
    if _is_reader(tensor):
        return tensor.read_box(box)
    if _is_sharded(tensor):
        return gather(box, ((part, partial(np.asarray, data)) for part, data in _shards(tensor).items()))
    return (_torch_array(tensor) if _is_torch(tensor) else np.asarray(tensor))[slices(box)]


def gather(box: Box, parts: Iterable[tuple[Box, Callable[[], np.ndarray]]]) -> np.ndarray:
    """`box`, from parts that do not overlap: a view when it lies inside one of them, else assembled from several."""
    meeting = [(part, common, make) for part, make in parts if (common := intersect(part, box)) is not None]
    if missing := volume(box) - sum(volume(common) for _, common, _ in meeting):
        raise MappingError(f"{missing} of the {volume(box)} elements of {box} are not in this process")
    found: np.ndarray | None = None
    for part, common, make in meeting:
        piece = make()[slices(shift(common, part))]
        if common == box:
            return piece
        if found is None:
            found = np.empty(shape_of(box), piece.dtype)
        found[slices(shift(common, box))] = piece
    assert found is not None
    return found


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.") if _is_torch(tensor) else np.dtype(tensor.dtype).name


def _leaves(params: Any) -> Iterator[tuple[str, Any]]:
    from jax.tree_util import GetAttrKey, tree_flatten_with_path

    flat = tree_flatten_with_path(params)[0]
    nodes = Counter(path[:end] for path, _ in flat for end in range(len(path)))
    for path, leaf in flat:
        # Only where `value` is its node's sole child: an attribute of that name beside others is a name like any other.
        if len(path) > 1 and path[-1] == GetAttrKey("value") and nodes[path[:-1]] == 1:
            path = path[:-1]
        name = ".".join(_step(key) for key in path)
        if not dataclasses.is_dataclass(leaf) or _is_array(leaf):
            yield name, leaf
            continue
        for field in dataclasses.fields(leaf):
            child = getattr(leaf, field.name)
            if child is not None and not callable(child) and not isinstance(child, (str, int, float)):  # no setting
                yield from ((".".join(filter(None, (name, field.name, n))), x) for n, x in _leaves(child))


def _step(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _is_array(leaf: Any) -> bool:
    kind = type(leaf)
    if kind in _array_types:  # a model has hundreds of tensors, and is synced every second
        return True
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and hasattr(leaf, "__array__"):
        if all(hasattr(kind, name) for name in ("shape", "dtype", "__array__")):
            _array_types.add(kind)
        return True
    return False


_array_types: set[type] = set()
"""Whose instances all are arrays."""


def _is_reader(tensor: Any) -> TypeGuard[Reader]:
    return hasattr(tensor, "read_box")  # isinstance with a protocol takes 20 µs, for every tensor of every sync


def is_jax_array(tensor: Any) -> bool:
    return _is_jax_type(type(tensor))  # type: ignore[arg-type]


@cache
def _is_jax_type(kind: Any) -> bool:
    """To ask an array itself for its shards makes a list of them."""
    return hasattr(kind, "addressable_shards")


def _is_sharded(tensor: Any) -> bool:
    """A JAX array of which a device holds only a part. One that every device holds whole is read as a plain array."""
    return is_jax_array(tensor) and not tensor.is_fully_replicated


def _shards(tensor: Any) -> dict[Box, Any]:
    """This process's shards by their boxes; replicas of a box count once."""
    found: dict[Box, Any] = {}
    for box, shard in zip(shard_boxes(tensor), tensor.addressable_shards):
        found.setdefault(box, shard.data)
    return found


def shard_boxes(array: Any) -> list[Box]:
    """Of a JAX array's addressable shards, in their order."""
    return [
        tuple(s.indices(size)[:2] for s, size in zip(shard.index, array.shape, strict=True))
        for shard in array.addressable_shards
    ]


def _is_torch(tensor: Any) -> bool:
    return hasattr(tensor, "data_ptr") and hasattr(tensor, "detach")


def _torch_array(tensor: Any) -> np.ndarray:
    """The same memory, when it is in the host's. numpy knows no bfloat16 of torch's, so its bits travel as int16."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _without_tied_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """PyTorch's state dicts list a tied head under both of its names; a checkpoint and an engine have it once."""
    head, embed = tensors.get(_HEAD), tensors.get(_EMBED)
    if _is_torch(head) and _is_torch(embed) and head.data_ptr() == embed.data_ptr():  # type: ignore[union-attr]
        del tensors[_HEAD]
    return tensors
