"""The sending and the receiving half of an update through host memory.

    trainer                                     engine
    ───────                                     ──────
    begin: plan, transport  ──────────────────► Inbox.begin     checks the plan, allocates at most two images per rank
    destinations            ◄──────────────────                 links, and the slot of each parameter
    send: cast, copy, checksum  ═══ bytes ════► the slot of each parameter that is not in use
    stage: checksums        ──────────────────► Inbox.receive   verifies; the new arrays are views of the image
    commit                  ──────────────────► engine.commit   swaps at a step boundary, then Inbox.finish

A parameter has two slots and arrives in the one that the serving version does not use. Unchanged parameters are not sent: the
new version shares them with the old one. (Memory shared with a trainer is a single slot, written in place.)"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from slipstream.errors import (
    ChecksumMismatch,
    DeltaMismatch,
    MappingError,
    PlanMismatch,
    TransferError,
    UnknownVersion,
    UpdateInProgress,
    VersionError,
)
from slipstream.runtime.failpoints import step
from slipstream.tensors.boxes import shape_of, slices
from slipstream.tensors.dlpack import DLPackView
from slipstream.types import Destinations, Offer, Parameter, StageReport
from slipstream.weights import delta
from slipstream.weights.checksum import PieceScan, ScanOptions, check_finite, pack_manifest, unpack_manifest
from slipstream.weights.delta import Encoding
from slipstream.weights.plan import Move, Plan, check_cover, missing_tensor_error
from slipstream.weights.rank_image import RankImage, num_bytes, numpy_dtype, rank_image
from slipstream.weights.sources.named_tensors import Tensor, is_jax_array, read
from slipstream.weights.transports.contract import HostReceiver, HostSender
from slipstream.weights.transports.device import DevicePiece, locate
from slipstream.weights.transports.host.shm import ShmReceiver
from slipstream.weights.transports.host.tcp import ListenConfig
from slipstream.weights.transports.shared.host_memory import SharedReceiver, is_shared
from slipstream.weights.update.device_delta import NEVER, SentKey
from slipstream.weights.update.sent_pieces import SentPiece, SentPieces
from slipstream.weights.update.transport_choice import SMALL_BYTES, make_receiver, open_sender, takes_deltas

NUM_SLOTS = 2


class CannotRelay(TransferError):
    """The engines cannot pass weights on to each other. Nothing was sent."""


class Sent(NamedTuple):
    """What one engine, or a chain of replicas, was sent."""

    manifests: list[bytes]
    """By engine rank."""
    num_bytes: int
    num_deltas: int = 0
    """Pieces that were sent as deltas."""

    @property
    def encoding(self) -> Literal["dense", "delta"]:
        return "delta" if self.num_deltas else "dense"


@dataclass
class _SentRank:
    scans: dict[int, PieceScan] = field(default_factory=dict)
    """What was found out about the pieces, by index."""
    num_bytes: int = 0
    num_deltas: int = 0

    def add(self, index: int, scan: PieceScan, num_bytes: int, is_delta: bool = False) -> None:
        self.scans[index] = scan
        self.num_bytes += num_bytes
        self.num_deltas += is_delta


class Outbox:
    """The sending half for one engine, or for a chain of replicas. Keeps its connections, and the slots in use, from update to
    update."""

    def __init__(
        self,
        plan: Plan,
        parameters: Sequence[Parameter],
        rank: int,
        options: ScanOptions,
        sent: SentPieces | None = None,
    ) -> None:
        """`sent`: what was sent before, to send deltas when `sends_deltas` is set."""
        self._plan, self._rank, self._options, self._sent = plan, rank, options, sent
        self.sends_deltas = False
        self._held: dict[str, int] = {}
        """The update in which the engine got a parameter, by the count of `sent`."""
        self._sending = NEVER
        """The update in progress, if its values are kept."""
        self._names = list(dict.fromkeys(p.name for p in parameters))
        num_ranks = 1 + max(p.rank for p in parameters)
        self._images = [rank_image(parameters, r, plan.dtype) for r in range(num_ranks)]
        self._streams = [plan.stream(rank, r) for r in range(num_ranks)]
        self._senders: dict[tuple[bytes, ...], HostSender] = {}
        """By the links to this engine and to the replicas behind it."""
        self._behind: list[tuple[tuple[bytes, ...], ...]] = []
        """Links of the replicas that the senders are for."""
        self._used: list[HostSender] = []
        """Senders of the update in progress."""
        self.destinations: Destinations | None = None
        """The engine's last answer to begin; after a commit, the answer that the next begin will get."""

    note = ""
    is_scanning = False
    """Bytes are scanned while they are copied."""

    async def confirmed(self) -> None:
        """Do nothing: the ranks verify their bytes when the version is staged."""

    async def released(self) -> float:
        """Return 0: no engine reads the trainer's memory."""
        return 0.0

    def promise(self, unchanged: Set[str], version: int) -> None:
        """Return None: checksums are known only after the bytes are sent."""

    def send(
        self,
        tensors: Mapping[str, Tensor],
        unchanged: Set[str],
        version: int,
        is_computed: bool = False,
        replicas: Sequence[Outbox] = (),
    ) -> Sent:
        """Send the parameters with changed tensors to all ranks; return a manifest per rank and the number of bytes. Raise
        `NonFiniteWeights` if values are not finite, unless the options say that it does not matter.

        The engines of `replicas` get the same bytes, each from the engine before it. Raise `CannotRelay` if they cannot."""
        sent = self._plan.changed_parameters(unchanged)
        ranks = range(len(self._streams))
        self._used = []
        for replica in replicas:  # an engine that waits for the one before it should be connected to nobody else
            replica._close_senders()
        paths = self._open_paths([replica.destinations for replica in replicas if replica.destinations], sent)
        chain = (self, *replicas)
        for outbox in chain:
            outbox._sending = self._sent.update if self._sent is not None and self.sends_deltas else NEVER
        holders = [outbox._held for outbox in chain]
        if self._sent is not None and self.sends_deltas:
            self._sent.prepare(partial(self._device_pieces, tensors, sent))

        def send_rank(rank: int) -> _SentRank:
            return self._send_rank(rank, tensors, paths, version, holders)

        if len(ranks) == 1 or not sent or self._plan.num_bytes <= SMALL_BYTES:
            by_rank = list(map(send_rank, ranks))
        else:
            with ThreadPoolExecutor(len(ranks)) as pool:  # copying and hashing release the GIL
                by_rank = list(pool.map(send_rank, ranks))
        scans = [found.scans for found in by_rank]
        self._check_finite(tensors, scans)
        for sender in self._used:
            sender.flush()
        sums = [{index: scan.checksum for index, scan in found.items()} for found in scans]
        manifests = [pack_manifest(version, found) for found in sums]
        return Sent(manifests, sum(f.num_bytes for f in by_rank), sum(f.num_deltas for f in by_rank))

    def _check_finite(self, tensors: Mapping[str, Tensor], scans: Sequence[Mapping[int, PieceScan]]) -> None:
        counts = {
            (move.tensor, move.tensor_box): scan.num_nonfinite
            for stream, found in zip(self._streams, scans)
            for index, scan in found.items()
            if scan.num_nonfinite and (move := stream[index])
        }
        check_finite(counts, {name: tensors[name].shape for name, _ in counts}, self._plan.dtype)

    def _open_paths(self, behind: Sequence[Destinations], sent: set[str]) -> dict[str, tuple[int, ...]]:
        """Return the slots that each parameter goes to, in this engine and in the replicas `behind` it. Open the connections
        through several engines, before anything is sent."""
        assert self.destinations is not None
        places = [self.destinations, *behind]
        paths = {name: path for name, *path in zip(self._names, *(d.slots for d in places)) if name in sent}
        if (links := [d.links for d in behind]) != self._behind:
            self._close_senders()
            self._behind = links
        try:
            for rank, stream in enumerate(self._streams if behind else ()):
                for slots in {tuple(paths[move.parameter]) for move in stream.values() if move.parameter in paths}:
                    self._sender(rank, slots)
        except TransferError as error:
            raise CannotRelay(str(error)) from None
        return {name: tuple(path) for name, path in paths.items()}

    def _send_rank(
        self,
        rank: int,
        tensors: Mapping[str, Tensor],
        paths: Mapping[str, tuple[int, ...]],
        version: int,
        holders: Sequence[Mapping[str, int]],
    ) -> _SentRank:
        """Send one rank's pieces. `holders` say of each engine in which update it got a parameter."""
        found = _SentRank()
        used: dict[tuple[int, ...], HostSender] = {}
        moves = {i: move for i, move in self._streams[rank].items() if move.parameter in paths}
        if missing := next((move for move in moves.values() if move.tensor not in tensors), None):
            raise missing_tensor_error(missing)
        with contextlib.closing(self._pieces(moves.values(), tensors)) as pieces:
            for (index, move), piece in zip(moves.items(), pieces):
                slots = paths[move.parameter]
                if slots not in used:
                    used[slots] = self._sender(rank, slots)
                    used[slots].begin(version)
                is_held = all(held.get(move.parameter, NEVER) == piece.since for held in holders)
                if piece.encoding != Encoding.DENSE and is_held:
                    used[slots].send_delta(index, piece.delta, piece.encoding)
                    found.add(index, piece.scan, len(piece.delta), is_delta=True)
                else:
                    scan = used[slots].send(index, piece.read().reshape(shape_of(move.local_box)))
                    found.add(index, scan, self._plan.size_of(move))
        self._used += used.values()
        return found

    def _device_pieces(self, tensors: Mapping[str, Tensor], sent: Set[str]) -> dict[SentKey, DevicePiece]:
        """Return the pieces that are JAX arrays, or boxes of one, on one device each."""
        found: dict[SentKey, DevicePiece] = {}
        for move in (move for stream in self._streams for move in stream.values() if move.parameter in sent):
            with contextlib.suppress(MappingError, KeyError):
                find, cut = locate(tensors[move.tensor], move.tensor_box)
                if is_jax_array(array := find(tensors[move.tensor])):
                    found[self._key(move)] = DevicePiece(array, cut, None)
        return found

    def _key(self, move: Move) -> SentKey:
        return self._plan.dtype, move.tensor, move.tensor_box

    def _pieces(self, moves: Iterable[Move], tensors: Mapping[str, Tensor]) -> Generator[SentPiece, None, None]:
        """Yield what to send for each move. Deltas are encoded ahead, by several threads, until it is closed."""
        if self._sent is None or not self.sends_deltas:
            yield from (SentPiece(partial(read, tensors[move.tensor], move.tensor_box)) for move in moves)
            return
        dtype, sent = numpy_dtype(self._plan.dtype), self._sent

        def encoded(move: Move) -> SentPiece:
            values = partial(read, tensors[move.tensor], move.tensor_box)
            return sent.piece(self._key(move), self._plan.size_of(move), dtype, values)

        pool = ThreadPoolExecutor(delta.NUM_THREADS, "slipstream-encode")
        try:
            yield from pool.map(encoded, moves)
        finally:
            pool.shutdown(cancel_futures=True)

    def committed(self, unchanged: Set[str]) -> None:
        """Note that the sent parameters are in use; next time they go to their other slot."""
        assert self.destinations is not None
        sent = self._plan.changed_parameters(unchanged)
        self._held |= dict.fromkeys(sent, self._sending)
        slots = bytes(1 - s if name in sent else s for name, s in zip(self._names, self.destinations.slots))
        complete = all(link for links in self.destinations.links for link in links)
        self.destinations = Destinations(self.destinations.links, slots) if complete else None

    def close(self) -> None:
        self._close_senders()
        self._used, self._held, self.destinations = [], {}, None

    def _close_senders(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._senders = {}

    def _sender(self, rank: int, slots: tuple[int, ...]) -> HostSender:
        assert self.destinations is not None
        path = tuple(links[rank][slot] for links, slot in zip((self.destinations.links, *self._behind), slots))
        if path not in self._senders:
            stream = self._streams[rank]
            self._senders[path] = open_sender(path[0], self._images[rank], stream, self._options, path[1:])
        return self._senders[path]


@dataclass
class IncomingUpdate:
    version: int
    plan: Plan
    hashed: bool
    slots: dict[str, int] = field(default_factory=dict)


class UpdateReceiver:
    """An engine's state of the update in progress, for any transport. Accepts one update at a time, newer than the serving
    version, with a plan that fits. Keeps the plan from update to update. Thread-safe."""

    def __init__(self, parameters: Sequence[Parameter], dtype: str, name: str) -> None:
        self._parameters, self._dtype, self._name = tuple(parameters), dtype, name
        self.num_bytes = num_bytes(self._parameters, dtype)
        """Size of all parameters on all ranks."""
        self._plan: Plan | None = None
        self._transport = ""
        self._update: IncomingUpdate | None = None
        self._lock = threading.Lock()

    def _admit(self, serving: int, version: int, offer: Offer) -> Plan:
        """Return the plan of an update, or raise without side effects. `serving` is the version the engine serves."""
        if self._update is not None:
            raise UpdateInProgress(
                f"engine {self._name!r} is receiving version {self._update.version}; commit it or roll it back before version "
                f"{version}"
            )
        if version <= serving:
            raise VersionError(f"engine {self._name!r} serves version {serving}; version {version} is not newer")
        return self._plan_for(offer)

    def _plan_for(self, offer: Offer) -> Plan:
        if self._plan is not None and self._plan.fingerprint == offer.fingerprint:
            return self._plan
        if not offer.plan:
            raise PlanMismatch(f"engine {self._name!r} does not have plan {offer.fingerprint}; send it with the offer")
        plan = Plan.from_bytes(offer.plan)
        if plan.fingerprint != offer.fingerprint:
            raise PlanMismatch(f"the plan has fingerprint {plan.fingerprint}, the offer says {offer.fingerprint}")
        if plan.dtype != self._dtype:
            raise PlanMismatch(f"engine {self._name!r} has dtype {self._dtype}, the plan sends {plan.dtype}")
        check_cover(plan, self._parameters)
        return plan

    def _manifests(
        self, update: IncomingUpdate, manifests: Sequence[Sequence[bytes]], num_ranks: int
    ) -> tuple[list[dict[int, int]], Counter[str], int]:
        """Unpack what the trainer sent: checksums per rank by piece index, number of pieces per parameter, number of bytes."""
        if len(manifests) != num_ranks:
            raise ChecksumMismatch(f"engine {self._name!r}: got manifests for {len(manifests)} of {num_ranks} rank(s)")
        sums: list[dict[int, int]] = []
        sent, num_bytes = Counter[str](), 0
        for rank, from_senders in enumerate(manifests):
            moves = update.plan.incoming.get(rank, ())
            expected: dict[int, int] = {}
            for manifest in from_senders:
                expected |= unpack_manifest(manifest, update.version, len(moves))
            sums.append(expected)
            sent.update(moves[index].parameter for index in expected)
            num_bytes += sum(map(update.plan.sizes.get(rank, ()).__getitem__, expected))
        return sums, sent, num_bytes

    def _check_complete(self, update: IncomingUpdate, sent: Mapping[str, int]) -> None:
        """Raise unless each parameter that was sent has all of its pieces."""
        for name, count in sent.items():
            if count != update.plan.num_pieces[name]:
                raise ChecksumMismatch(
                    f"engine {self._name!r}: got {count} of {update.plan.num_pieces[name]} pieces of {name}; version "
                    f"{update.version} is not used. Do the trainer processes disagree on what has changed?"
                )

    @property
    def is_updating(self) -> bool:
        return self._update is not None

    def check(self, version: int) -> None:
        """Raise `UnknownVersion` unless this version is being updated."""
        with self._lock:
            self._current(version)

    def _current(self, version: int) -> IncomingUpdate:
        if self._update is None or self._update.version != version:
            present = "none" if self._update is None else f"version {self._update.version}"
            raise UnknownVersion(
                f"engine {self._name!r}: version {version} is not in progress (in progress: {present})"
            )
        return self._update


class EngineInbox(UpdateReceiver):
    """The receiving half of an engine that has its weights in this process. Keeps its receivers from update to update."""

    def rollback(self, version: int) -> None:
        """Discard an update. Never raises. Its receivers are not used again, as a sender may still be writing to them."""
        with self._lock:
            if self._update is not None and self._update.version == version:
                self._update = None
                self._close_receivers()

    def release(self) -> None:
        """Close the receivers, unless an update is in progress."""
        with self._lock:
            if self._update is None:
                self._close_receivers()

    def close(self) -> None:
        with self._lock:
            self._close_receivers()
            self._update = None

    def _close_receivers(self) -> None:
        """Close the receivers. What was received lives on."""
        raise NotImplementedError


@dataclass
class _Rank:
    image: RankImage
    receivers: dict[int, HostReceiver] = field(default_factory=dict)
    """By slot; created when first needed."""
    pieces: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    """By slot, then by move index: the memory of the piece."""
    writers: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By slot: the trainer ranks that have written to it, and so have opened its link."""


class Inbox(EngineInbox):
    """An engine's receiving half for transports through host memory."""

    def __init__(
        self, parameters: Sequence[Parameter], dtype: str, name: str, listen: ListenConfig | None = None
    ) -> None:
        super().__init__(parameters, dtype, name)
        self._listen = listen
        self._names = list(dict.fromkeys(p.name for p in self._parameters))
        num_ranks = 1 + max(p.rank for p in self._parameters)
        self._ranks = [_Rank(rank_image(self._parameters, rank, dtype)) for rank in range(num_ranks)]
        self._live: dict[str, int | None] = dict.fromkeys(self._names)
        """Slot that the serving version uses, by parameter; None if its array is elsewhere."""

    def begin(self, serving: int, version: int, offer: Offer) -> Destinations:
        with self._lock:
            plan = self._admit(serving, version, offer)
            if offer.fresh or plan is not self._plan or offer.transport != self._transport:
                self._close_receivers()
            one_slot = is_shared(offer.transport)
            slots = {name: 0 if one_slot or live is None else 1 - live for name, live in self._live.items()}
            links = tuple(self._prepare(rank, version, plan, slots, offer) for rank in range(len(self._ranks)))
            self._plan, self._transport = plan, offer.transport
            self._update = IncomingUpdate(version, plan, offer.hashed, slots)
            return Destinations(links, bytes(slots[name] for name in self._names))

    def _prepare(
        self, rank: int, version: int, plan: Plan, slots: Mapping[str, int], offer: Offer
    ) -> tuple[bytes, ...]:
        """Create the receivers that an update needs and prepare them for it; return their links."""
        held, moves = self._ranks[rank], plan.incoming.get(rank, ())
        for slot in sorted(set(slots.values())):
            if slot not in held.receivers:
                receiver = make_receiver(offer.transport, held.image.num_bytes, len(moves), self._listen)
                for parameter in self._parameters:
                    for box in parameter.padding if parameter.rank == rank else ():
                        held.image.view(receiver.buffer, parameter.name)[slices(box)] = 0
                held.receivers[slot], held.pieces[slot] = (
                    receiver,
                    held.image.pieces(receiver.buffer, dict(enumerate(moves))),
                )
            serving = held.pieces.get(1 - slot, {}) if offer.hashed and takes_deltas(offer.transport) else {}
            held.receivers[slot].bases = {
                index: piece for index, piece in serving.items() if self._live[moves[index].parameter] == 1 - slot
            }
            held.receivers[slot].expect(version, held.pieces[slot], offer.hashed)
        return tuple(held.receivers[slot].link if slot in held.receivers else b"" for slot in range(NUM_SLOTS))

    def receive(
        self, version: int, manifests: Sequence[Sequence[bytes]]
    ) -> tuple[dict[str, list[np.ndarray]], StageReport]:
        """Wait for the pieces and verify them; return the new local arrays by parameter and rank, as views of the image.

        Parameters that were not sent are left out. `manifests` has, per rank, one from each trainer process. Blocks: call it in
        a thread."""
        with self._lock:
            update = self._current(version)
        start = time.perf_counter()
        sums, sent, num_bytes = self._manifests(update, manifests, len(self._ranks))
        for rank, expected in enumerate(sums):
            self._verify(rank, update, expected)
        self._check_complete(update, sent)
        arrays: dict[str, list[np.ndarray]] = {name: [] for name in self._names if name in sent}
        for parameter in self._parameters:
            if parameter.name in sent:
                held = self._ranks[parameter.rank]
                receiver = held.receivers[update.slots[parameter.name]]
                arrays[parameter.name].append(held.image.view(receiver.buffer, parameter.name))
        update.slots = {name: slot for name, slot in update.slots.items() if name in sent}
        return arrays, StageReport(num_bytes, time.perf_counter() - start)

    def _verify(self, rank: int, update: IncomingUpdate, expected: Mapping[int, int]) -> None:
        moves = update.plan.incoming.get(rank, ())
        for slot, receiver in self._ranks[rank].receivers.items():
            in_slot = {i: c for i, c in expected.items() if update.slots[moves[i].parameter] == slot}
            self._ranks[rank].writers[slot].update(moves[i].sender for i in in_slot)
            if in_slot:
                step("engine.verify", memory=self._ranks[rank].pieces[slot][min(in_slot)], version=update.version)
            for index, received in receiver.checksums(in_slot).items():
                if update.hashed and received != in_slot[index]:
                    if index in receiver.deltas:
                        why = receiver.deltas[index] or "the result has another checksum than the trainer's values"
                        raise DeltaMismatch(
                            f"engine {self._name!r}, rank {rank}: cannot apply the delta of {moves[index].tensor}: {why}; "
                            f"version {update.version} is not used"
                        )
                    raise ChecksumMismatch(
                        f"engine {self._name!r}, rank {rank}: {moves[index].tensor} arrived with checksum {received:016x}, the "
                        f"trainer sent {in_slot[index]:016x}; version {update.version} is not used. If this repeats, suspect "
                        "the memory or a second writer to the trainer's buffers"
                    )

    def addresses(self) -> dict[str, int]:
        """Return the memory addresses of rank 0's parameters that the serving version reads from a receiver."""
        held = self._ranks[0]
        return {
            name: held.image.view(held.receivers[slot].buffer, name).ctypes.data
            for name, slot in self._live.items()
            if slot in held.receivers
        }

    def foreign(self, names: Iterable[str]) -> dict[str, DLPackView]:
        """Return rank 0's parameters in memory shared with a trainer, as objects that JAX adopts."""
        held = self._ranks[0]
        receiver = held.receivers[0]
        assert isinstance(receiver, SharedReceiver), "other receivers have their own memory"
        return {name: receiver.array(held.image.view(receiver.buffer, name)) for name in names}

    def files(self) -> list[str]:
        """Return the shared-memory files that weights arrive in, for engines whose worker processes read them. Map them before
        the commit: afterwards they may be unlinked."""
        with self._lock:
            return [str(_in_shm(receiver).path) for rank in self._ranks for receiver in rank.receivers.values()]

    def places(self, version: int, names: Iterable[str]) -> dict[str, list[tuple[str, int, tuple[int, ...]] | None]]:
        """Return `(file, offset, local shape)` per rank for parameters that have arrived; None for a rank without the
        parameter."""
        with self._lock:
            update = self._current(version)
        result: dict[str, list[tuple[str, int, tuple[int, ...]] | None]] = {name: [] for name in names}
        for name, places in result.items():
            for rank in self._ranks:
                if name not in rank.image.places:
                    places.append(None)
                    continue
                receiver = _in_shm(rank.receivers[update.slots[name]])
                offset, shape = rank.image.places[name]
                places.append((str(receiver.path), receiver.start + offset, shape))
        return result

    def finish(self, version: int) -> None:
        """End a committed update: the parameters that were sent are in use."""
        with self._lock:
            update = self._current(version)
            self._live |= update.slots
            for rank, held in enumerate(self._ranks):
                senders = {move.sender for move in update.plan.incoming.get(rank, ())}
                for slot, receiver in held.receivers.items():
                    if held.writers[slot] >= senders:  # an update may leave a slot, or the part of a sender, unwritten
                        receiver.senders_opened()
            self._update = None

    def _close_receivers(self) -> None:
        """Close the receivers. The serving version's arrays keep their memory alive."""
        for rank in self._ranks:
            for receiver in rank.receivers.values():
                receiver.close()
            rank.receivers, rank.pieces, rank.writers = {}, {}, defaultdict(set)
        self._live = dict.fromkeys(self._names)


def _in_shm(receiver: HostReceiver) -> ShmReceiver:
    assert isinstance(receiver, ShmReceiver), "other processes can read only shared memory"
    return receiver
