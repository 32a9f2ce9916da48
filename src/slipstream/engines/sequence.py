"""What is under way: requests, their samples, and what each has produced. Plain data, no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from slipstream.errors import SlipstreamError
from slipstream.types import FinishReason, Progress, SamplingParams, TopLogprobs, VersionSpan


class Job(Protocol):
    """Whom to tell: one call of `generate` or `score`. The scheduler only carries it."""

    def deliver(self, outcomes: Sequence[Outcome]) -> None: ...

    def __hash__(self) -> int: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """A request under way: what its samples share. Compared by identity, as ids may repeat between callers."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    limit: int
    """Most tokens to generate: `max_tokens`, or what the context leaves. 0: the prompt is scored, nothing is drawn."""
    stop: tuple[int, ...]
    job: Job
    priority: int = 0
    find_stop: Callable[[Sequence[int]], int | None] | None = None
    """For stop texts: how many of a completion's tokens there are when the first such text is complete, if it is."""
    tells: bool = False
    """Its job hears of every sample's tokens as they come."""

    @property
    def is_scoring(self) -> bool:
        return self.limit == 0

    def samples(self) -> list[Sample]:
        return [Sample(self, index) for index in range(self.sampling.n)]


@dataclass(slots=True, eq=False)
class Sample:
    """One sample of a request. Its KV cache is `pages`, of which the first `num_computed` positions are filled."""

    ticket: Ticket
    sample_index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    """When scoring: of the prompt's tokens but the first."""
    tops: list[TopLogprobs] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """`(version, start)` wherever the version changed."""
    stopped: bool = False
    """Its last token, or a stop text, ended it."""
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    cache_version: int = -1
    """The policy version of its whole cache; -1 once it holds a mix, which no one else may use."""
    pending: list[Any] = field(default_factory=list)
    """Nodes of the prefix tree that wait for this sample's prefill."""
    settings: Any = None
    """Its row of sampling settings, made once."""
    arrival: int = 0
    """Counts up: the younger of two has the larger."""

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first and is preempted last."""
        return self.ticket.priority, self.arrival

    @property
    def length(self) -> int:
        return len(self.ticket.prompt) + len(self.tokens)

    @property
    def ids(self) -> tuple[int, ...]:
        return self.ticket.prompt + tuple(self.tokens)

    @property
    def end(self) -> int:
        """The length at which it must stop."""
        return len(self.ticket.prompt) + self.ticket.limit

    @property
    def prefill_end(self) -> int:
        """Positions to compute before it can decode. The newest token is left to the decode step, and so all sampling
        happens in one place. Scoring ends with the last token that has a successor."""
        return self.length - 1

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.stopped:
            return "stop"
        return "length" if len(self.tokens) >= self.ticket.limit else None

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        stops = [start for _, start in self.versions[1:]] + [len(self.tokens)]
        return tuple(VersionSpan(version, start, stop) for (version, start), stop in zip(self.versions, stops))

    def extend(
        self,
        tokens: list[int],
        logprobs: list[float],
        raw_logprobs: list[float],
        tops: list[TopLogprobs],
        stopped: bool,
        version: int,
    ) -> None:
        """Takes what was drawn under `version`."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.tokens)))
        self.tokens += tokens
        self.logprobs += logprobs
        self.raw_logprobs += raw_logprobs
        self.tops += tops
        self.stopped = stopped
        if self.ticket.find_stop is not None:
            count = self.ticket.find_stop(self.tokens)
            if count is not None:
                self._cut(count)
        if self.ticket.tells and self.finish_reason is None:
            start = len(self.tokens) - len(tokens)
            told = Progress(
                self.ticket.request_id, self.sample_index, start, tuple(tokens), tuple(logprobs), tuple(tops)
            )
            self.ticket.job.deliver([Grown(self.ticket, told)])

    def _cut(self, count: int) -> None:
        """A stop text was complete with token `count`: what was drawn after it never was."""
        for column in (self.tokens, self.logprobs, self.raw_logprobs, self.tops):
            del column[count:]
        self.stopped = True

    def restart(self) -> None:
        """Back to the prompt."""
        for column in (self.tokens, self.logprobs, self.raw_logprobs, self.tops, self.versions):
            column.clear()
        self.stopped = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that ends without its remaining samples."""

    ticket: Ticket
    error: SlipstreamError


@dataclass(frozen=True, slots=True)
class Grown:
    """A sample of a request that asked to be told has more tokens, and goes on."""

    ticket: Ticket
    progress: Progress


Outcome: TypeAlias = Sample | Failed | Grown
"""What a job hears of."""
