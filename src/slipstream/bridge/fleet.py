"""The trainer's interface to its engines, and retries when engines join or leave."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from slipstream.bridge.rollouts import PromptQueue
from slipstream.errors import FleetChanged
from slipstream.types import (
    Completion,
    EngineInfo,
    Failure,
    FleetMembers,
    FleetStatus,
    MemoryReport,
    MemoryTag,
    Progress,
    Request,
    Score,
)
from slipstream.weights.update.publication import UpdateClient

MAX_ATTEMPTS = 5

T = TypeVar("T")


class Fleet(UpdateClient, PromptQueue, Protocol):
    """Implemented by `gateway.client.GatewayFleet` and `bridge.in_process.LocalFleet`."""

    is_elastic: bool
    """Whether engines may join and leave."""

    async def status(self) -> FleetStatus: ...

    async def refresh(self) -> FleetMembers: ...

    def generate(
        self, requests: Sequence[Request], engine: str = ""
    ) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        """Yield results as they finish, and the progress of requests that ask for it. Closing it cancels the rest."""

    async def score(
        self, sequences: Sequence[Sequence[int]], engine: str = "", top_k: int = 0, adapter: str = ""
    ) -> list[Score]: ...

    async def pause(self, engine: str = "") -> None: ...

    async def resume(self, engine: str = "") -> None: ...

    async def sleep(self, level: int = 1, engine: str = "") -> dict[str, MemoryReport]: ...

    async def wake(self, tags: Sequence[MemoryTag] | None = None, engine: str = "") -> dict[str, MemoryReport]: ...

    async def reset_prefix_cache(self, engine: str = "") -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def memory(self, engine: str = "") -> dict[str, MemoryReport]: ...

    async def quarantine(self, engine: str, reason: str, since: int | None = None) -> None: ...

    async def drain(self, engine: str, *, undo: bool = False, hand_back: bool = False, force: bool = False) -> None: ...

    async def close(self) -> None: ...


async def with_engines(
    fleet: Fleet,
    attempt: Callable[[tuple[EngineInfo, ...], int], Awaitable[T]],
    purpose: str,
    known: FleetMembers | None = None,
) -> T:
    """Return `attempt(engines, next_version)` for the fleet as it is. If it raises `FleetChanged`, refresh and retry.
    `known` saves the first refresh. `purpose` completes the error "there is no engine" ("to sync to")."""
    for _ in range(MAX_ATTEMPTS):
        members = known or await fleet.refresh()
        if not members.engines:
            raise (await fleet.status()).no_engines(purpose)
        try:
            return await attempt(members.engines, members.next_version)
        except FleetChanged as error:
            known, last_error = None, error
    raise FleetChanged(
        f"the fleet changed during each of {MAX_ATTEMPTS} attempts; see `slipstream status`. Last error: {last_error}"
    )
