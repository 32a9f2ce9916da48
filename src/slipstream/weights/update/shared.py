"""Weights shared by a trainer and its engines: one copy in memory, written by the trainer and read by every engine.

An update is the transaction of `bridge.sync` without bytes to move:

    trainer                                     engine
    ───────                                     ──────
    begin: the memory       ──────────────────► maps it if it is new; otherwise stops at a step boundary
    (writes)                                    runs no step
    stage: manifests        ──────────────────► hashes memory it has just mapped, and compares
    commit                  ──────────────────► serves the version, drops older prefix caches, and steps again

With vLLM the memory is the engine's own (`transports/shared/engine_memory.py`): its answer to begin says where it is, and it
stops at every begin.

There is no second slot to return to. An update that is rolled back after begin, or whose trainer dies, leaves the engine
without a policy rather than with a half-written one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slipstream.errors import MappingError, TransferError, UnknownVersion, Unsupported
from slipstream.runtime.clock import unix_time
from slipstream.tensors.boxes import full_box, slices
from slipstream.types import (
    Box,
    Destinations,
    EngineInfo,
    EngineSync,
    InFlight,
    Offer,
    Parameter,
    SyncReport,
    UpdateSteps,
)
from slipstream.weights.checksum import ScanOptions, check_finite, pack_manifest, scan
from slipstream.weights.plan import Plan, make_plan
from slipstream.weights.rank_image import RankImage, rank_image
from slipstream.weights.sources.named_tensors import Tensor, check_not_deleted, describe, dtype_name, read
from slipstream.weights.transports.cuda.driver import CudaDriver
from slipstream.weights.transports.shared.cuda_memory import SharedCudaMemory
from slipstream.weights.transports.shared.engine_memory import EngineMemory
from slipstream.weights.transports.shared.host_memory import CUDA_NAME, ENGINE_NAME, NAME, SharedHostMemory
from slipstream.weights.update.publication import UpdateClient
from slipstream.weights.update.transport_choice import host_identity


@dataclass(frozen=True)
class _SharedUpdate:
    """An update between begin and commit."""

    version: int
    engines: tuple[EngineInfo, ...]
    new_engines: tuple[str, ...]
    """Engines that have just mapped the memory."""
    started: float


class Sharing:
    """The trainer's half. Call `begin`, then `commit` or `rollback`; one update at a time."""

    def __init__(
        self,
        client: UpdateClient,
        tensors: Mapping[str, Tensor],
        engines: Sequence[EngineInfo],
        options: ScanOptions,
        device: int = 0,
    ) -> None:
        """Allocate memory for the engines' parameters and copy `tensors` into it; the first `begin` attaches the engines. The
        memory is on the host, or on this process's GPU `device` where the engines are on a GPU. Where it is an engine's own,
        the first `begin` copies `tensors` into it."""
        self._client, self._options = client, options
        model = engines[0]
        check_not_deleted(tensors)
        _check_dtypes(tensors, model)
        self._parameters, self._kind = model.parameters, _kind(model)
        self._plan: Plan = make_plan(describe(tensors), model.tensors, model.parameters, model.dtype)
        for engine in engines:
            self._check(engine)
        self._memory: SharedHostMemory | SharedCudaMemory | EngineMemory
        self.arrays: dict[str, Any] = {}
        """The trainer's view: numpy arrays on the host; on a GPU, objects that `torch.from_dlpack` adopts."""
        self._device = device
        self._waiting = tensors
        """What the first `begin` copies into an engine's memory."""
        self._transport = ENGINE_NAME
        if self._kind != ENGINE_NAME:
            image: RankImage = rank_image(model.parameters, 0, model.dtype)
            size = image.num_bytes
            memory = SharedCudaMemory(size, device) if self._kind == CUDA_NAME else SharedHostMemory(size)
            self._transport = memory.transport
            self._fill(memory, {name: image.view(memory.buffer, name) for name in image.places})
        self._attached: set[tuple[str, str, int]] = set()
        """Engine processes that serve from the memory."""
        self._process: tuple[str, str, int] = ("", "", 0)
        """The engine process whose memory is shared."""
        self._update: _SharedUpdate | None = None

    def _fill(self, memory: SharedHostMemory | SharedCudaMemory | EngineMemory, views: dict[str, np.ndarray]) -> None:
        tensors, self._waiting = self._waiting, {}
        self._memory, self._views = memory, views
        self.arrays = {name: memory.array(view) for name, view in views.items()}
        for name, view in views.items():
            memory.write(view, read(tensors[name], full_box(view.shape)))

    def _open(self, engine: EngineInfo, destinations: Destinations | None) -> None:
        """Find the engine's memory, once."""
        if self.arrays:
            return
        if destinations is None or not destinations.links or not destinations.links[0]:
            raise TransferError(f"engine {engine.name!r} has not said where its parameters lie")
        driver = CudaDriver(self._device)
        memory = EngineMemory(destinations.links[0][0], self._parameters, engine.dtype, self._device, driver)
        self._fill(memory, memory.views)

    @property
    def is_updating(self) -> bool:
        return self._update is not None

    async def begin(self, engines: Sequence[EngineInfo], version: int) -> None:
        """Begin an update. Once this returns, no engine reads the memory until `commit`."""
        started = time.perf_counter()
        for engine in engines:
            self._check(engine)
        if self._kind == ENGINE_NAME and (len(engines) > 1 or (self.arrays and _process(engines[0]) != self._process)):
            raise Unsupported(
                "weights in an engine's own memory have one engine, which must not be restarted: its memory was the module's. "
                "Load the module again, and share it again; bridge.sync sends copies to several engines"
            )
        self._process = _process(engines[0])
        new = tuple(engine.name for engine in engines if _process(engine) not in self._attached)
        plan, transport = self._plan, self._transport
        steps = {}
        for engine in engines:
            is_new = engine.name in new
            offer = Offer(
                plan.to_bytes() if is_new else b"", plan.fingerprint, transport, is_new, self._options.checksums
            )
            steps[engine.name] = UpdateSteps(version, offer)
        try:
            await self._client.send_steps(steps)
            reports = await self._client.receive_reports()
            if self._kind == ENGINE_NAME:
                await asyncio.to_thread(self._open, engines[0], reports[engines[0].name].destinations)
        except BaseException:
            await self._roll_back(version)
            raise
        self._update = _SharedUpdate(version, tuple(engines), new, started)

    async def commit(self, in_flight: InFlight) -> SyncReport:
        """Make the memory's content the version that was begun."""
        if self._update is None:
            raise UnknownVersion("no update of the shared weights is in progress; begin one before writing to them")
        update, self._update = self._update, None
        version, names, written = update.version, [e.name for e in update.engines], time.perf_counter()
        try:
            self._memory.synchronize()
            sums = await asyncio.to_thread(self._scan, bool(update.new_engines))
            manifests = {name: [[pack_manifest(version, sums if name in update.new_engines else {})]] for name in names}
            hashed = time.perf_counter()
            await self._client.send_steps({name: UpdateSteps(version, manifests=manifests[name]) for name in names})
            stages = await self._client.receive_reports()
            staged = time.perf_counter()
            await self._client.send_steps({name: UpdateSteps(version, in_flight=in_flight) for name in names})
            commits = await self._client.receive_reports()
        except BaseException:
            await self._roll_back(version)
            raise
        committed = time.perf_counter()
        self._attached = {_process(e) for e in update.engines if e.name in commits}
        engines = []
        for name, reports in commits.items():
            stage, commit = stages[name].stage, reports.commit
            assert stage is not None and commit is not None
            checksummed = self._options.checksums and name in update.new_engines and self._kind != ENGINE_NAME
            engines.append(EngineSync(name, self._kind, stage, commit, checksummed))
        return SyncReport(
            version=version,
            num_bytes=0,
            plan_seconds=0.0,
            send_seconds=hashed - written,
            stage_seconds=staged - hashed,
            commit_seconds=committed - staged,
            total_seconds=committed - update.started,
            engines=tuple(engines),
            lost=tuple(name for name in names if name not in commits),
            started=unix_time(update.started),
        )

    async def rollback(self) -> None:
        """Give the update up. Engines that serve from the memory have no policy until the next commit."""
        if self._update is not None:
            update, self._update = self._update, None
            await self._roll_back(update.version)

    async def _roll_back(self, version: int) -> None:
        self._attached = set()
        await asyncio.shield(self._client.rollback(version))

    def close(self) -> None:
        """Let no more engines attach. The arrays stay valid."""
        if self.arrays:
            self._memory.close()

    def _scan(self, has_new_engines: bool) -> dict[int, int]:
        """Hash every piece, as engines that have just mapped the memory will. Raise `NonFiniteWeights`; memory on a GPU is read
        only for such engines."""
        reads = (has_new_engines and self._kind != ENGINE_NAME) or (self._options.finite and self._kind == NAME)
        options = replace(self._options, checksums=self._options.checksums and has_new_engines)
        sums: dict[int, int] = {}
        counts: dict[tuple[str, Box], int] = {}
        for index, move in enumerate(self._plan.incoming[0] if reads else ()):
            piece = scan(self._memory.read(self._views[move.parameter][slices(move.local_box)]), options)
            sums[index], counts[move.tensor, move.tensor_box] = piece
        check_finite(counts, {name: view.shape for name, view in self._views.items()}, self._plan.dtype)
        return sums

    def _check(self, engine: EngineInfo) -> None:
        if problem := _problem(engine) or self._difference(engine):
            raise Unsupported(
                f"engine {engine.name!r} ({engine.kind}, {engine.dtype}, {engine.num_ranks} rank(s)) cannot share weights: "
                f"{problem}. bridge.sync sends it a copy instead"
            )

    def _difference(self, engine: EngineInfo) -> str:
        """Return why an engine cannot use the first engine's memory; empty if it can."""
        if engine.parameters != self._parameters:
            return "it holds other parameters"
        if _kind(engine) != self._kind:
            return f"it serves from memory of another kind ({_kind(engine)}) than the first engine ({self._kind})"
        return ""


def _process(engine: EngineInfo) -> tuple[str, str, int]:
    return engine.name, engine.host, engine.pid


def _problem(engine: EngineInfo) -> str:
    """Return why an engine cannot serve from a trainer's memory; empty if it can."""
    if engine.host != host_identity():
        return "it runs on another host"
    if engine.num_ranks > 1 or not (all(map(_is_whole, engine.parameters)) or _kind(engine) == ENGINE_NAME):
        return (
            "its ranks hold parts of tensors, or several tensors fused, and a trainer's module holds whole ones (vLLM with one "
            "rank can share its own memory: VllmConfig(share_weights=True), on a GPU)"
        )
    if not _kind(engine):
        return (
            "it cannot serve from foreign memory. The embedded engine can, on CPU and GPU, with tensor_parallel_size=1 and "
            "without a draft model"
        )
    return ""


def _kind(engine: EngineInfo) -> str:
    """Return the kind of shared memory that an engine serves from; empty if none."""
    return next((name for name in (NAME, CUDA_NAME, ENGINE_NAME) if name in engine.transports), "")


def _is_whole(parameter: Parameter) -> bool:
    """Whether a parameter is exactly one tensor of the checkpoint."""
    frame = full_box(parameter.shape)
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
                f"{name} is {kind}, and engine {engine.name!r} computes in {engine.dtype}; shared memory has one dtype. Start "
                f"the engine with EmbeddedConfig(dtype={kind!r}), or convert the module"
            )
