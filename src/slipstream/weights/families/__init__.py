"""Model families: from an HF config to the names and shapes of its tensors, and how tensor parallelism splits them.

A family is a function from `ModelConfig` to `FamilyTensor`s under their HF names. The embedded engine's live parameters
carry the same names and orientation, so that its side of a plan is `parameters(config, tp)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.types import Parameter, Part, TensorSpec
from slipstream.weights.families import llama, qwen2, qwen3
from slipstream.weights.families.base import FamilyTensor
from slipstream.weights.layout import shape_of, shift, split, whole

_FAMILIES: dict[str, Callable[[ModelConfig], Iterator[FamilyTensor]]] = {
    "llama": llama.tensors,
    "qwen2": qwen2.tensors,
    "qwen3": qwen3.tensors,
}


def family_tensors(config: ModelConfig) -> tuple[FamilyTensor, ...]:
    return tuple(_FAMILIES[config.family](config))


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Names and whole shapes, as in an HF checkpoint."""
    return tuple(t.spec for t in family_tensors(config))


def shard_dims(config: ModelConfig, tp: int) -> dict[str, int | None]:
    """For each tensor the dimension that `tp` ranks split, or None where each holds the whole."""
    if config.num_heads % tp or config.intermediate_size % tp:
        raise ConfigError(
            f"tp={tp} does not divide num_heads ({config.num_heads}) and intermediate_size ({config.intermediate_size}); "
            "choose a tp that divides both"
        )
    return {t.name: t.split(tp) for t in family_tensors(config)}


def parameters(config: ModelConfig, tp: int = 1) -> tuple[Parameter, ...]:
    """What each of `tp` ranks holds when live parameters are the HF tensors, split."""
    dims = shard_dims(config, tp)
    found = []
    for tensor in family_tensors(config):
        for rank in range(tp):
            box = split(whole(tensor.shape), dims[tensor.name], rank, tp)
            part = Part(tensor.name, box, shift(box, box))
            found.append(Parameter(tensor.name, rank, shape_of(box), (part,)))
    return tuple(found)
