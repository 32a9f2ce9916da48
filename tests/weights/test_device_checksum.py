"""The checksum that JAX and torch compute on a device, against a naive reference."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.tensors.strided import Strided
from slipstream.weights import device_checksum
from slipstream.weights.checksum import PieceScan, ScanOptions
from slipstream.weights.device_checksum import ROW, jax_checksum, torch_checksums
from slipstream.weights.rank_image import numpy_dtype
from slipstream.weights.sources.transforms import View
from slipstream.weights.transports.device import DevicePiece, DeviceSlice
from slipstream.weights.update.device_scan import DeviceScanner
from slipstream.weights.update.torch_scan import TorchScanner
from tests.weights.naive_checksum import naive_checksum


def as_torch(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, array.dtype.name))


def bits(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Random bit patterns, also of values that are not finite."""
    kind = numpy_dtype(dtype)
    data = np.random.default_rng(seed).integers(0, 256, [*shape, kind.itemsize], np.uint8)
    return data.view(kind).reshape(shape)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 5, 7), (ROW,), (2, ROW + 1), (300, 500)])
def test_all_compute_the_same(shape: tuple[int, ...], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    array = bits(shape, dtype)
    expected = naive_checksum(array)
    assert int(jax.jit(jax_checksum)(jnp.asarray(array))) == expected
    for slab in (device_checksum.SLAB, 3 * ROW):
        monkeypatch.setattr(device_checksum, "SLAB", slab)
        assert torch_checksums([as_torch(array)]) == [expected]


def test_strides_do_not_matter_and_tensors_do_not_mix() -> None:
    array = bits((400, 700), "bfloat16")
    views = [array.T, array[3:200, 5:], array[:, :1], array]
    assert torch_checksums(
        [as_torch(array).T, as_torch(array)[3:200, 5:], as_torch(array)[:, :1], as_torch(array)]
    ) == [naive_checksum(view) for view in views]
    assert torch_checksums([]) == []


def test_a_float64_is_two_elements() -> None:
    array = bits((7, 9), "float64")
    assert torch_checksums([as_torch(array)]) == [naive_checksum(array)]


@given(st.integers(0, 999), st.integers(0, 15), st.integers(1, 999))
def test_a_flipped_bit_and_swapped_values_change_it(at: int, bit: int, distance: int) -> None:
    array = bits((1000,), "bfloat16")
    expected = naive_checksum(array)
    flipped, swapped = array.copy(), array.copy()
    flipped.view(np.uint16)[at] ^= 1 << bit
    assert naive_checksum(flipped) != expected
    other = (at + distance) % 1000
    swapped[[at, other]] = array[[other, at]]
    assert naive_checksum(swapped) != expected or array.view(np.uint16)[at] == array.view(np.uint16)[other]


@pytest.mark.parametrize("casts", [False, True])
def test_torch_tensors_are_scanned_as_jax_arrays_are(casts: bool) -> None:
    values = np.arange(72, dtype=np.float32).reshape(3, 4, 6)
    values[1, 1, 2], values[2, 3, 3] = np.inf, np.finfo(np.float32).max
    cuts = [DeviceSlice(View(), index) for index in ((), (slice(0, 1),), (slice(0, 3), slice(0, 4), slice(2, 4)))]
    expected = DeviceScanner(ScanOptions(), "bfloat16", casts).scan(
        {(0, n): DevicePiece(jnp.asarray(values), cut, None) for n, cut in enumerate(cuts)}
    )
    tensor = torch.from_numpy(values).requires_grad_()
    pieces = {(0, n): DevicePiece(tensor, cut, None) for n, cut in enumerate(cuts)}
    assert TorchScanner(ScanOptions(), "bfloat16", casts).scan(pieces) == expected
    assert [scan.num_nonfinite for scan in expected.values()] == [2, 0, 2]
    unchecked = TorchScanner(ScanOptions(finite=False), "bfloat16", casts).scan(pieces)
    assert unchecked == {key: PieceScan(scan.checksum) for key, scan in expected.items()}


@pytest.mark.parametrize("casts", [False, True])
def test_pieces_are_scanned_on_their_own_devices(casts: bool) -> None:
    """In the dtype in which the engine sees them. Values that overflow in it are not finite."""
    values = np.arange(72, dtype=np.float32).reshape(3, 4, 6)
    values[1, 1, 2], values[2, 3, 3] = np.inf, np.finfo(np.float32).max
    rounded = values.astype(numpy_dtype("bfloat16")) if casts else values
    whole = Strided.row_major(values.shape)
    layers = [DeviceSlice(View(), (slice(i, i + 1),)) for i in range(3)]
    pieces, expected = {}, {}
    for rank, device in enumerate(jax.devices()[:2]):
        array = jax.device_put(values, device)
        for index, cut in enumerate(layers):
            pieces[rank, index] = DevicePiece(array, cut, whole[cut.index].transpose((0, 2, 1)))
            expected[rank, index] = PieceScan(naive_checksum(rounded[cut.index].transpose(0, 2, 1)), [0, 1, 1][index])
        pieces[rank, 3] = DevicePiece(array, DeviceSlice(View(), ()), whole)
        pieces[rank, 4] = DevicePiece(array, layers[2], None)
        expected[rank, 3] = PieceScan(naive_checksum(rounded), 2)
        expected[rank, 4] = PieceScan(naive_checksum(rounded[2:]), 1)
    scanner = DeviceScanner(ScanOptions(), "bfloat16", casts)
    fewer = list(pieces)[1:]
    for keys in (pieces, pieces, fewer, pieces, fewer, fewer, fewer):
        assert scanner.scan({key: pieces[key] for key in keys}) == {key: expected[key] for key in keys}
    assert len(scanner._programs) == 3, "the layers share one"
    arrays = [weakref.ref(piece.array) for piece in pieces.values()]
    unchecked = DeviceScanner(ScanOptions(checksums=False, finite=False), "bfloat16", casts).scan(pieces)
    assert set(unchecked.values()) == {PieceScan()}
    del array
    pieces.clear()
    gc.collect()
    assert not any(ref() for ref in arrays), "programs keep no array"
