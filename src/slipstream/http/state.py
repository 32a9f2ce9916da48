"""State shared by all endpoints: the fleet, the tokenizer, weight updates and requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request

from slipstream.bridge.chat_tokenizer import ChatTokenizer
from slipstream.bridge.fleet import Fleet
from slipstream.config import LOOPBACK, HttpConfig
from slipstream.gateway.admission import Admission, Ticket
from slipstream.gateway.mapping_file import mapping
from slipstream.http.checkpoint_updates import CheckpointUpdates
from slipstream.http.errors import HttpError
from slipstream.http.in_flight import InFlightRequests
from slipstream.http.limits import TICKET
from slipstream.http.metrics import Metrics
from slipstream.http.sessions import OpenSessions
from slipstream.http.trainer_communicator import TrainerCommunicator
from slipstream.model.checkpoints.hub import hub_name
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
    sessions: OpenSessions
    communicator: TrainerCommunicator
    metrics: Metrics = field(default_factory=Metrics)
    started: int = field(default_factory=lambda: int(time.time()))
    is_paused_by_sleep: bool = False
    """The fleet is paused because of `/sleep?level=0`; `/wake_up` resumes it."""
    _cached_info: tuple[float, EngineInfo] | None = None
    _info_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def create(
        cls, fleet: Fleet, connect: Callable[[], Fleet], config: HttpConfig, directory: Path | None = None
    ) -> Front:
        """`connect` opens a separate connection to the same fleet, for a weight update. `directory` is where sessions are kept;
        None keeps them in memory."""
        tokenizer = ChatTokenizer.read(config.model) if config.model else ChatTokenizer()
        updates = CheckpointUpdates(connect, Path(config.weights) if config.weights else None)
        admission = Admission(config.max_requests, config.max_buffered_bytes, "this server")
        in_flight, sessions = InFlightRequests(config.request_seconds), OpenSessions(config, directory)
        communicator = TrainerCommunicator(config.nccl_python)
        return cls(fleet, config, tokenizer, updates, in_flight, admission, sessions, communicator)

    @cached_property
    def model_name(self) -> str:
        model = self.config.model
        return self.config.model_name or hub_name(model) or (Path(model).resolve().name if model else "policy")

    @property
    def local_weights(self) -> str:
        """The directory of checkpoints, for trainers on this machine; empty if there is none, or clients may be elsewhere."""
        config = self.config
        return str(Path(config.weights).resolve()) if config.weights and config.host in LOOPBACK else ""

    async def adapter_of(self, model: str) -> str:
        """Return the adapter that a request's model names; empty for the base model."""
        if model in ("", self.model_name):
            return ""
        loaded = await self.adapters()
        if model not in loaded:
            known = ", ".join(map(repr, (self.model_name, *loaded)))
            message = f"the model {model[:100]!r} does not exist; this fleet serves {known}"
            raise HttpError(404, message, "model_not_found", "model")
        return model

    async def adapters(self) -> list[str]:
        """Return the names of the adapters that engines have loaded."""
        return sorted({name for engine in (await self.fleet.status()).present for name in engine.adapters})

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
        """Return where each tensor lies in each engine."""
        engines = (await self.fleet.refresh()).engines
        if not engines:
            raise (await self.fleet.status()).no_engines("whose weights to map")
        return mapping(self.model_name, engines)


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
