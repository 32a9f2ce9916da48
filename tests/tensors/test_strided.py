"""`Strided` compared with the strides that numpy computes."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from slipstream.tensors.strided import NotAView, Strided, strided_view
from slipstream.weights.sources.transforms import Merge, Permute, Rotary, Scale, Split, View, expand


def assert_same(found: Strided, array: np.ndarray, base: np.ndarray) -> None:
    assert found.shape == array.shape
    if array.size:
        flat = base.reshape(-1)
        again = np.lib.stride_tricks.as_strided(
            flat[found.offset :], found.shape, [s * base.itemsize for s in found.strides]
        )
        np.testing.assert_array_equal(again, array)
        assert found.extent <= base.size


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[str, object]]]:
    """A shape and a few operations on an array of it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    array, steps = np.zeros(shape), []
    for kind in draw(st.lists(st.sampled_from(["cut", "transpose", "merge", "split"]), max_size=5)):
        if kind == "cut":
            index = []
            for size in array.shape:
                start = draw(st.integers(0, size - 1))
                index.append(slice(start, draw(st.integers(start + 1, size)), draw(st.integers(1, 2))))
            steps.append((kind, tuple(index)))
            array = array[tuple(index)]
        elif kind == "transpose":
            axes = tuple(draw(st.permutations(range(array.ndim))))
            steps.append((kind, axes))
            array = array.transpose(axes)
        else:
            size = math.prod(array.shape)
            divisor = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
            new = (divisor, size // divisor) if kind == "split" else (size,)
            steps.append(("reshape", new))
            array = array.reshape(new)
    return shape, steps


@given(chains())
def test_chains_of_views_match_numpy_and_copies_are_refused(case) -> None:
    shape, steps = case
    base = np.arange(math.prod(shape)).reshape(shape)
    array, found = base, Strided.row_major(shape)
    for kind, argument in steps:
        if kind == "cut":
            array, found = array[argument], found[argument]
        elif kind == "transpose":
            array, found = array.transpose(argument), found.transpose(argument)
        else:
            before, array = array, array.reshape(argument)
            try:
                found = found.reshape(argument)
            except NotAView:
                assert not np.shares_memory(before, array) or array.size == 1
                return
            assert np.shares_memory(before, array)
    assert_same(found, array, base)


def test_transforms_are_views_or_reported_as_copies() -> None:
    shape = (6, 4, 8)  # [D, H, K]
    (held,) = expand((Permute((1, 2, 0)), Merge(0)), shape, tuple((0, n) for n in shape))
    found = strided_view(held.view, shape)
    base = np.arange(math.prod(shape)).reshape(shape)
    assert found is not None
    assert_same(found, held.view(base), base)
    (split,) = expand((Split(0, (2, 3)),), (6, 5), ((0, 6), (0, 5)))
    assert strided_view(split.view, (6, 5)) == Strided((2, 3, 5), (15, 5, 1))
    (turned,) = expand((Rotary(0, 4),), (8, 2), ((0, 8), (0, 2)))
    assert strided_view(turned.view, (8, 2)) is None
    (scaled,) = expand((Scale(2.0),), (3,), ((0, 3),))
    assert strided_view(scaled.view, (3,)) is None
    assert strided_view(View(), (3, 2)) == Strided((3, 2), (2, 1))


def test_a_reshape_to_another_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot reshape"):
        Strided.row_major((2, 3)).reshape((4,))
