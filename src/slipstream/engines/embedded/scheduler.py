"""Who runs next: slots, a waiting queue, and what each sequence has produced. Plain Python, no JAX.

A request becomes `n` samples. A sample waits (first come, first served), gets a slot of the KV cache, gains one token
per step, and leaves when it is finished, cancelled or failed."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.errors import SlipstreamError
from slipstream.types import FinishReason, SamplingParams, VersionSpan


class Job(Protocol):
    """Whom to tell: one call of `generate`. The scheduler only carries it."""

    def deliver(self, outcomes: list[Sample | Failed]) -> None: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """A request under way: what its samples share. Compared by identity, as ids may repeat between callers."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    limit: int
    """Most tokens to generate: `max_tokens`, or what the context leaves."""
    stop: frozenset[int]
    job: Job

    def samples(self) -> list[Sample]:
        return [Sample(self, index) for index in range(self.sampling.n)]


@dataclass(slots=True, eq=False)
class Sample:
    """One sample of a request, waiting or in a slot."""

    ticket: Ticket
    sample_index: int
    slot: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """`(version, start)` wherever the version changed."""

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.tokens and self.tokens[-1] in self.ticket.stop:
            return "stop"
        return "length" if len(self.tokens) >= self.ticket.limit else None

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        stops = [start for _, start in self.versions[1:]] + [len(self.tokens)]
        return tuple(VersionSpan(version, start, stop) for (version, start), stop in zip(self.versions, stops))

    @property
    def length(self) -> int:
        return len(self.ticket.prompt) + len(self.tokens)

    def append(self, token: int, logprob: float, raw_logprob: float, version: int) -> None:
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.tokens)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.raw_logprobs.append(raw_logprob)


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that ends without its remaining samples."""

    ticket: Ticket
    error: SlipstreamError


class Scheduler:
    """Slots are handed out lowest first, so that few live samples lie in the first few slots."""

    def __init__(self, num_slots: int) -> None:
        self.waiting: deque[Sample] = deque()
        self.running: dict[int, Sample] = {}
        """By slot."""
        self.free = list(range(num_slots))

    def add(self, samples: Iterable[Sample]) -> None:
        self.waiting.extend(samples)

    def admit(self, max_prefill_tokens: int) -> list[Sample]:
        """Moves samples from the queue into free slots, in order, while their distinct prompts, padded to the longest,
        make at most `max_prefill_tokens`. The first is admitted whatever its length."""
        admitted: list[Sample] = []
        prompts: set[tuple[int, ...]] = set()
        longest = 0
        while self.waiting and self.free:
            prompt = self.waiting[0].ticket.prompt
            longest = max(longest, len(prompt))
            prompts.add(prompt)
            if admitted and len(prompts) * longest > max_prefill_tokens:
                break
            sample = self.waiting.popleft()
            sample.slot = heapq.heappop(self.free)
            self.running[sample.slot] = sample
            admitted.append(sample)
        return admitted

    def record(
        self, tokens: Sequence[int], logprobs: Sequence[float], raw_logprobs: Sequence[float], version: int
    ) -> list[Sample]:
        """Gives every running sample the token of its slot, drawn under `version`. Returns those that are finished;
        their slots are free again."""
        finished = []
        for slot, sample in self.running.items():
            sample.append(tokens[slot], logprobs[slot], raw_logprobs[slot], version)
            if sample.finish_reason is not None:
                finished.append(sample)
        for sample in finished:
            self._release(sample)
        return finished

    def drop(self, unwanted: Callable[[Ticket], bool]) -> list[Ticket]:
        """Removes all samples of the tickets that `unwanted` picks, running or waiting, and returns those tickets."""
        dropped = {s.ticket: None for s in (*self.running.values(), *self.waiting) if unwanted(s.ticket)}
        self.waiting = deque(s for s in self.waiting if s.ticket not in dropped)
        for sample in [s for s in self.running.values() if s.ticket in dropped]:
            self._release(sample)
        return list(dropped)

    def _release(self, sample: Sample) -> None:
        del self.running[sample.slot]
        heapq.heappush(self.free, sample.slot)


@dataclass(frozen=True, slots=True)
class Prefill:
    """What must be computed before admitted samples can decode: each distinct prompt once, into the slot of its first
    sample, and copies from there to the slots of the others."""

    prompts: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]
    """`(from slot, to slot)`."""

    @property
    def longest(self) -> int:
        return max((len(prompt) for prompt in self.prompts), default=0)


def plan_prefill(admitted: Iterable[Sample]) -> Prefill:
    """The last token of a prompt is left out: the decode step takes it, and so all sampling happens in one place. A
    prompt of one token needs no prefill."""
    homes: dict[tuple[int, ...], int] = {}
    copies = []
    for sample in admitted:
        prompt = sample.ticket.prompt[:-1]
        if prompt in homes:
            copies.append((homes[prompt], sample.slot))
        elif prompt:
            homes[prompt] = sample.slot
    return Prefill(tuple(homes), tuple(homes.values()), tuple(copies))


def plan_scoring(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of sequences to score together: of like length, at most `max_tokens` with padding to the longest."""
    chunks: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if chunks and (len(chunks[-1]) + 1) * lengths[index] <= max_tokens:
            chunks[-1].append(index)
        else:
            chunks.append([index])
    return chunks


def bucket(size: int, low: int, high: int) -> int:
    """The smallest power of two that is at least `size` and `low`, capped at `high`. Shapes come from few buckets, so
    that few programs are compiled."""
    return min(max(low, 1 << max(size - 1, 0).bit_length()), high)
