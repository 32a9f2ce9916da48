"""Deltas found on a GPU: the same bits as on the host; the time of 2.47 GB is printed."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from slipstream.tensors.boxes import full_box
from slipstream.weights import delta
from slipstream.weights.delta import Encoding
from slipstream.weights.transports.device import DevicePiece
from slipstream.weights.update.device_delta import DeviceDeltas

LAYERS, HIDDEN, VOCABULARY = 16, 2048, 128_256


def pieces_of(tensors: dict[str, jax.Array]) -> dict[Any, DevicePiece]:
    return {("bfloat16", n, full_box(t.shape)): DevicePiece(t, lambda array: array, None) for n, t in tensors.items()}


@jax.jit
def moved(tensors: dict[str, jax.Array], key: jax.Array) -> dict[str, jax.Array]:
    return {
        n: t + 6e-7 * jax.random.normal(jax.random.fold_in(key, i), t.shape) for i, (n, t) in enumerate(tensors.items())
    }


def test_a_gpu_finds_what_changed() -> None:
    shapes = {"embedding": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"{layer}.up": (4 * HIDDEN, 3 * HIDDEN), f"{layer}.attention": (HIDDEN, 5 * HIDDEN // 2)}
    keys = iter(jax.random.split(jax.random.key(0), 2 * len(shapes)))
    # In the order in which `jit` returns dicts: a set of pieces in another order would be a new one.
    tensors = {n: 0.02 * jax.random.normal(next(keys), shapes[n]) for n in sorted(shapes)}
    found, seconds, programs = DeviceDeltas(), [], []
    found.find(pieces_of(tensors), 1)
    for update in range(2, 7):
        old, tensors = tensors, jax.block_until_ready(moved(tensors, next(keys)))
        start = time.perf_counter()
        deltas = found.find(pieces_of(tensors), update)
        seconds.append(time.perf_counter() - start)
    (kept,) = found._kept.values()
    arrays = [[tensors[key[1]] for key in group.keys] for group in kept.groups]
    for _ in range(6):
        start = time.perf_counter()
        kept.bases, result = kept.program(arrays, kept.bases)
        jax.block_until_ready(result)
        programs.append(time.perf_counter() - start)
    size = 2 * sum(t.size for t in tensors.values())
    payload = sum(len(d.delta) for d in deltas.values())
    print(
        f"\n  {size / 1e9:.2f} GB in bf16: find and encode on the device {1e3 * statistics.median(programs):.2f} ms, with "
        f"fetch and compression {1e3 * statistics.median(seconds):.1f} ms; the delta is {payload / size:.2%} of it"
    )
    for name in ("0.up", "norm"):
        before = np.asarray(old[name].astype(jnp.bfloat16))
        after = np.asarray(tensors[name].astype(jnp.bfloat16))
        piece, target = deltas["bfloat16", name, full_box(after.shape)], np.empty(after.shape, ml_dtypes.bfloat16)
        assert delta.apply(piece.delta, before, target, Encoding.DEVICE_DELTA) == piece.scan.checksum
        assert np.array_equal(target.view(np.uint16), after.view(np.uint16))
