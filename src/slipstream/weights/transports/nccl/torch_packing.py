"""Turns pieces of torch tensors into messages, as `packing.py` does for JAX arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import MappingError
from slipstream.weights.plan import Move, Plan
from slipstream.weights.transports.device import DevicePiece, wait_for
from slipstream.weights.transports.nccl.wire_format import Bucket


@dataclass(slots=True)
class TorchInput:
    """A piece during an update."""

    values: torch.Tensor
    is_sent_in_place: bool


class TorchPacker:
    """See `Packer`. The bridge has waited until the tensors are computed."""

    def __init__(self, plan: Plan, moves: Mapping[int, Move], device: torch.device) -> None:
        self._plan, self._moves, self._device, self._dtype = plan, moves, device, getattr(torch, plan.dtype)

    @property
    def ordinal(self) -> int:
        return self._device.index or 0

    def upload(self, data: bytes) -> tuple[int, Any]:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        wait_for(tensor)
        return tensor.data_ptr(), tensor

    def inputs(self, pieces: Mapping[int, DevicePiece]) -> dict[int, TorchInput]:
        return {index: self._input(index, piece) for index, piece in pieces.items()}

    def _input(self, index: int, piece: DevicePiece) -> TorchInput:
        values, move = piece.slice(piece.array.detach()), self._moves[index]
        if (num_bytes := values.numel() * self._dtype.itemsize) != self._plan.size_of(move):
            raise MappingError(
                f"the piece of {move.tensor} for {move.parameter} has {num_bytes} bytes as {self._plan.dtype}, the plan says "
                f"{self._plan.size_of(move)}"
            )
        return TorchInput(
            values, values.is_contiguous() and values.dtype == self._dtype and values.device == self._device
        )

    def wait(self, inputs: Mapping[int, TorchInput]) -> None:
        """They are computed."""

    def prepare(self, buckets: Iterable[Bucket], inputs: Mapping[int, TorchInput]) -> None:
        """There is nothing to compile."""

    def pack(
        self, bucket: Bucket, inputs: Mapping[int, TorchInput]
    ) -> tuple[list[tuple[int, int]], list[torch.Tensor]]:
        alone = [self._flat(inputs[index]) for index in bucket.alone]
        together = [self._flat(inputs[index]) for index in bucket.together]
        held = alone + ([torch.cat(together)] if together else [])
        for tensor in held[-1:]:
            wait_for(tensor)  # and so for all that was started before
        return [(tensor.data_ptr(), tensor.nbytes) for tensor in held], held

    def _flat(self, source: TorchInput) -> torch.Tensor:
        if source.is_sent_in_place:
            return source.values.view(-1)
        return source.values.to(self._device, self._dtype).contiguous().view(-1)
