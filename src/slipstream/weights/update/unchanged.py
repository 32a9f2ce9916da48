"""The tensors an engine holds: a tensor that did not change since the engine's last commit is not sent again.

A JAX array is immutable, so the same object has the same content and the comparison is free. A mapped tensor is unchanged if
it is cut in the same way from the same arrays. Other arrays may have been written to. They are compared by checksum, which
costs a read but saves the transfer; as parts of mapped tensors they are always sent."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.types import TensorSpec
from slipstream.weights.checksum import checksum
from slipstream.weights.sources.named_tensors import Tensor, is_jax_array
from slipstream.weights.sources.tree_mapping import MappedTensor


class HeldTensors:
    """The tensors of the version that one engine committed last."""

    def __init__(self) -> None:
        self._arrays: dict[str, weakref.ref[Any]] = {}
        """Tensors that are JAX arrays."""
        self._mapped: dict[str, list[tuple[weakref.ref[Any], object]]] = {}
        """Mapped tensors: the arrays each is made of, and how it is cut from them."""
        self._checksums: dict[str, int] = {}
        """Tensors that are mutable arrays."""

    def unchanged(self, tensors: Mapping[str, Tensor], wanted: Sequence[TensorSpec]) -> set[str]:
        """Return the names that need not be sent, including the `wanted` tensors that a partial sync leaves out."""
        names = {spec.name for spec in wanted if spec.name not in tensors}
        for name, tensor in tensors.items():
            if self._is_same_object(name, tensor) or (
                isinstance(tensor, np.ndarray) and self._checksums.get(name) == checksum(tensor)
            ):
                names.add(name)
        return names

    def _is_same_object(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor consists of the same immutable arrays as the committed one."""
        if (array := self._arrays.get(name)) is not None:
            return array() is tensor
        held = self._mapped.get(name)
        if held is None or not isinstance(tensor, MappedTensor):
            return False
        parts = _parts(tensor)
        return len(held) == len(parts) and all(
            ref() is array and held_cut == cut for (ref, held_cut), (array, cut) in zip(held, parts)
        )

    def after(self, tensors: Mapping[str, Tensor]) -> HeldTensors:
        """Return what the engine holds once it has committed `tensors`."""
        result = HeldTensors()
        result._arrays = {name: ref for name, ref in self._arrays.items() if name not in tensors}
        result._mapped = {name: parts for name, parts in self._mapped.items() if name not in tensors}
        result._checksums = {name: digest for name, digest in self._checksums.items() if name not in tensors}
        for name, tensor in tensors.items():
            if _is_immutable(tensor):
                result._arrays[name] = weakref.ref(tensor)
            elif isinstance(tensor, MappedTensor) and all(map(_is_immutable, tensor.leaves)):
                result._mapped[name] = [(weakref.ref(leaf), cut) for leaf, cut in _parts(tensor)]
            elif isinstance(tensor, np.ndarray):
                result._checksums[name] = checksum(tensor)
        return result


def _parts(tensor: MappedTensor) -> list[tuple[Any, object]]:
    """Return the arrays that a tensor is cut from, each with its cut."""
    return [(origin.leaf, (origin.shard, origin.mapped)) for origin in tensor.origins]


def _is_immutable(array: Any) -> bool:
    return is_jax_array(array) and not array.is_deleted()
