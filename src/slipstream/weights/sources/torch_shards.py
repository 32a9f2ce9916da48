"""PyTorch tensors of which a trainer's processes hold parts or replicas: `DTensor`s, as FSDP2 makes them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from slipstream.errors import MappingError
from slipstream.tensors.boxes import full_box, intersect, shape_of, shift, slices, volume
from slipstream.types import Box


class TorchShards:
    """A tensor of which this process holds one box. See `BoxReader`."""

    def __init__(self, local: Any, shape: tuple[int, ...], box: Box, holders: tuple[tuple[int, Box], ...]) -> None:
        self.local, self.shape, self.box, self.holders = local, shape, box, holders

    @cached_property
    def dtype(self) -> np.dtype:
        from slipstream.weights.rank_image import numpy_dtype

        return numpy_dtype(str(self.local.dtype).removeprefix("torch."))

    def __array__(self) -> np.ndarray:
        return self.read_box(full_box(self.shape))

    def boxes(self) -> tuple[Box, ...]:
        return (self.box,) if volume(self.box) else ()

    def read_box(self, box: Box) -> np.ndarray:
        if intersect(self.box, box) != box:
            raise MappingError(
                f"this process holds {self.box} of a tensor of shape {list(self.shape)}, not all of {box}"
            )
        return torch_array(self.local)[slices(shift(box, self.box))]


def is_dtensor_type(kind: type) -> bool:
    return hasattr(kind, "full_tensor") and hasattr(kind, "to_local")


def dtensor_shards(name: str, tensor: Any) -> TorchShards:
    """Return a `DTensor` as the box that this process holds. Nothing is gathered."""
    from torch import distributed

    local, shape = tensor.to_local(), tuple(tensor.shape)
    mesh = tensor.device_mesh.mesh
    boxes = {
        int(mesh[place]): _box(name, shape, tensor.placements, place, tuple(mesh.shape))
        for place in product(*map(range, mesh.shape))
    }
    own = boxes.get(distributed.get_rank(), ((0, 0),) * len(shape))
    if shape_of(own) != tuple(local.shape) and volume(own):
        raise MappingError(
            f"{name}: rank {distributed.get_rank()} holds shape {list(local.shape)}, and the placements "
            f"{tensor.placements} of {list(shape)} say {own}"
        )
    return TorchShards(local, shape, own, tuple(sorted((rank, box) for rank, box in boxes.items() if volume(box))))


def _box(
    name: str, shape: tuple[int, ...], placements: Iterable[Any], place: tuple[int, ...], mesh: tuple[int, ...]
) -> Box:
    """Return the box at a place of the mesh. PyTorch cuts a dimension into chunks of equal size; the last may be smaller."""
    box = list(full_box(shape))
    for placement, position, count in zip(placements, place, mesh, strict=True):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard":
            raise MappingError(
                f"{name} is placed as {placement}; only Shard and Replicate can be sent: redistribute it first"
            )
        start, stop = box[placement.dim]
        chunk = math.ceil((stop - start) / count)
        first = min(start + position * chunk, stop)
        box[placement.dim] = (first, min(first + chunk, stop))
    return tuple(box)


def replicated(tensors: Mapping[str, Any], num_processes: int) -> dict[str, Any]:
    """Say of plain tensors that every process of the trainer holds the same, so that all make the same plan."""

    def whole(tensor: Any) -> TorchShards:
        box = full_box(tuple(tensor.shape))
        return TorchShards(tensor, tuple(tensor.shape), box, tuple((rank, box) for rank in range(num_processes)))

    return {name: t if is_dtensor_type(type(t)) else whole(t) for name, t in tensors.items()}


def wait_until_computed(params: Any) -> None:
    """Wait for the GPUs that hold torch tensors. Engines read their memory, and their streams do not wait for the trainer's."""
    if "torch" in sys.modules and isinstance(params, Mapping):
        import torch

        for device in {t.device for t in _locals(params.values()) if t.is_cuda}:
            torch.cuda.synchronize(device)


def _locals(tensors: Iterable[Any]) -> Iterator[Any]:
    import torch

    for tensor in map(local_tensor, tensors):
        if isinstance(tensor, torch.Tensor):
            yield tensor


def local_tensor(tensor: Any) -> Any:
    """Return what this process holds of a tensor."""
    return tensor.local if isinstance(tensor, TorchShards) else tensor


def is_torch(tensor: Any) -> bool:
    return hasattr(tensor, "data_ptr") and hasattr(tensor, "detach")


def torch_array(tensor: Any) -> np.ndarray:
    """Return a view of a host tensor, a copy of a device tensor. torch converts bfloat16 to numpy only as int16."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16:
        return np.asarray(tensor.numpy())
    import ml_dtypes

    return np.asarray(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
