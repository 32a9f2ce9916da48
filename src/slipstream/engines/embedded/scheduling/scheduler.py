"""Continuous batching with chunked prefill and preemption over a paged KV cache. Plain Python, no JAX.

    waiting ──admit──► prefilling ──all but the newest token computed──► running ──finished──► removed
       ▲                   │                                               │
       └────── preempted: pages ran out, or all at once (sleep, recompute) ┘

A preempted sample keeps its tokens. Its KV cache is computed again when it is readmitted, except for what the prefix tree
still has."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from slipstream.engines.embedded.scheduling.pages import PagePool
from slipstream.engines.embedded.scheduling.radix_cache import PrefixTree
from slipstream.engines.embedded.scheduling.shapes import Shapes
from slipstream.engines.embedded.scheduling.steps_per_tick import best_num_steps
from slipstream.engines.frontend.sequence import EngineRequest, Sample
from slipstream.engines.frontend.waiting_queue import FairQueue


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Positions `[start, stop)` of a sample, computed in one tick."""

    sample: Sample
    start: int
    stop: int
    is_last: bool
    """The sample's prefill ends with this chunk."""


@dataclass(slots=True)
class Tick:
    """The plan of one round trip to the device: page copies, then prefill and scoring, then decoding. Samples whose prefill
    ends in a tick decode in the same tick."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    prefill: list[PrefillChunk] = field(default_factory=list)
    scoring: list[PrefillChunk] = field(default_factory=list)
    decode: list[Sample] = field(default_factory=list)
    room: list[int] = field(default_factory=list)
    """Tokens that each sample of `decode` may draw: what its pages hold, up to its own limit."""
    upcoming: int = 0
    """Samples that decode now or are waiting to."""
    steps: int = 0
    early_exit_rows: int = 0
    """Decoding ends, after at least one step, when no more than this many samples are unfinished."""

    @property
    def is_empty(self) -> bool:
        return not (self.copies or self.prefill or self.scoring or self.decode)


MAX_DEFERRED = 64
"""Deferred requests after which a plan stops looking for one that can start."""

Admission: TypeAlias = Literal["admitted", "deferred", "no pages"]
"""`deferred`: another sample is computing this one's prefix, and waiting for it saves work."""


class Scheduler:
    """Used in a loop: `plan` a tick, run it, then `finish_prefill` and `record` its results."""

    def __init__(self, shapes: Shapes, max_samples: int, prefix_cache: bool = True) -> None:
        self._shapes, self._max_samples = shapes, max_samples
        self.pool = PagePool(shapes.num_pages)
        self.tree = PrefixTree(self.pool, shapes.page_size) if prefix_cache else None
        self.waiting: FairQueue[Sample] = FairQueue()
        self.prefilling: dict[Sample, None] = {}
        self.running: dict[Sample, None] = {}
        self._arrivals = itertools.count()
        self._version = -1
        """At which the base model, or all, last changed."""
        self._adapter_versions: dict[str, int] = {}
        """By adapter: the version at which it last changed, if that is later."""
        self._page_scores: dict[int, tuple[list[float], int]] = {}
        """For scored pages: raw logprobs of the successors of the page's tokens, and the last of these successors, which is
        the first token after the page."""
        self.num_preemptions = self.prefill_tokens = 0

    # --- samples ---

    def add(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            sample.arrival = next(self._arrivals)
            self.waiting.push(sample, sample.request.priority, sample.request.sink)

    @property
    def live(self) -> list[Sample]:
        return [*self.prefilling, *self.running]

    @property
    def has_in_flight(self) -> bool:
        """Whether a sample is live, or is waiting with tokens already drawn."""
        return bool(self.prefilling or self.running) or any(sample.tokens for sample in self.waiting)

    def drop(self, unwanted: Callable[[EngineRequest], bool]) -> list[EngineRequest]:
        """Remove all samples of the requests for which `unwanted` is true; returns those requests."""
        dropped = {s.request: None for s in (*self.live, *self.waiting) if unwanted(s.request)}
        for sample in [s for s in self.live if s.request in dropped]:
            self._remove(sample)
        self.waiting.discard_if(lambda sample: sample.request in dropped)
        return list(dropped)

    def preempt_all(self, restart: bool = False, adapters: Collection[str] | None = None) -> int:
        """Free the pages of all live samples and return them to the queue. With `restart`, drop all drawn tokens, too. With
        `adapters`, only samples of these. Return the number of dropped tokens."""
        for sample in sorted(self.live, key=lambda s: s.order, reverse=True):
            if _is_of(sample, adapters):
                self._preempt(sample)
        dropped = 0
        for sample in self.waiting if restart else ():
            if _is_of(sample, adapters):
                dropped += len(sample.tokens)
                sample.restart()
        return dropped

    def set_version(self, version: int, adapters: Collection[str] | None = None) -> None:
        """Continue under another policy version, in which all has changed, or only `adapters`. The prefix cache of what changed
        is cleared, and a running sample's KV cache, now a mix of versions, is no longer shared. Samples without tokens, and
        scores, start over: a result attributed to one version must not depend on keys and values of another."""
        if adapters is None:
            self._version, self._adapter_versions = version, {}
            self.clear_cache()
        else:
            self._adapter_versions |= dict.fromkeys(adapters, version)
            for adapter in adapters:
                self.clear_adapter(adapter)
        for sample in self.live:
            if _is_of(sample, adapters):
                sample.cache_version = -1
                sample.pending.clear()
                if not sample.tokens:
                    self._preempt(sample)
        for sample in self.waiting:
            if sample.request.is_scoring and _is_of(sample, adapters):
                sample.restart()

    def _version_of(self, sample: Sample) -> int:
        """Return the version at which what a sample computes with last changed."""
        return self._adapter_versions.get(sample.request.adapter, self._version)

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache. Running samples keep their pages, unshared."""
        self.clear_cache()
        for sample in self.live:
            sample.pending.clear()

    def clear_adapter(self, adapter: str) -> None:
        """Clear the prefix cache of an adapter that is gone."""
        if self.tree is not None:
            self.tree.clear_adapter(adapter)

    def clear_cache(self) -> None:
        if self.tree is not None:
            self.tree.clear()
        self._page_scores.clear()

    # --- the plan ---

    def plan(self, steps: int, admit: bool = True, overhead: float = 1.0) -> Tick:
        """Plan a tick of at most `steps` decode steps.

        One step if a waiting sample could start in the next tick. If samples wait for a row, the number of steps with the
        most tokens per time; `overhead` is a tick's time outside its steps, in steps. Without `admit` no new sample starts,
        but preempted ones are readmitted."""
        tick = Tick()
        self._reserve_pages(steps)
        budget = self._shapes.blocks[-1]
        for sample in list(self.prefilling):
            if budget > 0:
                budget -= self._prefill(sample, tick, budget)
        others_ready = self._admit(tick, budget, admit)
        tick.decode = list(self.running)
        tick.room = [self._room(sample) for sample in tick.decode]
        tick.upcoming = len(self.running) + len(self.prefilling) + len(self.waiting)
        if others_ready or self.prefilling:
            tick.steps = 1
        else:
            remaining = [sample.end - sample.length for sample in tick.decode] if self.waiting and admit else ()
            tick.steps = best_num_steps(remaining, steps, overhead)
        return tick

    def _reserve_pages(self, steps: int) -> None:
        """Give running samples pages for the tokens they will draw. If there are too few, preempt the last in order."""
        for sample in list(self.running):
            if sample not in self.running:
                continue  # preempted in this loop
            if self._extend(sample, min(sample.length - 1 + steps, sample.end - 1)):
                continue
            while sample in self.running and not self._extend(sample, sample.length):
                self._preempt(max(self.live, key=lambda s: s.order))
                self.num_preemptions += 1

    def _may_grow(self, sample: Sample) -> bool:
        """Whether the sample may need more pages than it has."""
        return self._shapes.num_pages_for(sample.end - 1) > len(sample.pages)

    def _room(self, sample: Sample) -> int:
        """Tokens that the sample can draw with its pages. The newest token is cached first; the last one drawn is not."""
        capacity = len(sample.pages) * self._shapes.page_size
        return min(capacity - (sample.length - 1), sample.end - sample.length)

    def _extend(self, sample: Sample, tokens: int) -> bool:
        needed = self._shapes.num_pages_for(tokens) - len(sample.pages)
        if needed <= 0:
            return True
        pages = self._take(needed)
        sample.pages += pages or []
        return pages is not None

    def _take(self, count: int, reserve: int = 0) -> list[int] | None:
        """Take pages, evicting from the prefix tree if needed. Returns None if fewer than `reserve` would be left."""
        lacking = count + reserve - self.pool.num_free
        if lacking > 0 and self.tree is not None:
            lacking -= self.tree.evict(lacking)
        pages = None if lacking > 0 else self.pool.take(count)
        for page in pages or ():
            self._page_scores.pop(page, None)
        return pages

    def _prefill(self, sample: Sample, tick: Tick, budget: int) -> int:
        """Plan as much of the sample's prefill as fits into `budget` blocks; returns the number of blocks used."""
        start = sample.num_computed
        stop = min(sample.prefill_end, start + budget * self._shapes.block)
        is_last = stop == sample.prefill_end
        (tick.scoring if sample.request.is_scoring else tick.prefill).append(PrefillChunk(sample, start, stop, is_last))
        sample.num_computed = stop
        self.prefill_tokens += stop - start
        if is_last and not sample.request.is_scoring:
            del self.prefilling[sample]
            self.running[sample] = None
        return self._shapes.num_blocks_for(stop - start)

    def _admit(self, tick: Tick, budget: int, newcomers: bool) -> bool:
        """Admit waiting samples in order. Returns whether some of the rest could start after this tick's prefill."""
        num_live = len(self.prefilling) + len(self.running)
        deferred: set[EngineRequest] = set()
        # Keep some pages free for samples that still grow, so that a newcomer does not preempt one of them at once.
        num_growing = sum(self._may_grow(sample) for sample in self.running)
        for sample in self.waiting.candidates(Counter(s.request.sink for s in self.live)):
            if num_live >= self._max_samples or len(deferred) == MAX_DEFERRED:
                return bool(deferred)
            if sample.request in deferred or not (newcomers or sample.tokens):
                continue
            if budget <= 0:
                return True
            admission = self._allocate(sample, tick, reserve=num_growing // 8)
            if admission == "no pages":
                return bool(deferred)  # strict order: no other sample overtakes this one
            if admission == "deferred":
                deferred.add(sample.request)
                continue
            self.waiting.remove(sample)
            num_live += 1
            num_growing += self._may_grow(sample)
            if sample.num_computed < sample.prefill_end:
                self.prefilling[sample] = None
                budget -= self._prefill(sample, tick, budget)
            else:
                self.running[sample] = None
        return bool(deferred)

    def _allocate(self, sample: Sample, tick: Tick, reserve: int) -> Admission:
        """Give a waiting sample its pages: shared pages for a cached prefix, new ones for the rest, leaving `reserve` free."""
        ids = sample.ids
        if sample.request.is_scoring:
            sample.restart()  # it may have been preempted half scored
        shared: list[int] = []
        copied, num_cached = None, 0
        if self.tree is not None:
            match = self.tree.match(ids, sample.prefill_end, sample.request.adapter)
            blocks, blocks_later = (
                self._shapes.num_blocks_for(sample.prefill_end - known)
                for known in (match.num_tokens, match.num_tokens + match.num_pending)
            )
            if blocks_later < blocks:
                return "deferred"
            shared, copied, num_cached = list(match.pages), match.partial, match.num_tokens
            if sample.request.is_scoring:
                shared, copied = self._scored_pages(sample, shared), None
                num_cached = len(shared) * self._shapes.page_size
        held = [*shared, *([] if copied is None else [copied])]
        self.pool.hold(held)  # before `_take` evicts
        num_new = self._shapes.num_pages_for(len(ids)) - len(shared)
        new = self._take(num_new, reserve)
        if new is None and copied is not None:
            # The page to copy may be the one page missing: evict it instead.
            self.pool.release([copied])
            held, copied, num_cached = shared, None, len(shared) * self._shapes.page_size
            new = self._take(num_new, reserve)
        if new is None:
            self.pool.release(held)
            return "no pages"
        if copied is not None:
            tick.copies.append((copied, new[0]))
            self.pool.release([copied])  # safe: a tick copies pages before it writes any
        sample.pages, sample.num_computed = [*shared, *new], num_cached
        sample.cache_version = self._version_of(sample)
        if self.tree is not None:
            self.tree.hit_tokens += num_cached
            self.tree.looked_up_tokens += sample.prefill_end
            if num_cached < sample.prefill_end:
                pages = sample.pages[: self._shapes.num_pages_for(sample.prefill_end)]
                computed, adapter = ids[: sample.prefill_end], sample.request.adapter
                sample.pending = self.tree.insert(computed, pages, ready=False, adapter=adapter)
        return "admitted"

    def _scored_pages(self, sample: Sample, shared: Sequence[int]) -> list[int]:
        """The cached pages whose logprobs are known as well, and add those to the sample. At least one position is left to
        compute; all of them if top logprobs are requested."""
        size, ids = self._shapes.page_size, sample.ids
        known: list[int] = []
        most = 0 if sample.request.sampling.top_logprobs else (sample.prefill_end - 1) // size
        for page in shared[:most]:
            logprobs, next_token = self._page_scores.get(page, ([], -1))
            if next_token != ids[(len(known) + 1) * size]:
                break
            sample.raw_logprobs += logprobs
            known.append(page)
        return known

    # --- results ---

    def finish_prefill(self, tick: Tick) -> list[Sample]:
        """Record that a tick's prefill is done. Returns the samples whose scoring is complete."""
        for chunk in (*tick.prefill, *tick.scoring):
            if chunk.is_last and self.tree is not None:
                self.tree.mark_ready(chunk.sample.pending)
                chunk.sample.pending = []
        scored = [chunk.sample for chunk in tick.scoring if chunk.is_last]
        for sample in scored:
            self._cache_scores(sample)
            self._remove(sample)
        return scored

    def _cache_scores(self, sample: Sample) -> None:
        size = self._shapes.page_size
        if self.tree is not None and sample.cache_version == self._version_of(sample):
            for index in range(sample.prefill_end // size):
                stop = (index + 1) * size
                logprobs = sample.raw_logprobs[stop - size : stop]
                self._page_scores[sample.pages[index]] = logprobs, sample.request.prompt[stop]

    def record(self, sample: Sample) -> bool:
        """Record that the sample has drawn tokens. Returns whether it is finished, in which case it is removed."""
        sample.num_computed = sample.length - 1
        if sample.finish_reason is None:
            return False
        if self.tree is not None and sample.cache_version == self._version_of(sample):
            # Cache the finished sequence: the next turn of a conversation starts with it.
            pages = sample.pages[: self._shapes.num_pages_for(sample.num_computed)]
            self.tree.insert(sample.ids[: sample.num_computed], pages, adapter=sample.request.adapter)
        self._remove(sample)
        return True

    def _preempt(self, sample: Sample) -> None:
        self._remove(sample)
        self.waiting.push(sample, sample.request.priority, sample.request.sink, front=True)

    def _remove(self, sample: Sample) -> None:
        del (self.prefilling if sample in self.prefilling else self.running)[sample]
        if self.tree is not None and sample.pending:
            self.tree.discard(sample.pending)
        self.pool.release(sample.pages)
        sample.pages, sample.pending, sample.num_computed, sample.cache_version = [], [], 0, -1


def _is_of(sample: Sample, adapters: Collection[str] | None) -> bool:
    """Whether a sample computes with one of these adapters; None stands for everything."""
    return adapters is None or sample.request.adapter in adapters
