"""The sending half of an update between devices, from the trainer's device arrays to one engine's ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

from slipstream.errors import TransferError
from slipstream.tensors.strided import Strided, strided_view
from slipstream.types import Box, Destinations, Parameter
from slipstream.weights.checksum import ScanOptions, add_manifest_header, check_finite, pack_entries
from slipstream.weights.plan import Move, Plan, missing_tensor_error
from slipstream.weights.sources.named_tensors import Tensor, check_not_deleted
from slipstream.weights.sources.torch_shards import is_torch
from slipstream.weights.transports.contract import unpack_link
from slipstream.weights.transports.device import (
    DEVICE_TRANSPORTS,
    LOCAL,
    ArrayFinder,
    DevicePiece,
    DeviceSender,
    DeviceSlice,
    is_row_major,
    locate,
)
from slipstream.weights.update.device_scan import DeviceScanner
from slipstream.weights.update.transfer import CannotRelay, Sent

if TYPE_CHECKING:
    import torch

    from slipstream.weights.update.torch_scan import TorchScanner


class DeviceOutbox:
    """The sending half for one engine; the counterpart of `transfer.Outbox`, which sends through host memory."""

    def __init__(
        self,
        plan: Plan,
        parameters: Sequence[Parameter],
        rank: int,
        engine: str,
        transport: str,
        options: ScanOptions,
    ) -> None:
        self._plan, self._rank, self._engine, self._options = plan, rank, engine, options
        self._casts = transport == "nccl"
        """Otherwise the engine reads the trainer's bytes and casts them."""
        self._scanner: DeviceScanner | TorchScanner | None = None
        self._streams = [plan.stream(rank, r) for r in range(1 + max(p.rank for p in parameters))]
        self._sizes = [{i: plan.size_of(move) for i, move in stream.items()} for stream in self._streams]
        self._senders: dict[bytes, DeviceSender] = {}
        self._known: dict[int, tuple[ArrayFinder, DeviceSlice, Strided | None]] = {}
        """By `id(move)`; the plan keeps one object per move."""
        self._chosen: tuple[Set[str], list[list[int]], list[bytes], int] | None = None
        """Cached from the last update: unchanged tensors, indices to send by rank, manifest entries, and number of bytes."""
        self._pinned: list[Mapping[int, DevicePiece]] = []
        """Pieces that engines may be reading; kept alive until they are done."""
        self.destinations: Destinations | None = None

    async def confirmed(self) -> None:
        for sender in self._senders.values():
            await sender.confirmed()

    async def released(self) -> float:
        return max([await sender.released() for sender in self._senders.values()], default=0.0)

    @property
    def is_scanning(self) -> bool:
        """Whether `send` reads all that it sends, and the engine reads it again before it confirms."""
        return self._options.checksums or self._options.finite

    @property
    def note(self) -> str:
        return ", ".join(sorted({sender.note for sender in self._senders.values()} - {""}))

    def promise(self, unchanged: Set[str], version: int) -> Sent:
        """Return what `send` will return."""
        _, rows, num_bytes = self._choose(unchanged)
        return Sent([add_manifest_header(version, packed) for packed in rows], num_bytes)

    def _choose(self, unchanged: Set[str]) -> tuple[list[list[int]], list[bytes], int]:
        if self._chosen is None or self._chosen[0] != unchanged:
            sent = self._plan.changed_parameters(unchanged)
            chosen = [[index for index, move in stream.items() if move.parameter in sent] for stream in self._streams]
            num_bytes = sum(sizes[index] for sizes, indices in zip(self._sizes, chosen) for index in indices)
            rows = [pack_entries(dict.fromkeys(indices, 0)) for indices in chosen]
            self._chosen = frozenset(unchanged), chosen, rows, num_bytes
        return self._chosen[1:]

    def send(
        self,
        tensors: Mapping[str, Tensor],
        unchanged: Set[str],
        version: int,
        is_computed: bool = False,
        replicas: Sequence[DeviceOutbox] = (),
    ) -> Sent:
        """Send what changed, once computed. Afterwards each rank has its pieces or knows where to read them.

        The engines of `replicas` get the same pieces, by broadcasts. Raise `CannotRelay` if NCCL cannot do that."""
        assert self.destinations is not None
        self._pinned = [
            {index: self._piece(tensors, stream[index]) for index in indices}
            for stream, indices in zip(self._streams, self._choose(unchanged)[0])
        ]
        if not is_computed:
            self._wait(tensors)
        # Also when nothing changed: the rank may be waiting.
        ranks = [(rank, pieces) for rank, pieces in enumerate(self._pinned) if self._streams[rank]]
        senders = [(self._sender(rank, pieces), pieces) for rank, pieces in ranks]
        others = [[replica._sender(rank, pieces) for replica in replicas] for rank, pieces in ranks]
        if replicas and not all(sender.can_broadcast(behind) for (sender, _), behind in zip(senders, others)):
            raise CannotRelay("NCCL broadcasts between different GPUs, and some ranks share one")
        if self._options.checksums:
            for sender, pieces in senders:
                sender.prepare(version, pieces)
        if self.is_scanning:
            self._scan(tensors)
        for (sender, pieces), behind in zip(senders, others):
            if behind:
                sender.broadcast(version, pieces, behind)
            else:
                sender.send(version, pieces)
        return self.promise(unchanged, version)

    def _wait(self, tensors: Mapping[str, Tensor]) -> None:
        arrays = [piece.array for pieces in self._pinned for piece in pieces.values()]
        if all(map(is_torch, arrays)):  # the bridge has waited for them
            return
        import jax

        try:
            jax.block_until_ready(arrays)
        except RuntimeError:
            check_not_deleted(tensors)
            raise

    def _scan(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the checksums to the pieces. Raise `NonFiniteWeights`, before the engine can commit them."""
        pieces = {(rank, index): piece for rank, own in enumerate(self._pinned) for index, piece in own.items()}
        counts: dict[tuple[str, Box], int] = {}
        if not pieces:  # of which framework the trainer is, is not known yet
            return
        if self._scanner is None:
            self._scanner = self._make_scanner(all(is_torch(piece.array) for piece in pieces.values()))
        for (rank, index), scan in self._scanner.scan(pieces).items():
            move = self._streams[rank][index]
            counts[move.tensor, move.tensor_box] = scan.num_nonfinite
            if self._options.checksums:
                pieces[rank, index].checksum = scan.checksum
        check_finite(counts, {name: tensors[name].shape for name, _ in counts}, self._plan.dtype)

    def _make_scanner(self, for_torch: bool) -> DeviceScanner | TorchScanner:
        if not for_torch:
            return DeviceScanner(self._options, self._plan.dtype, self._casts)
        from slipstream.weights.update.torch_scan import TorchScanner

        return TorchScanner(self._options, self._plan.dtype, self._casts)

    def _piece(self, tensors: Mapping[str, Tensor], move: Move) -> DevicePiece:
        tensor = tensors.get(move.tensor)
        if tensor is None:
            raise missing_tensor_error(move)
        if (known := self._known.get(id(move))) is None:
            check_not_deleted({move.tensor: tensor})
            find, cut = locate(tensor, move.tensor_box)
            array = find(tensor)
            strides = strided_view(cut, tuple(array.shape)) if is_row_major(array) else None
            known = self._known[id(move)] = find, cut, strides
        find, cut, strides = known
        return DevicePiece(find(tensor), cut, strides)

    def _sender(self, rank: int, pieces: Mapping[int, DevicePiece]) -> DeviceSender:
        assert self.destinations is not None
        link = self.destinations.links[rank][self._rank]
        if link not in self._senders:
            array = next((piece.array for piece in pieces.values()), None)
            device = array.device if array is not None and is_torch(array) else None
            self._senders[link] = open_device_sender(
                link, self._plan, self._streams[rank], f"{self._engine}, rank {rank}", device
            )
        return self._senders[link]

    def committed(self, unchanged: Set[str]) -> None:
        """Note that the engine is done reading."""
        self._pinned = []

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._senders, self.destinations = {}, None


def open_device_sender(
    link: bytes, plan: Plan, moves: dict[int, Move], peer: str, device: torch.device | None = None
) -> DeviceSender:
    """`device` is that of the pieces, if they are torch tensors."""
    match unpack_link(link)["transport"]:
        case "cuda":
            from slipstream.weights.transports.cuda.mapped_memory import CudaSender

            return CudaSender(link, peer)
        case "nccl":
            from slipstream.weights.transports.nccl.transport import NcclSender

            return NcclSender(link, plan, moves, peer, device=device)
        case name if name == LOCAL:
            from slipstream.weights.transports.device_copy import LocalSender

            return LocalSender(link, peer)
        case other:
            raise TransferError(
                f"engine {peer}: {other!r} is not a transport between devices; known: {', '.join((*DEVICE_TRANSPORTS, LOCAL))}"
            )
