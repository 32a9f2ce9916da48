"""Weights that lie in an accelerator's memory: which array, and which rectangle of it. Nothing is brought to the host.

The planes that carry them (`transports/cuda.py`, `transports/nccl.py`) have no memory on the sender's side to write into,
so the halves are other ones than those of `transports/base.py`:

    trainer   DeviceSender.send(version, pieces)      tells the engine's rank where they are, or sends them
    engine    Receiver.wait(version, indices)         they are within reach: mapped, or in a buffer of the rank's
              Receiver.source(index)                  … and this is one
              Receiver.done(version, copied)          all are copied, or will be when `copied` returns
    trainer   DeviceSender.released()                 the arrays may be donated and freed again

A piece is written into the live parameter when the version is committed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from slipstream.errors import MappingError, TransferError
from slipstream.types import Berths, Box, Parameter
from slipstream.weights.checksum import pack_rows, with_version
from slipstream.weights.layout import intersect, shift, slices
from slipstream.weights.plan import Move, Plan, lacks_tensor
from slipstream.weights.source import Tensor, is_jax_array, shard_boxes
from slipstream.weights.strided import Strided, geometry
from slipstream.weights.transforms import View
from slipstream.weights.transports.base import unpack_link
from slipstream.weights.trees import MappedTensor

PLANES = ("cuda", "nccl")
"""Transports of weights that never leave the accelerators."""

Find: TypeAlias = Callable[[Any], Any]
"""From a tensor, as it is this time, to the array of one device that holds a rectangle of it."""


@dataclass(frozen=True)
class Cut:
    """A rectangle of one device's array: `cut(array)`, for JAX arrays (also traced), torch tensors and `Strided`."""

    view: View
    index: tuple[slice, ...]

    def __call__(self, array: Any) -> Any:
        return self.view(array)[self.index]


@dataclass(slots=True)
class DevicePiece:
    """A rectangle on its way. As long as the piece is kept, so is its memory."""

    array: Any
    """A JAX array on one device."""
    cut: Cut
    strides: Strided | None
    """Where in the array it lies; None when it must be computed first."""


class DeviceSender(Protocol):
    @property
    def note(self) -> str:
        """What a report should say about the way that the bytes take; usually nothing."""
        ...

    def send(self, version: int, pieces: Mapping[int, DevicePiece]) -> None:
        """In every update, also when there are no pieces for this rank."""
        ...

    async def confirmed(self) -> None:
        """Returns once the rank has said that it can read all that it was told of. Raises `TransferError` if it cannot."""
        ...

    async def released(self) -> float:
        """After the commit: returns once the rank reads nothing of it any more. The seconds that its copying took."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The half in an engine's rank. Used by one thread at a time."""

    @property
    def seconds(self) -> float:
        """What it took the last version's bytes to come; 0 where they stay at the trainer until they are copied."""
        ...

    @property
    def links(self) -> Mapping[int, bytes]:
        """By trainer rank."""
        ...

    def start(self) -> None:
        """Trainer ranks may come from now on."""
        ...

    def expect(self, version: int) -> None:
        """An update begins."""
        ...

    def wait(self, version: int, indices: Collection[int], patience: float = math.inf) -> int | None:
        """Returns, once all these pieces are within reach, the number of their bytes; None if they are not so within
        `patience` seconds. Raises `TransferError` in the end, whatever the patience."""
        ...

    def source(self, index: int) -> Any:
        """A piece that has been waited for, as a torch tensor on the rank's device."""
        ...

    def done(self, version: int, copied: Callable[[], float]) -> float:
        """Nothing of this version is read any more once `copied` returns: the seconds that copying took. What is returned
        here, too, unless it is left to a thread to wait; then 0."""
        ...

    def abandon(self) -> None:
        """The update is off. What it may still be doing is stopped; a later one begins with new links."""
        ...

    def close(self) -> None: ...


def on_accelerator(tensors: Mapping[str, Tensor]) -> bool:
    """Whether all of them lie in the memory of NVIDIA devices that this process can address."""
    return all(_platform(tensor) == "gpu" for tensor in tensors.values())


def _platform(tensor: Any) -> str:
    if isinstance(tensor, MappedTensor):
        found = {_platform(leaf) for leaf in tensor.leaves}
        return found.pop() if len(found) == 1 else "mixed"
    if not is_jax_array(tensor):
        return "host"
    return str(next(iter(tensor.sharding.device_set)).platform)


def is_deleted(tensor: Any) -> bool:
    return any(leaf.is_deleted() for leaf in _leaves(tensor))


def are_ready(tensors: Iterable[Any]) -> bool:
    """Whether they are computed; arrays of the host's always are. One that was deleted never is: who waits for it hears so."""
    try:
        for tensor in tensors:
            if is_jax_array(tensor):
                if not tensor.is_ready():
                    return False
            elif isinstance(tensor, MappedTensor) and not are_ready(tensor.leaves):
                return False
    except RuntimeError:
        return False
    return True


def is_row_major(array: Any) -> bool:
    """Compiled programs may lay arrays out otherwise when they are told to."""
    layout = getattr(getattr(array, "format", None), "layout", None)
    order = getattr(layout, "major_to_minor", None)
    return order is None or tuple(order) == tuple(range(array.ndim))


def _leaves(tensor: Any) -> list[Any]:
    return tensor.leaves if isinstance(tensor, MappedTensor) else [tensor]


def locate(tensor: Tensor, box: Box) -> tuple[Find, Cut]:
    """How to come by a rectangle of a tensor, this time and whenever a tensor of the same make comes."""
    if isinstance(tensor, MappedTensor):
        number, origin = next(
            ((n, o) for n, o in enumerate(tensor.origins) if intersect(o.held.box, box) == box), (0, None)
        )
        if origin is not None:
            find = _shard(origin.leaf, origin.shard)
            index = slices(shift(box, origin.held.box))
            return lambda t: find(t.origins[number].leaf), Cut(origin.held.view, index)
    elif is_jax_array(tensor):
        for shard in shard_boxes(tensor):
            if intersect(shard, box) == box:
                return _shard(tensor, shard), Cut(View(), slices(shift(box, shard)))
    raise MappingError(
        f"{box} of a tensor of shape {list(tensor.shape)} is not in one piece on a device of this process"
    )


def _shard(array: Any, box: Box) -> Find:
    """That of the array's shards which is `box`."""
    if len(array.sharding.device_set) == 1:
        return lambda array: array
    number = shard_boxes(array).index(box)
    return lambda array: array.addressable_shards[number].data


class DeviceOutbox:
    """The sending half towards one engine, as `transfer.Outbox` is for planes through the host."""

    def __init__(self, plan: Plan, parameters: Sequence[Parameter], rank: int, engine: str) -> None:
        self._plan, self._rank, self._engine = plan, rank, engine
        self._streams = [plan.stream(rank, r) for r in range(1 + max(p.rank for p in parameters))]
        self._sizes = [{i: plan.size_of(move) for i, move in stream.items()} for stream in self._streams]
        self._senders: dict[bytes, DeviceSender] = {}
        self._known: dict[int, tuple[Find, Cut, Strided | None]] = {}
        """By the identity of a move, of which the plan keeps one object each."""
        self._chosen: tuple[Set[str], list[list[int]], list[bytes], int] | None = None
        """What was sent last time: unchanged tensors, what is left to send by rank, its manifests' rows, and its bytes."""
        self._pinned: list[Mapping[int, DevicePiece]] = []
        """What engines may be reading: neither freed nor donated before they say that they are done."""
        self.berths: Berths | None = None

    async def confirmed(self) -> None:
        for sender in self._senders.values():
            await sender.confirmed()

    async def released(self) -> float:
        return max([await sender.released() for sender in self._senders.values()], default=0.0)

    @property
    def note(self) -> str:
        return ", ".join(sorted({sender.note for sender in self._senders.values()} - {""}))

    def promise(self, unchanged: Set[str], version: int) -> tuple[list[bytes], int]:
        """What `send` will return."""
        _, rows, num_bytes = self._choose(unchanged)
        return [with_version(version, packed) for packed in rows], num_bytes

    def _choose(self, unchanged: Set[str]) -> tuple[list[list[int]], list[bytes], int]:
        if self._chosen is None or self._chosen[0] != unchanged:
            sent = self._plan.changed(unchanged)
            chosen = [[index for index, move in stream.items() if move.parameter in sent] for stream in self._streams]
            num_bytes = sum(sizes[index] for sizes, indices in zip(self._sizes, chosen) for index in indices)
            rows = [pack_rows(dict.fromkeys(indices, 0)) for indices in chosen]
            self._chosen = frozenset(unchanged), chosen, rows, num_bytes
        return self._chosen[1:]

    def send(
        self, tensors: Mapping[str, Tensor], unchanged: Set[str], version: int, is_computed: bool = False
    ) -> tuple[list[bytes], int]:
        """As `Outbox.send`. Returns when every array is computed and the engine's ranks know where, or have them."""
        assert self.berths is not None
        self._pinned = [
            {index: self._piece(tensors, stream[index]) for index in indices}
            for stream, indices in zip(self._streams, self._choose(unchanged)[0])
        ]
        if not is_computed:
            self._wait(tensors)
        for rank, pieces in enumerate(self._pinned):
            if self._streams[rank]:  # also when nothing changed: a rank may be waiting to hear it
                self._sender(rank).send(version, pieces)
        return self.promise(unchanged, version)

    def _wait(self, tensors: Mapping[str, Tensor]) -> None:
        import jax

        try:
            jax.block_until_ready([piece.array for pieces in self._pinned for piece in pieces.values()])
        except RuntimeError:
            if deleted := [name for name, tensor in tensors.items() if is_deleted(tensor)]:
                raise _was_deleted(deleted[0]) from None
            raise

    def _piece(self, tensors: Mapping[str, Tensor], move: Move) -> DevicePiece:
        tensor = tensors.get(move.tensor)
        if tensor is None:
            raise lacks_tensor(move)
        if (known := self._known.get(id(move))) is None:
            if is_deleted(tensor):
                raise _was_deleted(move.tensor)
            find, cut = locate(tensor, move.tensor_box)
            array = find(tensor)
            strides = geometry(cut, tuple(array.shape)) if is_row_major(array) else None
            known = self._known[id(move)] = find, cut, strides
        find, cut, strides = known
        return DevicePiece(find(tensor), cut, strides)

    def _sender(self, rank: int) -> DeviceSender:
        assert self.berths is not None
        link = self.berths.links[rank][self._rank]
        if link not in self._senders:
            self._senders[link] = open_device_sender(
                link, self._plan, self._streams[rank], f"{self._engine}, rank {rank}"
            )
        return self._senders[link]

    def committed(self, unchanged: Set[str]) -> None:
        """The engine is done reading."""
        self._pinned = []

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._senders, self.berths = {}, None


def _was_deleted(tensor: str) -> MappingError:
    return MappingError(f"{tensor} was donated or deleted before the sync; sync what the step returned")


def open_device_sender(link: bytes, plan: Plan, moves: dict[int, Move], peer: str) -> DeviceSender:
    match unpack_link(link)["transport"]:
        case "cuda":
            from slipstream.weights.transports.cuda import CudaSender

            return CudaSender(link, peer)
        case "nccl":
            from slipstream.weights.transports.nccl import NcclSender

            return NcclSender(link, plan, moves, peer)
        case other:
            raise TransferError(f"engine {peer}: {other!r} is no transport between devices; known: {', '.join(PLANES)}")
