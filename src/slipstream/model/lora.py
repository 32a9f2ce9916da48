"""Which matrices of a model a LoRA adapter can change, and the names of its tensors. Without JAX."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from slipstream.config import AdapterConfig
from slipstream.errors import ConfigError, MappingError
from slipstream.types import AdapterSupport, Lora, TensorSpec

A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of the two factors, after the name of the projection."""

_WEIGHT = ".weight"


def projections(base: Iterable[TensorSpec]) -> dict[str, tuple[int, int]]:
    """Return `(out, in)` of the matrices that an adapter can change, by name without `.weight`: those in layers, but no experts
    and no routers. `base` are the model's tensors."""
    found: dict[str, tuple[int, int]] = {}
    for spec in base:
        name = spec.name.removesuffix(_WEIGHT)
        is_matrix = len(spec.shape) == 2 and name != spec.name and name.startswith("model.layers.")
        if is_matrix and ".experts." not in name and target_of(name) != "gate":
            found[name] = (spec.shape[0], spec.shape[1])
    return found


def target_of(projection: str) -> str:
    """Return the name by which `Lora.targets` has a projection: `q_proj` for `model.layers.0.self_attn.q_proj`."""
    return projection.rpartition(".")[2]


def targets(base: Iterable[TensorSpec]) -> tuple[str, ...]:
    """Return all possible `Lora.targets` of a model, sorted."""
    return tuple(sorted(set(map(target_of, projections(base)))))


def adapter_support(config: AdapterConfig, base: Iterable[TensorSpec]) -> AdapterSupport:
    """Return which adapters an engine of a model serves. Raise `ConfigError` for targets that the model does not have."""
    possible = targets(base)
    if not possible:
        raise ConfigError(
            "adapters change projections named as in model.layers.0.self_attn.q_proj, outside of experts; this model has none"
        )
    if unknown := set(config.targets) - set(possible):
        raise ConfigError(
            f"adapters.targets has {', '.join(sorted(unknown))}; this model has {', '.join(possible)} outside of experts"
        )
    return AdapterSupport(config.slots, config.rank, tuple(sorted(config.targets)) or possible)


def adapter_tensors(base: Iterable[TensorSpec], lora: Lora) -> tuple[TensorSpec, ...]:
    """Return the tensors of an adapter. Raise `MappingError` for targets that the model does not have."""
    return _adapter_tensors(tuple(base), lora)


@lru_cache(maxsize=256)
def _adapter_tensors(base: tuple[TensorSpec, ...], lora: Lora) -> tuple[TensorSpec, ...]:
    possible = targets(base)
    if unknown := set(lora.targets) - set(possible):
        raise MappingError(
            f"adapter {lora.name!r} changes {', '.join(sorted(unknown))}, and the model has no such projection outside of "
            f"experts; it has {', '.join(possible) or 'none'}"
        )
    specs = []
    for name, (num_out, num_in) in projections(base).items():
        if target_of(name) in lora.targets:
            specs += [TensorSpec(name + A, (lora.rank, num_in)), TensorSpec(name + B, (num_out, lora.rank))]
    return tuple(specs)
