from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.errors import MappingError
from slipstream.weights import source


class Layer(NamedTuple):
    weight: jnp.ndarray
    bias: jnp.ndarray


def test_leaves_are_named_by_their_path():
    tree = {"a": [{"w": jnp.ones((2, 3))}, {"w": jnp.zeros(4)}], "b": Layer(jnp.ones(1), jnp.ones(2))}
    assert set(source.named_tensors(tree)) == {"a.0.w", "a.1.w", "b.weight", "b.bias"}


def test_a_flat_mapping_keeps_its_dotted_names():
    assert set(source.named_tensors({"model.norm.weight": np.ones(3), "lm_head.weight": jnp.ones(2)})) == {
        "model.norm.weight",
        "lm_head.weight",
    }


def test_describe_and_read():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensors = source.named_tensors({"w": jnp.asarray(array)})
    described = source.describe(tensors)["w"]
    assert (described.shape, described.dtype, described.shards) == ((3, 4), "float32", ((0, ((0, 3), (0, 4))),))
    np.testing.assert_array_equal(source.read(tensors["w"], ((1, 3), (0, 2))), array[1:3, 0:2])
    assert source.describe({"h": jnp.ones(2, jnp.bfloat16)})["h"].dtype == "bfloat16"


@pytest.mark.parametrize("tree", [{}, {"a": {}}, {"a": "text"}, {"a": {"b": 1.0}}])
def test_what_is_no_tree_of_arrays_is_refused(tree):
    with pytest.raises(MappingError):
        source.named_tensors(tree)


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(MappingError, match=r"a\.0"):
        source.named_tensors({"a": [np.ones(1)], "a.0": np.ones(1), "nested": {"x": np.ones(1)}})
