"""Comparison of the tensors that an engine reports with a trainer's tree, on handwritten parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slipstream.errors import FleetChanged
from slipstream.model import families
from slipstream.model.config import ModelConfig
from slipstream.model.families.vllm_parameters import vllm_parameters
from slipstream.model.tree import flatten
from slipstream.tensors.boxes import full_box, shape_of, slices
from slipstream.types import Box, Checksums, EngineInfo, Parameter, ParameterChecksums
from slipstream.weights.rank_image import numpy_dtype
from slipstream.weights.update.verify import compare, hash_parameters
from tests.tiny import random_params, tiny_config


def engine_of(config: ModelConfig, parameters: Any, dtype: str, name: str = "e") -> EngineInfo:
    ranks = 1 + max(p.rank for p in parameters)
    tensors = families.tensors(config)
    return EngineInfo(name, "hand", "m", dtype, ranks, tensors, tuple(parameters), (), "h", 64, 8, 5)


def held(engine: EngineInfo, tensors: Any) -> Checksums:
    """What an engine that was given `tensors` answers. Padding is not a number, so that it would show."""

    def local(parameter: Parameter) -> np.ndarray:
        array = np.full(parameter.shape, np.nan, numpy_dtype(engine.dtype))
        for part in parameter.parts:
            box = np.asarray(tensors[part.tensor])[slices(part.tensor_box)]
            array[slices(part.local_box)] = box.reshape(shape_of(part.local_box))
        return array

    return Checksums(engine.version, hash_parameters(engine.parameters, local))


LAYOUTS = [
    ("llama", "embedded", 1, "float32"),
    ("qwen2", "embedded", 2, "bfloat16"),
    ("qwen2", "vllm", 1, "bfloat16"),
    ("llama", "vllm", 4, "float16"),  # more ranks than KV heads: they are repeated
    ("qwen3_moe", "vllm", 2, "float32"),
    ("gemma3_text", "vllm", 2, "bfloat16"),
]


@pytest.mark.parametrize("family,kind,tp,dtype", LAYOUTS)
def test_every_layout_verifies_and_names_what_changed(family: str, kind: str, tp: int, dtype: str) -> None:
    config = tiny_config(family, vocab_size=100)
    parameters = vllm_parameters(config, tp) if kind == "vllm" else families.parameters(config, tp)
    engine, tensors = engine_of(config, parameters, dtype), flatten(random_params(config))
    clean = compare(tensors, [engine], {"e": held(engine, tensors)})
    assert clean.is_same and not clean.unchecked and clean.versions == (("e", 5),)
    assert clean.num_parts == sum(len(p.parts) for p in parameters)
    for name in tensors:
        report = compare(tensors, [engine], {"e": held(engine, tensors | {name: tensors[name] * 2})})
        assert report.tensors == (name,)
        wanted = {(p.rank, p.name) for p in parameters for part in p.parts if part.tensor == name}
        assert {(d.rank, d.parameter) for d in report.differences} == wanted


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_one_element_on_one_rank_is_found(data: st.DataObject) -> None:
    config = tiny_config("qwen2")
    engine, tensors = engine_of(config, vllm_parameters(config, 2), "float32"), flatten(random_params(config))
    parameter = data.draw(st.sampled_from([p for p in engine.parameters if p.parts]))
    part = data.draw(st.sampled_from(parameter.parts))
    at = tuple(data.draw(st.integers(start, stop - 1)) for start, stop in part.tensor_box)
    changed = np.array(tensors[part.tensor])
    changed[at] += 1
    other = {(p.name, p.rank): p for p in held(engine, tensors | {part.tensor: changed}).parameters}
    mixed = [
        other[p.name, p.rank] if (p.name, p.rank) == (parameter.name, parameter.rank) else p
        for p in held(engine, tensors).parameters
    ]
    (found,) = compare(tensors, [engine], {"e": Checksums(5, tuple(mixed))}).differences
    assert (found.rank, found.parameter, found.tensor) == (parameter.rank, parameter.name, part.tensor)
    assert found.tensor_box == part.tensor_box


def test_engines_of_different_dtypes_are_compared_each_in_its_own() -> None:
    config = tiny_config()
    tensors = flatten(random_params(config))
    engines = [
        engine_of(config, families.parameters(config, tp), dtype, dtype)
        for tp, dtype in ((1, "float32"), (2, "bfloat16"))
    ]
    found = {e.name: held(e, tensors) for e in engines}
    assert compare(tensors, engines, found).is_same
    rounded = {name: np.asarray(x).astype(numpy_dtype("bfloat16")) for name, x in tensors.items()}
    assert {d.engine for d in compare(rounded, engines, found).differences} == {"float32"}


def test_sharded_arrays_are_read_where_they_lie_and_keep_no_copy() -> None:
    if len(jax.devices()) < 2:
        pytest.skip("one device")
    config = tiny_config()
    engine, tensors = engine_of(config, families.parameters(config, 1), "bfloat16"), flatten(random_params(config))
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharded = {name: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("x"))) for name, leaf in tensors.items()}
    assert compare(sharded, [engine], {"e": held(engine, tensors)}).is_same
    assert all(leaf._npy_value is None for leaf in sharded.values())


class Half:
    """A tensor of which another process has the second half."""

    def __init__(self, array: Any) -> None:
        self._array = np.asarray(array)
        self.shape, self.dtype = self._array.shape, self._array.dtype

    def __array__(self) -> np.ndarray:
        raise AssertionError("it is not all here")

    def boxes(self) -> tuple[Box, ...]:
        return (((0, self.shape[0] // 2), *full_box(self.shape[1:])),)

    def read_box(self, box: Box) -> np.ndarray:
        from slipstream.weights.sources.named_tensors import assemble

        (own,) = self.boxes()
        return assemble(box, [(own, lambda: self._array[slices(own)])])


def test_what_another_process_holds_is_said_to_be_unchecked() -> None:
    config = tiny_config()
    engine, tensors = engine_of(config, families.parameters(config, 2), "float32"), flatten(random_params(config))
    name = "model.layers.0.mlp.gate_proj.weight"  # split by rows: rank 0 has what is here
    report = compare(tensors | {name: Half(tensors[name])}, [engine], {"e": held(engine, tensors)})
    assert report.is_same and {u.tensor for u in report.unchecked} == {name}
    assert report.num_parts == sum(len(p.parts) for p in engine.parameters) - 1


def test_answers_for_other_parameters_are_refused() -> None:
    config = tiny_config()
    engine, tensors = engine_of(config, families.parameters(config, 1), "float32"), flatten(random_params(config))
    found = held(engine, tensors)
    for wrong in (
        found.parameters[1:],
        (ParameterChecksums("another", 0, (1,)), *found.parameters[1:]),
        (replace(found.parameters[0], parts=(1, 2, 3)), *found.parameters[1:]),
    ):
        with pytest.raises(FleetChanged, match="engine 'e'"):
            compare(tensors, [engine], {"e": Checksums(5, wrong)})


def test_nothing_compared_is_not_sameness() -> None:
    assert not compare({}, [], {}).is_same
