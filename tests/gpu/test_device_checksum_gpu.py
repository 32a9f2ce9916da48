"""The checksum of weights, computed on a GPU by JAX and by torch."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.tensors.strided import Strided
from slipstream.weights.checksum import PieceScan, ScanOptions
from slipstream.weights.device_checksum import ROW, jax_checksum, torch_checksums, torch_scans
from slipstream.weights.sources.transforms import View
from slipstream.weights.transports.device import DevicePiece, DeviceSlice
from slipstream.weights.update.device_scan import DeviceScanner
from tests.weights.naive_checksum import naive_checksum
from tests.weights.test_device_checksum import as_torch, bits

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here"),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(), (7,), (2, ROW + 1), (3000, 5001)])
def test_both_frameworks_compute_the_reference(shape: tuple[int, ...], dtype: str) -> None:
    array = bits(shape, dtype)
    expected = naive_checksum(array)
    assert int(jax.jit(jax_checksum)(jnp.asarray(array))) == expected
    tensor = as_torch(array).cuda()
    num_nonfinite = int((~np.isfinite(array.astype(np.float32))).sum())
    assert torch_checksums([tensor]) == [expected] and torch_scans([tensor]) == ([expected], [num_nonfinite])
    if len(shape) == 2:
        views = [array.T, array[5:, 3:]]
        counts = [int((~np.isfinite(view.astype(np.float32))).sum()) for view in views]
        assert torch_scans([tensor.T, tensor[5:, 3:]]) == ([naive_checksum(view) for view in views], counts)


def test_a_scan_and_what_it_costs() -> None:
    """About the tensors of a model with a billion parameters."""
    shapes = [(2048, 2048), (2048, 8192)] * 48
    arrays = [jax.random.normal(jax.random.key(n), shape, jnp.bfloat16) for n, shape in enumerate(shapes)]
    pieces = {
        (0, n): DevicePiece(array, DeviceSlice(View(), ()), Strided.row_major(array.shape))
        for n, array in enumerate(arrays)
    }
    scanner = DeviceScanner(ScanOptions(), "bfloat16", casts=False)
    jax.block_until_ready(arrays)
    start = time.perf_counter()
    scans = scanner.scan(pieces)
    print(f"\n  first scan, with compilation: {time.perf_counter() - start:.2f} s")
    start = time.perf_counter()
    for _ in range(5):
        assert scanner.scan(pieces) == scans
    size = sum(array.nbytes for array in arrays) / 1e9
    print(f"  JAX: {size:.1f} GB in {(time.perf_counter() - start) / 5 * 1e3:.2f} ms")
    tensors = [torch.from_dlpack(array) for array in arrays]
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = torch_checksums(tensors)
        print(f"  torch: {size:.1f} GB in {(time.perf_counter() - start) * 1e3:.2f} ms")
        start = time.perf_counter()
        assert torch_scans(tensors) == (found, [0] * len(found))
        print(f"  torch, with the check for NaN: {size:.1f} GB in {(time.perf_counter() - start) * 1e3:.2f} ms")
    assert [PieceScan(value, 0) for value in found] == list(scans.values())
    assert found[0] == naive_checksum(np.asarray(arrays[0]))
