"""`nccl`: from a GPU of the trainer to a GPU of the engine, by NCCL. Each pair of a trainer rank and an engine rank has a
communicator of its own, and fails alone.

The engine's worker makes a `NcclReceiver`, whose links (one per trainer rank) reach the trainer through the gateway; each
trainer rank opens its link as a `NcclSender`. Both sides then meet (`NcclReceiver.start`, `NcclSender.__init__`), and stay so
from update to update:

    worker    receiver.expect(version)
    trainer   sender.send(version, pieces)         to every receiver in every update, also when there are no pieces for it
    worker    receiver.wait(version, indices), receiver.view(parameter)

On the wire, per update: a header (version, which moves, how they are grouped), then buckets. A bucket is one NCCL group:
each large move is a message, all small ones together are another. Both sides derive the
buckets from the header and the plan (`buckets_of`). Whether a message comes from the array itself or from a packed copy is the
sender's affair, and whether it goes straight into the image or through a buffer is the receiver's.

Nothing is posted while no update is under way, so no kernel waits on the GPU then. Every wait ends when nothing has moved for
`deadline` seconds. After an error both halves are spent: make new ones, with new links."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import MappingError, TransferError
from slipstream.types import Parameter
from slipstream.weights.image import image_of
from slipstream.weights.layout import slices
from slipstream.weights.plan import Move, Plan
from slipstream.weights.transports.nccl_lane import GRACE_SECONDS, Lane, settle, view_of
from slipstream.weights.transports.nccl_packing import DevicePiece, Packer
from slipstream.weights.transports.nccl_pair import ABORT_SECONDS, NCCL, How, Library, Pair
from slipstream.weights.transports.nccl_wire import (
    BUCKET,
    DEADLINE,
    IN_FLIGHT,
    Bucket,
    Header,
    Link,
    buckets_of,
    check_versions,
    lost,
    sizes_of,
    unpack_indices,
)

if TYPE_CHECKING:
    import jax
    import torch

__all__ = ["BUCKET", "Bucket", "DevicePiece", "NcclReceiver", "NcclSender", "buckets_of"]


class NcclSender:
    """The trainer's half: sends the moves of one stream, from one device; pieces that lie on others are brought there first.
    `peer` is the receiver's name in errors. One thread calls `send`; `close` may come from another."""

    note = ""

    def __init__(
        self,
        link: bytes,
        plan: Plan,
        moves: dict[int, Move],
        peer: str,
        bucket_bytes: int = BUCKET,
        deadline: float = DEADLINE,
        device: jax.Device | None = None,
        library: Library = NCCL,
    ) -> None:
        import jax

        found = Link.unpack(link, len(moves))
        check_versions(library.version(), found.nccl, peer)
        if found.plan != plan.fingerprint:
            raise TransferError(f"{peer} receives by plan {found.plan}, this trainer sends by plan {plan.fingerprint}")
        self._plan, self._moves, self._peer, self._limit = plan, moves, peer, bucket_bytes
        self._dense = unpack_indices(found.dense, moves)
        self._device = device or jax.local_devices()[0]
        self._packer = Packer(plan, moves, self._device)
        self._lock, self._stop = threading.Lock(), threading.Event()
        ordinal = self._device.local_hardware_id or 0
        self._pair: Pair | None = library.pair(found.unique_id, 0, ordinal, found.how, peer, deadline, self._stop)

    def send(self, version: int, pieces: Mapping[int, DevicePiece]) -> None:
        """Returns when NCCL has taken the last byte. The arrays must not be donated or deleted before. Raises
        `TransferError`, having aborted the communicator; a piece that does not fit the plan is a `MappingError`."""
        with self._lock:
            if self._pair is None:
                raise TransferError(
                    f"nccl: the sender to {self._peer} is closed; an update that failed needs new links"
                )
            held: list[object] = []
            try:
                self._send(self._pair, version, pieces, held)
            except BaseException:
                self._leave(held)
                raise

    async def confirmed(self) -> None:
        """The receiver says so when the version is staged."""

    async def released(self) -> float:
        """What `send` has sent is no longer read here."""
        return 0.0

    def close(self) -> None:
        """Aborts a `send` under way. What was sent may still be on its way: wait for the receiver's word first."""
        self._stop.set()
        with self._lock:
            self._leave([])

    def _send(self, pair: Pair, version: int, pieces: Mapping[int, DevicePiece], held: list[object]) -> None:
        import jax

        if unknown := sorted(pieces.keys() - self._moves.keys()):
            raise MappingError(f"move {unknown[0]} is not one of those planned from this trainer rank to {self._peer}")
        sources = self._packer.sources(pieces)
        held.append(sources)
        jax.block_until_ready([source.array for source in sources.values()])  # NCCL's stream knows nothing of JAX's
        direct = frozenset(index for index in self._dense & sources.keys() if sources[index].is_straight)
        buckets = buckets_of(sizes_of(self._plan, self._moves, sources), direct, self._limit)
        self._packer.prepare(buckets, sources)
        header = Header(version, self._limit, frozenset(sources), direct).pack(self._moves)
        data = jax.device_put(np.frombuffer(header, np.uint8), self._device).block_until_ready()
        # The first bucket is packed before anything is sent: what waits for a peer is in the way of what computes.
        packed = self._packer.pack(buckets[0], sources) if buckets else None
        held += [data, packed]
        with pair.group(f"sending the header of version {version}"):
            pair.send(data.unsafe_buffer_pointer(), data.nbytes)
        in_flight: deque[tuple[str, Any, object]] = deque()
        held.append(in_flight)
        for number, bucket in enumerate(buckets, 1):
            if len(in_flight) == IN_FLIGHT:
                self._sent(pair, in_flight)
            what = f"sending bucket {number} of {len(buckets)} of version {version}"
            messages, kept = packed or self._packer.pack(bucket, sources)
            packed = None
            held.append(kept)  # until the mark below holds it
            with pair.group(what):
                for message in messages:
                    pair.send(message.pointer, message.num_bytes)
            in_flight.append((what, pair.mark(), kept))
            held.pop()
        while in_flight:
            self._sent(pair, in_flight)
        pair.wait(pair.mark(), f"sending version {version}")

    def _sent(self, pair: Pair, in_flight: deque[tuple[str, Any, object]]) -> None:
        what, mark, _ = in_flight[0]
        pair.wait(mark, what)
        in_flight.popleft()

    def _leave(self, held: object) -> None:
        pair, self._pair = self._pair, None
        if pair is not None and not pair.close():
            lost.append(held)


class NcclReceiver:
    """The engine worker's half: receives what a rank is sent, into a staging image on its GPU. The calls come from one
    thread; a thread of its own serves each trainer rank.

    After an error, or to roll back, `abandon`: then `links` are new ones, and `start` has to be called again."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        senders: Sequence[int],
        device: int,
        parameters: Sequence[Parameter],
        deadline: float = DEADLINE,
        how: How = "send",
        library: Library = NCCL,
    ) -> None:
        import torch

        self._plan, self._rank, self._senders, self._how = plan, rank, tuple(senders), how
        self._ordinal, self._deadline, self._library = device, deadline, library
        self._moves = plan.incoming.get(rank, ())
        self._image = image_of(parameters, rank, plan.dtype)
        self._device = torch.device(library.place(device))
        self._staging: torch.Tensor | None = None
        self._views: dict[int, torch.Tensor] = {}
        self._lanes: dict[int, Lane] = {}

    @property
    def seconds(self) -> float:
        """What the last update took, from its header to its last byte, in the slowest lane."""
        return max((lane.seconds for lane in self._lanes.values()), default=0.0)

    @property
    def links(self) -> dict[int, bytes]:
        """By trainer rank; made without waiting for anyone. The same ones until `abandon`."""
        return {sender: lane.link for sender, lane in self._ways().items()}

    def start(self) -> None:
        """Enters the communicators. Returns at once: whoever does not come is reported by `wait`."""
        for lane in self._ways().values():
            lane.start()

    def expect(self, version: int) -> None:
        """An update begins: from now on the headers are awaited. Raises `TransferError` when a lane has failed before."""
        if not self._lanes:
            raise TransferError(
                f"nccl: rank {self._rank} has no links for version {version}; make links and start first"
            )
        for lane in self._lanes.values():
            lane.expect(version)

    def wait(self, version: int, indices: Collection[int], patience: float = math.inf) -> int | None:
        """Until exactly these moves of this version are in the image; the number of their bytes. None after `patience`
        seconds, unless the lanes themselves have given up by then."""
        until = time.monotonic() + patience
        wanted: dict[int, set[int]] = {sender: set() for sender in self._senders}
        for index in indices:
            if not 0 <= index < len(self._moves) or self._moves[index].sender not in wanted:
                raise TransferError(
                    f"nccl: move {index} of version {version} comes from none of the trainer ranks {list(wanted)} that rank "
                    f"{self._rank} has links to"
                )
            wanted[self._moves[index].sender].add(index)
        for sender, expected in wanted.items():
            if not self._lanes:
                raise TransferError(f"nccl: version {version} was never expected by rank {self._rank}")
            if not self._lanes[sender].check(version, expected, until):
                return None
        return sum(self._plan.size_of(self._moves[index]) for index in set(indices))

    def view(self, parameter: str) -> torch.Tensor:
        """The staged parameter. Its memory is written again by the next update."""
        return view_of(self._memory(), self._image, parameter, self._plan.dtype)

    def source(self, index: int) -> torch.Tensor:
        """A piece that has been waited for."""
        if index not in self._views:
            move = self._moves[index]
            self._views[index] = self.view(move.parameter)[slices(move.local_box)]
        return self._views[index]

    def done(self, version: int, copied: Callable[[], float]) -> float:
        """Waits: the next update overwrites what was staged."""
        return copied()

    def abandon(self) -> None:
        """Gives the update up, and with it the communicators: a sender in mid-transfer gets an error. The next `links` are
        new. Never raises."""
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.halt()
        end = time.monotonic() + 2 * ABORT_SECONDS + GRACE_SECONDS
        ended = [lane.ended(max(0.0, end - time.monotonic())) for lane in lanes.values()]
        if not all(ended):
            lost.append((self._staging, lanes))
            self._staging, self._views = None, {}

    def close(self) -> None:
        self.abandon()
        self._staging, self._views = None, {}

    def _memory(self) -> torch.Tensor:
        """Zeros, so that padding is."""
        import torch

        if self._staging is None:
            self._staging = torch.zeros(self._image.num_bytes, dtype=torch.uint8, device=self._device)
            settle(self._device)
        return self._staging

    def _ways(self) -> dict[int, Lane]:
        if not self._lanes:
            staging = self._memory()
            plan, image, how, deadline = self._plan, self._image, self._how, self._deadline
            self._lanes = {
                sender: Lane(sender, self._rank, self._ordinal, plan, image, staging, how, deadline, self._library)
                for sender in self._senders
            }
        return self._lanes
