"""Whole tensors from shared memory through vLLM's own loader. On CPU vLLM packs linear weights after loading, so live
parameters cannot be written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from slipstream.engines.frontend.checks import not_staged
from slipstream.engines.frontend.draw_rate import Drawn
from slipstream.engines.vllm.adapters import VllmAdapters
from slipstream.engines.vllm.weight_loading import CallWorkers, Inboxes, MappedFiles, Place, missing_tensors
from slipstream.errors import Unsupported
from slipstream.model.families import whole_parameters
from slipstream.types import Destinations, Offer, ParameterChecksums, StageReport, TensorSpec
from slipstream.weights.rank_image import num_bytes
from slipstream.weights.update.publisher import DRAFT
from slipstream.weights.update.transport_choice import is_quick

T = TypeVar("T")


class ReloadLoader:
    """Documents the methods that it shares with `DirectLoader`. Every load is of the whole model. Tensors that an update did
    not bring are still in shared memory, or in the engine's checkpoint."""

    is_single_call = False
    """Whether `load` is a single call to the workers. vLLM makes such a call between two steps, so stepping need not be
    stopped for it."""
    transports: tuple[str, ...] = ("shm",)
    takes_all = False
    """See `EngineInfo.takes_all`."""

    def __init__(
        self,
        engine: str,
        tensors: Sequence[TensorSpec],
        dtype: str,
        call_workers: CallWorkers,
        has_checkpoint: bool,
        adapters: VllmAdapters,
    ) -> None:
        self._engine, self._dtype, self._call_workers, self._adapters = engine, dtype, call_workers, adapters
        self._has_weights = self._has_checkpoint = has_checkpoint
        self._names = {t.name for t in tensors if not t.name.startswith(DRAFT)}
        """Names of the tensors that an engine without weights needs; a draft model always has its own."""
        # One rank: tensors arrive whole, and each worker takes its own part of them.
        self.parameters, self.num_ranks = whole_parameters(tensors), 1
        self.num_bytes = num_bytes(self.parameters, dtype)
        self._inboxes = Inboxes(tensors, self.parameters, dtype, engine)
        self._is_quick = False
        """The update in progress is too small to be worth a thread."""
        self._serving: dict[str, Place] = {}
        """Tensors that came by an update; all others are the checkpoint's."""
        self._staged: tuple[int, dict[str, Place]] | None = None
        self._files = MappedFiles(engine, call_workers)

    async def begin(self, serving: int, version: int, offer: Offer) -> Destinations:
        self._is_quick = is_quick(offer.transport, self.num_bytes)
        return await self._run(partial(self._inboxes.begin, serving, version, offer))

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        inbox = self._inboxes.current
        arrays, report = await self._run(partial(inbox.receive, version, manifests))
        arrived, brought = self._inboxes.places(version, arrays)
        places = self._serving | {name: place for name, (place, *_) in arrived.items() if place is not None}
        in_use = {file for file, _, _ in (*places.values(), *self._serving.values())}
        await self._files.map(in_use | self._inboxes.files())
        missing = sorted(self._names - places.keys())
        if missing and not self._has_checkpoint:
            raise missing_tensors(self._engine, missing)
        await self._adapters.stage(brought)
        inbox.check(version)  # it may have been rolled back meanwhile
        self._staged = version, places
        return report

    async def _run(self, work: Callable[[], T]) -> T:
        return work() if self._is_quick else await asyncio.to_thread(work)

    def check_staged(self, version: int) -> None:
        """Raise `UnknownVersion` unless this version is staged."""
        if self._staged is None or self._staged[0] != version:
            raise not_staged(self._engine, version)

    async def load(self, version: int) -> tuple[Drawn, float]:
        """Make the workers compute with this version. Return the tokens that requests had drawn, and the
        seconds the workers spent. Raise `WeightsPending` if the weights have not arrived yet."""
        self.check_staged(version)
        assert self._staged is not None
        places = self._staged[1]
        # The last stage of a pipeline draws the tokens.
        drawn: Drawn = (await self._call_workers("slipstream_drawn"))[-1]
        seconds = await self._adapters.load()
        if places != self._serving:
            seconds += await self._reload(places)
        self._serving, self._has_weights = places, True
        self._adapters.committed()
        return drawn, seconds

    async def _reload(self, places: Mapping[str, Place]) -> float:
        tensors = [[name, file, offset, list(shape)] for name, (file, offset, shape) in places.items()]
        return max(await self._call_workers("slipstream_reload", tensors, self._dtype))

    async def restore(self) -> None:
        """After `load` failed halfway: bring back what it may have overwritten, or raise. Here: load the serving weights again,
        if there are any."""
        await self._adapters.undo()
        if self._has_weights and self._staged is not None and self._staged[1] != self._serving:
            await self._reload(self._serving)

    def finish(self, version: int) -> None:
        self._unstage(version)
        self._inboxes.finish(version)

    async def rollback(self, version: int) -> None:
        self._unstage(version)
        self._adapters.drop()
        self._inboxes.current.rollback(version)

    def _unstage(self, version: int) -> None:
        if self._staged is not None and self._staged[0] == version:
            self._staged = None

    async def checksums(self) -> tuple[ParameterChecksums, ...]:
        raise Unsupported(
            f"engine {self._engine!r} cannot read its weights back: on CPU vLLM packs linear weights after loading them"
        )

    def weights_dropped(self) -> None:
        """Take note that sleep level 2 has dropped the weights."""
        self._serving, self._has_weights, self._has_checkpoint = {}, False, False

    async def release(self) -> None:
        """Release what is held for the trainer, which is gone. Here nothing: the shared memory holds the serving weights."""

    @property
    def is_updating(self) -> bool:
        return self._inboxes.is_updating

    def close(self) -> None:
        self._inboxes.close()
