"""The scheduler without JAX, against a fake device that records every write and checks every read."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engines.embedded.scheduling.radix_cache import Node
from slipstream.engines.embedded.scheduling.scheduler import MAX_DEFERRED, PrefillChunk, Scheduler, Tick
from slipstream.engines.embedded.scheduling.shapes import Shapes
from slipstream.engines.frontend.sequence import EngineRequest, FailedRequest, Sample
from slipstream.types import SamplingParams, TopLogprobs


def small(num_pages: int) -> Shapes:
    """Pages of four tokens; a tick prefills four blocks of two."""
    return Shapes(page_size=4, num_pages=num_pages, max_length=64, rows=(8,), block=2, blocks=(1, 4), max_steps=4)


SHAPES = small(64)
ADAPTERS = ("", "a", "b")


class NeverCalled:
    def deliver(self, results: list[Sample | FailedRequest]) -> None:
        raise AssertionError("the scheduler carries sinks and never calls them")


SINK = NeverCalled()


def request(
    prompt: str, limit: int = 3, *, n: int = 1, sink: Any = SINK, priority: int = 0, top: int = 0, adapter: str = ""
) -> EngineRequest:
    """A letter is a token. A limit of 0 scores the prompt."""
    sampling = SamplingParams(n=n, top_logprobs=top)
    return EngineRequest(prompt, tuple(map(ord, prompt)), sampling, 0, limit, (), sink, priority, adapter=adapter)


def drawn_after(ids: tuple[int, ...], sample: Sample) -> int:
    """One of three letters, so that completions share prefixes, too."""
    return ord("a") + crc32(bytes([*ids, sample.sample_index])) % 3


def logprob(ids: tuple[int, ...], version: int) -> float:
    """Logprob of the last of `ids` after the others."""
    return -float(crc32(bytes([*ids, version % 256])))


def completion(sample: Sample) -> list[int]:
    """The completion of an undisturbed run."""
    ids = sample.request.prompt
    while len(ids) < sample.end:
        ids += (drawn_after(ids, sample),)
    return list(ids[len(sample.request.prompt) :])


class Device:
    """Stands in for executor and device. Keys and values depend on all tokens up to their own and on the weights, so a slot of a
    page holds the sequence up to there and the version."""

    def __init__(self, shapes: Shapes = SHAPES, max_samples: int = 8, prefix_cache: bool = True) -> None:
        self.shapes = shapes
        self.scheduler = Scheduler(shapes, max_samples, prefix_cache)
        self.slots: dict[tuple[int, int], tuple[tuple[int, ...], tuple[str, int]]] = {}
        self.finished: list[Sample] = []
        self.version = 0
        self.changed = defaultdict[str, int](int)
        """By adapter: the version at which what it computes with last changed."""
        self.scheduler.set_version(0)

    def add(self, *requests: EngineRequest) -> list[Sample]:
        samples = [sample for request in requests for sample in request.samples()]
        self.scheduler.add(samples)
        return samples

    def new_version(self, adapters: list[str] | None = None) -> None:
        self.version += 1
        self.changed |= dict.fromkeys(ADAPTERS if adapters is None else adapters, self.version)
        self.scheduler.set_version(self.version, adapters)

    def sleep(self) -> None:
        self.scheduler.preempt_all()
        self.scheduler.clear_cache()
        self.slots.clear()

    def tick(self, steps: int = 4, admit: bool = True) -> Tick:
        scheduler = self.scheduler
        has_work = scheduler.has_in_flight or bool(scheduler.waiting and admit)
        tick = scheduler.plan(steps, admit)
        assert has_work != tick.is_empty, "work is waiting and nothing runs: the compute thread would fail"
        self.check_plan(tick, steps)
        copied = {
            (target, offset): self.slots[source, offset]
            for source, target in tick.copies
            for offset in range(self.shapes.page_size)
            if (source, offset) in self.slots
        }
        self.slots.update(copied)
        chunks = [*tick.prefill, *tick.scoring]
        for chunk in chunks:
            self.check_cache(chunk.sample, chunk.start)  # another chunk of this tick does not count
        for chunk in chunks:
            self.write(chunk.sample, chunk.start, chunk.stop)
            if chunk.sample.request.is_scoring:
                self.score(chunk)
        for sample, room in zip(tick.decode, tick.room):
            self.check_cache(sample, sample.length - 1)
            self.decode(sample, min(room, tick.steps))
            self.waste(sample, room)
        self.finished += scheduler.finish_prefill(tick)
        self.finished += [sample for sample in tick.decode if scheduler.record(sample)]
        self.check()
        return tick

    def drain(self, steps: int = 4) -> list[Sample]:
        """Run until everything is finished."""
        for _ in range(2000):
            if not (self.scheduler.live or self.scheduler.waiting):
                break
            self.tick(steps)
        assert not self.scheduler.live and not self.scheduler.waiting, "they hinder each other for ever"
        for sample in self.finished:
            self.check_finished(sample)
        return self.finished

    # --- the fake device ---

    def write(self, sample: Sample, start: int, stop: int) -> None:
        for position in range(start, stop):
            self.slots[self.place(sample, position)] = (sample.ids[: position + 1], self.weights(sample))

    def decode(self, sample: Sample, count: int) -> None:
        changed = self.weights(sample)[1]
        assert sample.tokens or sample.cache_version == changed, "its first token rests on another version"
        for _ in range(count):
            self.write(sample, sample.length - 1, sample.length)
            sample.extend([drawn_after(sample.ids, sample)], [-1.0], [-2.0], [], False, self.version)

    def waste(self, sample: Sample, room: int) -> None:
        """Write rejected draft tokens, as far as there is room behind the accepted ones."""
        for position in range(sample.length, min(sample.length + room, len(sample.pages) * self.shapes.page_size)):
            self.slots[self.place(sample, position)] = ((-1,), ("", -1))

    def score(self, chunk: PrefillChunk) -> None:
        sample, positions = chunk.sample, range(chunk.start, chunk.stop)
        version = self.weights(sample)[1]
        sample.raw_logprobs += [logprob(sample.ids[: position + 2], version) for position in positions]
        sample.versions = [(version, 0)]
        if sample.request.sampling.top_logprobs:
            sample.top_logprobs += [TopLogprobs((position,), (0.0,)) for position in positions]

    def weights(self, sample: Sample) -> tuple[str, int]:
        """What the sample computes with."""
        return sample.request.adapter, self.changed[sample.request.adapter]

    # --- invariants ---

    def place(self, sample: Sample, position: int) -> tuple[int, int]:
        """The slot for a position. Besides the sample, only the prefix tree may hold its page."""
        page = sample.pages[position // self.shapes.page_size]
        assert [other for other in self.scheduler.live if page in other.pages] == [sample]
        return page, position % self.shapes.page_size

    def check_plan(self, tick: Tick, steps: int) -> None:
        shapes, block = self.shapes, self.shapes.block
        for chunks in (tick.prefill, tick.scoring):
            assert all(chunk.start < chunk.stop <= chunk.sample.prefill_end for chunk in chunks)
            assert all(chunk.is_last == (chunk.stop == chunk.sample.prefill_end) for chunk in chunks)
        chunks = [*tick.prefill, *tick.scoring]
        assert sum(math.ceil((chunk.stop - chunk.start) / block) for chunk in chunks) <= shapes.blocks[-1]
        assert len({chunk.sample for chunk in chunks}) == len(chunks)
        assert all(chunk.sample in tick.decode for chunk in tick.prefill if chunk.is_last)
        assert len(tick.decode) <= len(self.scheduler.live) <= self.scheduler._max_samples
        assert 1 <= tick.steps <= steps
        for sample, room in zip(tick.decode, tick.room, strict=True):
            assert 1 <= room <= sample.end - sample.length
            assert (
                sample.length - 1 + room <= len(sample.pages) * shapes.page_size <= shapes.num_pages * shapes.page_size
            )
        targets = [target for _, target in tick.copies]
        assert len(set(targets)) == len(targets)
        for i, (source, _) in enumerate(tick.copies):  # copies may run in any order
            assert source not in targets[: i + 1]

    def check_cache(self, sample: Sample, stop: int) -> None:
        """Everything before `stop` is cached, under the serving version unless the sample has seen a version change."""
        assert sample.cache_version in (self.weights(sample)[1], -1)
        for position in range(stop):
            page, offset = sample.pages[position // self.shapes.page_size], position % self.shapes.page_size
            ids, weights = self.slots[page, offset]
            assert ids == sample.ids[: position + 1] and weights[0] == sample.request.adapter
            assert weights == self.weights(sample) or sample.cache_version == -1

    def check(self) -> None:
        """Every page is free or held by its users, and the tree describes its pages correctly."""
        scheduler, pool, tree = self.scheduler, self.scheduler.pool, self.scheduler.tree
        of_samples = Counter(page for sample in scheduler.live for page in sample.pages)
        of_tree = [page for page in range(pool.num_pages) if pool.holders(page) > of_samples[page]]
        assert all(pool.holders(page) - of_samples[page] == (page in of_tree) for page in range(pool.num_pages))
        assert len(of_tree) == (tree.num_pages if tree else 0)
        assert pool.num_free == pool.num_pages - len({*of_samples, *of_tree})
        assert all(sample.pages == [] for sample in scheduler.waiting)
        if tree is not None:
            for adapter, root in tree._roots.items():
                self.check_tree(root, (), (adapter, self.changed[adapter]))
        if not scheduler.live:
            assert pool.num_free + len(of_tree) == pool.num_pages

    def check_tree(self, node: Node, before: tuple[int, ...], weights: tuple[str, int]) -> None:
        for child in node.ordered:
            for offset in range(child.num_ready):
                assert self.slots[child.page, offset] == (before + child.tokens[: offset + 1], weights)
            self.check_tree(child, before + child.tokens, weights)

    def check_finished(self, sample: Sample) -> None:
        if not sample.request.is_scoring:
            assert (sample.tokens, sample.finish_reason) == (completion(sample), "length")
            return
        ((version, _),) = sample.versions
        prompt = sample.request.prompt
        assert sample.raw_logprobs == [logprob(prompt[: i + 1], version) for i in range(1, len(prompt))]
        assert [top.token_ids for top in sample.top_logprobs] == [
            (i,) for i in range(len(prompt) - 1) if sample.request.sampling.top_logprobs
        ]


def chunks(tick: Tick) -> list[tuple[str, int, int, bool]]:
    return [(p.sample.request.request_id, p.start, p.stop, p.is_last) for p in (*tick.prefill, *tick.scoring)]


# --- prefill ---


def test_a_long_prompt_is_prefilled_in_chunks_and_decodes_in_the_tick_of_the_last() -> None:
    device = Device()
    (sample,) = device.add(request("abcdefghijklmnopqrst", limit=6))
    seen = [device.tick() for _ in range(3)]
    assert [chunks(tick) for tick in seen] == [
        [("abcdefghijklmnopqrst", 0, 8, False)],
        [("abcdefghijklmnopqrst", 8, 16, False)],
        [("abcdefghijklmnopqrst", 16, 19, True)],  # the newest token belongs to the decode step
    ]
    assert [tick.decode for tick in seen] == [[], [], [sample]]
    assert len(sample.tokens) == 1  # limited by its five pages
    assert device.scheduler.prefill_tokens == 19


def test_a_chunk_holds_several_prompts_in_whole_blocks() -> None:
    device = Device()
    device.add(request("abcd"), request("efgh"), request("ijklmn"))
    # Three tokens are two blocks of two, so two prompts fill the four blocks.
    assert chunks(device.tick()) == [("abcd", 0, 3, True), ("efgh", 0, 3, True)]
    assert chunks(device.tick()) == [("ijklmn", 0, 5, True)]


def test_the_rest_of_a_chunk_goes_to_the_next_prompt() -> None:
    device = Device()
    device.add(request("abcdefghijkl"), request("mnopqrst"))
    assert chunks(device.tick()) == [("abcdefghijkl", 0, 8, False)]
    assert chunks(device.tick()) == [("abcdefghijkl", 8, 11, True), ("mnopqrst", 0, 4, False)]
    assert chunks(device.tick()) == [("mnopqrst", 4, 7, True)]


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    device = Device()
    device.add(request("a", limit=1))
    tick = device.tick()
    assert (chunks(tick), len(tick.decode)) == ([], 1)
    device.drain()


# --- sharing ---


def test_followers_wait_for_the_leader_and_share_all_but_the_last_token() -> None:
    device = Device()
    samples = device.add(request("abcdefghijk", n=3))
    assert chunks(device.tick()) == [("abcdefghijk", 0, 8, False)]
    assert device.scheduler.live == samples[:1]
    assert chunks(device.tick()) == [("abcdefghijk", 8, 10, True)]
    leader = samples[0].pages
    tick = device.tick(steps=1)
    followers = [sample.pages for sample in samples[1:]]
    assert chunks(tick) == []
    # Two full pages are shared. The third, half full, is copied, because each sample writes its own tokens there.
    assert [pages[:2] for pages in followers] == [leader[:2]] * 2
    assert tick.copies == [(leader[2], pages[2]) for pages in followers]
    assert device.scheduler.tree.hit_tokens == 20 and device.scheduler.prefill_tokens == 10
    assert len(device.drain()) == 3


def test_followers_of_another_prompt_compute_only_what_differs() -> None:
    device = Device()
    device.add(request("abcdefghijk"))
    device.drain()
    device.add(request("abcdefgxyz"))
    tick = device.tick()
    assert chunks(tick) == [("abcdefgxyz", 7, 9, True)]
    assert len(tick.copies) == 1


def test_a_sample_does_not_wait_for_a_prefix_that_saves_no_block() -> None:
    """Prefill runs in blocks of two: "ax" of "axy" is one block, with or without "a" cached."""
    device = Device()
    device.add(request("ab"), request("axy"), request("axyz"))
    assert chunks(device.tick()) == [("ab", 0, 1, True), ("axy", 0, 2, True)]
    assert chunks(device.tick()) == [("axyz", 2, 3, True)]
    assert len(device.drain()) == 3


def test_deferred_samples_do_not_block_other_prompts() -> None:
    device = Device(small(256), max_samples=200)
    requests = [request(letter * 3, n=MAX_DEFERRED) for letter in "abc"]
    device.add(*requests)
    assert [chunk.sample.request for chunk in device.tick().prefill] == requests
    assert len(device.tick().decode) == 3 * MAX_DEFERRED


@pytest.mark.parametrize(("limit", "admitted"), [(3, 16), (30, 15)])
def test_pages_are_reserved_for_those_that_will_need_more(limit: int, admitted: int) -> None:
    device = Device(replace(small(16), blocks=(16,)), max_samples=16, prefix_cache=False)
    device.add(*(request("ab", limit) for _ in range(16)))
    assert len(device.tick(steps=1).decode) == admitted


def test_the_next_turn_of_a_conversation_reuses_the_last_completion() -> None:
    device = Device()
    (first,) = device.add(request("abcde", limit=6))
    device.drain()
    device.add(request("".join(map(chr, first.ids)) + "xyz"))
    # The last token drawn was never computed.
    assert chunks(device.tick()) == [("".join(map(chr, first.ids)) + "xyz", 10, 13, True)]


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    device = Device(prefix_cache=False)
    device.add(request("abcdefgh", n=3))
    device.drain()
    assert device.scheduler.prefill_tokens == 3 * 7
    assert device.scheduler.pool.num_free == SHAPES.num_pages


# --- decoding ---


def test_one_step_per_tick_while_a_waiting_sample_could_start() -> None:
    device = Device()
    device.add(request("ab", limit=40))
    assert device.tick(steps=4).steps == 4
    device.add(request("cdefghijklmnopqrst", limit=2))
    assert [device.tick(steps=4).steps for _ in range(2)] == [1, 1]  # still prefilling
    assert device.tick(steps=4).steps == 4
    device.add(request("uvwxyz", n=2))
    assert device.tick(steps=4).steps == 1  # a deferred sample starts after this prefill
    assert device.tick(steps=4).steps == 4


def test_samples_that_wait_for_a_row_do_not_slow_down_decoding() -> None:
    device = Device(max_samples=1)
    device.add(request("ab", limit=20), request("cd"))
    assert [device.tick(steps=4).steps for _ in range(3)] == [4, 4, 4]
    assert device.tick(steps=4, admit=False).steps == 4


def test_samples_that_wait_for_pages_do_not_slow_down_decoding() -> None:
    device = Device(small(3))
    device.add(request("abcde", limit=7), request("fghijklm", limit=2))
    assert device.tick(steps=4).steps == 4
    assert len(device.scheduler.waiting) == 1


def test_without_admit_no_sample_starts() -> None:
    device = Device()
    (sample,) = device.add(request("ab", limit=8))
    device.tick()
    device.add(request("cd"))
    assert device.tick(admit=False).decode == [sample]
    assert len(device.scheduler.waiting) == 1


def test_room_is_what_pages_and_limit_allow() -> None:
    device = Device()
    device.add(request("abc", limit=50), request("xyz", limit=2))
    assert device.tick(steps=1).room == [2, 2]  # three tokens have a page of four
    # Pages for the requested steps: the newest token is at position 3, and four more are drawn from 4 on.
    assert device.tick(steps=4).room == [5, 1]


# --- running out of pages ---


def test_preemption_takes_the_youngest_of_the_least_urgent() -> None:
    device = Device(small(6))
    old, young = device.add(request("abc", limit=13), request("def", limit=13))
    urgent = device.add(request("ghi", limit=13, priority=-1))[0]
    gone: list[Sample] = []
    while not device.finished:
        before = device.scheduler.live
        device.tick(steps=1)
        gone += [s for s in before if s in device.scheduler.waiting]
    assert gone[:2] == [young, old] and urgent not in gone
    assert device.scheduler.num_preemptions == len(gone)
    assert device.finished == [urgent]
    assert len(device.drain()) == 3  # with the tokens of undisturbed runs


def test_preempted_samples_keep_their_tokens_and_their_order() -> None:
    device = Device(small(4))
    first, second, third = device.add(*(request(prompt, limit=10) for prompt in ("abc", "def", "ghi")))
    while device.scheduler.live != [first]:
        device.tick(steps=1)
    fourth = device.add(request("jkl", limit=10))[0]
    kept = list(second.tokens)
    assert kept and device.scheduler.has_in_flight
    while second in device.scheduler.waiting:
        device.tick(steps=1)
    assert second.tokens[: len(kept)] == kept
    assert fourth in device.scheduler.waiting
    assert device.drain() == [first, second, third, fourth]


def test_a_sample_that_fills_the_whole_pool_runs() -> None:
    """`RequestParser` rejects larger requests."""
    device = Device(small(3))
    (sample,) = device.add(request("abcdefghij", limit=2))
    device.tick()
    assert (len(sample.pages), device.scheduler.pool.num_free) == (3, 0)
    assert device.drain() == [sample] and sample.tokens == completion(sample)
    assert device.scheduler.num_preemptions == 0


def test_a_sample_that_fills_the_whole_pool_evicts_the_page_it_would_copy() -> None:
    """Its prefix is cached in part of a page, and there is no free page to copy it to."""
    device = Device(small(3))
    device.add(request("abcdefghij", limit=2, n=2))
    assert len(device.drain()) == 2


def test_admission_reserves_pages_for_running_samples() -> None:
    device = Device(small(10), max_samples=16)
    device.add(*(request(chr(ord("a") + i), limit=8) for i in range(8)))
    device.tick(steps=1)
    assert (len(device.scheduler.running), device.scheduler.pool.num_free) == (8, 2)
    device.add(request("xyzzy"))
    device.tick(steps=1)
    assert len(device.scheduler.waiting) == 1  # two pages would fit, but leave none
    assert len(device.drain()) == 9


# --- order ---


def test_priority_order_is_strict_when_pages_are_short() -> None:
    device = Device(small(5))
    large = request("abcdefghijklm", limit=3)
    device.add(request("nopqr", limit=3), large, request("s", limit=1), request("tu", limit=1, priority=-1))
    tick = device.tick(steps=1)
    assert [s.request.request_id for s in tick.decode] == ["tu", "nopqr"]
    assert [s.request for s in device.scheduler.waiting if len(s.request.prompt) > 1] == [large]
    assert len(device.drain()) == 4


def test_callers_take_turns() -> None:
    device = Device(max_samples=4)
    device.add(*(request(chr(ord("a") + i), limit=20, sink=SINK) for i in range(6)))
    other = NeverCalled()
    device.add(*(request(chr(ord("p") + i), limit=20, sink=other) for i in range(3)))
    tick = device.tick(steps=1)
    assert Counter(s.request.sink for s in tick.decode) == {SINK: 2, other: 2}


# --- cancellation ---


def test_drop_frees_the_pages_of_all_samples() -> None:
    device = Device(max_samples=2, prefix_cache=False)
    running, prefilling, waiting = request("ab", 9), request("cdefghijklmnopqr"), request("st", n=2)
    kept = request("uv")
    device.add(running, prefilling, waiting, kept)
    device.tick(steps=1)
    assert [s.request for s in device.scheduler.running] == [running]
    assert [s.request for s in device.scheduler.prefilling] == [prefilling]
    assert device.scheduler.drop(lambda t: t is not kept) == [prefilling, running, waiting]
    device.check()
    assert device.scheduler.pool.num_free == SHAPES.num_pages
    assert device.scheduler.drop(lambda t: t is not kept) == []
    assert [s.request for s in device.drain()] == [kept]


def test_followers_of_a_leader_that_is_dropped_compute_it_themselves() -> None:
    device = Device()
    leader, follower = request("abcdefghijklmnopqr"), request("abcdefghijklmnopqr")
    device.add(leader, follower)
    device.tick()
    device.scheduler.drop(lambda t: t is leader)
    device.check()
    assert device.scheduler.tree.num_pages == 0  # the leader was not finished
    assert chunks(device.tick()) == [("abcdefghijklmnopqr", 0, 8, False)]
    assert [s.request for s in device.drain()] == [follower]


@pytest.mark.parametrize("restart", [False, True])
def test_preempt_all(restart: bool) -> None:
    device = Device()
    running, prefilling = device.add(request("abc", limit=9), request("defghijklmnop"))
    device.tick(steps=2)
    waiting = device.add(request("xyz"))[0]
    assert [len(s.tokens) for s in (running, prefilling, waiting)] == [1, 0, 0]
    assert device.scheduler.preempt_all(restart) == (1 if restart else 0), "tokens that will be drawn again"
    device.check()
    assert device.scheduler.live == []
    assert (running.tokens == running.versions == []) == restart
    assert device.scheduler.has_in_flight != restart
    # In their old order, before samples that never ran.
    tick = device.tick(steps=1)
    assert [*device.scheduler.running, *device.scheduler.prefilling] == [running, prefilling]
    assert tick.decode == [running]
    assert len(device.drain()) == 3


# --- versions ---


def test_nothing_of_an_old_version_is_shared() -> None:
    device = Device()
    device.add(request("abcdefgh"))
    device.drain()
    device.new_version()
    device.check()
    assert device.scheduler.tree.num_pages == 0
    device.add(request("abcdefgh"))
    assert chunks(device.tick()) == [("abcdefgh", 0, 7, True)]
    device.drain()


def test_a_cache_of_two_versions_is_not_shared() -> None:
    device = Device()
    (running,) = device.add(request("abcdef", limit=9))
    device.tick(steps=1)
    device.new_version()
    device.check()
    device.drain()
    assert device.scheduler.tree.num_pages == 0
    assert running.spans[0].version == 0 and running.spans[-1].version == 1


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_version_change_during_prefill_restarts_it(prefix_cache: bool) -> None:
    device = Device(prefix_cache=prefix_cache)
    (sample,) = device.add(request("abcdefghijkl"))
    assert chunks(device.tick()) == [("abcdefghijkl", 0, 8, False)]
    device.new_version()
    device.check()
    assert chunks(device.tick()) == [("abcdefghijkl", 0, 8, False)]
    device.tick(steps=1)
    assert sample.cache_version == 1
    device.drain()
    assert [span.version for span in sample.spans] == [1]


def test_a_new_version_frees_followers_of_an_old_leader() -> None:
    device = Device()
    leader, follower = device.add(request("abcdefghijklmnop", n=2))
    device.tick()
    device.tick(steps=1)
    device.sleep()
    tick = device.tick()
    assert [(p.sample, p.start) for p in tick.prefill] == [(leader, 0)]
    device.new_version()
    tick = device.tick()
    assert [(p.sample, p.start) for p in tick.prefill] == [(leader, 8)]  # it has a token already
    device.tick()
    assert follower.cache_version == 1
    device.drain()


def test_a_cache_recomputed_after_a_version_change_is_shared() -> None:
    device = Device()
    device.add(request("abcdefgh", limit=9))
    device.tick(steps=2)
    device.scheduler.preempt_all()
    device.new_version()
    device.drain()
    assert device.scheduler.tree.num_pages == 4  # 16 of its 17 tokens


def test_sleep_clears_the_cache_and_loses_no_sample() -> None:
    device = Device()
    device.add(request("abcdef", limit=9, n=3), request("abcdefghijkl", limit=0))
    device.tick(steps=1)
    device.sleep()
    device.check()
    assert device.scheduler.pool.num_free == SHAPES.num_pages
    assert len(device.drain()) == 4


# --- scores ---


def test_scores_are_prefills_that_end_with_their_logprobs() -> None:
    device = Device()
    (sample,) = device.add(request("abcdefghijkl", limit=0))
    tick = device.tick()
    assert (tick.prefill, tick.decode) == ([], [])
    assert chunks(tick) == [("abcdefghijkl", 0, 8, False)]
    assert chunks(device.tick()) == [("abcdefghijkl", 8, 11, True)]
    assert device.drain() == [sample] and len(sample.raw_logprobs) == 11


def test_pages_that_were_scored_give_their_logprobs_again() -> None:
    device = Device()
    device.add(request("abcdefghijkl", limit=0))
    device.drain()
    device.add(request("abcdefghijkl", limit=0), request("abcdefghijxyz", limit=0))
    # Logprobs are cached in whole pages, and at least one position is left to compute.
    assert chunks(device.tick()) == [("abcdefghijkl", 8, 11, True), ("abcdefghijxyz", 8, 12, True)]
    assert len(device.drain()) == 3


def test_a_page_whose_next_token_is_another_is_scored_again() -> None:
    """A page's last logprob belongs to the token after the page, which may differ between sequences."""
    device = Device()
    device.add(request("abcdefghijkl", limit=0))
    device.drain()
    device.add(request("abcdefghXYZ", limit=0))
    assert chunks(device.tick()) == [("abcdefghXYZ", 4, 10, True)]
    device.drain()


def test_pages_that_were_prefilled_but_not_scored_are_computed_again() -> None:
    device = Device()
    device.add(request("abcdefghi"))
    device.drain()
    device.add(request("abcdefghi", limit=0))
    assert chunks(device.tick()) == [("abcdefghi", 0, 8, True)]
    device.drain()


def test_scores_are_forgotten_with_their_pages() -> None:
    device = Device(small(3))
    device.add(request("acdebefgbh", limit=0))
    device.drain()
    device.add(request("xxxxbyyybz", limit=2))  # takes all pages
    device.drain()
    device.add(request("xxxxbyyybz", limit=0))
    assert chunks(device.tick()) == [("xxxxbyyybz", 0, 8, False)]
    device.drain()


def test_top_logprobs_are_not_cached() -> None:
    device = Device()
    device.add(request("abcdefghi", limit=0))
    device.drain()
    device.add(request("abcdefghi", limit=0, top=1))
    assert chunks(device.tick()) == [("abcdefghi", 0, 8, True)]
    assert len(device.drain()[-1].top_logprobs) == 8


def test_generation_reuses_scored_pages() -> None:
    device = Device()
    device.add(request("abcdefghi", limit=0))
    device.drain()
    device.add(request("abcdefghijk"))
    assert chunks(device.tick()) == [("abcdefghijk", 8, 10, True)]
    device.drain()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_version_change_restarts_scores(prefix_cache: bool) -> None:
    device = Device(prefix_cache=prefix_cache)
    (sample,) = device.add(request("abcdefghijkl", limit=0))
    device.tick()
    assert len(sample.raw_logprobs) == 8
    device.new_version()
    assert chunks(device.tick()) == [("abcdefghijkl", 0, 8, False)]
    device.drain()
    assert sample.versions == [(1, 0)]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_scores_start_over(prefix_cache: bool) -> None:
    device = Device(prefix_cache=prefix_cache)
    (sample,) = device.add(request("abcdefghijkl", limit=0))
    device.tick()
    assert len(sample.raw_logprobs) == 8
    device.scheduler.preempt_all()
    assert device.scheduler.live == [] and list(device.scheduler.waiting) == [sample]
    assert chunks(device.tick()) == [("abcdefghijkl", 0, 8, False)]
    assert len(sample.raw_logprobs) == 8  # not those of the first attempt, too
    assert device.drain() == [sample] and len(sample.raw_logprobs) == 11


# --- random events ---

stems = st.sampled_from(["aaaaaaaaaa", "ababababab", "aabbaabbaa"])
prompts = st.builds(lambda stem, stop, end: stem[:stop] + end, stems, st.integers(1, 10), st.text("ab", max_size=2))
adds = st.tuples(
    st.just("add"),
    st.builds(
        dict,
        prompt=prompts,
        limit=st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5, 6]),
        n=st.integers(1, 3),
        sink=st.integers(0, 1),
        priority=st.integers(-1, 1),
        top=st.sampled_from([0, 0, 0, 1]),
        adapter=st.sampled_from(ADAPTERS),
    ),
)
others = st.sampled_from(
    [
        *[("tick", {"steps": steps}) for steps in (1, 1, 1, 2, 2, 4, 4, 4)],
        ("tick", {"admit": False}),
        ("cancel", {"which": 0}),
        ("cancel", {"which": 1}),
        ("put back", {"restart": False}),
        ("put back", {"restart": True}),
        ("new version", {}),
        ("new version", {"adapters": ["a"]}),
        ("new version", {"adapters": ["b", "a"]}),
        ("sleep", {}),
    ]
)


@settings(max_examples=200)
@given(
    page_size=st.integers(1, 4),
    num_pages=st.integers(2, 12),
    blocks=st.sampled_from([(1,), (1, 3), (8,)]),
    max_samples=st.integers(1, 10),
    prefix_cache=st.sampled_from([True, True, False]),
    events=st.lists(st.one_of(adds, others), min_size=12, max_size=60),
)
def test_soak(
    page_size: int,
    num_pages: int,
    blocks: tuple[int, ...],
    max_samples: int,
    prefix_cache: bool,
    events: list[tuple[str, dict[str, Any]]],
) -> None:
    """Under random events all reads are right, no page leaks, and every sample that is not canceled finishes."""
    shapes = Shapes(page_size, num_pages, num_pages * page_size, (16,), block=2, blocks=blocks, max_steps=4)
    device = Device(shapes, max_samples, prefix_cache)
    expected: set[Sample] = set()
    requests: list[EngineRequest] = []
    for event, details in events:
        if event == "add":
            prompt, limit = details["prompt"], details["limit"]
            if len(prompt) + limit > shapes.max_length or (limit == 0 and len(prompt) < 2):
                continue  # the request parser rejects these
            requests.append(request(**details) if limit else request(**{**details, "n": 1}))
            expected.update(device.add(requests[-1]))
        elif event == "cancel" and requests:
            unwanted = {requests[-1 - details["which"] % len(requests)]}
            dropped = device.scheduler.drop(unwanted.__contains__)
            expected -= {s for s in expected if s.request in dropped}
        elif event == "put back":
            device.scheduler.preempt_all(**details)
        elif event == "new version":
            device.new_version(**details)
        elif event == "sleep":
            device.sleep()
        elif event == "tick" and (device.scheduler.live or device.scheduler.waiting):
            device.tick(**details)
        device.check()
    finished = device.drain()
    assert len(finished) == len(set(finished))
    assert expected <= set(finished)
