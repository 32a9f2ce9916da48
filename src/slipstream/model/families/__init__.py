"""Model families: the names, shapes and tensor-parallel sharding of a model's tensors.

Read `family.py` and `llama.py` first. Families below are built in; others are added with `register`, by a module that every
process imports (`load_plugins`). The embedded engine holds tensors with the names and orientation of the checkpoint:
`parameters(config, tp)`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from importlib.metadata import entry_points

from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.model.families import gemma2, gemma3, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from slipstream.model.families.family import Family, FamilyTensor
from slipstream.model.families.family import Mlp as Mlp
from slipstream.model.families.family import Norms as Norms
from slipstream.tensors.boxes import full_box, shape_of, shift, split
from slipstream.types import Parameter, ParameterPart, TensorSpec

_FAMILIES: dict[str, Family] = {}

ENTRY_POINTS = "slipstream.families"
"""Group of entry points. Each names a module that registers families."""
PLUGINS = "SLIPSTREAM_PLUGINS"
"""Environment variable: modules that register families, separated by commas. Processes inherit it."""

_FAMILY_SETTINGS = {
    "sliding_window": "sliding_window",
    "layer_types": "layer_types",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attn_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping",
    "rope_local_theta": "rope_local_base_freq",
}
"""Fields of `ModelConfig` that only some families support (`Family.settings`), with their names in `config.json`."""


def register(family: Family) -> None:
    """Register a family in this process. Trainer and engines both need it (`load_plugins`). Registering the same `Family` again
    has no effect."""
    if _FAMILIES.setdefault(family.name, family) is not family:
        raise ConfigError(
            f"a model family {family.name!r} is already registered; give a variant its own name and model_type"
        )


def load_plugins(modules: Iterable[str]) -> None:
    """Import modules that register families, in this process and in those that it starts."""
    named = dict.fromkeys(filter(None, (*os.environ.get(PLUGINS, "").split(","), *modules)))
    if named:
        os.environ[PLUGINS] = ",".join(named)
    for module in named:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"the plugin {module!r} cannot be imported: {error}; is it on the PYTHONPATH?") from None


@cache
def _load_installed() -> None:
    """Register the families of installed packages and of `PLUGINS`."""
    load_plugins(())
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()


def names() -> tuple[str, ...]:
    """Return the names of all registered families."""
    _load_installed()
    return tuple(_FAMILIES)


def is_known(name: str) -> bool:
    """Return whether a family is registered. Plugins are looked for only if it is not built in."""
    return name in _FAMILIES or name in names()


def family_named(name: str) -> Family:
    if not is_known(name):
        raise ConfigError(
            f"unknown model family {name!r}; known: {', '.join(_FAMILIES)}. Add others with "
            "slipstream.model.families.register (docs/add-a-family.md)"
        )
    return _FAMILIES[name]


@lru_cache
def family_of(config: ModelConfig) -> Family:
    """Return the family of a model. Raise `ConfigError` if the config sets something that the family does not support."""
    family = family_named(config.family)
    for name, setting in _FAMILY_SETTINGS.items():
        if getattr(config, name) and setting not in family.settings:
            raise ConfigError(f"{name} is set, but {config.family} models have no {setting} in config.json")
    if "rope_local_base_freq" in family.settings and config.rope_local_theta is None:
        raise ConfigError(f"a {config.family} model needs rope_local_theta, the rotary base of local layers")
    if family.has_experts != (config.moe is not None):
        needs = "needs" if family.has_experts else "cannot have"
        raise ConfigError(f"a {config.family} model {needs} experts, but moe is {config.moe}")
    return family


def family_tensors(config: ModelConfig) -> tuple[FamilyTensor, ...]:
    return tuple(family_of(config).tensors(config))


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Return the names and shapes of the tensors of an HF checkpoint."""
    return tuple(t.spec for t in family_tensors(config))


def shard_dims(config: ModelConfig, tp: int) -> dict[str, int | None]:
    """Return for each tensor the dimension that `tp` ranks shard, or None if it is replicated."""
    sizes = {"num_heads": config.num_heads, "intermediate_size": config.intermediate_size}
    if config.moe:
        sizes["moe.intermediate_size"] = config.moe.intermediate_size
    if any(size % tp for size in sizes.values()):
        listed = " and ".join(f"{name} ({size})" for name, size in sizes.items())
        raise ConfigError(f"tp={tp} does not divide {listed}; choose one that divides all of them")
    return {t.name: t.split(tp) for t in family_tensors(config)}


def parameters(config: ModelConfig, tp: int = 1) -> tuple[Parameter, ...]:
    """Return the parameters of `tp` ranks that hold shards of the HF tensors."""
    dims = shard_dims(config, tp)
    sharded = []
    for tensor in family_tensors(config):
        for rank in range(tp):
            box = split(full_box(tensor.shape), dims[tensor.name], rank, tp)
            part = ParameterPart(tensor.name, box, shift(box, box))
            sharded.append(Parameter(tensor.name, rank, shape_of(box), (part,)))
    return tuple(sharded)


def whole_parameters(tensors: Sequence[TensorSpec], num_ranks: int = 1) -> tuple[Parameter, ...]:
    """Return the parameters of ranks that each receive every tensor whole."""
    return tuple(
        Parameter(t.name, rank, t.shape, (ParameterPart(t.name, full_box(t.shape), full_box(t.shape)),))
        for rank in range(num_ranks)
        for t in tensors
    )


def prefixed(parameters: Iterable[Parameter], prefix: str) -> tuple[Parameter, ...]:
    """Return parameters of tensors whose names, like their own, have this prefix."""
    return tuple(
        replace(p, name=prefix + p.name, parts=tuple(replace(part, tensor=prefix + part.tensor) for part in p.parts))
        for p in parameters
    )


for _module in (llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, gemma2, gemma3):
    register(_module.FAMILY)
