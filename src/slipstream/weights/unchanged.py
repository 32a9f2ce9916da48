"""What an engine holds already: tensors whose content did not change since its last commit are not sent again.

A JAX array is immutable, so the same object is the same content, and finding that out costs nothing; a mapped tensor is the
same if it is cut in the same way from the same objects. Other arrays may have been written to; they are compared by checksum,
which costs a read but saves the transfer, and are always sent where they are mapped."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from slipstream.types import TensorSpec
from slipstream.weights.checksum import checksum
from slipstream.weights.source import Tensor
from slipstream.weights.trees import MappedTensor


class Memory:
    """What one engine committed last."""

    def __init__(self) -> None:
        self._whole: dict[str, weakref.ref[Any]] = {}
        """Tensors that were an array of JAX's."""
        self._mapped: dict[str, list[tuple[weakref.ref[Any], object]]] = {}
        """Mapped tensors: the arrays that each was made of, and how it was cut from them."""
        self._hashes: dict[str, int] = {}

    def unchanged(self, tensors: Mapping[str, Tensor], wanted: Sequence[TensorSpec]) -> set[str]:
        """Names that need not be sent. A tensor that is not in `tensors` (a partial sync) is left as it is."""
        found = {spec.name for spec in wanted if spec.name not in tensors}
        for name, tensor in tensors.items():
            if self.is_same(name, tensor) or (
                isinstance(tensor, np.ndarray) and self._hashes.get(name) == checksum(tensor)
            ):
                found.add(name)
        return found

    def is_same(self, name: str, tensor: Tensor) -> bool:
        """Made of the very arrays that were committed last, which cannot have changed."""
        if (whole := self._whole.get(name)) is not None:
            return whole() is tensor
        held = self._mapped.get(name)
        if held is None or not isinstance(tensor, MappedTensor):
            return False
        parts = _parts(tensor)
        return len(held) == len(parts) and all(
            ref() is array and before == cut for (ref, before), (array, cut) in zip(held, parts)
        )

    def after(self, tensors: Mapping[str, Tensor]) -> Memory:
        """What it will be once the engine has committed these."""
        found = Memory()
        found._whole = {name: ref for name, ref in self._whole.items() if name not in tensors}
        found._mapped = {name: parts for name, parts in self._mapped.items() if name not in tensors}
        found._hashes = {name: digest for name, digest in self._hashes.items() if name not in tensors}
        for name, tensor in tensors.items():
            if _is_immutable(tensor):
                found._whole[name] = weakref.ref(tensor)
            elif isinstance(tensor, MappedTensor) and all(map(_is_immutable, tensor.leaves)):
                found._mapped[name] = [(weakref.ref(leaf), cut) for leaf, cut in _parts(tensor)]
            elif isinstance(tensor, np.ndarray):
                found._hashes[name] = checksum(tensor)
        return found


def _parts(tensor: MappedTensor) -> list[tuple[Any, object]]:
    """The arrays that hold a tensor, each with the cut that makes a rectangle of the tensor out of it."""
    return [(origin.leaf, (origin.shard, origin.held)) for origin in tensor.origins]


def _is_immutable(array: Any) -> bool:
    return _is_of_jax(type(array)) and not array.is_deleted()  # type: ignore[arg-type]


@cache
def _is_of_jax(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("jax", "jaxlib") and hasattr(kind, "is_deleted")
