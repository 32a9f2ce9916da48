"""Which tensors an engine does not hold as the trainer has them. An engine hashes every part of its live parameters; the
trainer makes the same bytes from its own tree, cut as the engine's parameters say and cast to its dtype, and compares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from slipstream.errors import FleetChanged, MappingError
from slipstream.types import (
    Box,
    Checksums,
    Difference,
    EngineInfo,
    Parameter,
    ParameterChecksums,
    Part,
    Unchecked,
    VerifyReport,
)
from slipstream.weights.checksum import checksum
from slipstream.weights.image import numpy_dtype
from slipstream.weights.layout import slices
from slipstream.weights.source import Tensor, is_jax_array, read


def hash_parameters(
    parameters: Iterable[Parameter], local: Callable[[Parameter], np.ndarray]
) -> tuple[ParameterChecksums, ...]:
    """The engine's half, where parameters can be had as arrays in host memory. `local` gives one as its rank holds it."""
    found = []
    for parameter in parameters:
        array = local(parameter)
        sums = tuple(checksum(array[slices(part.local_box)]) for part in parameter.parts)
        found.append(ParameterChecksums(parameter.name, parameter.rank, sums))
    return tuple(found)


def compare(
    tensors: Mapping[str, Tensor], engines: Iterable[EngineInfo], found: Mapping[str, Checksums]
) -> VerifyReport:
    """The trainer's half. `found` is what each engine answered; of those that did not, nothing is said. Blocks: call it in a
    thread."""
    engines = [engine for engine in engines if engine.name in found]
    rows: dict[str, list[tuple[EngineInfo, Parameter, Part, int]]] = defaultdict(list)
    unchecked = []
    for engine in engines:
        for parameter, sums in _paired(engine, found[engine.name]):
            if not sums.parts:
                why = f"the engine cannot read {parameter.name} as the tensors that it is made of"
                unchecked += [Unchecked(engine.name, part.tensor, why) for part in parameter.parts]
                continue
            for part, value in zip(parameter.parts, sums.parts, strict=True):
                rows[part.tensor].append((engine, parameter, part, value))
    differences, num_parts = [], 0
    for name in rows.keys() & tensors.keys():  # a draft that was not given is not compared
        expected = _Hashed(tensors[name])
        for engine, parameter, part, value in rows[name]:
            try:
                same = expected(part.tensor_box, engine.dtype) == value
            except MappingError as error:  # another process of the trainer holds it
                unchecked.append(Unchecked(engine.name, name, str(error)))
                continue
            num_parts += 1
            if not same:
                differences.append(Difference(engine.name, parameter.rank, parameter.name, name, part.tensor_box))
    return VerifyReport(
        versions=tuple((engine.name, found[engine.name].version) for engine in engines),
        num_parts=num_parts,
        differences=tuple(sorted(differences, key=lambda d: (d.engine, d.tensor, d.rank, d.tensor_box))),
        unchecked=tuple(sorted(set(unchecked), key=lambda u: (u.engine, u.tensor, u.why))),
    )


def _paired(engine: EngineInfo, found: Checksums) -> list[tuple[Parameter, ParameterChecksums]]:
    answers = {(p.name, p.rank): p for p in found.parameters}
    pairs = [(p, answers.get((p.name, p.rank))) for p in engine.parameters]
    if len(answers) != len(pairs):
        raise _other_layout(engine)
    checked = []
    for parameter, sums in pairs:
        if sums is None or len(sums.parts) not in (0, len(parameter.parts)):
            raise _other_layout(engine)
        checked.append((parameter, sums))
    return checked


def _other_layout(engine: EngineInfo) -> FleetChanged:
    return FleetChanged(
        f"engine {engine.name!r} answered for other parameters than it registered with; has another engine taken its name? "
        "Verify again"
    )


class _Hashed:
    """A tensor's rectangles, each hashed once however many ranks and engines hold it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._known = _apart(tensor), dict[tuple[Box, str], int]()

    def __call__(self, box: Box, dtype: str) -> int:
        if (box, dtype) not in self._known:
            self._known[box, dtype] = checksum(read(self._tensor, box), numpy_dtype(dtype))
        return self._known[box, dtype]


def _apart(tensor: Any) -> Any:
    """The same data as another array. A JAX array keeps the copy in host memory that it was once read into: the whole model
    would stay there for as long as the trainer keeps its parameters."""
    if not is_jax_array(tensor):
        return tensor
    import jax

    shards = [shard.data for shard in tensor.addressable_shards]
    return jax.make_array_from_single_device_arrays(tensor.shape, tensor.sharding, shards)
