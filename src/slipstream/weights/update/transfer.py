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

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from slipstream.errors import (
    ChecksumMismatch,
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
from slipstream.weights.checksum import PieceScan, ScanOptions, check_finite, pack_manifest, unpack_manifest
from slipstream.weights.plan import Plan, check_cover, missing_tensor_error
from slipstream.weights.rank_image import RankImage, rank_image
from slipstream.weights.sources.named_tensors import Tensor, read
from slipstream.weights.transports.contract import HostReceiver, HostSender
from slipstream.weights.transports.host.shm import ShmReceiver
from slipstream.weights.transports.host.tcp import ListenConfig
from slipstream.weights.transports.shared.host_memory import SharedReceiver, is_shared
from slipstream.weights.update.transport_choice import SMALL_BYTES, make_receiver, open_sender

NUM_SLOTS = 2


class CannotRelay(TransferError):
    """The engines cannot pass weights on to each other. Nothing was sent."""


class Outbox:
    """The sending half for one engine, or for a chain of replicas. Keeps its connections, and the slots in use, from update to
    update."""

    def __init__(self, plan: Plan, parameters: Sequence[Parameter], rank: int, options: ScanOptions) -> None:
        self._plan, self._rank, self._options = plan, rank, options
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
    ) -> tuple[list[bytes], int]:
        """Send the parameters with changed tensors to all ranks; return a manifest per rank and the number of bytes. Raise
        `NonFiniteWeights` if values are not finite, unless the options say that it does not matter.

        The engines of `replicas` get the same bytes, each from the engine before it. Raise `CannotRelay` if they cannot."""
        sent = self._plan.changed_parameters(unchanged)
        ranks = range(len(self._streams))
        self._used = []
        for replica in replicas:  # an engine that waits for the one before it should be connected to nobody else
            replica._close_senders()
        paths = self._open_paths([replica.destinations for replica in replicas if replica.destinations], sent)
        if len(ranks) == 1 or not sent or self._plan.num_bytes <= SMALL_BYTES:
            scans = [self._send_rank(rank, tensors, paths, version) for rank in ranks]
        else:
            with ThreadPoolExecutor(len(ranks)) as pool:  # copying and hashing release the GIL
                scans = list(pool.map(lambda rank: self._send_rank(rank, tensors, paths, version), ranks))
        self._check_finite(tensors, scans)
        for sender in self._used:
            sender.flush()
        num_bytes = sum(self._plan.size_of(self._streams[r][i]) for r, found in enumerate(scans) for i in found)
        sums = [{index: scan.checksum for index, scan in found.items()} for found in scans]
        return [pack_manifest(version, found) for found in sums], num_bytes

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
        self, rank: int, tensors: Mapping[str, Tensor], paths: Mapping[str, tuple[int, ...]], version: int
    ) -> dict[int, PieceScan]:
        """Send one rank's pieces; return what was found out about them, by index."""
        scans: dict[int, PieceScan] = {}
        used: dict[tuple[int, ...], HostSender] = {}
        for index, move in self._streams[rank].items() if paths else ():
            if (slots := paths.get(move.parameter)) is not None:
                if slots not in used:
                    used[slots] = self._sender(rank, slots)
                    used[slots].begin(version)
                if move.tensor not in tensors:
                    raise missing_tensor_error(move)
                array = read(tensors[move.tensor], move.tensor_box)
                scans[index] = used[slots].send(index, array.reshape(shape_of(move.local_box)))
        self._used += used.values()
        return scans

    def committed(self, unchanged: Set[str]) -> None:
        """Note that the sent parameters are in use; next time they go to their other slot."""
        assert self.destinations is not None
        sent = self._plan.changed_parameters(unchanged)
        slots = bytes(1 - s if name in sent else s for name, s in zip(self._names, self.destinations.slots))
        complete = all(link for links in self.destinations.links for link in links)
        self.destinations = Destinations(self.destinations.links, slots) if complete else None

    def close(self) -> None:
        self._close_senders()
        self._used, self.destinations = [], None

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


@dataclass
class _Rank:
    image: RankImage
    receivers: dict[int, HostReceiver] = field(default_factory=dict)
    """By slot; created when first needed."""
    pieces: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    """By slot, then by move index: the memory of the piece."""
    writers: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By slot: the trainer ranks that have written to it, and so have opened its link."""


class Inbox(UpdateReceiver):
    """An engine's receiving half for transports through host memory. Keeps its receivers from update to update."""

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
        """Close the receivers. The serving version's arrays keep their memory alive."""
        for rank in self._ranks:
            for receiver in rank.receivers.values():
                receiver.close()
            rank.receivers, rank.pieces, rank.writers = {}, {}, defaultdict(set)
        self._live = dict.fromkeys(self._names)


def _in_shm(receiver: HostReceiver) -> ShmReceiver:
    assert isinstance(receiver, ShmReceiver), "other processes can read only shared memory"
    return receiver
