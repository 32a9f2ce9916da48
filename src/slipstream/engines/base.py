"""The engine contract: what the embedded JAX engine, vLLM and remote engines all do."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from slipstream.types import (
    Berths,
    Checksums,
    CommitReport,
    Completion,
    EngineInfo,
    Failure,
    InFlight,
    MemoryReport,
    MemoryTag,
    Offer,
    Progress,
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
    that never began, and leaves the engine serving what it served before. (Only where a trainer writes a version into
    the very memory that serves, `shared`, is there no before: the engine then has no policy. From `begin` to `commit` of
    such an update no step runs.)

    Two things hold generation up, each on its own, so that an engine may be both: an engine steps when it is neither
    paused nor asleep.

        pause() ──► resume()            no step runs; the KV cache is kept
        sleep(level) ──► wake(tags)     weights and KV cache are given up; an update brings the weights back, too

    Requests and scores that come meanwhile are accepted and wait, without a deadline of the engine's own: whoever calls
    keeps one. Closing a `generate` iterator cancels a waiting request as it does a running one. `close` always works."""

    def describe(self) -> EngineInfo:
        """Cheap; reflects the version that serves now."""
        ...

    def generate(self, requests: Sequence[Request]) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        """Yields what finished since the last yield, until all `n` samples of every request are answered. A request
        that fails yields one `Failure` and no more completions. Closing the iterator cancels what is unfinished. Of requests
        that ask for it, an engine that can also yields the `Progress`."""
        ...

    async def score(self, sequences: Sequence[Sequence[int]], top_k: int = 0) -> list[Score]:
        """Raw logprobs of given token sequences, in order; with `top_k`, also those of the likeliest tokens at each
        position. Raises `InvalidPrompt` for sequences it cannot take, `InvalidSampling` for a `top_k` it cannot."""
        ...

    async def begin(self, version: int, offer: Offer) -> Berths:
        """Checks the plan and makes room for the version: says where it wants it. Raises without side effects.

        `VersionError` unless `version` is greater than the one that serves; `UpdateInProgress` while another is
        under way."""
        ...

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        """Receives into a shadow and verifies coverage and checksums: per rank, a manifest from each trainer rank.
        Generation goes on. Raises `FleetChanged` when a tensor did not come because the trainer thinks it is here, while
        `sleep` has dropped it: `bridge.sync` then sends everything."""
        ...

    async def commit(self, version: int, in_flight: InFlight = "keep") -> CommitReport:
        """Swaps the shadow in at a step boundary. Idempotent for the version that serves already.

        `in_flight` is the fate of the requests that run (see `types.InFlight`); those that have not started yet run under
        the new version, whatever it says. `finish` waits as long as the running requests take and lets no other start
        meanwhile; the others wait for one step. A paused or sleeping engine commits at once and stays paused; its weights
        are awake from then on. `finish` on such an engine with requests running raises `Unsupported` and changes
        nothing, because they would never end."""
        ...

    async def rollback(self, version: int) -> None:
        """Forgets an update that was begun. Never raises."""
        ...

    async def release(self) -> None:
        """The trainer is gone: what is kept for it alone (connections, memory to receive into) is given up. Another may
        come."""
        ...

    async def checksums(self) -> Checksums:
        """What the live parameters hold, part by part: all of `describe().parameters`, of one version. Reads and hashes every
        weight, so it is for when something is wrong, not for every step; generation goes on or waits, as the engine can.
        A commit may wait for it. Raises `NotReady` while there are no weights or they sleep, `UpdateInProgress` when commits
        came too fast to read a version as a whole, `Unsupported` where live weights cannot be read back."""
        ...

    async def pause(self) -> None:
        """Once this returns, no step runs until `resume`: it waits for the one under way, not for requests to end.
        Idempotent."""
        ...

    async def resume(self) -> None:
        """Requests go on where they were. Idempotent, and does not wake a sleeping engine."""
        ...

    async def sleep(self, level: int = 1) -> MemoryReport:
        """Gives device memory up at the next step boundary; returns once it is free.

        Level 1 moves the weights to host memory and drops the KV cache. Level 2 drops both, and an update with every
        tensor must bring weights before the engine serves again. Running requests are kept as tokens, and their KV cache
        is computed anew after waking: the same tokens come as without the sleep. Asleep already, it goes to the deeper of
        the two levels. Raises `UpdateInProgress` between `begin` and `commit`, `Unsupported` for a level it does not
        know."""
        ...

    async def wake(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport:
        """Brings back what `tags` name, in any order and in any number of calls; None brings back all that is asleep.
        Steps run again when nothing is asleep. Naming what is awake changes nothing. Weights dropped by level 2 cannot be
        woken: named, they raise `NotReady`; with None they stay asleep until an update brings them."""
        ...

    async def forget_prefixes(self) -> None:
        """Drops what is cached of prompts and completions; those that run keep theirs, or compute it anew. Not needed after an
        update: what an older version computed is never found."""
        ...

    async def memory(self) -> MemoryReport:
        """What the engine holds now. Cheap; waits for no step."""
        ...

    async def close(self) -> None:
        """Ends the engine; unfinished requests fail with `EngineLost`."""
        ...
