"""LoRA adapters for tests, and what transformers computes with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from slipstream.model.config import ModelConfig
from slipstream.model.families import tensors
from slipstream.model.lora import A, B, adapter_tensors
from slipstream.model.tree import flatten, unflatten
from slipstream.types import Lora


def random_adapter(config: ModelConfig, lora: Lora, seed: int, size: float = 0.3) -> dict[str, Any]:
    """Weights large enough to change tokens, as numpy arrays."""
    rng = np.random.default_rng(seed)
    specs = adapter_tensors(tensors(config), lora)
    return unflatten({spec.name: size * rng.standard_normal(spec.shape, np.float32) for spec in specs})


@contextlib.contextmanager
def adapted(module: Any, adapter: Mapping[str, Any], lora: Lora) -> Iterator[None]:
    """A `transformers` model that computes `W x + alpha / rank * B (A x)`, as PEFT does."""
    import torch

    named, handles = flatten(adapter), []
    modules = dict(module.named_modules())
    for name in {name.removesuffix(A) for name in named if name.endswith(A)}:
        a, b = (torch.tensor(np.asarray(named[name + end])) for end in (A, B))

        def hook(_: Any, args: Any, out: Any, a: Any = a, b: Any = b) -> Any:
            return out + (args[0] @ a.T) @ b.T * (lora.alpha / lora.rank)

        handles.append(modules[name].register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
