import dataclasses
import json
import os
import socket
import subprocess
import sys
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, register_pytree_with_keys
from safetensors.numpy import save_file

from slipstream.errors import ConfigError, MappingError
from slipstream.model import families
from slipstream.model.checkpoints import hf_weights
from slipstream.tensors.boxes import exact_cover, full_box
from slipstream.weights.sources import named_tensors
from slipstream.weights.update.transfer import Inbox
from tests.tiny import hf_directory, hf_model, random_params, variant
from tests.weights.by_hand import HandUpdate


class Layer(NamedTuple):
    weight: jnp.ndarray
    bias: jnp.ndarray


def test_leaves_are_named_by_their_path():
    tree = {"a": [{"w": jnp.ones((2, 3))}, {"w": jnp.zeros(4)}], "b": Layer(jnp.ones(1), jnp.ones(2))}
    assert set(named_tensors.named_tensors(tree)) == {"a.0.w", "a.1.w", "b.weight", "b.bias"}


def test_a_flat_mapping_keeps_its_dotted_names():
    assert set(named_tensors.named_tensors({"model.norm.weight": np.ones(3), "lm_head.weight": jnp.ones(2)})) == {
        "model.norm.weight",
        "lm_head.weight",
    }


def test_repeated_trees_are_described_once():
    describe = named_tensors.DescriptionCache(rank=3)
    tree = {"a": jnp.ones((2, 3)), "b": jnp.ones(4)}
    found = describe(tree)
    assert found == named_tensors.describe(tree, 3)
    assert describe({name: leaf * 2 for name, leaf in tree.items()}) is found
    for other in (
        tree | {"b": jnp.ones(5)},
        tree | {"b": jnp.ones(4, jnp.bfloat16)},
        tree | {"b": np.ones(6)},
        tree | {"b": np.ones(7)},
        {"a": tree["a"]},
        {"c": tree["a"], "b": tree["b"]},
    ):
        assert describe(other) == named_tensors.describe(other, 3)
    assert describe(tree) == found


def test_describe_and_read():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensors = named_tensors.named_tensors({"w": jnp.asarray(array)})
    described = named_tensors.describe(tensors)["w"]
    assert (described.shape, described.dtype, described.shards) == ((3, 4), "float32", ((0, ((0, 3), (0, 4))),))
    np.testing.assert_array_equal(named_tensors.read(tensors["w"], ((1, 3), (0, 2))), array[1:3, 0:2])
    assert named_tensors.describe({"h": jnp.ones(2, jnp.bfloat16)})["h"].dtype == "bfloat16"


@pytest.mark.parametrize("tree", [{}, {"a": {}}, {"a": "text"}, {"a": {"b": 1.0}}])
def test_trees_with_other_leaves_than_arrays_are_refused(tree):
    with pytest.raises(MappingError):
        named_tensors.named_tensors(tree)


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(MappingError, match=r"a\.0"):
        named_tensors.named_tensors({"a": [np.ones(1)], "a.0": np.ones(1), "nested": {"x": np.ones(1)}})


# --- modules and states -----------------------------------------------------------------------------------------------


class Variable:
    """Flattens as `flax.nnx.Variable` does: one child, under `GetAttrKey("value")`."""

    def __init__(self, value):
        self.value = value


class State(dict):
    """Flattens as `flax.nnx.State` does: sorted, under `DictKey`s."""


register_pytree_with_keys(Variable, lambda v: (((GetAttrKey("value"), v.value),), None), lambda _, c: Variable(*c))
register_pytree_with_keys(
    State,
    lambda s: (tuple((DictKey(k), v) for k, v in sorted(s.items())), tuple(sorted(s))),
    lambda keys, children: State(zip(keys, children)),
)


def test_names_of_an_nnx_state_do_not_end_in_value():
    layer = State(attn=State(q_proj=State(w=Variable(jnp.ones((2, 3)))), value=Variable(jnp.ones(4))))
    state = State(layers=State({0: layer, 1: layer}), scale=Variable(jnp.ones(())))
    names = {f"layers.{i}.attn.{x}" for i in range(2) for x in ("q_proj.w", "value")} | {"scale"}
    assert named_tensors.named_tensors(state).keys() == names


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "value"], meta_fields=["size"])
@dataclasses.dataclass
class Registered:
    weight: Any
    value: Any
    size: int = 3


@dataclasses.dataclass
class Plain:
    layers: list
    norm: np.ndarray
    inner: Any = None
    num_heads: int = 4
    activation: Any = jnp.tanh


def test_attribute_paths_of_modules_and_dataclasses():
    """An attribute called `value` beside others keeps its name; settings of a plain dataclass are not leaves."""
    module = Registered(jnp.ones(1), jnp.ones(2))
    assert named_tensors.named_tensors({"m": module}).keys() == {"m.weight", "m.value"}
    tree = Plain([module, Plain([], np.ones(1))], np.ones(3), inner={"w": np.ones(2)})
    assert named_tensors.named_tensors(tree).keys() == {
        "layers.0.weight", "layers.0.value", "layers.1.norm", "norm", "inner.w",
    }  # fmt: skip
    with pytest.raises(MappingError, match=r"layers\.0: leaves must be arrays, found function.*eqx\.filter"):
        named_tensors.named_tensors(Plain([lambda x: x], np.ones(1)))


# --- sharded arrays ---------------------------------------------------------------------------------------------------

MESH = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("x", "y"))


@pytest.mark.parametrize(
    "spec, boxes",
    [
        (("x",), {((0, 2), (0, 6)), ((2, 4), (0, 6))}),
        ((None, "x"), {((0, 4), (0, 3)), ((0, 4), (3, 6))}),
        ((None, "y"), {((0, 4), (0, 6))}),  # both devices hold the full array: listed once
        ((), {((0, 4), (0, 6))}),
    ],
)
def test_shards_are_listed_once_and_read_without_gathering(spec, boxes, monkeypatch):
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    sharded = jax.device_put(array, NamedSharding(MESH, PartitionSpec(*spec)))
    described = named_tensors.describe({"w": sharded}, rank=5)["w"]
    assert {box for _, box in described.shards} == boxes and len(described.shards) == len(boxes)
    assert {rank for rank, _ in described.shards} == {5}
    assert exact_cover([box for _, box in described.shards], full_box((4, 6))) is None
    if len(boxes) > 1:  # the full array must not be requested
        monkeypatch.setattr(type(sharded), "__array__", _refuse_sharded(type(sharded).__array__))
    for box in (*boxes, ((1, 3), (2, 5)), ((0, 1), (0, 6)), ((3, 4), (5, 6))):  # also across shards
        rows, columns = box
        np.testing.assert_array_equal(named_tensors.read(sharded, box), array[slice(*rows), slice(*columns)])


def _refuse_sharded(convert):
    def __array__(self, *args, **kwargs):
        assert len(self.sharding.device_set) == 1, "the whole sharded array was gathered"
        return convert(self, *args, **kwargs)

    return __array__


_PROCESS = """
import json, os, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
from slipstream.errors import MappingError
from slipstream.weights.sources import named_tensors as source
from slipstream.weights.sources.transforms import Permute
from slipstream.weights.sources.tree_mapping import Rule, Target, TreeMapping
array = np.arange(32.0, dtype=np.float32).reshape(8, 4)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("process", "device"))
make = lambda *spec: jax.make_array_from_callback((8, 4), NamedSharding(mesh, P(*spec)), lambda i: array[i])
tensors = {"a": make(("process", "device")), "b": make("process"), "c": make()}
assert not tensors["a"].is_fully_addressable
mapped = TreeMapping(tuple(Rule(x, Target(x + "t", (Permute((1, 0)),))) for x in "ab")).tensors({x: tensors[x] for x in "ab"})
described = source.describe({**tensors, **mapped}, rank)
for name, what in described.items():
    expected = array.T if name.endswith("t") else array
    for rows, columns in (box for owner, box in what.shards if owner == rank):
        found = source.read({**tensors, **mapped}[name], (rows, columns))
        np.testing.assert_array_equal(found, expected[slice(*rows), slice(*columns)])
try:
    source.read(tensors["a"], ((0, 8), (0, 4)))
    raise SystemExit("read what another process holds")
except MappingError as error:
    assert "16 of the 32 elements" in str(error), error
print("RESULT " + json.dumps({name: what.shards for name, what in described.items()}))
"""


def test_two_processes_list_and_read_their_own_shards():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-c", _PROCESS]
    run = partial(subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    processes = [run([*command, str(rank), port]) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0, 0], outputs
    first, second = (json.loads(out.split("RESULT ")[1]) for out, _ in outputs)
    for name in "abc":  # both know the global sharding, so they make the same plan
        assert first[name] == second[name]
    assert first["at"] == [[0, [[0, 4], [0, 2]]], [0, [[0, 4], [2, 4]]]]  # a mapped tree knows only its own process
    assert first["a"] == [[0, [[0, 2], [0, 4]]], [0, [[2, 4], [0, 4]]], [1, [[4, 6], [0, 4]]], [1, [[6, 8], [0, 4]]]]
    assert first["b"] == [[0, [[0, 4], [0, 4]]], [1, [[4, 8], [0, 4]]]]  # two replicas each, listed once
    assert first["c"] == [[0, [[0, 8], [0, 4]]], [1, [[0, 8], [0, 4]]]]


# --- torch and safetensors --------------------------------------------------------------------------------------------


def synced(tensors, config, dtype="float32"):
    """Return what an engine of two ranks receives, assembled."""
    parameters, specs = families.parameters(config, 2), families.tensors(config)
    update, inbox = HandUpdate(tensors, specs, parameters, dtype, 0), Inbox(parameters, dtype, "e0")
    arrays, _ = inbox.receive(0, update.send(inbox.begin(-1, 0, update.offer)))
    dims = families.shard_dims(config, 2)
    return {
        name: parts[0] if dims[name] is None else np.concatenate(parts, dims[name]) for name, parts in arrays.items()
    }


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])  # qwen2 is tied: its state dict has the embedding twice
def test_a_torch_model_is_synced(name, dtype):
    config = variant(name)
    model = hf_model(config, seed=3).to(getattr(torch, dtype))
    tensors = named_tensors.named_tensors(model.state_dict())
    assert {s.dtype for s in named_tensors.describe(tensors).values()} == {dtype}
    expected = {n: np.asarray(x) for n, x in named_tensors.named_tensors(random_params(config, 3)).items()}
    cast = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    equal(synced(tensors, config, dtype), {n: x.astype(cast) for n, x in expected.items()})


def test_torch_tensors_are_read_in_place():
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.zeros((4, 6), dtype=dtype, requires_grad=True)
        view = named_tensors.read(tensor, ((1, 3), (2, 4)))
        with torch.no_grad():
            tensor[1, 2] = 7
        assert view[0, 0] == 7
        np.testing.assert_array_equal(
            named_tensors.read(tensor.T, ((2, 3), (0, 4)))[0].astype(np.float32), [0, 7, 0, 0]
        )


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_directory_of_safetensors_is_synced(tmp_path, name):
    config = variant(name)
    directory = hf_directory(tmp_path / "m", name, seed=4)
    tensors = named_tensors.named_tensors(directory)
    equal(synced(tensors, config), hf_weights.read_arrays(directory, config))
    assert named_tensors.named_tensors(str(directory)).keys() == tensors.keys()


def test_several_files_bfloat16_and_a_head_stored_twice(tmp_path):
    rng = np.random.default_rng(0)
    embed, norm = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((5, 4), (4,)))
    save_file(
        {"model.embed_tokens.weight": embed, "l.rotary_emb.inv_freq": np.ones(2, np.float32)},
        tmp_path / "a.safetensors",
    )
    save_file({"model.norm.weight": norm, "lm_head.weight": embed}, tmp_path / "b.safetensors")
    index = {"model.embed_tokens.weight": "a.safetensors", "model.norm.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert "lm_head.weight" in named_tensors.named_tensors(tmp_path)
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    tensors = named_tensors.named_tensors(tmp_path)
    assert tensors.keys() == {"model.embed_tokens.weight", "model.norm.weight"}
    assert named_tensors.describe(tensors)["model.norm.weight"].dtype == "bfloat16"
    np.testing.assert_array_equal(
        named_tensors.read(tensors["model.embed_tokens.weight"], ((1, 3), (0, 2))), embed[1:3, :2]
    )
    np.testing.assert_array_equal(np.asarray(tensors["model.norm.weight"]), norm)
    save_file({"model.norm.weight": norm, "lm_head.weight": embed + 1}, tmp_path / "b.safetensors")
    with pytest.raises(MappingError, match=r"lm_head\.weight differs"):
        named_tensors.named_tensors(tmp_path)


def test_directories_that_hold_no_readable_weights(tmp_path):
    with pytest.raises(ConfigError, match="holds no weights"):
        named_tensors.named_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        named_tensors.named_tensors(tmp_path)
    save_file({"ids": np.ones(3, np.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(MappingError, match="ids has dtype I64"):
        named_tensors.named_tensors(tmp_path)
