"""What an engine holds already: tensors whose content did not change since its last commit are not sent again.

A JAX array is immutable, so the same object is the same content, and finding that out costs nothing. Other arrays may
have been written to; they are compared by checksum, which costs a read but saves the transfer."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from slipstream.types import TensorSpec
from slipstream.weights.checksum import checksum
from slipstream.weights.source import Tensor


class Memory:
    """What one engine committed last."""

    def __init__(self) -> None:
        self._objects: dict[str, weakref.ref[Any]] = {}
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
        """The very array that was committed last, and cannot have changed."""
        held = self._objects.get(name)
        return held is not None and held() is tensor

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if _is_of_jax(type(tensor)) and not tensor.is_deleted():  # type: ignore[attr-defined]
                self._objects[name] = weakref.ref(tensor)
                continue
            self._objects.pop(name, None)
            self._hashes.pop(name, None)
            if isinstance(tensor, np.ndarray):
                self._hashes[name] = checksum(tensor)


@cache
def _is_of_jax(kind: type) -> bool:
    """Immutable, that is."""
    return kind.__module__.split(".")[0] in ("jax", "jaxlib") and hasattr(kind, "is_deleted")
