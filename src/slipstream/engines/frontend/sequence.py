"""Requests and samples inside an engine, and the results they produce. No JAX."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slipstream.errors import SlipstreamError
from slipstream.types import ExpertRoutes, FinishReason, Progress, SamplingParams, TopLogprobs, VersionSpan


class ResultSink:
    """Results of one `generate` or `score` call. Delivered from any thread, received on the event loop of the call."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Sequence[EngineResult]] = asyncio.Queue()

    def deliver(self, results: Sequence[EngineResult]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the caller is gone
            self._loop.call_soon_threadsafe(self._queue.put_nowait, results)

    async def receive(self) -> list[EngineResult]:
        """Wait for at least one delivery, then return everything delivered so far."""
        results = [*await self._queue.get()]
        while not self._queue.empty():
            results += self._queue.get_nowait()
        return results


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request inside an engine: what its samples share. Compared by identity, since callers may reuse ids."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    max_new_tokens: int
    """`max_tokens`, or fewer if the context length is reached first. 0 scores the prompt and samples nothing."""
    stop_ids: tuple[int, ...]
    sink: ResultSink
    priority: int = 0
    find_stop_string: Callable[[Sequence[int]], int | None] | None = None
    """Given a completion's tokens, returns how many of them complete the first stop string, or None if none does."""
    streams: bool = False
    """Deliver tokens to the sink as they are sampled."""
    adapter: str = ""
    """Name of the adapter to compute with; empty is the base model."""

    @property
    def is_scoring(self) -> bool:
        return self.max_new_tokens == 0

    def samples(self) -> list[Sample]:
        return [Sample(self, index) for index in range(self.sampling.n)]


@dataclass(slots=True, eq=False)
class Sample:
    """One sequence being generated. Its KV cache is in `pages`, filled for the first `num_computed` positions."""

    request: EngineRequest
    sample_index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    """One per completion token. When scoring: one per prompt token except the first."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """`(version, start)` at every change of the policy version."""
    routes: ExpertRoutes | None = None
    """Set when the sample is finished, if they are recorded."""
    stopped: bool = False
    """The last token is a stop token or completes a stop string."""
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    cache_version: int = -1
    """Policy version that computed the whole KV cache of this sample; -1 for a mix, which cannot be shared."""
    pending: list[Any] = field(default_factory=list)
    """Prefix-tree handles that become ready when this sample's prefill ends."""
    settings: Any = None
    """The packed row of sampling settings, built on first use."""
    arrival: int = 0
    """Ascending arrival number."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: lower is scheduled first and preempted last."""
        return self.request.priority, self.arrival

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    @property
    def ids(self) -> tuple[int, ...]:
        return self.request.prompt + tuple(self.tokens)

    @property
    def end(self) -> int:
        """The largest length the sample may reach."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def prefill_end(self) -> int:
        """Positions to compute before decoding. The newest token is left to the decode step, so that all sampling happens
        in one place. When scoring, the last token has no successor and is not computed."""
        return self.length - 1

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.stopped:
            return "stop"
        return "length" if len(self.tokens) >= self.request.max_new_tokens else None

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        stops = [start for _, start in self.versions[1:]] + [len(self.tokens)]
        return tuple(VersionSpan(version, start, stop) for (version, start), stop in zip(self.versions, stops))

    def extend(
        self,
        tokens: list[int],
        logprobs: list[float],
        raw_logprobs: list[float],
        top_logprobs: list[TopLogprobs],
        stopped: bool,
        version: int,
    ) -> None:
        """Append tokens sampled under `version`, cut at the first stop string, and stream them if requested."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.tokens)))
        self.tokens += tokens
        self.logprobs += logprobs
        self.raw_logprobs += raw_logprobs
        self.top_logprobs += top_logprobs
        self.stopped = stopped
        request = self.request
        if request.find_stop_string is not None:
            count = request.find_stop_string(self.tokens)
            if count is not None:
                self._truncate(count)
        if request.streams and self.finish_reason is None:
            start = len(self.tokens) - len(tokens)
            progress = Progress(
                request.request_id,
                self.sample_index,
                start,
                tuple(tokens),
                tuple(logprobs),
                tuple(top_logprobs),
                version=version,
            )
            request.sink.deliver([StreamedTokens(request, progress)])

    def _truncate(self, count: int) -> None:
        """Drop the tokens after a stop string."""
        for column in (self.tokens, self.logprobs, self.raw_logprobs, self.top_logprobs):
            del column[count:]
        self.stopped = True

    def restart(self) -> None:
        """Drop everything but the prompt."""
        for column in (self.tokens, self.logprobs, self.raw_logprobs, self.top_logprobs, self.versions):
            column.clear()
        self.stopped = False


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """The request ends without its remaining samples."""

    request: EngineRequest
    error: SlipstreamError


@dataclass(frozen=True, slots=True)
class StreamedTokens:
    """New tokens of an unfinished sample."""

    request: EngineRequest
    progress: Progress


EngineResult: TypeAlias = Sample | FailedRequest | StreamedTokens
"""A finished sample, a failed request, or new tokens of an unfinished sample."""
