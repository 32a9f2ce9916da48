"""The contract of transports between accelerators (`cuda`, `nccl`, `device`): pieces of device arrays that never pass
through the host.

Unlike `contract.py`, the sender has no memory to write into. The halves work as follows:

    trainer   DeviceSender.prepare(version, pieces)   lets the rank compute checksums while the trainer does
              DeviceSender.send(version, pieces)      announces where the pieces are, or sends them
    engine    DeviceReceiver.wait(version, indices)   waits until they are readable: mapped, or in the rank's staging image,
                                                      and their checksums are compared
              DeviceReceiver.source(index)            returns a piece
              DeviceReceiver.done(version, copied)    all pieces are copied, or will be when `copied` returns
    trainer   DeviceSender.released()                 the arrays may be donated and freed again

vLLM's ranks write a piece into the live parameter when the version is committed. The embedded engine copies it when it
arrives, and commits the copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from slipstream.errors import MappingError
from slipstream.tensors.boxes import intersect, shift, slices
from slipstream.tensors.strided import Strided
from slipstream.types import Box
from slipstream.weights.sources.named_tensors import Tensor, is_jax_array, shard_boxes
from slipstream.weights.sources.torch_shards import TorchShards, is_torch, local_tensor
from slipstream.weights.sources.transforms import View
from slipstream.weights.sources.tree_mapping import MappedTensor, Origin

DEVICE_TRANSPORTS = ("cuda", "nccl")
LOCAL = "device"
"""The transport between devices in one process (`device_copy.py`)."""

ArrayFinder: TypeAlias = Callable[[Any], Any]
"""Returns, for the current value of a tensor, the single-device array that holds a given box."""


@dataclass(frozen=True)
class DeviceSlice:
    """Cuts a box out of a single-device array: a JAX array (traced or not), a torch tensor or a `Strided`."""

    view: View
    index: tuple[slice, ...]

    def __call__(self, array: Any) -> Any:
        return self.view(array)[self.index]


@dataclass(slots=True)
class DevicePiece:
    """A box of a device array to transfer. The piece keeps the array's memory alive."""

    array: Any
    """A JAX array or torch tensor on one device."""
    slice: Callable[[Any], Any]
    """Returns the piece, given the array; traceable. Usually a `DeviceSlice`."""
    strides: Strided | None
    """The piece as a view of the array; None if it must be computed first."""
    checksum: int | None = None
    """See `device_checksum`: of the piece as the rank will see it. None if it is not to be compared."""


class DeviceSender:
    """The half in a trainer rank."""

    @property
    def note(self) -> str:
        """A remark for the sync report about the path of the bytes."""
        return ""

    def prepare(self, version: int, pieces: Mapping[int, DevicePiece]) -> None:
        """Called before `send` if checksums are compared, and before the trainer has computed them."""

    def send(self, version: int, pieces: Mapping[int, DevicePiece]) -> None:
        """Called in every update, even without pieces for this rank."""
        raise NotImplementedError

    def can_broadcast(self, replicas: Sequence[Any]) -> bool:
        """Whether `broadcast` works with these senders, which are of the same class."""
        return False

    def broadcast(self, version: int, pieces: Mapping[int, DevicePiece], replicas: Sequence[Any]) -> None:
        """`send`, to this rank and to those of `replicas`, which have the same moves."""
        raise NotImplementedError

    async def confirmed(self) -> None:
        """Return once the rank can read all announced pieces. Raise `TransferError` if it cannot."""

    async def released(self) -> float:
        """After the commit: return once the rank no longer reads the pieces, with the seconds that copying took."""
        return 0.0

    def close(self) -> None: ...


class DeviceReceiver(Protocol):
    """The half in an engine rank. Used by one thread at a time."""

    @property
    def seconds(self) -> float:
        """Transfer time of the last version; 0 if the bytes stay at the trainer until they are copied."""

    @property
    def links(self) -> Mapping[int, bytes]:
        """Links by trainer rank."""

    def start(self) -> None:
        """Accept connections from trainer ranks."""

    def expect(self, version: int) -> None:
        """Begin an update."""

    def wait(self, version: int, indices: Collection[int], patience: float = math.inf) -> int | None:
        """Wait until all these pieces are readable and return their bytes; None after `patience` seconds. Raise
        `TransferError` after the transport's deadline, whatever the patience, or `ChecksumMismatch`."""

    def source(self, index: int) -> Any:
        """Return a piece after `wait`, as a torch tensor or JAX array on the rank's device."""

    def done(self, version: int, copied: Callable[[], float]) -> float:
        """End the version. `copied` waits for the copies and returns their seconds; after it the pieces are no longer
        read. Return these seconds, or 0 if a thread calls `copied` later."""

    def abandon(self) -> None:
        """Cancel the update and stop its transfers. A later update begins with new links."""

    def close(self) -> None: ...


def on_accelerator(tensors: Mapping[str, Tensor]) -> bool:
    """Whether all tensors are on NVIDIA devices that this process can address."""
    return all(_platform(tensor) == "gpu" for tensor in tensors.values())


def _platform(tensor: Any) -> str:
    if isinstance(tensor, MappedTensor):
        platforms = {_platform(leaf) for leaf in tensor.leaves}
        return platforms.pop() if len(platforms) == 1 else "mixed"
    if not is_jax_array(tensor):
        return "gpu" if getattr(local_tensor(tensor), "is_cuda", False) else "host"
    return str(next(iter(tensor.sharding.device_set)).platform)


def are_jax_arrays(tensors: Mapping[str, Tensor]) -> bool:
    leaves = (tensor.leaves if isinstance(tensor, MappedTensor) else (tensor,) for tensor in tensors.values())
    return all(is_jax_array(leaf) for of_tensor in leaves for leaf in of_tensor)


def gpu_ordinals(tensors: Mapping[str, Tensor]) -> set[int]:
    """Return the GPUs of this process that hold tensors which are `on_accelerator`."""
    return {ordinal for tensor in tensors.values() for ordinal in _ordinals(tensor)}


def _ordinals(tensor: Any) -> set[int]:
    if isinstance(tensor, MappedTensor):
        return {ordinal for leaf in tensor.leaves for ordinal in _ordinals(leaf)}
    if not is_jax_array(tensor):
        local = tensor.local if isinstance(tensor, TorchShards) else tensor
        return {local.get_device()}
    return {device.local_hardware_id for device in tensor.sharding.addressable_devices}


def are_ready(tensors: Iterable[Any]) -> bool:
    """Whether all tensors are computed. Host arrays are, and torch tensors, for which the bridge has waited. Deleted arrays are
    not, and waiting for one raises."""
    for tensor in tensors:
        if is_jax_array(tensor):
            if tensor.is_deleted() or not tensor.is_ready():  # `is_ready` of a deleted array crashes the process
                return False
        elif isinstance(tensor, MappedTensor) and not are_ready(tensor.leaves):
            return False
    return True


def is_row_major(array: Any) -> bool:
    """Whether a JAX array has the default layout; compiled programs can be given others."""
    layout = getattr(getattr(array, "format", None), "layout", None)
    order = getattr(layout, "major_to_minor", None)
    return order is None or tuple(order) == tuple(range(array.ndim))


def pointer_of(array: Any) -> int:
    return int(array.data_ptr() if is_torch(array) else array.unsafe_buffer_pointer())


def wait_for(array: Any) -> None:
    """Wait until an array is computed that this process has just started to compute."""
    if not is_torch(array):
        array.block_until_ready()
    elif array.is_cuda:
        import torch

        torch.cuda.current_stream(array.device).synchronize()


def locate(tensor: Tensor, box: Box) -> tuple[ArrayFinder, DeviceSlice]:
    """Return how to get a box of a tensor, now and from later values with the same sharding. Raise `MappingError`
    unless one addressable shard contains the box."""
    if isinstance(tensor, MappedTensor):
        for number, origin in enumerate(tensor.origins):
            if intersect(origin.mapped.box, box) == box:
                index = slices(shift(box, origin.mapped.box))
                return _origin_finder(origin, number), DeviceSlice(origin.mapped.view, index)
    elif is_jax_array(tensor):
        for shard in shard_boxes(tensor):
            if intersect(shard, box) == box:
                return _shard_finder(tensor, shard), DeviceSlice(View(), slices(shift(box, shard)))
    elif isinstance(tensor, TorchShards):
        if intersect(tensor.box, box) == box:
            return (lambda tensor: _row_major(tensor.local)), DeviceSlice(View(), slices(shift(box, tensor.box)))
    elif is_torch(tensor):
        return _row_major, DeviceSlice(View(), slices(box))
    raise MappingError(
        f"no device of this process holds the complete box {box} of a tensor of shape {list(tensor.shape)}"
    )


def _origin_finder(origin: Origin, number: int) -> ArrayFinder:
    find = _shard_finder(origin.leaf, origin.shard)
    return lambda tensor: find(tensor.origins[number].leaf)


def _row_major(tensor: Any) -> Any:
    """Return a torch tensor itself, or a copy if it is a view with other strides."""
    row_major = tensor.contiguous()
    if row_major is not tensor:
        wait_for(row_major)
    return row_major


def _shard_finder(array: Any, box: Box) -> ArrayFinder:
    if is_torch(array):
        return _row_major
    if len(array.sharding.device_set) == 1:
        return lambda array: array
    number = shard_boxes(array).index(box)
    return lambda array: array.addressable_shards[number].data
