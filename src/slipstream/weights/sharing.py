"""Weights that trainer and engines share: one copy in memory, written by the trainer and read by every engine.

An update is the transaction of `bridge.sync`, without bytes to move:

    trainer                                     engine
    ───────                                     ──────
    Offer: the memory       ──────────────────► map it, if that is new; else stop at a step boundary, for it is what serves
    (writes)                                    no step runs
    manifests               ──────────────────► what is new is hashed, and compared with what the trainer has
    commit                  ──────────────────► the version counts, what older ones cached is forgotten, and steps run again

There is no second slot to go back to. An update that is called off after `begin`, or whose trainer dies, leaves the engine
without a policy rather than with half of one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import MappingError, UnknownVersion, Unsupported
from slipstream.types import EngineInfo, EngineSync, InFlight, Offer, Parameter, SyncReport
from slipstream.weights.checksum import checksum, pack_manifest
from slipstream.weights.image import Image, image_of
from slipstream.weights.layout import slices, whole
from slipstream.weights.plan import Plan, make_plan
from slipstream.weights.publisher import Fleet
from slipstream.weights.source import Tensor, describe, dtype_name, read
from slipstream.weights.transports import host_identity
from slipstream.weights.transports.shared import CUDA_NAME, NAME, Memory, SharedMemory
from slipstream.weights.transports.shared_cuda import DeviceMemory


@dataclass(frozen=True)
class _UnderWay:
    version: int
    engines: tuple[EngineInfo, ...]
    new: tuple[str, ...]
    """Engines that have just mapped the memory."""
    started: float


class Sharing:
    """The trainer's half. Not for concurrent use: `begin`, then `commit` or `rollback`."""

    def __init__(
        self, fleet: Fleet, tensors: Mapping[str, Tensor], engines: Sequence[EngineInfo], hashed: bool, device: int = 0
    ) -> None:
        """Memory for an engine's parameters, holding `tensors`; engines come into it with the first `begin`. It is the host's,
        or, where engines are on a GPU, that of this process's GPU `device`."""
        self._fleet, self._hashed = fleet, hashed
        model = engines[0]
        _check_dtypes(tensors, model)
        self._parameters, self._kind = model.parameters, _kind(model)
        self._plan: Plan = make_plan(describe(tensors), model.tensors, model.parameters, model.dtype)
        for engine in engines:
            self._check(engine)
        image: Image = image_of(model.parameters, 0, model.dtype)
        self._memory = _memory_for(model, image.num_bytes, device)
        self._views = {name: image.view(self._memory.buffer, name) for name in image.places}
        self.arrays: dict[str, Any] = {name: self._memory.array(view) for name, view in self._views.items()}
        """For the trainer: numpy's on the host; of a GPU's memory, what PyTorch adopts (`torch.from_dlpack`)."""
        for name, view in self._views.items():
            self._memory.write(view, read(tensors[name], whole(view.shape)))
        self._attached: set[tuple[str, str, int]] = set()
        """Engines, as processes, that serve from the memory."""
        self._under_way: _UnderWay | None = None

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    async def begin(self, engines: Sequence[EngineInfo], version: int) -> None:
        """Once this returns, no engine reads the memory until `commit`."""
        started = time.perf_counter()
        new = []
        for engine in engines:
            self._check(engine)
            if _process(engine) not in self._attached:
                new.append(engine.name)
        plan, transport = self._plan, self._memory.transport
        offers = {
            e.name: Offer(
                plan.to_bytes() if e.name in new else b"", plan.fingerprint, transport, e.name in new, self._hashed
            )
            for e in engines
        }
        try:
            await self._fleet.begin(version, offers, False)
            await self._fleet.begun()
        except BaseException:
            await self._roll_back(version)
            raise
        self._under_way = _UnderWay(version, tuple(engines), tuple(new), started)

    async def commit(self, in_flight: InFlight) -> SyncReport:
        """What the memory holds now is the version that was begun."""
        if self._under_way is None:
            raise UnknownVersion("no version of the shared weights is under way: begin one before writing to them")
        update, self._under_way = self._under_way, None
        version, written = update.version, time.perf_counter()
        try:
            self._memory.settle()
            sums = await asyncio.to_thread(self._checksums) if update.new else {}
            manifests = {
                e.name: [[pack_manifest(version, sums if e.name in update.new else {})]] for e in update.engines
            }
            hashed = time.perf_counter()
            await self._fleet.stage(version, manifests)
            stages = await self._fleet.staged()
            staged = time.perf_counter()
            await self._fleet.commit(version, in_flight)
            commits = await self._fleet.committed()
        except BaseException:
            await self._roll_back(version)
            raise
        committed = time.perf_counter()
        self._attached = {_process(e) for e in update.engines if e.name in commits}
        return SyncReport(
            version=version,
            num_bytes=0,
            plan_seconds=0.0,
            send_seconds=hashed - written,
            stage_seconds=staged - hashed,
            commit_seconds=committed - staged,
            total_seconds=committed - update.started,
            engines=tuple(EngineSync(name, self._kind, stages[name], commits[name]) for name in commits),
            lost=tuple(e.name for e in update.engines if e.name not in commits),
        )

    async def rollback(self) -> None:
        """Engines that served from the memory have no policy until the next commit."""
        if self._under_way is not None:
            update, self._under_way = self._under_way, None
            await self._roll_back(update.version)

    async def _roll_back(self, version: int) -> None:
        self._attached = set()
        await asyncio.shield(self._fleet.rollback(version))

    def close(self) -> None:
        """No engine can come into the memory any more; the arrays stay."""
        self._memory.close()

    def _checksums(self) -> dict[int, int]:
        """Of all pieces, as an engine that is new will find them."""
        found = {}
        for index, move in enumerate(self._plan.incoming[0]):
            piece = self._views[move.parameter][slices(move.local_box)]
            found[index] = checksum(self._memory.read(piece)) if self._hashed else 0
        return found

    def _check(self, engine: EngineInfo) -> None:
        if problem := _problem(engine) or self._difference(engine):
            raise Unsupported(
                f"engine {engine.name!r} ({engine.kind}, {engine.dtype}, {engine.num_ranks} rank(s)) cannot share weights: "
                f"{problem}. bridge.sync brings it a copy"
            )

    def _difference(self, engine: EngineInfo) -> str:
        """Why it cannot have the memory that the first engine has."""
        if engine.parameters != self._parameters:
            return "it holds other parameters"
        if _kind(engine) != self._kind:
            return f"it serves from memory of another kind ({_kind(engine)}) than the first engine ({self._kind})"
        return ""


def _process(engine: EngineInfo) -> tuple[str, str, int]:
    return engine.name, engine.host, engine.pid


def _problem(engine: EngineInfo) -> str:
    """Why an engine cannot serve from a trainer's memory; empty if it can."""
    if engine.host != host_identity():
        return "it runs on another host"
    if engine.num_ranks > 1 or not all(map(_is_whole, engine.parameters)):
        return "a module holds whole tensors, and its ranks hold parts of them, or several in one"
    if not _kind(engine):
        return (
            "it does not take foreign memory for its own. The embedded engine does, on CPU and on a GPU, with tp=1 and "
            "without a draft model"
        )
    return ""


def _kind(engine: EngineInfo) -> str:
    """Of memory that an engine serves from; empty if there is none."""
    return next((name for name in (NAME, CUDA_NAME) if name in engine.transports), "")


def _memory_for(engine: EngineInfo, size: int, device: int) -> Memory:
    return DeviceMemory(size, device) if _kind(engine) == CUDA_NAME else SharedMemory(size)


def _is_whole(parameter: Parameter) -> bool:
    """Whether it is one tensor, as it is in the checkpoint."""
    frame = whole(parameter.shape)
    return (
        len(parameter.parts) == 1
        and not parameter.padding
        and parameter.parts[0].tensor == parameter.name
        and parameter.parts[0].tensor_box == parameter.parts[0].local_box == frame
    )


def _check_dtypes(tensors: Mapping[str, Tensor], engine: EngineInfo) -> None:
    for name, tensor in tensors.items():
        if (kind := dtype_name(tensor)) != engine.dtype:
            raise MappingError(
                f"{name} is {kind}, and engine {engine.name!r} computes in {engine.dtype}: memory that both use has one dtype. "
                f"Start the engine with EngineConfig(dtype={kind!r}), or convert the module"
            )
