"""Transforms compared with plain numpy: on full arrays of three libraries, and on arbitrary shards."""

from itertools import pairwise

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import MappingError
from slipstream.tensors.boxes import exact_cover, full_box, slices
from slipstream.weights.sources.transforms import Merge, Permute, Rotary, Scale, Split, Take, Unstack, expand


def interleaved_to_half(array, dim, head_dim):
    """Return the permutation as an index gather, unlike the implementation's reshape."""
    order = [
        h + i for h in range(0, array.shape[dim], head_dim) for i in (*range(0, head_dim, 2), *range(1, head_dim, 2))
    ]
    return np.take(array, order, axis=dim)


CASES = {
    "flip": ((6, 4), (Permute((1, 0)),), lambda a: a.T),
    "heads out": ((6, 3, 4), (Permute((1, 2, 0)), Merge(0)), lambda a: a.reshape(6, 12).T),
    "heads in": ((3, 4, 6), (Merge(0), Permute((1, 0))), lambda a: a.reshape(12, 6).T),
    "merge three": ((2, 3, 4, 5), (Merge(1, 3),), lambda a: a.reshape(2, 60)),
    "split": ((12, 5), (Split(0, (3, 4)),), lambda a: a.reshape(3, 4, 5)),
    "split in three, then turn": ((2, 24), (Split(1, (2, 3, 4)), Permute((3, 0, 1, 2))), lambda a: a.reshape(2, 2, 3, 4).transpose(3, 0, 1, 2)),
    "take": ((10, 4), (Take(0, 3, 8),), lambda a: a[3:8]),
    "take heads of a fused leaf": ((5, 6, 4), (Take(1, 2, 4), Permute((1, 2, 0)), Merge(0)), lambda a: a[:, 2:4].reshape(5, 8).T),
    "rotary": ((12, 5), (Rotary(0, 4),), lambda a: interleaved_to_half(a, 0, 4)),
    "rotary in a stack": ((5, 2, 6), (Rotary(2, 6), Permute((1, 2, 0)), Merge(0)), lambda a: interleaved_to_half(a, 2, 6).reshape(5, 12).T),
    "rotary there and back": ((16, 2), (Rotary(0, 8), Rotary(0, 8, to_half=False)), lambda a: a),
    "rotary back": ((16,), (Rotary(0, 8, to_half=False),), lambda a: np.argsort(interleaved_to_half(np.arange(16), 0, 8)) * 1.0),
    "scale": ((4, 6), (Scale(1.7), Permute((1, 0))), lambda a: (a * np.float32(1.7)).T),
}  # fmt: skip


def leaf(shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("library", [np.asarray, jnp.asarray, torch.from_numpy])
def test_a_full_leaf_in_every_library(case, library):
    shape, steps, naive = CASES[case]
    (made,) = expand(steps, shape, full_box(shape))
    array = made.view(library(leaf(shape)))
    assert made.box == full_box(made.shape) == full_box(tuple(array.shape))
    np.testing.assert_array_equal(np.asarray(array), naive(leaf(shape)))


@st.composite
def cuts(draw, shape):
    """Partition a shape into boxes by cutting each dimension at random places."""
    ranges = []
    for size in shape:
        edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        ranges.append(list(pairwise(edges)))
    boxes = [()]
    for choices in ranges:
        boxes = [(*box, choice) for box in boxes for choice in choices]
    return boxes


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_arbitrary_shards_assemble_to_the_full_tensor(case, data):
    shape, steps, naive = CASES[case]
    expected = naive(leaf(shape))
    found, written = np.full(expected.shape, np.nan, np.float32), []
    for box in data.draw(cuts(shape)):
        for piece in expand(steps, shape, box):
            found[slices(piece.box)] = piece.view(leaf(shape)[slices(box)])
            written.append(piece.box)
    assert exact_cover(written, full_box(expected.shape)) is None
    np.testing.assert_array_equal(found, expected)


def test_a_stack_gives_one_tensor_per_index_of_the_shard():
    stack = leaf((3, 4, 2))
    pieces = expand((Unstack(1, "layer"), Permute((1, 0))), stack.shape, ((0, 3), (1, 3), (0, 2)))
    assert [p.placeholders for p in pieces] == [{"layer": 1}, {"layer": 2}]
    for piece in pieces:
        assert (piece.shape, piece.box) == ((2, 3), ((0, 2), (0, 3)))
        np.testing.assert_array_equal(piece.view(stack[:, 1:3]), stack[:, piece.placeholders["layer"]].T)


def test_views_do_not_copy_where_strides_allow():
    array = leaf((6, 3, 4))
    for steps in (
        (Permute((1, 2, 0)), Merge(0)),
        (Unstack(1, "i"), Permute((1, 0))),
        (Take(1, 1, 2), Permute((1, 2, 0))),
    ):
        for piece in expand(steps, array.shape, full_box(array.shape)):
            assert np.shares_memory(piece.view(array), array)


def test_the_number_of_pieces_is_minimal():
    heads_out = (Permute((1, 2, 0)), Merge(0))
    assert len(expand(heads_out, (6, 4, 8), ((0, 3), (2, 4), (0, 8)))) == 1  # complete heads of some rows of D
    assert len(expand(heads_out, (6, 4, 8), ((0, 6), (0, 4), (0, 4)))) == 4  # half of each head
    assert len(expand((Rotary(0, 8),), (32,), ((8, 24),))) == 1  # complete heads
    assert len(expand((Rotary(0, 8),), (32,), ((7, 24),))) == 2  # plus one element of the head before


@pytest.mark.parametrize(
    "library", [np.asarray, jnp.asarray, lambda a: torch.from_numpy(a.astype(np.float32)).bfloat16()]
)
def test_scale_rounds_once(library):
    array = np.random.default_rng(0).standard_normal(64).astype(ml_dtypes.bfloat16)
    (piece,) = expand((Scale(11.3137),), (64,), full_box((64,)))
    scaled = piece.view(library(array))
    assert "bfloat16" in str(scaled.dtype)
    found = scaled.float().numpy() if hasattr(scaled, "float") else np.asarray(scaled).astype(np.float32)
    np.testing.assert_array_equal(
        found, (array.astype(np.float32) * np.float32(11.3137)).astype(ml_dtypes.bfloat16).astype(np.float32)
    )


@pytest.mark.parametrize(
    "transform, shape",
    [(Permute((1, 0)), (2, 3, 4)), (Merge(1, 2), (2, 3)), (Split(0, (2, 3)), (7,)), (Take(0, 2, 5), (4,)), (Unstack(2, "i"), (2, 3)), (Rotary(0, 4), (6,)), (Rotary(0, 3), (6,))],
)  # fmt: skip
def test_a_shape_that_does_not_fit_is_refused(transform, shape):
    with pytest.raises(MappingError, match=type(transform).__name__):
        expand((transform,), shape, full_box(shape))
