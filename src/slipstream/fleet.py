"""The engines as the trainer's side sees them, and how it makes an attempt on all of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from slipstream.errors import FleetChanged
from slipstream.gateway.staleness import Bound
from slipstream.types import (
    Completion,
    EngineInfo,
    Failure,
    FleetStatus,
    MemoryReport,
    MemoryTag,
    Progress,
    Request,
    RolloutGroup,
    Score,
)
from slipstream.weights.publisher import Fleet as UpdateFleet

MAX_LOOKS = 5

T = TypeVar("T")


class Fleet(UpdateFleet, Protocol):
    """`gateway.client.GatewayFleet`, or `engines.local.LocalFleet`."""

    async def status(self) -> FleetStatus: ...

    async def refresh(self) -> tuple[tuple[EngineInfo, ...], int]: ...

    def generate(
        self, requests: Sequence[Request], engine: str = ""
    ) -> AsyncGenerator[list[Completion | Failure], None]: ...

    def stream(self, requests: Sequence[Request]) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        """As `generate`, with the progress of those requests that ask for it."""
        ...

    async def score(self, sequences: Sequence[Sequence[int]], engine: str = "", top_k: int = 0) -> list[Score]: ...

    async def submit(self, bound: Bound, requests: Sequence[Request]) -> int: ...

    async def take(
        self, bound: Bound, after: int, count: int, timeout: float, saved: int = 0, version: int = 0, more: bool = False
    ) -> list[RolloutGroup]: ...

    async def pause(self, engine: str = "") -> None: ...

    async def resume(self, engine: str = "") -> None: ...

    async def sleep(self, level: int = 1, engine: str = "") -> dict[str, MemoryReport]: ...

    async def wake(self, tags: Sequence[MemoryTag] | None = None, engine: str = "") -> dict[str, MemoryReport]: ...

    async def forget_prefixes(self, engine: str = "") -> None: ...

    async def memory(self, engine: str = "") -> dict[str, MemoryReport]: ...

    async def close(self) -> None: ...


async def with_engines(
    fleet: Fleet,
    attempt: Callable[[tuple[EngineInfo, ...], int], Awaitable[T]],
    needed: str,
    known: tuple[tuple[EngineInfo, ...], int] | None = None,
) -> T:
    """What `attempt` makes of the engines and the version that is committed. If that is no longer the fleet (`FleetChanged`),
    it is looked at again; the first time only if it is not `known`. `needed` is for `FleetStatus.nobody`."""
    for _ in range(MAX_LOOKS):
        engines, version = known or await fleet.refresh()
        if not engines:
            raise (await fleet.status()).nobody(needed)
        try:
            return await attempt(engines, version)
        except FleetChanged as changed:
            known, why = None, changed
    raise FleetChanged(
        f"the fleet changed during each of {MAX_LOOKS} attempts; see `slipstream status`. The last time: {why}"
    )
