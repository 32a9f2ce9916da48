"""The copies that bring one version into a rank's live parameters, grouped by the fastest way to run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from slipstream.engines.vllm.undoable_reload import Weights
from slipstream.tensors.boxes import slices
from slipstream.types import Box
from slipstream.weights.transports.cuda.driver import CudaDriver

LARGE_BYTES = 16 << 20
"""Tensors of at least this size are copied one by one, by the driver. The multi-tensor kernel is launched once per 40 MB,
which costs more host time, and a commit is reported only when everything is launched."""


@dataclass
class StagedCopies:
    version: int
    indices: set[int] = field(default_factory=set)
    """Indices of the pieces in the plan."""
    memcpys: list[tuple[int, int, int]] = field(default_factory=list)
    """`(target address, source address, bytes)`: large contiguous pieces."""
    batches: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = field(
        default_factory=dict
    )
    """Targets and sources of other contiguous pieces, by their dtypes: a few kernels copy them all."""
    strided: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Target and source of pieces with any strides, copied one by one."""
    reloaded: dict[str, list[tuple[Box, torch.Tensor]]] = field(default_factory=dict)
    """The boxes of whole tensors that go through vLLM's loader, by tensor name."""

    def copy(self) -> StagedCopies:
        batches = {dtypes: (list(targets), list(sources)) for dtypes, (targets, sources) in self.batches.items()}
        reloaded = {name: list(boxes) for name, boxes in self.reloaded.items()}
        return StagedCopies(self.version, set(self.indices), list(self.memcpys), batches, list(self.strided), reloaded)

    def add(self, target: torch.Tensor, source: torch.Tensor, is_contiguous: bool, has_driver: bool) -> None:
        """`is_contiguous` is the target's; `has_driver` tells whether a driver can copy from the source."""
        if not (is_contiguous and source.shape == target.shape and source.is_contiguous()):
            self.strided.append((target, source))
        elif has_driver and source.dtype == target.dtype and target.nbytes >= LARGE_BYTES:
            self.memcpys.append((target.data_ptr(), source.data_ptr(), target.nbytes))
        else:
            targets, sources = self.batches.setdefault((target.dtype, source.dtype), ([], []))
            targets.append(target)
            sources.append(source)

    def run(self, driver: CudaDriver | None, device: torch.device, reload: Callable[[Weights], None]) -> None:
        """Launch all copies on the current stream. vLLM's loader comes first: it may fail, and then nothing is written."""
        if self.reloaded:
            reload((name, _assemble(boxes)) for name, boxes in self.reloaded.items())
        if self.memcpys:
            assert driver is not None
            stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
            driver.copy_async(self.memcpys, stream)
        for targets, sources in self.batches.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for target, source in self.strided:
            target.copy_(source, non_blocking=True)


def _assemble(boxes: Sequence[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    """Build a whole tensor from its boxes."""
    if len(boxes) == 1:
        return boxes[0][1].clone()
    shape = tuple(max(box[dim][1] for box, _ in boxes) for dim in range(len(boxes[0][0])))
    whole = torch.empty(shape, dtype=boxes[0][1].dtype, device=boxes[0][1].device)
    for box, piece in boxes:
        whole[slices(box)] = piece
    return whole
