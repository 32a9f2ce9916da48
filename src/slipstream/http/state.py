"""State shared by all endpoints: the fleet, the tokenizer, weight updates and requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request

from slipstream.bridge.fleet import Fleet
from slipstream.config import HttpConfig
from slipstream.gateway.admission import Admission, Ticket
from slipstream.http import mapping
from slipstream.http.checkpoint_updates import CheckpointUpdates
from slipstream.http.errors import HttpError
from slipstream.http.in_flight import InFlightRequests
from slipstream.http.limits import TICKET
from slipstream.http.metrics import Metrics
from slipstream.http.tokenizer import ChatTokenizer
from slipstream.model.checkpoints.hub import hub_name, model_directory
from slipstream.types import EngineInfo

INFO_CACHE_SECONDS = 0.5
"""How long an engine's description is reused before the fleet is asked again."""


@dataclass
class Front:
    """Belongs to one event loop."""

    fleet: Fleet
    config: HttpConfig
    tokenizer: ChatTokenizer
    updates: CheckpointUpdates
    in_flight: InFlightRequests
    admission: Admission
    run_dir: Path | None = None
    """Directory of the mapping file for local trainers."""
    metrics: Metrics = field(default_factory=Metrics)
    started: int = field(default_factory=lambda: int(time.time()))
    is_paused_by_sleep: bool = False
    """The fleet is paused because of `/sleep?level=0`; `/wake_up` resumes it."""
    _cached_info: tuple[float, EngineInfo] | None = None
    _info_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _mapped_layouts: object = None
    """Layouts that the mapping file describes."""
    _mapping_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def create(
        cls, fleet: Fleet, connect: Callable[[], Fleet], config: HttpConfig, run_dir: Path | None = None
    ) -> Front:
        """`connect` opens a separate connection to the same fleet, for a weight update."""
        tokenizer = (
            ChatTokenizer.read(model_directory(config.model, weights=False)) if config.model else ChatTokenizer()
        )
        updates = CheckpointUpdates(connect, Path(config.weights) if config.weights else None)
        admission = Admission(config.max_requests, config.max_buffered_bytes, "this server")
        return cls(fleet, config, tokenizer, updates, InFlightRequests(config.request_seconds), admission, run_dir)

    @cached_property
    def model_name(self) -> str:
        model = self.config.model
        return self.config.model_name or hub_name(model) or (Path(model).resolve().name if model else "policy")

    def check_model(self, name: str) -> None:
        if name not in ("", self.model_name):
            message = f"the model {name[:100]!r} does not exist; this fleet serves {self.model_name!r}"
            raise HttpError(404, message, "model_not_found", "model")

    async def engine_info(self) -> EngineInfo:
        """Describe the engine with the shortest context. All engines hold the same model."""
        async with self._info_lock:  # of many calls, one asks
            if self._cached_info is None or time.monotonic() - self._cached_info[0] > INFO_CACHE_SECONDS:
                status = await self.fleet.status()
                if not status.present:
                    raise HttpError(503, str(status.no_engines("to ask")), "not_ready")
                shortest = min(status.present, key=lambda e: e.info.max_model_len)
                self._cached_info = (time.monotonic(), shortest.info)
            return self._cached_info[1]

    async def parameter_mapping(self) -> dict[str, Any]:
        """Return where each tensor lies in each engine, and write it to the mapping file."""
        engines = (await self.fleet.refresh()).engines
        if not engines:
            raise (await self.fleet.status()).no_engines("whose weights to map")
        parameters = mapping.mapping(self.model_name, engines)
        async with self._mapping_lock:
            if self.run_dir is not None and not self.is_mapped(engines):
                await asyncio.to_thread(mapping.write, self.run_dir, parameters)
                self._mapped_layouts = _layouts(engines)
        return parameters

    def is_mapped(self, engines: Sequence[EngineInfo]) -> bool:
        """Whether the mapping file exists and describes these engines."""
        is_written = self.run_dir is not None and (self.run_dir / mapping.FILE).exists()
        return is_written and self._mapped_layouts == _layouts(engines)


def _layouts(engines: Sequence[EngineInfo]) -> set[tuple[str, str, str, int]]:
    """Return what determines the engines' layouts."""
    return {(e.name, e.model, e.dtype, e.num_ranks) for e in engines}


async def _front(request: Request) -> Front:
    front: Front = request.app.state.front
    return front


async def _ticket(request: Request) -> Ticket:
    ticket: Ticket = request.scope[TICKET]
    return ticket


CurrentFront = Annotated[Front, Depends(_front)]
"""An endpoint's parameter of this type is the application's `Front`."""
CurrentTicket = Annotated[Ticket, Depends(_ticket)]
"""An endpoint's parameter of this type counts what its request holds."""
