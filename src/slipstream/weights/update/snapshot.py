"""The weights that a trainer committed last, kept for engines that start or come back before its next sync."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from slipstream.config import Snapshot
from slipstream.tensors.boxes import full_box
from slipstream.weights.sources.named_tensors import Tensor, is_deleted, is_jax_array, read
from slipstream.weights.sources.tree_mapping import MappedTensor


class KeptWeights(NamedTuple):
    version: int
    tensors: Mapping[str, Tensor]

    @property
    def are_donated(self) -> bool:
        """Whether a training step has taken the memory of some of them."""
        return any(map(is_deleted, self.tensors.values()))


def keep(
    how: Snapshot, version: int, tensors: Mapping[str, Tensor], before: KeptWeights | None, partial: bool
) -> KeptWeights | None:
    """Return what is kept after a commit of `tensors`; None if they cannot be kept. With `partial`, the tensors that are not
    among them stay as they were before. Copies block: call it in a thread."""
    if how == "none" or (partial and before is None):
        return None
    if how == "copy":
        tensors = {name: np.array(read(tensor, full_box(tensor.shape))) for name, tensor in tensors.items()}
    elif not all(map(_is_immutable, tensors.values())):
        return None
    return KeptWeights(version, {**before.tensors, **tensors} if partial and before is not None else tensors)


def _is_immutable(tensor: Tensor) -> bool:
    """Whether the content stays what it is. Donation deletes an array, it does not change it."""
    if isinstance(tensor, MappedTensor):
        return all(map(is_jax_array, tensor.leaves))
    return is_jax_array(tensor)
