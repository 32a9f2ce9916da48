"""An adapter's tensors as the one tensor that updates bring (`weights/adapters.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slipstream.errors import MappingError
from slipstream.model.lora import adapter_tensors
from slipstream.tensors.boxes import full_box
from slipstream.types import Lora, TensorSpec
from slipstream.weights.sources.named_tensors import Tensor, is_jax_array, read


def pack(named: Mapping[str, Tensor], base: Sequence[TensorSpec], lora: Lora) -> np.ndarray:
    """Return an adapter's tensors as one, in host memory. Raise `MappingError` unless they are those of `lora`."""
    specs = adapter_tensors(base, lora)
    found = {name: tuple(tensor.shape) for name, tensor in named.items()}
    problems = [
        f"{spec.name}: {lora.name!r} has shape {list(spec.shape)}, the tree {list(found.get(spec.name, ())) or 'nothing'}"
        for spec in specs
        if found.get(spec.name) != spec.shape
    ]
    problems += [f"{name} is no part of it" for name in found.keys() - {spec.name for spec in specs}]
    if problems:
        raise MappingError(
            f"the tree is not one of adapter {lora}, {len(problems)} tensor(s): " + "; ".join(problems[:4])
        )
    return np.concatenate([_array(named[spec.name]).reshape(-1) for spec in specs])


def _array(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor) if is_jax_array(tensor) else read(tensor, full_box(tensor.shape))
