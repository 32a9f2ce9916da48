"""Adapters in weight updates: the tensors of an adapter, and the layout of an update that brings some. Pure.

An update brings tensors of the base model, adapters, or both (`Offer.adapters`, `Offer.only_adapters`). An adapter is one
tensor, `adapters.0` for the first: all of its tensors one after the other, since hundreds of small ones would take longer to
list than to send. It goes whole to the engine's first rank, in the engine's dtype and its own rank; the engine pads and shards
it. Adapters of the same rank and targets have the same plan. Trainer and engine derive the layout from the same facts: the base
model's tensors, and `Lora`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from slipstream.errors import Unsupported
from slipstream.model.families import whole_parameters
from slipstream.model.lora import adapter_tensors
from slipstream.types import EngineInfo, Lora, Parameter, TensorSpec

PREFIX = "adapters."
HOST_TRANSPORTS = ("memory", "shm", "tcp", "disk")
"""Adapters are small and travel through the host."""

T = TypeVar("T")
Array = TypeVar("Array", bound=Any)


def layout(
    tensors: Sequence[TensorSpec], parameters: Sequence[Parameter], adapters: Sequence[Lora], only_adapters: bool
) -> tuple[tuple[TensorSpec, ...], tuple[Parameter, ...]]:
    """Return the tensors and parameters of an update, given those of the base model."""
    specs, own = (() if only_adapters else tuple(tensors)), (() if only_adapters else tuple(parameters))
    for index, lora in enumerate(adapters):
        size = sum(math.prod(spec.shape) for spec in adapter_tensors(tensors, lora))
        packed = (TensorSpec(f"{PREFIX}{index}", (size,)),)
        specs, own = specs + packed, own + whole_parameters(packed)
    return specs, own


def with_adapters(engine: EngineInfo, adapters: Sequence[Lora], only_adapters: bool) -> EngineInfo:
    """Return the engine as the target of an update with adapters. Raise `Unsupported` if it does not serve them."""
    for lora in adapters:
        check_supported(engine, lora)
    tensors, parameters = layout(engine.tensors, engine.parameters, adapters, only_adapters)
    if not only_adapters:
        return replace(engine, tensors=tensors, parameters=parameters)
    usable = tuple(name for name in engine.transports if name in HOST_TRANSPORTS)
    return replace(engine, tensors=tensors, parameters=parameters, transports=usable, num_ranks=1, takes_all=False)


def check_supported(engine: EngineInfo, lora: Lora) -> None:
    if (support := engine.adapters) is None:
        raise Unsupported(
            f"engine {engine.name!r} serves no adapters; start it with room for some, as in "
            "EmbeddedConfig(adapters=AdapterConfig(slots=8))"
        )
    if lora.rank > support.max_rank:
        raise Unsupported(
            f"adapter {lora.name!r} has rank {lora.rank}, and engine {engine.name!r} serves adapters up to rank "
            f"{support.max_rank}; start it with a larger adapters.rank"
        )
    if missing := set(lora.targets) - set(support.targets):
        raise Unsupported(
            f"adapter {lora.name!r} changes {', '.join(sorted(missing))}, and engine {engine.name!r} serves adapters of "
            f"{', '.join(support.targets)}; start it with these in adapters.targets"
        )


def split(named: Mapping[str, T], adapters: Sequence[Lora]) -> tuple[dict[str, T], dict[Lora, T]]:
    """Split what an update has brought into the base model's part and the tensor of each adapter."""
    rest = {name: value for name, value in named.items() if not name.startswith(PREFIX)}
    return rest, {lora: named[f"{PREFIX}{index}"] for index, lora in enumerate(adapters)}


def parts(base: Sequence[TensorSpec], lora: Lora) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yield name, first element and shape of each tensor in an adapter's one."""
    start = 0
    for spec in adapter_tensors(base, lora):
        yield spec.name, start, spec.shape
        start += math.prod(spec.shape)


def unpack(base: Sequence[TensorSpec], lora: Lora, packed: Array) -> dict[str, Array]:
    return {name: packed[start : start + math.prod(shape)].reshape(shape) for name, start, shape in parts(base, lora)}
