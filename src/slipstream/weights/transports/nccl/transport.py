"""`nccl`: both halves of the transport from a trainer GPU to an engine GPU. Each pair of trainer rank and engine rank
has its own communicator, so pairs fail independently. To replicas a trainer rank broadcasts, over a further communicator
that it has with all of them; the headers, which still go over the pairs, tell them to join.

The engine's worker makes a `NcclReceiver`, whose links (one per trainer rank) reach the trainer through the gateway.
Each trainer rank opens its link as a `NcclSender`. Both sides then connect (`NcclReceiver.start`,
`NcclSender.__init__`) and stay connected from update to update:

    worker    receiver.expect(version)
    trainer   sender.send(version, pieces)         to every receiver in every update, even without pieces for it
    worker    receiver.wait(version, indices), receiver.source(index)

`wire_format.py` describes what is sent. Nothing is posted between updates, so no kernel waits on the GPU then. Every
wait ends if there is no progress for `deadline` seconds. After an error both halves are unusable: make new ones, with
new links."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slipstream.errors import MappingError, TransferError
from slipstream.tensors.boxes import slices
from slipstream.types import Parameter
from slipstream.weights.plan import Move, Plan
from slipstream.weights.rank_image import rank_image
from slipstream.weights.transports.device import DevicePiece, DeviceSender
from slipstream.weights.transports.nccl.communicator import (
    ABORT_SECONDS,
    NCCL,
    Nccl4py,
    NcclPair,
    Primitive,
    check_versions,
)
from slipstream.weights.transports.nccl.packing import Packer
from slipstream.weights.transports.nccl.receive_thread import GRACE_SECONDS, ReceiveThread, synchronize, torch_view
from slipstream.weights.transports.nccl.wire_format import (
    BUCKET_BYTES,
    DEADLINE_SECONDS,
    MAX_IN_FLIGHT,
    NcclLink,
    Seat,
    UpdateHeader,
    buckets_of,
    leaked_memory,
    sizes_of,
    unpack_indices,
)

if TYPE_CHECKING:
    import jax
    import torch


class NcclSender(DeviceSender):
    """The trainer's half. Sends the moves to one engine rank from one device, where pieces on others are copied first. The
    receiver confirms when the version is staged. `peer` names it in errors. Another thread may call `close`."""

    def __init__(
        self,
        link: bytes,
        plan: Plan,
        moves: dict[int, Move],
        peer: str,
        bucket_bytes: int = BUCKET_BYTES,
        deadline: float = DEADLINE_SECONDS,
        device: jax.Device | torch.device | None = None,
        library: Nccl4py = NCCL,
    ) -> None:
        """`device` is a torch device if the pieces are torch tensors; by default it is JAX's first."""
        fields = NcclLink.unpack(link, len(moves))
        check_versions(library.version(), fields.nccl, peer)
        if fields.plan != plan.fingerprint:
            raise TransferError(f"{peer} follows plan {fields.plan}, this trainer follows plan {plan.fingerprint}")
        self._plan, self._moves, self._peer, self._limit = plan, moves, peer, bucket_bytes
        self._contiguous = unpack_indices(fields.contiguous, moves)
        self._packer = _packer(plan, moves, device)
        self._library, self._deadline, self._peer_device = library, deadline, fields.device
        self._group: tuple[tuple[NcclPair, ...], Seat, NcclPair] | None = None
        """Pairs with the replicas, and the communicator for broadcasts to them."""
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._pair: NcclPair | None = library.pair(
            fields.unique_id, 0, self._packer.ordinal, fields.primitive, peer, deadline, self._stop
        )

    def can_broadcast(self, replicas: Sequence[Any]) -> bool:
        """Whether all ranks are on different GPUs."""
        devices = [self._library.device_id(self._packer.ordinal), *(s._peer_device for s in (self, *replicas))]
        return len(set(devices)) == len(devices)

    def send(self, version: int, pieces: Mapping[int, DevicePiece]) -> None:
        """Return once NCCL has read the last byte; the arrays must not be donated or deleted before. On `TransferError`
        the communicator has been aborted. Raise `MappingError` for a piece that does not match the plan."""
        self.broadcast(version, pieces, ())

    def broadcast(self, version: int, pieces: Mapping[int, DevicePiece], replicas: Sequence[Any]) -> None:
        senders: tuple[NcclSender, ...] = (self, *replicas)
        with contextlib.ExitStack() as locks:
            for sender in senders:
                locks.enter_context(sender._lock)
            held: list[object] = []
            try:
                self._send([sender._open_pair() for sender in senders], version, pieces, held)
            except BaseException:
                for sender in senders:
                    sender._close_pair(held)
                raise

    def _open_pair(self) -> NcclPair:
        if self._pair is None:
            raise TransferError(
                f"nccl: the sender to {self._peer} is closed; after a failed update both sides need new links"
            )
        return self._pair

    def close(self) -> None:
        """Abort a running `send`. Data may still be in transit: wait for the receiver's confirmation first."""
        self._stop.set()
        with self._lock:
            self._close_pair([])

    def _send(
        self, pairs: Sequence[NcclPair], version: int, pieces: Mapping[int, DevicePiece], held: list[object]
    ) -> None:
        if unknown := sorted(pieces.keys() - self._moves.keys()):
            raise MappingError(f"the plan has no move {unknown[0]} from this trainer rank to {self._peer}")
        inputs = self._packer.inputs(pieces)
        held.append(inputs)
        self._packer.wait(inputs)
        direct = frozenset(index for index in self._contiguous & inputs.keys() if inputs[index].is_sent_in_place)
        buckets = buckets_of(sizes_of(self._plan, self._moves, inputs), direct, self._limit)
        self._packer.prepare(buckets, inputs)
        checksums = {index: piece.checksum for index, piece in pieces.items() if piece.checksum is not None}
        header = UpdateHeader(version, self._limit, frozenset(inputs), direct, checksums)
        seats = self._seats(pairs)
        packs = [replace(header, seat=seat).pack(self._moves) for seat in seats]
        uploads = [self._packer.upload(pack) for pack in packs]
        # Pack the first bucket before sending anything: a kernel that waits for its peer delays kernels that compute.
        packed = self._packer.pack(buckets[0], inputs) if buckets else None
        held += [uploads, packed]
        what = f"sending the header of version {version}"
        for pair, pack, (pointer, _) in zip(pairs, packs, uploads):
            with pair.group(what):
                pair.send(pointer, len(pack))
        pair = pairs[0]
        if len(pairs) > 1:
            for other in pairs:
                other.wait(other.mark(), what)
            pair = self._joined(pairs, seats[0])
        in_flight: deque[tuple[str, Any, object]] = deque()
        held.append(in_flight)
        for number, bucket in enumerate(buckets, 1):
            if len(in_flight) == MAX_IN_FLIGHT:
                self._wait_for_oldest(pair, in_flight)
            what = f"sending bucket {number} of {len(buckets)} of version {version}"
            messages, memory = packed or self._packer.pack(bucket, inputs)
            packed = None
            held.append(memory)  # until `in_flight` holds it
            with pair.group(what):
                for pointer, num_bytes in messages:
                    pair.send(pointer, num_bytes)
            in_flight.append((what, pair.mark(), memory))
            held.pop()
        while in_flight:
            self._wait_for_oldest(pair, in_flight)
        pair.wait(pair.mark(), f"sending version {version}")

    def _wait_for_oldest(self, pair: NcclPair, in_flight: deque[tuple[str, Any, object]]) -> None:
        what, mark, _ = in_flight[0]
        pair.wait(mark, what)
        in_flight.popleft()

    def _seats(self, pairs: Sequence[NcclPair]) -> list[Seat | None]:
        """Return the receivers' places in the communicator for broadcasts, which is another one if the receivers are others."""
        if self._group is not None and self._group[0] != tuple(pairs):
            self._close_group([])
        if len(pairs) == 1:
            return [None]
        unique_id = self._group[1].unique_id if self._group is not None else self._library.new_id()
        return [Seat(unique_id, rank, len(pairs) + 1) for rank in range(1, len(pairs) + 1)]

    def _joined(self, pairs: Sequence[NcclPair], seat: Seat | None) -> NcclPair:
        assert seat is not None
        if self._group is None:
            peers = f"{self._peer} and {len(pairs) - 1} more"
            where = seat.unique_id, 0, self._packer.ordinal
            joined = self._library.pair(*where, "broadcast", peers, self._deadline, self._stop, seat.size)
            self._group = tuple(pairs), seat, joined
        return self._group[2]

    def _close_pair(self, held: object) -> None:
        self._close_group(held)
        pair, self._pair = self._pair, None
        if pair is not None and not pair.close():
            leaked_memory.append(held)

    def _close_group(self, held: object) -> None:
        group, self._group = self._group, None
        if group is not None and not group[2].close():
            leaked_memory.append(held)


def _packer(plan: Plan, moves: dict[int, Move], device: jax.Device | torch.device | None) -> Any:
    if type(device).__module__ == "torch":
        from slipstream.weights.transports.nccl.torch_packing import TorchPacker

        return TorchPacker(plan, moves, device)
    import jax

    return Packer(plan, moves, device or jax.local_devices()[0])


class NcclReceiver:
    """The engine worker's half. Receives a rank's moves into a staging image on its GPU, with one `ReceiveThread` per
    trainer rank. One thread at a time calls the methods.

    After an error, or to roll back, call `abandon`; then `links` are new, and `start` must be called again."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        senders: Sequence[int],
        device: int,
        parameters: Sequence[Parameter],
        deadline: float = DEADLINE_SECONDS,
        primitive: Primitive = "send",
        library: Nccl4py = NCCL,
    ) -> None:
        import torch

        self._plan, self._rank, self._senders, self._primitive = plan, rank, tuple(senders), primitive
        self._ordinal, self._deadline, self._library = device, deadline, library
        self._moves = plan.incoming.get(rank, ())
        self._image = rank_image(parameters, rank, plan.dtype)
        self._device = torch.device(library.torch_device(device))
        self._staging: torch.Tensor | None = None
        self._views: dict[int, torch.Tensor] = {}
        self._threads: dict[int, ReceiveThread] = {}

    @property
    def seconds(self) -> float:
        """Duration of the last update, from its header to its last byte, in the slowest thread."""
        return max((thread.seconds for thread in self._threads.values()), default=0.0)

    @property
    def links(self) -> dict[int, bytes]:
        """Links by trainer rank, created without waiting for a peer. They stay the same until `abandon`."""
        return {sender: thread.link for sender, thread in self._make_threads().items()}

    def start(self) -> None:
        """Start connecting and return at once; `wait` reports trainer ranks that do not connect."""
        for thread in self._make_threads().values():
            thread.start()

    def expect(self, version: int) -> None:
        """Begin an update: post receives for the headers. Raise `TransferError` if a receive thread has failed."""
        if not self._threads:
            raise TransferError(
                f"nccl: rank {self._rank} has no links for version {version}; call `links` and `start` first"
            )
        for thread in self._threads.values():
            thread.expect(version)

    def wait(self, version: int, indices: Collection[int], patience: float = math.inf) -> int | None:
        """Wait until exactly these moves of this version are in the image and return their bytes. Return None after
        `patience` seconds. Raise `TransferError` or `ChecksumMismatch` if a receive thread has failed."""
        until = time.monotonic() + patience
        wanted: dict[int, set[int]] = {sender: set() for sender in self._senders}
        for index in indices:
            if not 0 <= index < len(self._moves) or self._moves[index].sender not in wanted:
                raise TransferError(
                    f"nccl: move {index} of version {version} is not from one of the trainer ranks {list(wanted)} that rank "
                    f"{self._rank} has links to"
                )
            wanted[self._moves[index].sender].add(index)
        for sender, expected in wanted.items():
            if not self._threads:
                raise TransferError(f"nccl: rank {self._rank} did not expect version {version}")
            if not self._threads[sender].wait_for(version, expected, until):
                return None
        return sum(self._plan.size_of(self._moves[index]) for index in set(indices))

    def view(self, parameter: str) -> torch.Tensor:
        """Return a staged parameter. The next update overwrites its memory."""
        return torch_view(self._staging_memory(), self._image, parameter, self._plan.dtype)

    def source(self, index: int) -> torch.Tensor:
        """Return a piece after `wait`."""
        if index not in self._views:
            move = self._moves[index]
            self._views[index] = self.view(move.parameter)[slices(move.local_box)]
        return self._views[index]

    def done(self, version: int, copied: Callable[[], float]) -> float:
        """Wait for the copies: the next update overwrites the staging image."""
        return copied()

    def abandon(self) -> None:
        """Abort the update and the communicators; a running sender gets an error. Never raises. `links` become new."""
        threads, self._threads = self._threads, {}
        for thread in threads.values():
            thread.stop()
        end = time.monotonic() + 2 * ABORT_SECONDS + GRACE_SECONDS
        are_quiet = [thread.join(max(0.0, end - time.monotonic())) for thread in threads.values()]
        if not all(are_quiet):
            leaked_memory.append((self._staging, threads))
            self._staging, self._views = None, {}

    def close(self) -> None:
        self.abandon()
        self._staging, self._views = None, {}

    def _staging_memory(self) -> torch.Tensor:
        """Allocate zeros, so that padding is zero."""
        import torch

        if self._staging is None:
            self._staging = torch.zeros(self._image.num_bytes, dtype=torch.uint8, device=self._device)
            synchronize(self._device)
        return self._staging

    def _make_threads(self) -> dict[int, ReceiveThread]:
        if not self._threads:
            staging = self._staging_memory()
            self._threads = {
                sender: ReceiveThread(
                    sender,
                    self._rank,
                    self._ordinal,
                    self._plan,
                    self._image,
                    staging,
                    self._primitive,
                    self._deadline,
                    self._library,
                )
                for sender in self._senders
            }
        return self._threads
