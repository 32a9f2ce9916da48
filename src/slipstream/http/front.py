"""What the calls of the front share: the fleet behind it, the model's text, and what is under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.config import HttpConfig
from slipstream.fleet import Fleet
from slipstream.http import mapping
from slipstream.http.answers import HttpError
from slipstream.http.flights import Flights
from slipstream.http.metrics import Metrics
from slipstream.http.weights import Weights
from slipstream.http.words import Words
from slipstream.types import EngineInfo, FleetStatus

NEAR = 0.5
"""Seconds for which what an engine said of itself need not be asked again."""


@dataclass
class Front:
    """On one event loop. `connect` makes a connection to the same fleet of its own, for a weight update."""

    fleet: Fleet
    config: HttpConfig
    words: Words
    weights: Weights
    flights: Flights
    metrics: Metrics = field(default_factory=Metrics)
    started: int = field(default_factory=lambda: int(time.time()))
    dozes: bool = False
    """The fleet is paused because it was told to sleep at level 0."""
    run_dir: Path | None = None
    """Where local trainers look for the mapping file."""
    _known: tuple[float, EngineInfo] | None = None
    _mapped: object = None
    """What the mapping file was written for."""
    _mapping: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def of(cls, fleet: Fleet, connect: Callable[[], Fleet], config: HttpConfig, run_dir: Path | None = None) -> Front:
        words = Words.read(Path(config.model)) if config.model else Words()
        weights = Weights(connect, Path(config.weights) if config.weights else None)
        return cls(fleet, config, words, weights, Flights(config.request_seconds), run_dir=run_dir)

    @property
    def name(self) -> str:
        """Of the model, as requests call it."""
        return self.config.model_name or (Path(self.config.model).resolve().name if self.config.model else "policy")

    def check_model(self, name: str) -> None:
        if name not in ("", self.name):
            text = f"the model {name[:100]!r} does not exist; this fleet serves {self.name!r}"
            raise HttpError(404, text, "model_not_found", "model")

    async def map(self) -> dict[str, Any]:
        """Where each tensor lies in each engine; also in the mapping file from now on."""
        engines, _ = await self.fleet.refresh()
        if not engines:
            raise (await self.status()).nobody("whose weights to map")
        found = mapping.mapping(self.name, engines)
        async with self._mapping:
            if self.run_dir is not None and not self.is_mapped(engines):
                await asyncio.to_thread(mapping.write, self.run_dir, found)
                self._mapped = _kinds(engines)
        return found

    def is_mapped(self, engines: Sequence[EngineInfo]) -> bool:
        """The mapping file is about these."""
        return self._mapped == _kinds(engines) and self.run_dir is not None and (self.run_dir / mapping.FILE).exists()

    async def status(self) -> FleetStatus:
        return await self.fleet.status()

    async def info(self) -> EngineInfo:
        """Of an engine that takes requests, or of any: they all hold the same model. Raises a 503 when there is none."""
        now = time.monotonic()
        if self._known is None or now - self._known[0] > NEAR:
            status = await self.status()
            if not status.present:
                text = str(status.nobody("to ask"))
                raise HttpError(503, text, "not_ready", headers={"Retry-After": "1"})
            first = min(status.present, key=lambda e: e.info.max_model_len)
            self._known = (now, first.info)
        return self._known[1]


def _kinds(engines: Sequence[EngineInfo]) -> set[tuple[str, str, str, int]]:
    """What their layouts follow from."""
    return {(e.name, e.model, e.dtype, e.num_ranks) for e in engines}
