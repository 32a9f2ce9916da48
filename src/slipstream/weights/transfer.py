"""Running a plan: the sending half and the receiving half of an update, side by side.

    trainer                                     engine
    ───────                                     ──────
    Offer: plan, transport  ──────────────────► Inbox.begin     check the plan, make room: two images per rank at most
    Berths: links, slots    ◄──────────────────
    send: cast, copy, checksum  ═══ bytes ════► the slot of each parameter that is not in use
    manifests: checksums    ──────────────────► Inbox.receive   verify; the new arrays are views of the image
                                                engine.commit   swap at a step boundary, then Inbox.finish

A parameter has two slots, and lands in the one that the serving version does not use. What did not change is not sent:
the new version then shares that parameter with the old one. (Memory that a trainer shares is one slot, written in place.)"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from slipstream.errors import (
    ChecksumMismatch,
    PlanMismatch,
    UnknownVersion,
    UpdateInProgress,
    VersionError,
)
from slipstream.types import Berths, Offer, Parameter, StageReport
from slipstream.weights.checksum import pack_manifest, unpack_manifest
from slipstream.weights.dlpack import Foreign
from slipstream.weights.image import Image, image_of
from slipstream.weights.layout import shape_of, slices
from slipstream.weights.plan import Move, Plan, check_cover, lacks_tensor
from slipstream.weights.source import Tensor, read
from slipstream.weights.transports import SMALL_BYTES, make_landing, open_sender
from slipstream.weights.transports.base import Landing, Sender
from slipstream.weights.transports.shared import SharedLanding, is_shared
from slipstream.weights.transports.shm import ShmLanding
from slipstream.weights.transports.tcp import Listen

NUM_SLOTS = 2


class Outbox:
    """The sending half towards one engine: links opened once and kept, slots remembered from commit to commit."""

    def __init__(self, plan: Plan, parameters: Sequence[Parameter], rank: int, hashed: bool) -> None:
        self._plan, self._rank, self._hashed = plan, rank, hashed
        self._names = list(dict.fromkeys(p.name for p in parameters))
        num_ranks = 1 + max(p.rank for p in parameters)
        self._images = [image_of(parameters, r, plan.dtype) for r in range(num_ranks)]
        self._streams = [plan.stream(rank, r) for r in range(num_ranks)]
        self._senders: dict[bytes, Sender] = {}
        self.berths: Berths | None = None
        """What the engine answered last, or, after a commit, what it will answer next."""

    note = ""

    async def confirmed(self) -> None:
        """What the engine's ranks have to say before the version may be used, they say when it is staged."""

    async def released(self) -> float:
        """Nothing is read out of the trainer's memory."""
        return 0.0

    def promise(self, unchanged: Set[str], version: int) -> None:
        """Checksums are known when the bytes are sent."""

    def send(
        self, tensors: Mapping[str, Tensor], unchanged: Set[str], version: int, is_computed: bool = False
    ) -> tuple[list[bytes], int]:
        """Sends what changed to every rank; returns a manifest per rank and the number of bytes. A parameter is sent
        unless all the tensors that it is made of are unchanged."""
        sent = self._plan.changed(unchanged)
        ranks = range(len(self._streams))
        if len(ranks) == 1 or not sent or self._plan.num_bytes <= SMALL_BYTES:
            sums = [self._send_rank(rank, tensors, sent, version) for rank in ranks]
        else:
            with ThreadPoolExecutor(len(ranks)) as pool:  # copying and hashing let go of the interpreter
                sums = list(pool.map(lambda rank: self._send_rank(rank, tensors, sent, version), ranks))
        num_bytes = sum(self._plan.size_of(self._streams[r][i]) for r, found in enumerate(sums) for i in found)
        return [pack_manifest(version, found) for found in sums], num_bytes

    def _send_rank(self, rank: int, tensors: Mapping[str, Tensor], sent: set[str], version: int) -> dict[int, int]:
        """Checksums of what was sent, by index."""
        assert self.berths is not None
        slot_of = dict(zip(self._names, self.berths.slots))
        checksums: dict[int, int] = {}
        used: dict[int, Sender] = {}
        for index, move in self._streams[rank].items() if sent else ():
            if move.parameter in sent:
                slot = slot_of[move.parameter]
                if slot not in used:
                    used[slot] = self._sender(self.berths.links[rank][slot], rank)
                    used[slot].begin(version)
                array = self._read(tensors, move)
                checksums[index] = used[slot].send(index, array.reshape(shape_of(move.local_box)))
        for sender in used.values():
            sender.flush()
        return checksums

    def _read(self, tensors: Mapping[str, Tensor], move: Move) -> np.ndarray:
        if move.tensor not in tensors:
            raise lacks_tensor(move)
        return read(tensors[move.tensor], move.tensor_box)

    def committed(self, unchanged: Set[str]) -> None:
        """What was sent is in use now; it lands in its other slot next time."""
        assert self.berths is not None
        sent = self._plan.changed(unchanged)
        slots = bytes(1 - s if name in sent else s for name, s in zip(self._names, self.berths.slots))
        complete = all(link for links in self.berths.links for link in links)
        self.berths = Berths(self.berths.links, slots) if complete else None

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._senders, self.berths = {}, None

    def _sender(self, link: bytes, rank: int) -> Sender:
        if link not in self._senders:
            self._senders[link] = open_sender(link, self._images[rank], self._streams[rank], self._hashed)
        return self._senders[link]


@dataclass
class Update:
    version: int
    plan: Plan
    hashed: bool
    slots: dict[str, int] = field(default_factory=dict)


class Reception:
    """What an engine knows of the update under way, whichever way its bytes come: one at a time, newer than what serves, by a
    plan that fits. The plan is kept from update to update. Safe to call from several threads."""

    def __init__(self, parameters: Sequence[Parameter], dtype: str, name: str) -> None:
        self._parameters, self._dtype, self._name = tuple(parameters), dtype, name
        self._plan: Plan | None = None
        self._transport = ""
        self._update: Update | None = None
        self._lock = threading.Lock()

    def _admit(self, serving: int, version: int, offer: Offer) -> Plan:
        """The plan that the update will follow. Raises before anything changes; `serving` is the version that the engine
        generates with."""
        if self._update is not None:
            raise UpdateInProgress(
                f"engine {self._name!r} is receiving version {self._update.version}; version {version} must wait, "
                "or the other be rolled back"
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
            raise PlanMismatch(f"the plan's fingerprint is {plan.fingerprint}, the offer says {offer.fingerprint}")
        if plan.dtype != self._dtype:
            raise PlanMismatch(f"engine {self._name!r} holds {self._dtype}, the plan sends {plan.dtype}")
        check_cover(plan, self._parameters)
        return plan

    def _manifests(
        self, update: Update, manifests: Sequence[Sequence[bytes]], num_ranks: int
    ) -> tuple[list[dict[int, int]], Counter[str], int]:
        """What trainers say that they sent: checksums per rank by a piece's index; how many pieces of each parameter; bytes."""
        if len(manifests) != num_ranks:
            raise ChecksumMismatch(f"engine {self._name!r}: manifests for {len(manifests)} of {num_ranks} rank(s) came")
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

    def _check_whole(self, update: Update, sent: Mapping[str, int]) -> None:
        """A parameter comes whole or not at all."""
        for name, count in sent.items():
            if count != update.plan.num_pieces[name]:
                raise ChecksumMismatch(
                    f"engine {self._name!r}: {count} of the {update.plan.num_pieces[name]} pieces of {name} came; version "
                    f"{update.version} is not used. Did trainer ranks disagree on what has changed?"
                )

    @property
    def is_updating(self) -> bool:
        return self._update is not None

    def check(self, version: int) -> None:
        """Raises `UnknownVersion` unless this update is under way."""
        with self._lock:
            self._current(version)

    def _current(self, version: int) -> Update:
        if self._update is None or self._update.version != version:
            under_way = "none" if self._update is None else f"version {self._update.version}"
            raise UnknownVersion(f"engine {self._name!r}: version {version} is not under way (under way: {under_way})")
        return self._update


@dataclass
class _Rank:
    image: Image
    landings: dict[int, Landing] = field(default_factory=dict)
    """By slot; made when first needed."""
    pieces: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    """By slot, then by a move's index: where it lands."""


class Inbox(Reception):
    """An engine's receiving half, for bytes that come through host memory. Landings are kept from update to update."""

    def __init__(self, parameters: Sequence[Parameter], dtype: str, name: str, listen: Listen | None = None) -> None:
        super().__init__(parameters, dtype, name)
        self._listen = listen
        self._names = list(dict.fromkeys(p.name for p in self._parameters))
        num_ranks = 1 + max(p.rank for p in self._parameters)
        self._ranks = [_Rank(image_of(self._parameters, rank, dtype)) for rank in range(num_ranks)]
        self._live: dict[str, int | None] = dict.fromkeys(self._names)
        """Slot that the serving version uses; None when its arrays are elsewhere."""

    def begin(self, serving: int, version: int, offer: Offer) -> Berths:
        with self._lock:
            plan = self._admit(serving, version, offer)
            if offer.fresh or plan is not self._plan or offer.transport != self._transport:
                self._leave_landings()
            one_slot = is_shared(offer.transport)
            slots = {name: 0 if one_slot or live is None else 1 - live for name, live in self._live.items()}
            links = tuple(self._prepare(rank, version, plan, slots, offer) for rank in range(len(self._ranks)))
            self._plan, self._transport = plan, offer.transport
            self._update = Update(version, plan, offer.hashed, slots)
            return Berths(links, bytes(slots[name] for name in self._names))

    def _prepare(
        self, rank: int, version: int, plan: Plan, slots: Mapping[str, int], offer: Offer
    ) -> tuple[bytes, ...]:
        """Makes the landings that this update needs, and tells them what to expect."""
        held, moves = self._ranks[rank], plan.incoming.get(rank, ())
        for slot in sorted(set(slots.values())):
            if slot not in held.landings:
                held.landings[slot] = make_landing(offer.transport, held.image.num_bytes, len(moves), self._listen)
                self._clear_padding(rank, slot)
                held.pieces[slot] = {
                    index: held.image.piece(held.landings[slot].buffer, move.parameter, move.local_box)
                    for index, move in enumerate(moves)
                }
            held.landings[slot].expect(version, held.pieces[slot], offer.hashed)
        return tuple(held.landings[slot].link if slot in held.landings else b"" for slot in range(NUM_SLOTS))

    def _clear_padding(self, rank: int, slot: int) -> None:
        landing = self._ranks[rank].landings[slot]
        for parameter in self._parameters:
            if parameter.rank == rank:
                for box in parameter.padding:
                    self._ranks[rank].image.view(landing.buffer, parameter.name)[slices(box)] = 0

    def receive(
        self, version: int, manifests: Sequence[Sequence[bytes]]
    ) -> tuple[dict[str, list[np.ndarray]], StageReport]:
        """For each parameter that was sent, its new local array per rank: a view of the image, verified. The others are
        as they were. `manifests` has, per rank, one from each trainer rank. Blocks: call it in a thread."""
        with self._lock:
            update = self._current(version)
        start = time.perf_counter()
        sums, sent, num_bytes = self._manifests(update, manifests, len(self._ranks))
        for rank, expected in enumerate(sums):
            self._verify(rank, update, expected)
        self._check_whole(update, sent)
        arrays: dict[str, list[np.ndarray]] = {name: [] for name in self._names if name in sent}
        for parameter in self._parameters:
            if parameter.name in sent:
                held = self._ranks[parameter.rank]
                landing = held.landings[update.slots[parameter.name]]
                arrays[parameter.name].append(held.image.view(landing.buffer, parameter.name))
        update.slots = {name: slot for name, slot in update.slots.items() if name in sent}
        return arrays, StageReport(num_bytes, time.perf_counter() - start)

    def _verify(self, rank: int, update: Update, expected: Mapping[int, int]) -> None:
        moves = update.plan.incoming.get(rank, ())
        for slot, landing in self._ranks[rank].landings.items():
            here = {i: c for i, c in expected.items() if update.slots[moves[i].parameter] == slot}
            for index, found in landing.checksums(here).items():
                if update.hashed and found != here[index]:
                    raise ChecksumMismatch(
                        f"engine {self._name!r}, rank {rank}: {moves[index].tensor} arrived with checksum {found:016x}, the "
                        f"trainer sent {here[index]:016x}; version {update.version} is not used. If it comes again, suspect "
                        "the memory, or a second writer to the trainer's buffers"
                    )

    def addresses(self) -> dict[str, int]:
        """Of the parameters of rank 0 that the serving version has from a landing: where they lie."""
        held = self._ranks[0]
        return {
            name: held.image.view(held.landings[slot].buffer, name).ctypes.data
            for name, slot in self._live.items()
            if slot in held.landings
        }

    def foreign(self, names: Iterable[str]) -> dict[str, Foreign]:
        """Parameters of rank 0 in memory that a trainer shares, as JAX adopts them."""
        held = self._ranks[0]
        landing = held.landings[0]
        assert isinstance(landing, SharedLanding), "other landings are the engine's own"
        return {name: landing.array(held.image.view(landing.buffer, name)) for name in names}

    def files(self) -> list[str]:
        """The files of shared memory in which weights land, for an engine whose own processes read them there. They may be
        gone from the directory once the version is committed: map them before."""
        with self._lock:
            return [str(_in_shm(landing).path) for rank in self._ranks for landing in rank.landings.values()]

    def places(self, version: int, names: Iterable[str]) -> dict[str, list[tuple[str, int, tuple[int, ...]]]]:
        """For parameters that have come, per rank: file, offset in it, local shape."""
        with self._lock:
            update = self._current(version)
        found: dict[str, list[tuple[str, int, tuple[int, ...]]]] = {name: [] for name in names}
        for name, places in found.items():
            for rank in self._ranks:
                landing = _in_shm(rank.landings[update.slots[name]])
                offset, shape = rank.image.places[name]
                places.append((str(landing.path), landing.start + offset, shape))
        return found

    def finish(self, version: int) -> None:
        """The version is committed: what was sent is in use."""
        with self._lock:
            update = self._current(version)
            self._live |= update.slots
            for rank in self._ranks:
                for landing in rank.landings.values():
                    landing.settle()
            self._update = None

    def rollback(self, version: int) -> None:
        """Forgets the update; never raises. Its landings are left to whoever may still be writing into them."""
        with self._lock:
            if self._update is not None and self._update.version == version:
                self._update = None
                self._leave_landings()

    def leave(self) -> None:
        """Lets go of the landings, unless an update is under way in them."""
        with self._lock:
            if self._update is None:
                self._leave_landings()

    def close(self) -> None:
        with self._lock:
            self._leave_landings()
            self._update = None

    def _leave_landings(self) -> None:
        """The serving version's arrays keep their memory alive as long as they need it."""
        for rank in self._ranks:
            for landing in rank.landings.values():
                landing.close()
            rank.landings, rank.pieces = {}, {}
        self._live = dict.fromkeys(self._names)


def _in_shm(landing: Landing) -> ShmLanding:
    assert isinstance(landing, ShmLanding), "other processes can see shared memory alone"
    return landing
