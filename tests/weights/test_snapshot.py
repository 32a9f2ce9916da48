"""What a trainer keeps of its last sync."""

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.weights.update.snapshot import keep


def test_jax_arrays_are_kept_as_they_are_until_they_are_donated():
    tensors = {"a": jnp.ones(3), "b": jnp.zeros(3)}
    kept = keep("reference", 4, tensors, None, partial=False)
    assert kept.version == 4 and kept.tensors["a"] is tensors["a"] and not kept.are_donated
    jax.jit(lambda x: x + 1, donate_argnums=0)(tensors["b"])
    assert kept.are_donated
    assert keep("none", 4, tensors, None, partial=False) is None


def test_arrays_that_may_be_overwritten_are_kept_as_copies_only():
    tensors = {"a": np.ones(3), "b": jnp.zeros(3)}
    assert keep("reference", 1, tensors, None, partial=False) is None
    kept = keep("copy", 1, tensors, None, partial=False)
    tensors["a"] *= 2
    assert kept.tensors["a"].tolist() == [1, 1, 1] and kept.tensors["b"].tolist() == [0, 0, 0]


def test_a_part_of_the_tree_replaces_that_part():
    part = {"a": jnp.ones(3)}
    assert keep("reference", 1, part, None, partial=True) is None
    whole = keep("reference", 1, {"a": jnp.zeros(3), "b": jnp.zeros(3)}, None, partial=False)
    kept = keep("reference", 2, part, whole, partial=True)
    assert kept.version == 2 and kept.tensors == {"a": part["a"], "b": whole.tensors["b"]}
