"""The adapters that a bridge has synced: how they are sent, and what engines that come back need of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.bridge.fleet import Fleet
from slipstream.config import SyncOptions
from slipstream.errors import NonFiniteWeights
from slipstream.types import EngineInfo, InFlight, Lora, SyncReport
from slipstream.weights import adapters as layouts
from slipstream.weights.sources.named_tensors import named_tensors
from slipstream.weights.sources.packed_adapters import pack
from slipstream.weights.update.publisher import Publisher
from slipstream.weights.update.snapshot import KeptWeights


class AdapterSyncs:
    def __init__(self, fleet: Fleet, options: SyncOptions) -> None:
        is_host = (options.transport or "").partition(":")[0] in layouts.HOST_TRANSPORTS
        # A delta would be against another adapter.
        self._options = dataclasses.replace(options, delta="never", transport=options.transport if is_host else None)
        self._fleet = fleet
        self._publishers: dict[tuple[int, tuple[str, ...]], Publisher] = {}
        """By rank and targets: such adapters share plan and connections."""
        self.kept: dict[str, tuple[Lora, np.ndarray]] = {}
        """By name: the adapters that engines serve, packed, for those that lack them."""

    async def publish(
        self,
        tree: Any,
        lora: Lora,
        engines: Sequence[EngineInfo],
        version: int,
        in_flight: InFlight,
        drop_failed: bool,
    ) -> SyncReport:
        """Make `tree` the weights of an adapter on every engine, as `version`."""
        key = lora.rank, lora.targets
        if key not in self._publishers:
            self._publishers[key] = Publisher(self._fleet, self._options, through_host=True)
        for engine in engines:
            layouts.check_supported(engine, lora)
        tensors = named_tensors(tree)
        packed = pack(tensors, engines[0].tensors, lora)
        publish = self._publishers[key].publish
        try:
            report = await publish(None, engines, version, in_flight, drop_failed=drop_failed, adapters={lora: packed})
        except NonFiniteWeights:
            wrong = [name for name, tensor in tensors.items() if not np.isfinite(np.asarray(tensor)).all()]
            if not wrong:  # beyond the range of the engine's dtype
                raise
            raise NonFiniteWeights(
                f"adapter {lora.name!r} has values that are not finite in {wrong[0]} and {len(wrong) - 1} more tensors; no "
                "engine uses them"
            ) from None
        if self._options.snapshot != "none" and self._options.process_count == 1:
            self.kept[lora.name] = lora, packed
        return dataclasses.replace(report, adapter=lora.name)

    async def publish_with(
        self,
        params: Any,
        engines: Sequence[EngineInfo],
        version: int,
        in_flight: InFlight = "keep",
        drop_failed: bool = False,
        draft: Any = None,
    ) -> tuple[SyncReport, KeptWeights | None]:
        """Send the base model together with all adapters, to engines that lack some of them. Return also what is kept of the
        base model."""
        publisher = Publisher(self._fleet, self._options, through_host=True)
        try:
            adapters = dict(self.kept.values())
            report = await publisher.publish(
                params, engines, version, in_flight, drop_failed=drop_failed, draft=draft, adapters=adapters
            )
            return report, publisher.kept
        finally:
            publisher.close()

    def close(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()
        self._publishers = {}
