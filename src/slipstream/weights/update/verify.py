"""Compares an engine's weights with the trainer's. The engine hashes every part of its live parameters; the trainer cuts and
casts its own tree as the engine's parameters say, hashes the same bytes, and compares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from slipstream.errors import FleetChanged, MappingError
from slipstream.tensors.boxes import slices
from slipstream.types import (
    Box,
    Checksums,
    Difference,
    EngineInfo,
    Parameter,
    ParameterChecksums,
    ParameterPart,
    Unchecked,
    VerifyReport,
)
from slipstream.weights.checksum import checksum
from slipstream.weights.rank_image import numpy_dtype
from slipstream.weights.sources.named_tensors import Tensor, is_jax_array, read


def hash_parameters(
    parameters: Iterable[Parameter], local: Callable[[Parameter], np.ndarray]
) -> tuple[ParameterChecksums, ...]:
    """Hash the engine's parameters. `local` returns a parameter of a rank as an array in host memory."""
    hashed = []
    for parameter in parameters:
        array = local(parameter)
        sums = tuple(checksum(array[slices(part.local_box)]) for part in parameter.parts)
        hashed.append(ParameterChecksums(parameter.name, parameter.rank, sums))
    return tuple(hashed)


def compare(
    tensors: Mapping[str, Tensor], engines: Iterable[EngineInfo], checksums: Mapping[str, Checksums]
) -> VerifyReport:
    """Compare the trainer's tensors with the engines that have checksums. Blocks: call it in a thread."""
    engines = [engine for engine in engines if engine.name in checksums]
    rows: dict[str, list[tuple[EngineInfo, Parameter, ParameterPart, int]]] = defaultdict(list)
    unchecked = []
    for engine in engines:
        for parameter, sums in _paired(engine, checksums[engine.name]):
            if not sums.parts:
                why = f"the engine cannot read {parameter.name} back as the tensors it consists of"
                unchecked += [Unchecked(engine.name, part.tensor, why) for part in parameter.parts]
                continue
            for part, value in zip(parameter.parts, sums.parts, strict=True):
                rows[part.tensor].append((engine, parameter, part, value))
    differences, num_parts = [], 0
    for name in rows.keys() & tensors.keys():  # a draft model is compared only if it was given
        expected = _box_checksums(tensors[name])
        for engine, parameter, part, value in rows[name]:
            try:
                same = expected(part.tensor_box, engine.dtype) == value
            except MappingError as error:  # another trainer process holds it
                unchecked.append(Unchecked(engine.name, name, str(error)))
                continue
            num_parts += 1
            if not same:
                differences.append(Difference(engine.name, parameter.rank, parameter.name, name, part.tensor_box))
    return VerifyReport(
        versions=tuple((engine.name, checksums[engine.name].version) for engine in engines),
        num_parts=num_parts,
        differences=tuple(sorted(differences, key=lambda d: (d.engine, d.tensor, d.rank, d.tensor_box))),
        unchecked=tuple(sorted(set(unchecked), key=lambda u: (u.engine, u.tensor, u.why))),
    )


def _paired(engine: EngineInfo, checksums: Checksums) -> list[tuple[Parameter, ParameterChecksums]]:
    answers = {(p.name, p.rank): p for p in checksums.parameters}
    own = {(p.name, p.rank): p for p in engine.parameters}
    if answers.keys() != own.keys() or any(len(answers[key].parts) not in (0, len(own[key].parts)) for key in own):
        raise FleetChanged(
            f"engine {engine.name!r} returned checksums of other parameters than it registered; did another engine take its "
            "name? Verify again"
        )
    return [(own[key], answers[key]) for key in own]


def _box_checksums(tensor: Tensor) -> Callable[[Box, str], int]:
    """Return checksums of a tensor's boxes, each computed once for all ranks and engines that hold it."""
    tensor = _without_host_cache(tensor)
    return cache(lambda box, dtype: checksum(read(tensor, box), numpy_dtype(dtype)))


def _without_host_cache(tensor: Any) -> Any:
    """Return the same data as another array. A JAX array caches the host copy made when it is read, so reading the trainer's
    own arrays would keep the whole model in host memory."""
    if not is_jax_array(tensor):
        return tensor
    import jax

    shards = [shard.data for shard in tensor.addressable_shards]
    return jax.make_array_from_single_device_arrays(tensor.shape, tensor.sharding, shards)
