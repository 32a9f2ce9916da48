"""Weights into vLLM's workers on a GPU: copied from the trainer's GPU memory (`cuda`), received over NCCL, or read from shared
memory. They go straight into the live, fused parameters, or, where no layout of these is known, through vLLM's own loader."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slipstream.engines.frontend.checks import not_staged
from slipstream.engines.frontend.draw_rate import Drawn
from slipstream.engines.vllm.adapters import VllmAdapters
from slipstream.engines.vllm.weight_loading import (
    WORKER_WAIT_SECONDS,
    CallWorkers,
    Inboxes,
    MappedFiles,
    Place,
    WeightsPending,
    missing_tensors,
)
from slipstream.errors import ChecksumMismatch, EngineFailure, SlipstreamError, TransferError
from slipstream.types import Destinations, Offer, Parameter, ParameterChecksums, StageReport, TensorSpec
from slipstream.weights.checksum import strip_manifest_header
from slipstream.weights.plan import Plan
from slipstream.weights.rank_image import num_bytes
from slipstream.weights.transports.device import DEVICE_TRANSPORTS
from slipstream.weights.update.transfer import IncomingUpdate, UpdateReceiver

log = logging.getLogger(__name__)

HASHED_BYTES = 256 << 20
"""Bytes a worker hashes per call; vLLM may take a step between two calls."""


class DirectLoader(UpdateReceiver):
    """Its methods are those of `ReloadLoader`. `parameters` are what each rank receives; those in `reloaded` are whole tensors,
    for vLLM's own loader. `failed` are the live parameters that they replace, or None if they replace all."""

    transports: tuple[str, ...] = (*DEVICE_TRANSPORTS, "shm")

    def __init__(
        self,
        engine: str,
        tensors: Sequence[TensorSpec],
        parameters: tuple[Parameter, ...],
        reloaded: Collection[str],
        failed: Collection[str] | None,
        dtype: str,
        num_ranks: int,
        call_workers: CallWorkers,
        has_weights: bool,
        adapters: VllmAdapters,
    ) -> None:
        self._call_workers, self._has_weights, self._adapters = call_workers, has_weights, adapters
        self.parameters, self._reloaded = parameters, frozenset(reloaded)
        self._failed = None if failed is None else sorted(failed)
        # Several ranks may have to undo what one of them failed to load.
        self.takes_all = bool(reloaded)
        super().__init__(self.parameters, dtype, engine)
        self.num_ranks = num_ranks
        self._inboxes = Inboxes(tensors, self.parameters, dtype, engine)
        """Receive weights that come through shared memory."""
        self._links: tuple[tuple[bytes, ...], ...] = ()
        self._files = MappedFiles(engine, call_workers)
        self._places: dict[str, list[Place | None]] = {}
        """Parameters of the update in progress that came through shared memory."""
        self._staged = -1
        self._is_torn = False
        """Whether live parameters may hold a mix of two versions."""
        self._indices: list[list[int]] = []
        """Indices of the staged pieces, per rank."""
        self._last_manifests: tuple[Plan | None, list[list[bytes]], int] = None, [], 0
        """Plan and manifests (without versions) that gave `_indices`, and the bytes they announce."""

    async def begin(self, serving: int, version: int, offer: Offer) -> Destinations:
        if offer.transport not in DEVICE_TRANSPORTS:
            if self._update is not None:
                self._admit(serving, version, offer)  # raises
            destinations = await asyncio.to_thread(self._inboxes.begin, serving, version, offer)
            self._transport = offer.transport
            return destinations
        if self._inboxes.is_updating:
            self._inboxes.begin(serving, version, offer)  # raises
        with self._lock:
            plan = self._admit(serving, version, offer)
            # Checksums come with the pieces, and the ranks compare them.
            self._update = IncomingUpdate(version, plan, hashed=False)
        try:
            if offer.fresh or plan is not self._plan or offer.transport != self._transport or not self._links:
                links = await self._call_workers("slipstream_connect", offer.transport, plan.to_bytes(), self._failed)
                self._links = tuple(tuple(map(bytes, rank)) for rank in links)
            if offer.transport == "nccl":  # over `cuda`, pieces need no preparation
                await self._call_workers("slipstream_expect", version)
        except BaseException:
            self._update = None
            raise
        self._plan, self._transport = plan, offer.transport
        return Destinations(self._links, b"")

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        if self._inboxes.is_updating:
            return await self._stage_shared_memory(version, manifests)
        start, receive_seconds = time.perf_counter(), 0.0
        with self._lock:
            update = self._current(version)
        announced = self._read_manifests(update, manifests)
        # Over `cuda` each rank confirms to the trainer itself. Over `nccl` a rank must wait, even if nothing comes.
        if self._transport == "nccl":
            receive_seconds = await self._receive(version)
        self.check(version)  # it may have been rolled back meanwhile
        self._staged = version
        return StageReport(announced, time.perf_counter() - start, receive_seconds)

    async def _stage_shared_memory(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        inbox = self._inboxes.current
        arrays, report = await asyncio.to_thread(inbox.receive, version, manifests)
        self._places, brought = self._inboxes.places(version, arrays)
        self._check_all_tensors(self._places)
        files = {place[0] for places in self._places.values() for place in places if place is not None}
        await self._files.map(files | self._inboxes.files())
        await self._adapters.stage(brought)
        inbox.check(version)
        self._staged = version
        return report

    async def _receive(self, version: int) -> float:
        """Wait until all ranks have received. Short calls let vLLM step meanwhile, and let a rollback through."""
        try:
            while True:
                answers = await self._call_workers("slipstream_receive", version, self._indices, WORKER_WAIT_SECONDS)
                if mismatches := [answer for answer in answers if isinstance(answer, str)]:
                    raise ChecksumMismatch(f"engine {self._name!r}: {mismatches[0]}; version {version} is not used")
                if None not in answers:
                    return max(answers)
                self.check(version)
        except SlipstreamError:
            raise
        except Exception as error:
            raise TransferError(
                f"engine {self._name!r}: version {version} did not arrive: {last_line(error)}"
            ) from None

    def _read_manifests(self, update: IncomingUpdate, manifests: Sequence[Sequence[bytes]]) -> int:
        """Check the manifests and return the number of bytes they announce. They are usually the same as for the last
        version."""
        key = update.plan, [[strip_manifest_header(m, update.version) for m in of_rank] for of_rank in manifests]
        if not self._has_weights or key != self._last_manifests[:2]:
            sums, sent, announced = self._manifests(update, manifests, self.num_ranks)
            self._check_complete(update, sent)
            self._check_all_tensors(sent)
            self._indices = [sorted(indices) for indices in sums]
            self._last_manifests = *key, announced
        return self._last_manifests[2]

    def _check_all_tensors(self, sent: Mapping[str, Any]) -> None:
        missing = {p.name for p in self.parameters} - sent.keys()
        if missing and not self._has_weights:
            raise missing_tensors(self._name, sorted(missing))
        if missing and sent and self.takes_all:
            raise TransferError(
                f"engine {self._name!r} takes all tensors or none; {min(missing)} and {len(missing) - 1} more are missing"
            )

    def check_staged(self, version: int) -> None:
        if self._staged != version:
            raise not_staged(self._name, version)

    async def load(self, version: int) -> tuple[Drawn, float]:
        self.check_staged(version)
        # Adapters first: writing the base model cannot be undone.
        adapter_seconds = await self._adapters.load()
        self._is_torn = True
        if self._inboxes.is_updating:
            places = [
                [name, [None if place is None else [*place[:2], list(place[2])] for place in by_rank]]
                for name, by_rank in self._places.items()
            ]
            answers = await self._call_workers("slipstream_write", places, self._dtype, sorted(self._reloaded))
        else:
            answers = await self._call_workers("slipstream_apply", version, self._indices, WORKER_WAIT_SECONDS)
        self._is_torn = any(reason == "" for _, _, reason, _ in answers)
        seconds = max(spent for _, spent, _, _ in answers)
        if reasons := [reason for _, _, reason, _ in answers if reason]:
            if all(may_retry for *_, may_retry in answers):
                raise WeightsPending(reasons[0], seconds)
            raise TransferError(reasons[0])
        self._has_weights, self._is_torn = True, False
        self._adapters.committed()
        if self._reloaded:
            await self._call_workers("slipstream_settle")
        return answers[-1][0], adapter_seconds + seconds  # the last stage of a pipeline draws the tokens

    async def restore(self) -> None:
        """Undo what vLLM's loader has loaded. Parameters that are written directly have no second copy: staging has checked all
        that can be checked, so only a failing device gets here, and this raises if they may be torn."""
        await self._adapters.undo()
        if self._reloaded:
            await self._call_workers("slipstream_undo")
            self._is_torn = False
        elif self._has_weights and self._is_torn:
            raise EngineFailure("the old weights were overwritten in part, and there is no copy of them")

    def finish(self, version: int) -> None:
        self._staged, self._places = -1, {}
        if self._inboxes.is_updating:
            return self._inboxes.finish(version)
        with self._lock:
            self._current(version)
            self._update = None

    async def rollback(self, version: int) -> None:
        if self._staged == version:
            self._staged, self._places = -1, {}
        self._adapters.drop()
        self._inboxes.current.rollback(version)
        if self._update is not None and self._update.version == version:
            self._update, self._links = None, ()
            try:
                await self._call_workers("slipstream_discard")
            except Exception as error:
                log.warning("engine %s: rolling back version %d: %s", self._name, version, error)

    async def checksums(self) -> tuple[ParameterChecksums, ...]:
        """Hash a few parameters per call, so that steps run in between. Parameters that vLLM's loader fills are rearranged by
        it and cannot be read back; they get no checksums."""
        sums: dict[tuple[str, int], tuple[int, ...]] = {}
        for names in self._checksum_batches():
            for rank, answer in enumerate(await self._call_workers("slipstream_checksums", names)):
                sums |= {(name, rank): tuple(parts) for name, parts in answer}
        return tuple(ParameterChecksums(p.name, p.rank, sums.get((p.name, p.rank), ())) for p in self.parameters)

    def _checksum_batches(self) -> list[list[str]]:
        """Names of readable parameters, in batches of about `HASHED_BYTES` per rank."""
        batches: list[list[str]] = []
        room = 0
        for name, size in {p.name: num_bytes([p], self._dtype) for p in self.parameters}.items():
            if name in self._reloaded:
                continue
            if not batches or size > room:
                batches.append([])
                room = HASHED_BYTES
            batches[-1].append(name)
            room -= size
        return batches

    def weights_dropped(self) -> None:
        self._has_weights = False

    def weights_written(self) -> None:
        """A trainer has written all of them in place."""
        self._has_weights, self._is_torn = True, False

    @property
    def is_single_call(self) -> bool:
        return not self._reloaded and not self._adapters.is_staged

    @property
    def writes_all(self) -> bool:
        """Whether every live parameter can be written in place, by one rank."""
        return self.num_ranks == 1 and not self._failed and not self._reloaded

    async def release(self) -> None:
        if self._links and self._update is None:
            self._links = ()
            await self._call_workers("slipstream_disconnect")

    @property
    def is_updating(self) -> bool:
        return self._update is not None or self._inboxes.is_updating

    def close(self) -> None:
        self._inboxes.close()


def last_line(error: Exception) -> str:
    """A worker's error includes its traceback; return only the last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
