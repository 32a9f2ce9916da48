"""Sources: a trainer's parameters as named tensors that can be read box by box.

A pytree's leaf is named by its path: keys and indices joined by dots. Dicts, lists, tuples, named tuples and registered
dataclasses all work; leaves are JAX or numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from slipstream.errors import MappingError
from slipstream.types import Box
from slipstream.weights.layout import slices, whole
from slipstream.weights.plan import Source


class Tensor(Protocol):
    """What a leaf must offer."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __array__(self) -> np.ndarray: ...


def named_tensors(params: Any) -> dict[str, Tensor]:
    """Leaves by name. A flat mapping from names to arrays is taken as it is."""
    if isinstance(params, Mapping) and params and all(isinstance(k, str) and _is_array(v) for k, v in params.items()):
        return dict(params)
    from jax.tree_util import tree_flatten_with_path

    found: dict[str, Tensor] = {}
    for path, leaf in tree_flatten_with_path(params)[0]:
        name = ".".join(_step(key) for key in path)
        if not _is_array(leaf):
            raise MappingError(f"{name or 'the tree'}: leaves must be arrays, found {type(leaf).__name__}")
        if name in found:
            raise MappingError(f"two leaves of the tree are named {name!r}")
        found[name] = leaf
    if not found:
        raise MappingError("the tree has no leaves; pass the model's parameters")
    return found


def describe(tensors: Mapping[str, Tensor]) -> dict[str, Source]:
    """Shapes and dtypes for the planner: one process, rank 0, which can read all of every tensor."""
    return {
        name: Source(tuple(leaf.shape), np.dtype(leaf.dtype).name, ((0, whole(tuple(leaf.shape))),))
        for name, leaf in tensors.items()
    }


def read(tensor: Tensor, box: Box) -> np.ndarray:
    """A view where the array is in host memory, else a copy. Waits until the array is computed."""
    return np.asarray(tensor)[slices(box)]


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and hasattr(leaf, "__array__")


def _step(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
