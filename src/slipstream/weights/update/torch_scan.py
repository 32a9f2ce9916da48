"""Checksums of an update's pieces, and a count of their values that are not finite, for torch tensors; see `device_scan.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from slipstream.weights.checksum import PieceScan, ScanOptions
from slipstream.weights.device_checksum import SLAB, torch_scans
from slipstream.weights.transports.device import DevicePiece
from slipstream.weights.update.device_scan import PieceKey


class TorchScanner:
    """`dtype` is the engine's. Checksums are of values in it if the sender `casts`, otherwise of the trainer's bytes."""

    def __init__(self, options: ScanOptions, dtype: str, casts: bool) -> None:
        self._options, self._dtype, self._casts = options, getattr(torch, dtype), casts

    def scan(self, pieces: Mapping[PieceKey, DevicePiece]) -> dict[PieceKey, PieceScan]:
        """Wait for the scan."""
        by_device: dict[torch.device, list[PieceKey]] = defaultdict(list)
        for key, piece in pieces.items():
            by_device[piece.array.device].append(key)
        found: dict[PieceKey, PieceScan] = {}
        with torch.no_grad():
            for keys in by_device.values():
                found |= zip(keys, self._scan([pieces[key].slice(pieces[key].array) for key in keys]))
        return found

    def _scan(self, values: list[torch.Tensor]) -> list[PieceScan]:
        cast = [i for i, value in enumerate(values) if value.dtype != self._dtype]
        if self._casts:
            values = [value.to(self._dtype) for value in values]
        sums, counts = torch_scans(values, self._options.finite)
        if self._options.finite and not self._casts:
            for i in cast:  # values may overflow in the engine's dtype
                counts[i] = sum(
                    int((~part.to(self._dtype).isfinite()).sum()) for part in values[i].reshape(-1).split(SLAB)
                )
        return [PieceScan(checksum, count) for checksum, count in zip(sums, counts)]
