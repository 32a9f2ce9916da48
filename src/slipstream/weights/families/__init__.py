"""Model families: from an HF config to the names and shapes of its tensors, and how tensor parallelism splits them.

A family is a `Family`, and is known once it is registered: ours below, others by a call of `register`. The embedded
engine's live parameters carry the names and orientation of the checkpoint, so that its side of a plan is
`parameters(config, tp)`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.errors import ConfigError
from slipstream.types import Parameter, Part, TensorSpec
from slipstream.weights.families import gemma2, gemma3, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from slipstream.weights.families.base import Family, FamilyTensor, Mlp, Norms
from slipstream.weights.layout import shape_of, shift, split, whole

if TYPE_CHECKING:
    from slipstream.model.config import ModelConfig

__all__ = [
    "Family",
    "FamilyTensor",
    "Mlp",
    "Norms",
    "family_named",
    "family_tensors",
    "names",
    "parameters",
    "register",
    "shard_dims",
    "tensors",
]

_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Makes a family known in this process, under its name. Trainer and engines each need it: an engine in a process of
    its own has to import the module that registers. A name is registered once; the same `Family` again changes nothing."""
    if _FAMILIES.setdefault(family.name, family) is not family:
        raise ConfigError(
            f"a model family {family.name!r} is registered already; a variant of it needs a name (and a model_type) of its own"
        )


def names() -> tuple[str, ...]:
    """The families that are known now."""
    return tuple(_FAMILIES)


def family_named(name: str) -> Family:
    try:
        return _FAMILIES[name]
    except KeyError:
        raise ConfigError(
            f"model family {name!r} is not known; known: {', '.join(_FAMILIES)}. Others are added with "
            "slipstream.weights.families.register, see docs/add-a-family.md"
        ) from None


def family_tensors(config: ModelConfig) -> tuple[FamilyTensor, ...]:
    return tuple(family_named(config.family).tensors(config))


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Names and whole shapes, as in an HF checkpoint."""
    return tuple(t.spec for t in family_tensors(config))


def shard_dims(config: ModelConfig, tp: int) -> dict[str, int | None]:
    """For each tensor the dimension that `tp` ranks split, or None where each holds the whole."""
    sizes = {"num_heads": config.num_heads, "intermediate_size": config.intermediate_size}
    if config.moe:
        sizes["moe.intermediate_size"] = config.moe.intermediate_size
    if any(size % tp for size in sizes.values()):
        listed = " and ".join(f"{name} ({size})" for name, size in sizes.items())
        raise ConfigError(f"tp={tp} does not divide {listed}; choose a tp that divides them all")
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


for _family in (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    mixtral.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
):
    register(_family)
