"""The engine contract: what the embedded JAX engine, vLLM and remote engines all do."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from slipstream.types import (
    Berths,
    CommitReport,
    Completion,
    EngineInfo,
    Failure,
    InFlight,
    Offer,
    Request,
    Score,
    StageReport,
)


class Engine(Protocol):
    """One replica of the policy. All methods are called from one event loop; the engine computes elsewhere.

    Order of an update, driven by one trainer at a time:

        begin(v) ─► stage(v) ─► commit(v)      the new version serves from the next step boundary on
                  └───────────┴► rollback(v)   the old version goes on; everything staged is dropped

    `generate` and `score` may run at any moment of it. `rollback` may come at any moment, twice, or for a version
    that never began, and always leaves the engine serving what it served before."""

    def describe(self) -> EngineInfo:
        """Cheap; reflects the version that serves now."""
        ...

    def generate(self, requests: Sequence[Request]) -> AsyncGenerator[list[Completion | Failure], None]:
        """Yields what finished since the last yield, until all `n` samples of every request are answered. A request
        that fails yields one `Failure` and no more completions. Closing the iterator cancels what is unfinished."""
        ...

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[Score]:
        """Raw logprobs of given token sequences, in order. Raises `InvalidPrompt` for sequences it cannot take."""
        ...

    async def begin(self, version: int, offer: Offer) -> Berths:
        """Checks the plan and makes room for the version: says where it wants it. Raises without side effects.

        `VersionError` unless `version` is greater than the one that serves; `UpdateInProgress` while another is
        under way."""
        ...

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        """Receives into a shadow and verifies coverage and checksums: per rank, a manifest from each trainer rank.
        Generation goes on."""
        ...

    async def commit(self, version: int, in_flight: InFlight = "keep") -> CommitReport:
        """Swaps the shadow in at a step boundary. Idempotent for the version that serves already."""
        ...

    async def rollback(self, version: int) -> None:
        """Forgets an update that was begun. Never raises."""
        ...

    async def close(self) -> None:
        """Ends the engine; unfinished requests fail with `EngineLost`."""
        ...
