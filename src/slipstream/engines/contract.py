"""The engine contract, implemented by the embedded JAX engine, vLLM and remote servers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from slipstream.types import (
    Checksums,
    CommitReport,
    Completion,
    Destinations,
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


class EngineBackend(Protocol):
    """One replica of the policy. All methods are called from one event loop; the engine computes elsewhere.

    An update, driven by one trainer at a time:

        begin(v) ─► stage(v) ─► commit(v)      the new version serves from the next step boundary on
                  └───────────┴► rollback(v)   the old version keeps serving; everything staged is dropped

    `generate` and `score` may run throughout. `rollback` may be called at any time, twice, or for a version that never began;
    the engine then serves the version it served before. The exception is `shared`, where the trainer overwrites the serving
    weights: no step runs from `begin` to `commit`, and a rollback leaves the engine without a policy.

    Two independent states stop generation. An engine steps when it is neither paused nor asleep.

        pause() ──► resume()            no step runs; the KV cache is kept
        sleep(level) ──► wake(tags)     weights and KV cache are released; an update also brings the weights back

    Requests and scores that arrive meanwhile are accepted and wait. The engine sets no deadline; callers do. Closing a
    `generate` iterator cancels waiting requests as well as running ones. `close` always works."""

    def describe(self) -> EngineInfo:
        """Describe the engine and the version that serves now. Cheap."""

    def generate(self, requests: Sequence[Request]) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        """Yield results as they finish, until all `n` samples of every request are answered. A request that fails yields one
        `Failure` and no further completions. Closing the iterator cancels unfinished requests. Engines that support it also
        yield `Progress` of requests that ask for it."""

    async def score(self, sequences: Sequence[Sequence[int]], top_k: int = 0, adapter: str = "") -> list[Score]:
        """Return raw logprobs of token sequences, in order; with `top_k`, also of the likeliest tokens at each position. Raises
        `InvalidPrompt` for an invalid sequence, `InvalidSampling` for an invalid `top_k` and `UnknownAdapter`."""

    async def begin(self, version: int, offer: Offer) -> Destinations:
        """Check the plan, allocate memory for the version, and return where to send it. Has no side effects if it raises.

        Raises `VersionError` unless `version` is greater than the serving one, and `UpdateInProgress` during another update."""

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        """Receive the version next to the serving one and verify coverage and checksums; `manifests` has, per engine rank, one
        manifest from each trainer rank. Generation continues. Raises `FleetChanged` if the trainer skipped a tensor as
        unchanged that `sleep` has dropped; `bridge.sync` then sends everything."""

    async def commit(self, version: int, in_flight: InFlight = "keep") -> CommitReport:
        """Swap in the staged version at a step boundary. Idempotent for the version that already serves.

        `in_flight` says what happens to running requests (see `types.InFlight`); requests that have not started run under the
        new version in any case. `finish` waits until the running requests are done and starts no others meanwhile; the other
        modes wait for one step. A paused or sleeping engine commits at once and stays paused, with its weights awake.
        `finish` on such an engine with running requests raises `Unsupported` and changes nothing, because they would never
        end."""

    async def rollback(self, version: int) -> None:
        """Abort an update. Never raises."""

    async def release(self) -> None:
        """Release what is kept for the current trainer only, such as connections and receive buffers: it is gone. Another
        trainer may connect."""

    async def checksums(self) -> Checksums:
        """Hash the live weights, part by part: all of `describe().parameters`, of one version. Reads every weight, so use it to
        diagnose a problem, not in every step. Generation may or may not continue meanwhile, and a commit may wait. Raises
        `NotReady` if there are no weights or they are asleep, `UpdateInProgress` if commits are too frequent to read one whole
        version, `Unsupported` if live weights cannot be read back."""

    async def pause(self) -> None:
        """Stop stepping until `resume`. Waits for the current step, not for requests to finish. Idempotent."""

    async def resume(self) -> None:
        """Continue the requests. Idempotent; does not wake a sleeping engine."""

    async def sleep(self, level: int = 1) -> MemoryReport:
        """Release device memory at the next step boundary; returns once it is free.

        Level 1 moves the weights to host memory and drops the KV cache. Level 2 drops both; the engine serves again after an
        update with every tensor. Running requests keep their tokens and recompute their KV cache after waking, with the same
        results as without the sleep. A sleeping engine goes to the deeper of the two levels. Raises `UpdateInProgress`
        between `begin` and `commit`, and `Unsupported` for an unknown level."""

    async def wake(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport:
        """Restore what `tags` name, in any order and number of calls; None restores everything. Steps run again once nothing is
        asleep. Naming what is awake has no effect. Weights dropped by level 2 cannot be woken: naming them raises `NotReady`,
        and with None they stay asleep until an update brings new ones."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that are loaded. Cheap.

        An update may bring adapters (`Offer.adapters`), with tensors of the base model or without (`only_adapters`); both are
        part of the same transaction. A new name takes a free slot, else `begin` raises `NoAdapterSlot`; a known one keeps its
        slot. What another adapter or the base model computes does not change by a bit, and what the prefix cache holds for them
        stays valid. An update of the base model leaves adapters loaded, as does `sleep`. A request for an adapter that is not
        loaded fails with `UnknownAdapter`."""

    async def unload_adapter(self, name: str) -> None:
        """Free an adapter's slot at the next step boundary, and fail its requests with `UnknownAdapter`. Idempotent."""

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix cache. Running requests keep their KV cache or recompute it. Not needed after an update: entries of
        an older version are never matched."""

    async def memory(self) -> MemoryReport:
        """Report memory in use. Cheap; does not wait for the current step."""

    async def close(self) -> None:
        """Shut down; unfinished requests fail with `EngineLost`."""
