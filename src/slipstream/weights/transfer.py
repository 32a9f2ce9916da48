"""Running a plan: the sending half and the receiving half of an update, side by side.

trainer                                   engine
───────                                   ──────
make links ───────── Offer ─────────────► Inbox.begin     check plan and fingerprint, open the links
send: pack, cast, checksum → stream       (the engine goes on generating)
manifest of checksums ──────────────────► Inbox.receive   verify, copy into fresh arrays
                                          engine.commit   swap at a step boundary, Inbox.finish
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from slipstream.errors import (
    ChecksumMismatch,
    PlanMismatch,
    UnknownVersion,
    UpdateInProgress,
    VersionError,
)
from slipstream.types import Offer, Parameter, StageReport
from slipstream.weights.checksum import checksum, pack_manifest, unpack_manifest
from slipstream.weights.layout import shape_of, slices
from slipstream.weights.plan import Plan, check_cover
from slipstream.weights.source import Tensor, read
from slipstream.weights.transports import open_receiver
from slipstream.weights.transports.base import Receiver, Sender

TRAINER_RANK = 0
"""One trainer process sends for now; the plan's moves name their sender already."""


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name)) if name == "bfloat16" else np.dtype(name)


def send(plan: Plan, receiver_rank: int, tensors: Mapping[str, Tensor], stream: Sender, version: int) -> bytes:
    """Packs one rank's pieces into its stream, cast to the engine's dtype, and returns their manifest."""
    dtype = numpy_dtype(plan.dtype)
    checksums = []
    for move in plan.streams[TRAINER_RANK, receiver_rank]:
        region = stream.region(move.offset, move.num_bytes)
        piece = region.view(dtype).reshape(shape_of(move.tensor_box))
        np.copyto(piece, read(tensors[move.tensor], move.tensor_box), casting="same_kind")
        checksums.append(checksum(region))
    stream.flush()
    return pack_manifest(version, checksums)


@dataclass
class _Update:
    version: int
    plan: Plan
    links: tuple[bytes, ...]


class Inbox:
    """An engine's receiving half. Plans and opened links are kept from update to update: a trainer that syncs every
    step sends its plan once and maps its memory once. One update at a time; safe to call from several threads."""

    def __init__(self, parameters: Sequence[Parameter], dtype: str, name: str) -> None:
        self._parameters, self._dtype, self._name = tuple(parameters), dtype, name
        self._num_ranks = 1 + max(p.rank for p in self._parameters)
        self._plan: Plan | None = None
        self._receivers: dict[bytes, Receiver] = {}
        self._update: _Update | None = None
        self._lock = threading.Lock()

    def begin(self, serving: int, version: int, offer: Offer) -> None:
        """Raises before anything changes; `serving` is the version that the engine generates with."""
        with self._lock:
            if self._update is not None:
                raise UpdateInProgress(
                    f"engine {self._name!r} is receiving version {self._update.version}; version {version} must wait or "
                    "the other be rolled back"
                )
            if version <= serving:
                raise VersionError(f"engine {self._name!r} serves version {serving}; version {version} is not newer")
            if len(offer.links) != self._num_ranks:
                raise PlanMismatch(
                    f"engine {self._name!r} has {self._num_ranks} rank(s), the trainer offers {len(offer.links)} link(s)"
                )
            plan = self._plan_for(offer)
            receivers = {link: self._receivers.get(link) or open_receiver(link) for link in offer.links}
            for old in self._receivers.keys() - receivers.keys():
                self._receivers[old].close()
            self._plan, self._receivers = plan, receivers
            self._update = _Update(version, plan, offer.links)

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

    def receive(self, version: int, manifests: Sequence[bytes]) -> tuple[dict[str, list[np.ndarray]], StageReport]:
        """For each parameter its new local array per rank, in memory of its own, verified. Blocks: call in a thread."""
        with self._lock:
            update = self._current(version)
            if len(manifests) != self._num_ranks:
                raise ChecksumMismatch(f"{len(manifests)} manifests came for {self._num_ranks} rank(s)")
            streams = [(self._receivers[link], manifest) for link, manifest in zip(update.links, manifests)]
        start, verify_seconds = time.perf_counter(), 0.0
        dtype = numpy_dtype(self._dtype)
        shapes = {(p.name, p.rank): p.shape for p in self._parameters}
        arrays: dict[tuple[str, int], np.ndarray] = {key: np.empty(shape, dtype) for key, shape in shapes.items()}
        for parameter in self._parameters:
            for box in parameter.padding:
                arrays[parameter.name, parameter.rank][slices(box)] = 0
        for rank, (receiver, manifest) in enumerate(streams):
            moves = update.plan.streams.get((TRAINER_RANK, rank), ())
            for move, expected in zip(moves, unpack_manifest(manifest, version, len(moves))):
                region = receiver.region(move.offset, move.num_bytes)
                piece = region.view(dtype).reshape(shape_of(move.local_box))
                target = arrays[move.parameter, rank]
                target[slices(move.local_box)] = piece
                # Verified after the copy, on the copy where it is whole: what is checked is what will be used.
                verify_start = time.perf_counter()
                copied = target if piece.shape == target.shape else np.ascontiguousarray(target[slices(move.local_box)])
                if (found := checksum(copied)) != expected:
                    raise ChecksumMismatch(
                        f"engine {self._name!r}, rank {rank}: {move.tensor} arrived with checksum {found:016x}, the trainer "
                        f"sent {expected:016x}; version {version} is not used. If it comes again, suspect the memory or "
                        "a second writer to the trainer's buffers"
                    )
                verify_seconds += time.perf_counter() - verify_start
        by_name: dict[str, list[np.ndarray]] = {}
        for (name, _), array in arrays.items():
            by_name.setdefault(name, []).append(array)
        seconds = time.perf_counter() - start - verify_seconds
        return by_name, StageReport(update.plan.num_bytes, seconds, verify_seconds)

    def check(self, version: int) -> None:
        """Raises `UnknownVersion` unless this update is under way."""
        with self._lock:
            self._current(version)

    def finish(self, version: int) -> None:
        """The version is committed."""
        with self._lock:
            self._current(version)
            self._update = None

    def rollback(self, version: int) -> None:
        """Forgets the update; never raises."""
        with self._lock:
            if self._update is not None and self._update.version == version:
                self._update = None

    def close(self) -> None:
        with self._lock:
            for receiver in self._receivers.values():
                receiver.close()
            self._receivers, self._update = {}, None

    def _current(self, version: int) -> _Update:
        if self._update is None or self._update.version != version:
            under_way = "none" if self._update is None else f"version {self._update.version}"
            raise UnknownVersion(f"engine {self._name!r}: version {version} is not under way (under way: {under_way})")
        return self._update
