"""Model FLOPs utilization (MFU; Chowdhery et al. 2022, arXiv:2204.02311): the arithmetic that an update needs, over what the
devices could do in the time that it took.

    FLOPs = 3 · Σ_sequences (2 · P · tokens + 4 · heads · head_dim · Σ_layers pairs)

P counts the parameters that a token is multiplied with: of the experts those that it is sent to, the head, not the lookup of
embeddings. Pairs are those of a token with one that it attends to. The factor 3 is for the forward pass, and a backward pass of
twice as much. Padding, and what is computed twice to save memory, do not count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax

from slipstream.deploy.advice.step_cost import ModelShape
from slipstream.model.config import ModelConfig
from slipstream.rl.algorithm.batch import Batch
from slipstream.rl.algorithm.packing import learned_lengths

PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
"""Dense bfloat16 FLOP/s by the start of `jax.Device.device_kind`, as their makers state them. Also the yardstick of updates in
float32."""


def mfu(model: ModelConfig, batch: Batch, passes: int, seconds: float, num_devices: int = 1) -> float | None:
    """Utilization by `passes` updates over the rows of an unpacked batch; None if the devices' peak is not known."""
    peak = peak_flops(jax.local_devices()[0].device_kind)
    if peak is None:
        return None
    return passes * training_flops(model, learned_lengths(batch)) / (seconds * peak * num_devices)


def training_flops(model: ModelConfig, lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward pass over sequences of these lengths."""
    windows = Counter(model.attention(layer).window for layer in range(model.num_layers))
    pairs = sum(layers * _pairs(length, window) for window, layers in windows.items() for length in lengths)
    products = 2 * ModelShape.of(model).active * sum(lengths)
    return 3.0 * (products + 4 * model.num_heads * model.head_dim * pairs)


def peak_flops(device_kind: str) -> float | None:
    """Peak of one device in FLOP/s; None if it is not known."""
    names = [name for name in PEAK_FLOPS if device_kind.startswith(name)]
    return PEAK_FLOPS[max(names, key=len)] if names else None


def _pairs(length: int, window: int | None) -> int:
    """Pairs of a token and one that it attends to, itself included."""
    reach = length if window is None else min(length, window)
    return length * reach - reach * (reach - 1) // 2
