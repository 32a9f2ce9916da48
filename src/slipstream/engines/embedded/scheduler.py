"""Who runs next: pages, a waiting queue, and one plan per round trip. Plain Python, no JAX.

    waiting ──admit──► prefilling ──all but the newest token computed──► running ──finished──► gone
       ▲                   │                                               │
       └──── preempted (pages ran out), or all put back (sleep, recompute) ┘

A sample that is put back keeps its tokens; its cache is computed again when its turn comes, as far as the prefix tree does
not still have it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from slipstream.engines.embedded.pace import worthwhile
from slipstream.engines.embedded.pages import PagePool
from slipstream.engines.embedded.queue import FairQueue
from slipstream.engines.embedded.radix import PrefixTree
from slipstream.engines.embedded.shapes import Shapes
from slipstream.engines.sequence import Sample, Ticket


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions `[start, stop)` of a sample that are computed in this tick."""

    sample: Sample
    start: int
    stop: int
    is_last: bool
    """Its prefill ends here."""


@dataclass(slots=True)
class Tick:
    """One round trip: copies, then prefill and scoring, then decoding. Samples whose prefill ends here decode here."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    prefill: list[Piece] = field(default_factory=list)
    scoring: list[Piece] = field(default_factory=list)
    decode: list[Sample] = field(default_factory=list)
    room: list[int] = field(default_factory=list)
    """Tokens that each sample of `decode` has pages for, at most its own limit."""
    soon: int = 0
    """How many samples decode here, or wait to."""
    steps: int = 0
    floor: int = 0
    """Decoding ends, after a step at least, when no more than so many have not ended."""

    @property
    def is_empty(self) -> bool:
        return not (self.copies or self.prefill or self.scoring or self.decode)


MAX_HELD_UP = 64
"""Requests that follow and are looked at in one plan: behind so many, who could start now is not worth looking for."""

Entry: TypeAlias = Literal["entered", "follows", "no pages"]
"""`follows`: another sample is computing the beginning of this one, and waiting for it spares work."""


class Scheduler:
    """`plan` a tick, run it, `finish_prefill` and `record` what came of it, and again."""

    def __init__(self, shapes: Shapes, max_samples: int, prefix_cache: bool = True) -> None:
        self._shapes, self._max_samples = shapes, max_samples
        self.pool = PagePool(shapes.num_pages)
        self.tree = PrefixTree(self.pool, shapes.page_size) if prefix_cache else None
        self.waiting: FairQueue[Sample] = FairQueue()
        self.prefilling: dict[Sample, None] = {}
        self.running: dict[Sample, None] = {}
        self._arrivals = itertools.count()
        self._version = -1
        self._scored: dict[int, tuple[list[float], int]] = {}
        """For pages that were scored: raw logprobs of the tokens that follow those of the page, and the token after the
        page, whose logprob is the last of them."""
        self.num_preemptions = self.prefill_tokens = 0

    # --- who is there ---

    def add(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            sample.arrival = next(self._arrivals)
            self.waiting.push(sample, sample.ticket.priority, sample.ticket.job)

    @property
    def live(self) -> list[Sample]:
        return [*self.prefilling, *self.running]

    @property
    def is_under_way(self) -> bool:
        """Some sample is live, or has drawn tokens and waits to go on."""
        return bool(self.prefilling or self.running) or any(sample.tokens for sample in self.waiting)

    def drop(self, unwanted: Callable[[Ticket], bool]) -> list[Ticket]:
        """Removes all samples of the tickets that `unwanted` picks, and returns those tickets."""
        dropped = {s.ticket: None for s in (*self.live, *self.waiting) if unwanted(s.ticket)}
        for sample in [s for s in self.live if s.ticket in dropped]:
            self._leave(sample)
        self.waiting.discard_if(lambda sample: sample.ticket in dropped)
        return list(dropped)

    def put_back(self, restart: bool = False) -> None:
        """All live samples wait again, their pages free; with `restart` everyone begins anew from the prompt."""
        for sample in sorted(self.live, key=lambda s: s.rank, reverse=True):
            self._put_back(sample)
        if restart:
            for sample in self.waiting:
                sample.restart()

    def new_version(self, version: int) -> None:
        """What follows is computed by another policy: nothing cached serves anyone but its owner, who has a mix from now on.
        Who has drawn nothing yet starts again, as do scores: what will say that it is of this version alone must not rest on
        what another has left in the cache."""
        self._version = version
        self.forget_cached()
        for sample in self.live:
            sample.cache_version = -1
            sample.pending.clear()
            if not sample.tokens:
                self._put_back(sample)
        for sample in self.waiting:
            if sample.ticket.is_scoring:
                sample.restart()

    def forget_prefixes(self) -> None:
        """What runs keeps its pages, and nobody else finds them."""
        self.forget_cached()
        for sample in self.live:
            sample.pending.clear()

    def forget_cached(self) -> None:
        if self.tree is not None:
            self.tree.clear()
        self._scored.clear()

    # --- the plan ---

    def plan(self, steps: int, admit: bool = True, overhead: float = 1.0) -> Tick:
        """`steps` is how far to decode when nobody else waits for the device. Where somebody does who could start now, one
        step; where somebody waits for a place, as many as are worth it (`overhead` is what a round trip costs besides, in
        steps). Without `admit` none starts, and those that lost their pages still come back."""
        tick = Tick()
        self._grow(steps)
        budget = self._shapes.blocks[-1]
        for sample in list(self.prefilling):
            if budget > 0:
                budget -= self._prefill(sample, tick, budget)
        hurried = self._admit(tick, budget, admit)
        tick.decode = list(self.running)
        tick.room = [self._room(sample) for sample in tick.decode]
        tick.soon = len(self.running) + len(self.prefilling) + len(self.waiting)
        if hurried or self.prefilling:
            tick.steps = 1
        else:
            left = [sample.end - sample.length for sample in tick.decode] if self.waiting and admit else ()
            tick.steps = worthwhile(left, steps, overhead)
        return tick

    def _grow(self, steps: int) -> None:
        """Pages for what the running samples will draw. When there are none, the last in line loses its own."""
        for sample in list(self.running):
            if sample not in self.running:
                continue  # preempted for one before it
            if self._extend(sample, min(sample.length - 1 + steps, sample.end - 1)):
                continue
            while sample in self.running and not self._extend(sample, sample.length):
                self._put_back(max(self.live, key=lambda s: s.rank))
                self.num_preemptions += 1

    def _may_grow(self, sample: Sample) -> bool:
        """Whether it may come to need more pages than it has."""
        return self._shapes.num_pages_for(sample.end - 1) > len(sample.pages)

    def _room(self, sample: Sample) -> int:
        """Tokens that it can draw: the newest one is written into the cache first, the last one drawn is not."""
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
        """New pages, if as many as `reserve` are left after that."""
        lacking = count + reserve - self.pool.num_free
        if lacking > 0 and self.tree is not None:
            lacking -= self.tree.evict(lacking)
        pages = None if lacking > 0 else self.pool.take(count)
        for page in pages or ():
            self._scored.pop(page, None)
        return pages

    def _prefill(self, sample: Sample, tick: Tick, budget: int) -> int:
        """Plans as much of the sample's prefill as `budget` blocks hold; returns how many it takes."""
        start = sample.num_computed
        stop = min(sample.prefill_end, start + budget * self._shapes.block)
        is_last = stop == sample.prefill_end
        (tick.scoring if sample.ticket.is_scoring else tick.prefill).append(Piece(sample, start, stop, is_last))
        sample.num_computed = stop
        self.prefill_tokens += stop - start
        if is_last and not sample.ticket.is_scoring:
            del self.prefilling[sample]
            self.running[sample] = None
        return self._shapes.num_blocks_for(stop - start)

    def _admit(self, tick: Tick, budget: int, newcomers: bool) -> bool:
        """Lets waiting samples in, in order, and says whether some could come in soon: after this prefill."""
        num_live = len(self.prefilling) + len(self.running)
        held_up: set[Ticket] = set()
        # Some pages are left to those that still grow, so that a newcomer does not push one of them out at once.
        num_growing = sum(self._may_grow(sample) for sample in self.running)
        for sample in self.waiting.candidates(Counter(s.ticket.job for s in self.live)):
            if num_live >= self._max_samples or len(held_up) == MAX_HELD_UP:
                return bool(held_up)
            if sample.ticket in held_up or not (newcomers or sample.tokens):
                continue
            if budget <= 0:
                return True
            entry = self._enter(sample, tick, reserve=num_growing // 8)
            if entry == "no pages":
                return bool(held_up)  # nobody overtakes it
            if entry == "follows":
                held_up.add(sample.ticket)
                continue
            self.waiting.remove(sample)
            num_live += 1
            num_growing += self._may_grow(sample)
            if sample.num_computed < sample.prefill_end:
                self.prefilling[sample] = None
                budget -= self._prefill(sample, tick, budget)
            else:
                self.running[sample] = None
        return bool(held_up)

    def _enter(self, sample: Sample, tick: Tick, reserve: int) -> Entry:
        """Gives a waiting sample its pages: shared ones where its beginning is cached, new ones for the rest, if as many as
        `reserve` are left."""
        ids = sample.ids
        if sample.ticket.is_scoring:
            sample.restart()  # it may have been put back half scored
        shared: list[int] = []
        copied, num_cached = None, 0
        if self.tree is not None:
            match = self.tree.match(ids, sample.prefill_end)
            blocks, blocks_later = (
                self._shapes.num_blocks_for(sample.prefill_end - known)
                for known in (match.num_tokens, match.num_tokens + match.num_pending)
            )
            if blocks_later < blocks:
                return "follows"
            shared, copied, num_cached = list(match.pages), match.partial, match.num_tokens
            if sample.ticket.is_scoring:
                shared, copied = self._scored_pages(sample, shared), None
                num_cached = len(shared) * self._shapes.page_size
        held = [*shared, *([] if copied is None else [copied])]
        self.pool.hold(held)  # before anything is evicted to make room
        num_new = self._shapes.num_pages_for(len(ids)) - len(shared)
        new = self._take(num_new, reserve)
        if new is None and copied is not None:
            # The page to copy may itself be the one that is lacking.
            self.pool.release([copied])
            held, copied, num_cached = shared, None, len(shared) * self._shapes.page_size
            new = self._take(num_new, reserve)
        if new is None:
            self.pool.release(held)
            return "no pages"
        if copied is not None:
            tick.copies.append((copied, new[0]))
            self.pool.release([copied])  # it is read before anyone can write it: copies come first in a tick
        sample.pages, sample.num_computed, sample.cache_version = [*shared, *new], num_cached, self._version
        if self.tree is not None:
            self.tree.count_hit(num_cached, sample.prefill_end)
            if num_cached < sample.prefill_end:
                pages = sample.pages[: self._shapes.num_pages_for(sample.prefill_end)]
                sample.pending = self.tree.insert(ids[: sample.prefill_end], pages, ready=False)
        return "entered"

    def _scored_pages(self, sample: Sample, shared: Sequence[int]) -> list[int]:
        """Of the cached pages those whose logprobs are known too, as a score needs both. At least one position is left to
        compute, and all where alternatives are asked for."""
        size, ids = self._shapes.page_size, sample.ids
        known: list[int] = []
        most = 0 if sample.ticket.sampling.top_logprobs else (sample.prefill_end - 1) // size
        for page in shared[:most]:
            logprobs, following = self._scored.get(page, ([], -1))
            if following != ids[(len(known) + 1) * size]:
                break
            sample.raw_logprobs += logprobs
            known.append(page)
        return known

    # --- what came of it ---

    def finish_prefill(self, tick: Tick) -> list[Sample]:
        """The prefill of a tick was done. Returns samples that were to be scored and now are."""
        for piece in (*tick.prefill, *tick.scoring):
            if piece.is_last and self.tree is not None:
                self.tree.mark_ready(piece.sample.pending)
                piece.sample.pending = []
        done = [piece.sample for piece in tick.scoring if piece.is_last]
        for sample in done:
            self._remember_scores(sample)
            self._leave(sample)
        return done

    def _remember_scores(self, sample: Sample) -> None:
        size = self._shapes.page_size
        if self.tree is not None and sample.cache_version == self._version:
            for index in range(sample.prefill_end // size):
                stop = (index + 1) * size
                self._scored[sample.pages[index]] = sample.raw_logprobs[stop - size : stop], sample.ticket.prompt[stop]

    def record(self, sample: Sample) -> bool:
        """The sample has drawn tokens. Says whether it is finished, and then it is gone."""
        sample.num_computed = sample.length - 1
        if sample.finish_reason is None:
            return False
        if self.tree is not None and sample.cache_version == self._version:
            # A finished sequence stays in the tree: the next turn of a conversation begins with it.
            pages = sample.pages[: self._shapes.num_pages_for(sample.num_computed)]
            self.tree.insert(sample.ids[: sample.num_computed], pages)
        self._leave(sample)
        return True

    def _put_back(self, sample: Sample) -> None:
        self._leave(sample)
        self.waiting.push(sample, sample.ticket.priority, sample.ticket.job, front=True)

    def _leave(self, sample: Sample) -> None:
        del (self.prefilling if sample in self.prefilling else self.running)[sample]
        if self.tree is not None and sample.pending:
            self.tree.discard(sample.pending)
        self.pool.release(sample.pages)
        sample.pages, sample.pending, sample.num_computed, sample.cache_version = [], [], 0, -1
