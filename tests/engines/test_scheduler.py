"""The scheduler, without JAX: a device that only remembers what was written where, and checks all that is read."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engines.embedded.radix import Node
from slipstream.engines.embedded.scheduler import MAX_HELD_UP, Piece, Scheduler, Tick
from slipstream.engines.embedded.shapes import Shapes
from slipstream.engines.sequence import Failed, Sample, Ticket
from slipstream.types import SamplingParams, TopLogprobs


def small(num_pages: int) -> Shapes:
    """Pages of four tokens; a tick prefills four blocks of two."""
    return Shapes(page_size=4, num_pages=num_pages, max_length=64, rows=(8,), block=2, blocks=(1, 4), max_steps=4)


SHAPES = small(64)


class Mailbox:
    def deliver(self, outcomes: list[Sample | Failed]) -> None:
        raise AssertionError("the scheduler carries jobs, it does not call them")


JOB = Mailbox()


def ticket(prompt: str, limit: int = 3, *, n: int = 1, job: Any = JOB, priority: int = 0, top: int = 0) -> Ticket:
    """A letter is a token. A limit of 0 scores the prompt."""
    sampling = SamplingParams(n=n, top_logprobs=top)
    return Ticket(prompt, tuple(map(ord, prompt)), sampling, 0, limit, (), job, priority)


def drawn_after(ids: tuple[int, ...], sample: Sample) -> int:
    """One of three letters, so that completions too begin alike."""
    return ord("a") + crc32(bytes([*ids, sample.sample_index])) % 3


def logprob(ids: tuple[int, ...], version: int) -> float:
    """Of the last of `ids`, after the others."""
    return -float(crc32(bytes([*ids, version % 256])))


def completion(sample: Sample) -> list[int]:
    """What the sample draws if nothing ever disturbs it."""
    ids = sample.ticket.prompt
    while len(ids) < sample.end:
        ids += (drawn_after(ids, sample),)
    return list(ids[len(sample.ticket.prompt) :])


class Device:
    """Plays the executor and the device. As keys and values depend on all tokens up to theirs and on the weights, a slot of
    a page holds just that: the sequence up to there, and the version."""

    def __init__(self, shapes: Shapes = SHAPES, max_samples: int = 8, prefix_cache: bool = True) -> None:
        self.shapes = shapes
        self.scheduler = Scheduler(shapes, max_samples, prefix_cache)
        self.slots: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
        self.finished: list[Sample] = []
        self.version = 0
        self.scheduler.new_version(0)

    def add(self, *tickets: Ticket) -> list[Sample]:
        samples = [sample for ticket in tickets for sample in ticket.samples()]
        self.scheduler.add(samples)
        return samples

    def new_version(self) -> None:
        self.version += 1
        self.scheduler.new_version(self.version)

    def sleep(self) -> None:
        self.scheduler.put_back()
        self.scheduler.forget_cached()
        self.slots.clear()

    def tick(self, steps: int = 4, admit: bool = True) -> Tick:
        scheduler = self.scheduler
        has_work = scheduler.is_under_way or bool(scheduler.waiting and admit)
        tick = scheduler.plan(steps, admit)
        assert has_work != tick.is_empty, "work waits, nothing runs: the worker would give up"
        self.check_plan(tick, steps)
        copied = {
            (target, offset): self.slots[source, offset]
            for source, target in tick.copies
            for offset in range(self.shapes.page_size)
            if (source, offset) in self.slots
        }
        self.slots.update(copied)
        pieces = [*tick.prefill, *tick.scoring]
        for piece in pieces:
            self.check_cache(piece.sample, piece.start)  # not even what another piece of this tick writes
        for piece in pieces:
            self.write(piece.sample, piece.start, piece.stop)
            if piece.sample.ticket.is_scoring:
                self.score(piece)
        for sample, room in zip(tick.decode, tick.room):
            self.check_cache(sample, sample.length - 1)
            self.decode(sample, min(room, tick.steps))
            self.waste(sample, room)
        self.finished += scheduler.finish_prefill(tick)
        self.finished += [sample for sample in tick.decode if scheduler.record(sample)]
        self.check()
        return tick

    def drain(self, steps: int = 4) -> list[Sample]:
        """Until all is done."""
        for _ in range(2000):
            if not (self.scheduler.live or self.scheduler.waiting):
                break
            self.tick(steps)
        assert not self.scheduler.live and not self.scheduler.waiting, "they hinder each other for ever"
        for sample in self.finished:
            self.check_finished(sample)
        return self.finished

    # --- what the device does ---

    def write(self, sample: Sample, start: int, stop: int) -> None:
        for position in range(start, stop):
            self.slots[self.place(sample, position)] = (sample.ids[: position + 1], self.version)

    def decode(self, sample: Sample, count: int) -> None:
        assert sample.tokens or sample.cache_version == self.version, "its first token rests on another version"
        for _ in range(count):
            self.write(sample, sample.length - 1, sample.length)
            sample.extend([drawn_after(sample.ids, sample)], [-1.0], [-2.0], [], False, self.version)

    def waste(self, sample: Sample, room: int) -> None:
        """Wrong guesses are written too, as far as there is room behind what counts."""
        for position in range(sample.length, min(sample.length + room, len(sample.pages) * self.shapes.page_size)):
            self.slots[self.place(sample, position)] = ((-1,), -1)

    def score(self, piece: Piece) -> None:
        sample, positions = piece.sample, range(piece.start, piece.stop)
        sample.raw_logprobs += [logprob(sample.ids[: position + 2], self.version) for position in positions]
        sample.versions = [(self.version, 0)]
        if sample.ticket.sampling.top_logprobs:
            sample.tops += [TopLogprobs((position,), (0.0,)) for position in positions]

    # --- what must hold ---

    def place(self, sample: Sample, position: int) -> tuple[int, int]:
        """Where the sample may write the position: nobody else looks at that page, but for the prefix tree."""
        page = sample.pages[position // self.shapes.page_size]
        assert [other for other in self.scheduler.live if page in other.pages] == [sample]
        return page, position % self.shapes.page_size

    def check_plan(self, tick: Tick, steps: int) -> None:
        shapes, block = self.shapes, self.shapes.block
        for pieces in (tick.prefill, tick.scoring):
            assert all(piece.start < piece.stop <= piece.sample.prefill_end for piece in pieces)
            assert all(piece.is_last == (piece.stop == piece.sample.prefill_end) for piece in pieces)
        pieces = [*tick.prefill, *tick.scoring]
        assert sum(math.ceil((piece.stop - piece.start) / block) for piece in pieces) <= shapes.blocks[-1]
        assert len({piece.sample for piece in pieces}) == len(pieces)
        assert all(piece.sample in tick.decode for piece in tick.prefill if piece.is_last)
        assert len(tick.decode) <= len(self.scheduler.live) <= self.scheduler._max_samples
        assert 1 <= tick.steps <= steps
        for sample, room in zip(tick.decode, tick.room, strict=True):
            assert 1 <= room <= sample.end - sample.length
            assert (
                sample.length - 1 + room <= len(sample.pages) * shapes.page_size <= shapes.num_pages * shapes.page_size
            )
        targets = [target for _, target in tick.copies]
        assert len(set(targets)) == len(targets)
        for i, (source, _) in enumerate(tick.copies):  # the copies may be done at once or one after the other
            assert source not in targets[: i + 1]

    def check_cache(self, sample: Sample, stop: int) -> None:
        """Everything before `stop` is there; of the version that serves, unless the sample lived through a change."""
        assert sample.cache_version in (self.version, -1)
        for position in range(stop):
            page, offset = sample.pages[position // self.shapes.page_size], position % self.shapes.page_size
            ids, version = self.slots[page, offset]
            assert ids == sample.ids[: position + 1]
            assert version == self.version or sample.cache_version == -1

    def check(self) -> None:
        """Every page is free or held by those that have it; and what the tree says of its pages is so."""
        scheduler, pool, tree = self.scheduler, self.scheduler.pool, self.scheduler.tree
        of_samples = Counter(page for sample in scheduler.live for page in sample.pages)
        of_tree = [page for page in range(pool.num_pages) if pool.holders(page) > of_samples[page]]
        assert all(pool.holders(page) - of_samples[page] == (page in of_tree) for page in range(pool.num_pages))
        assert len(of_tree) == (tree.num_pages if tree else 0)
        assert pool.num_free == pool.num_pages - len({*of_samples, *of_tree})
        assert all(sample.pages == [] for sample in scheduler.waiting)
        if tree is not None:
            self.check_tree(tree._root, ())
        if not scheduler.live:
            assert pool.num_free + len(of_tree) == pool.num_pages

    def check_tree(self, node: Node, before: tuple[int, ...]) -> None:
        for child in node.ordered:
            for offset in range(child.num_ready):
                assert self.slots[child.page, offset] == (before + child.tokens[: offset + 1], self.version)
            self.check_tree(child, before + child.tokens)

    def check_finished(self, sample: Sample) -> None:
        if not sample.ticket.is_scoring:
            assert (sample.tokens, sample.finish_reason) == (completion(sample), "length")
            return
        ((version, _),) = sample.versions
        prompt = sample.ticket.prompt
        assert sample.raw_logprobs == [logprob(prompt[: i + 1], version) for i in range(1, len(prompt))]
        assert [top.token_ids for top in sample.tops] == [
            (i,) for i in range(len(prompt) - 1) if sample.ticket.sampling.top_logprobs
        ]


def pieces(tick: Tick) -> list[tuple[str, int, int, bool]]:
    return [(p.sample.ticket.request_id, p.start, p.stop, p.is_last) for p in (*tick.prefill, *tick.scoring)]


# --- prefill ---


def test_a_long_prompt_is_prefilled_in_chunks_and_decodes_in_the_tick_of_the_last() -> None:
    device = Device()
    (sample,) = device.add(ticket("abcdefghijklmnopqrst", limit=6))
    seen = [device.tick() for _ in range(3)]
    assert [pieces(tick) for tick in seen] == [
        [("abcdefghijklmnopqrst", 0, 8, False)],
        [("abcdefghijklmnopqrst", 8, 16, False)],
        [("abcdefghijklmnopqrst", 16, 19, True)],  # the newest token is the decode step's
    ]
    assert [tick.decode for tick in seen] == [[], [], [sample]]
    assert len(sample.tokens) == 1  # its five pages are full then
    assert device.scheduler.prefill_tokens == 19


def test_a_chunk_holds_several_prompts_in_whole_blocks() -> None:
    device = Device()
    device.add(ticket("abcd"), ticket("efgh"), ticket("ijklmn"))
    # Three tokens are two blocks of two, so two prompts fill the four blocks.
    assert pieces(device.tick()) == [("abcd", 0, 3, True), ("efgh", 0, 3, True)]
    assert pieces(device.tick()) == [("ijklmn", 0, 5, True)]


def test_the_rest_of_a_chunk_goes_to_the_next_prompt() -> None:
    device = Device()
    device.add(ticket("abcdefghijkl"), ticket("mnopqrst"))
    assert pieces(device.tick()) == [("abcdefghijkl", 0, 8, False)]
    assert pieces(device.tick()) == [("abcdefghijkl", 8, 11, True), ("mnopqrst", 0, 4, False)]
    assert pieces(device.tick()) == [("mnopqrst", 4, 7, True)]


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    device = Device()
    device.add(ticket("a", limit=1))
    tick = device.tick()
    assert (pieces(tick), len(tick.decode)) == ([], 1)
    device.drain()


# --- sharing ---


def test_followers_wait_for_the_leader_and_share_all_but_the_last_token() -> None:
    device = Device()
    samples = device.add(ticket("abcdefghijk", n=3))
    assert pieces(device.tick()) == [("abcdefghijk", 0, 8, False)]
    assert device.scheduler.live == samples[:1]
    assert pieces(device.tick()) == [("abcdefghijk", 8, 10, True)]
    leader = samples[0].pages
    tick = device.tick(steps=1)
    followers = [sample.pages for sample in samples[1:]]
    assert pieces(tick) == []
    # Two full pages are shared; the third, half full, is copied for each, as each writes its own tokens there.
    assert [pages[:2] for pages in followers] == [leader[:2]] * 2
    assert tick.copies == [(leader[2], pages[2]) for pages in followers]
    assert device.scheduler.tree.hit_tokens == 20 and device.scheduler.prefill_tokens == 10
    assert len(device.drain()) == 3


def test_followers_of_another_prompt_compute_only_what_differs() -> None:
    device = Device()
    device.add(ticket("abcdefghijk"))
    device.drain()
    device.add(ticket("abcdefgxyz"))
    tick = device.tick()
    assert pieces(tick) == [("abcdefgxyz", 7, 9, True)]
    assert len(tick.copies) == 1


def test_waiting_for_a_beginning_that_spares_no_work_is_not_worth_it() -> None:
    """All but the newest token is computed, in blocks of two: without its "a", the "ax" of "axy" is a block as before."""
    device = Device()
    device.add(ticket("ab"), ticket("axy"), ticket("axyz"))
    assert pieces(device.tick()) == [("ab", 0, 1, True), ("axy", 0, 2, True)]
    assert pieces(device.tick()) == [("axyz", 2, 3, True)]
    assert len(device.drain()) == 3


def test_the_samples_of_one_prompt_do_not_hide_the_prompts_behind_them() -> None:
    device = Device(small(256), max_samples=200)
    tickets = [ticket(letter * 3, n=MAX_HELD_UP) for letter in "abc"]
    device.add(*tickets)
    assert [piece.sample.ticket for piece in device.tick().prefill] == tickets
    assert len(device.tick().decode) == 3 * MAX_HELD_UP


@pytest.mark.parametrize(("limit", "admitted"), [(3, 16), (30, 15)])
def test_pages_are_reserved_for_those_that_will_need_more(limit: int, admitted: int) -> None:
    device = Device(replace(small(16), blocks=(16,)), max_samples=16, prefix_cache=False)
    device.add(*(ticket("ab", limit) for _ in range(16)))
    assert len(device.tick(steps=1).decode) == admitted


def test_the_next_turn_of_a_conversation_begins_with_what_the_last_one_drew() -> None:
    device = Device()
    (first,) = device.add(ticket("abcde", limit=6))
    device.drain()
    device.add(ticket("".join(map(chr, first.ids)) + "xyz"))
    # The last token drawn was never computed.
    assert pieces(device.tick()) == [("".join(map(chr, first.ids)) + "xyz", 10, 13, True)]


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    device = Device(prefix_cache=False)
    device.add(ticket("abcdefgh", n=3))
    device.drain()
    assert device.scheduler.prefill_tokens == 3 * 7
    assert device.scheduler.pool.num_free == SHAPES.num_pages


# --- decoding ---


def test_steps_are_all_when_nobody_waits_and_one_while_somebody_could_come_in_soon() -> None:
    device = Device()
    device.add(ticket("ab", limit=40))
    assert device.tick(steps=4).steps == 4
    device.add(ticket("cdefghijklmnopqrst", limit=2))
    assert [device.tick(steps=4).steps for _ in range(2)] == [1, 1]  # its prefill goes on
    assert device.tick(steps=4).steps == 4
    device.add(ticket("uvwxyz", n=2))
    assert device.tick(steps=4).steps == 1  # a follower comes in after this prefill
    assert device.tick(steps=4).steps == 4


def test_who_could_not_come_in_does_not_slow_those_that_run() -> None:
    device = Device(max_samples=1)
    device.add(ticket("ab", limit=20), ticket("cd"))
    assert [device.tick(steps=4).steps for _ in range(3)] == [4, 4, 4]
    assert device.tick(steps=4, admit=False).steps == 4


def test_who_lacks_pages_does_not_slow_those_that_run() -> None:
    device = Device(small(3))
    device.add(ticket("abcde", limit=7), ticket("fghijklm", limit=2))
    assert device.tick(steps=4).steps == 4
    assert len(device.scheduler.waiting) == 1


def test_nobody_is_admitted_when_told_so() -> None:
    device = Device()
    (sample,) = device.add(ticket("ab", limit=8))
    device.tick()
    device.add(ticket("cd"))
    assert device.tick(admit=False).decode == [sample]
    assert len(device.scheduler.waiting) == 1


def test_room_is_what_pages_and_limit_allow() -> None:
    device = Device()
    device.add(ticket("abc", limit=50), ticket("xyz", limit=2))
    assert device.tick(steps=1).room == [2, 2]  # three tokens have a page of four
    # Pages for the steps asked for: the newest token stands at 3, and four more are drawn from 4 on.
    assert device.tick(steps=4).room == [5, 1]


# --- running out of pages ---


def test_preemption_takes_the_youngest_of_the_least_urgent() -> None:
    device = Device(small(6))
    old, young = device.add(ticket("abc", limit=13), ticket("def", limit=13))
    urgent = device.add(ticket("ghi", limit=13, priority=-1))[0]
    gone: list[Sample] = []
    while not device.finished:
        before = device.scheduler.live
        device.tick(steps=1)
        gone += [s for s in before if s in device.scheduler.waiting]
    assert gone[:2] == [young, old] and urgent not in gone
    assert device.scheduler.num_preemptions == len(gone)
    assert device.finished == [urgent]
    assert len(device.drain()) == 3  # and all have drawn what they would have drawn alone


def test_the_preempted_keep_their_tokens_and_come_in_again_in_their_order() -> None:
    device = Device(small(4))
    first, second, third = device.add(*(ticket(prompt, limit=10) for prompt in ("abc", "def", "ghi")))
    while device.scheduler.live != [first]:
        device.tick(steps=1)
    fourth = device.add(ticket("jkl", limit=10))[0]
    kept = list(second.tokens)
    assert kept and device.scheduler.is_under_way
    while second in device.scheduler.waiting:
        device.tick(steps=1)
    assert second.tokens[: len(kept)] == kept
    assert fourth in device.scheduler.waiting
    assert device.drain() == [first, second, third, fourth]


def test_a_sample_that_fills_the_whole_pool_runs() -> None:
    """Intake refuses what is larger."""
    device = Device(small(3))
    (sample,) = device.add(ticket("abcdefghij", limit=2))
    device.tick()
    assert (len(sample.pages), device.scheduler.pool.num_free) == (3, 0)
    assert device.drain() == [sample] and sample.tokens == completion(sample)
    assert device.scheduler.num_preemptions == 0


def test_a_sample_that_fills_the_whole_pool_runs_beside_what_is_cached() -> None:
    """Its beginning is cached in part of a page; there is no page to copy it to while that one is kept."""
    device = Device(small(3))
    device.add(ticket("abcdefghij", limit=2, n=2))
    assert len(device.drain()) == 2


def test_newcomers_leave_some_pages_to_those_that_run() -> None:
    device = Device(small(10), max_samples=16)
    device.add(*(ticket(chr(ord("a") + i), limit=8) for i in range(8)))
    device.tick(steps=1)
    assert (len(device.scheduler.running), device.scheduler.pool.num_free) == (8, 2)
    device.add(ticket("xyzzy"))
    device.tick(steps=1)
    assert len(device.scheduler.waiting) == 1  # two pages would fit, but then none were left
    assert len(device.drain()) == 9


# --- order ---


def test_the_urgent_go_first_and_nobody_overtakes_who_lacks_pages() -> None:
    device = Device(small(5))
    large = ticket("abcdefghijklm", limit=3)
    device.add(ticket("nopqr", limit=3), large, ticket("s", limit=1), ticket("tu", limit=1, priority=-1))
    tick = device.tick(steps=1)
    assert [s.ticket.request_id for s in tick.decode] == ["tu", "nopqr"]
    assert [s.ticket for s in device.scheduler.waiting if len(s.ticket.prompt) > 1] == [large]
    assert len(device.drain()) == 4


def test_jobs_take_turns() -> None:
    device = Device(max_samples=4)
    device.add(*(ticket(chr(ord("a") + i), limit=20, job=JOB) for i in range(6)))
    other = Mailbox()
    device.add(*(ticket(chr(ord("p") + i), limit=20, job=other) for i in range(3)))
    tick = device.tick(steps=1)
    assert Counter(s.ticket.job for s in tick.decode) == {JOB: 2, other: 2}


# --- leaving early ---


def test_drop_frees_the_pages_of_the_prefilling_the_running_and_the_waiting() -> None:
    device = Device(max_samples=2, prefix_cache=False)
    running, prefilling, waiting = ticket("ab", 9), ticket("cdefghijklmnopqr"), ticket("st", n=2)
    kept = ticket("uv")
    device.add(running, prefilling, waiting, kept)
    device.tick(steps=1)
    assert [s.ticket for s in device.scheduler.running] == [running]
    assert [s.ticket for s in device.scheduler.prefilling] == [prefilling]
    assert device.scheduler.drop(lambda t: t is not kept) == [prefilling, running, waiting]
    device.check()
    assert device.scheduler.pool.num_free == SHAPES.num_pages
    assert device.scheduler.drop(lambda t: t is not kept) == []
    assert [s.ticket for s in device.drain()] == [kept]


def test_followers_of_a_leader_that_is_dropped_compute_it_themselves() -> None:
    device = Device()
    leader, follower = ticket("abcdefghijklmnopqr"), ticket("abcdefghijklmnopqr")
    device.add(leader, follower)
    device.tick()
    device.scheduler.drop(lambda t: t is leader)
    device.check()
    assert device.scheduler.tree.num_pages == 0  # it was not computed to its end
    assert pieces(device.tick()) == [("abcdefghijklmnopqr", 0, 8, False)]
    assert [s.ticket for s in device.drain()] == [follower]


@pytest.mark.parametrize("restart", [False, True])
def test_put_back(restart: bool) -> None:
    device = Device()
    running, prefilling = device.add(ticket("abc", limit=9), ticket("defghijklmnop"))
    device.tick(steps=2)
    waiting = device.add(ticket("xyz"))[0]
    assert [len(s.tokens) for s in (running, prefilling, waiting)] == [1, 0, 0]
    device.scheduler.put_back(restart)
    device.check()
    assert device.scheduler.live == []
    assert (running.tokens == running.versions == []) == restart
    assert device.scheduler.is_under_way != restart
    # In their old order, before those that never ran.
    tick = device.tick(steps=1)
    assert [*device.scheduler.running, *device.scheduler.prefilling] == [running, prefilling]
    assert tick.decode == [running]
    assert len(device.drain()) == 3


# --- versions ---


def test_nothing_of_an_old_version_is_shared() -> None:
    device = Device()
    device.add(ticket("abcdefgh"))
    device.drain()
    device.new_version()
    device.check()
    assert device.scheduler.tree.num_pages == 0
    device.add(ticket("abcdefgh"))
    assert pieces(device.tick()) == [("abcdefgh", 0, 7, True)]
    device.drain()


def test_a_cache_of_two_versions_stays_its_owners() -> None:
    device = Device()
    (running,) = device.add(ticket("abcdef", limit=9))
    device.tick(steps=1)
    device.new_version()
    device.check()
    device.drain()
    assert device.scheduler.tree.num_pages == 0
    assert running.spans[0].version == 0 and running.spans[-1].version == 1


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_change_of_version_in_the_midst_of_a_prompt_starts_it_again(prefix_cache: bool) -> None:
    device = Device(prefix_cache=prefix_cache)
    (sample,) = device.add(ticket("abcdefghijkl"))
    assert pieces(device.tick()) == [("abcdefghijkl", 0, 8, False)]
    device.new_version()
    device.check()
    assert pieces(device.tick()) == [("abcdefghijkl", 0, 8, False)]
    device.tick(steps=1)
    assert sample.cache_version == 1
    device.drain()
    assert [span.version for span in sample.spans] == [1]


def test_a_new_version_frees_followers_of_an_old_leader() -> None:
    device = Device()
    leader, follower = device.add(ticket("abcdefghijklmnop", n=2))
    device.tick()
    device.tick(steps=1)
    device.sleep()
    tick = device.tick()
    assert [(p.sample, p.start) for p in tick.prefill] == [(leader, 0)]
    device.new_version()
    tick = device.tick()
    assert [(p.sample, p.start) for p in tick.prefill] == [(leader, 8)]  # as it has a token already
    device.tick()
    assert follower.cache_version == 1
    device.drain()


def test_who_is_computed_again_after_a_change_is_of_one_version_and_shared() -> None:
    device = Device()
    device.add(ticket("abcdefgh", limit=9))
    device.tick(steps=2)
    device.scheduler.put_back()
    device.new_version()
    device.drain()
    assert device.scheduler.tree.num_pages == 4  # 16 of its 17 tokens


def test_sleep_forgets_the_cache_and_loses_nobody() -> None:
    device = Device()
    device.add(ticket("abcdef", limit=9, n=3), ticket("abcdefghijkl", limit=0))
    device.tick(steps=1)
    device.sleep()
    device.check()
    assert device.scheduler.pool.num_free == SHAPES.num_pages
    assert len(device.drain()) == 4


# --- scores ---


def test_scores_are_prefills_that_end_with_their_logprobs() -> None:
    device = Device()
    (sample,) = device.add(ticket("abcdefghijkl", limit=0))
    tick = device.tick()
    assert (tick.prefill, tick.decode) == ([], [])
    assert pieces(tick) == [("abcdefghijkl", 0, 8, False)]
    assert pieces(device.tick()) == [("abcdefghijkl", 8, 11, True)]
    assert device.drain() == [sample] and len(sample.raw_logprobs) == 11


def test_pages_that_were_scored_give_their_logprobs_again() -> None:
    device = Device()
    device.add(ticket("abcdefghijkl", limit=0))
    device.drain()
    device.add(ticket("abcdefghijkl", limit=0), ticket("abcdefghijxyz", limit=0))
    # At least one position is left; logprobs are known by whole pages.
    assert pieces(device.tick()) == [("abcdefghijkl", 8, 11, True), ("abcdefghijxyz", 8, 12, True)]
    assert len(device.drain()) == 3


def test_a_page_whose_next_token_is_another_is_scored_again() -> None:
    """A page's last logprob is that of the token after it, which another sequence does not share with the page."""
    device = Device()
    device.add(ticket("abcdefghijkl", limit=0))
    device.drain()
    device.add(ticket("abcdefghXYZ", limit=0))
    assert pieces(device.tick()) == [("abcdefghXYZ", 4, 10, True)]
    device.drain()


def test_pages_that_were_prefilled_but_not_scored_are_computed_again() -> None:
    device = Device()
    device.add(ticket("abcdefghi"))
    device.drain()
    device.add(ticket("abcdefghi", limit=0))
    assert pieces(device.tick()) == [("abcdefghi", 0, 8, True)]
    device.drain()


def test_scores_are_forgotten_with_their_pages() -> None:
    device = Device(small(3))
    device.add(ticket("acdebefgbh", limit=0))
    device.drain()
    device.add(ticket("xxxxbyyybz", limit=2))  # takes all pages, for other tokens before the same
    device.drain()
    device.add(ticket("xxxxbyyybz", limit=0))
    assert pieces(device.tick()) == [("xxxxbyyybz", 0, 8, False)]
    device.drain()


def test_alternatives_are_never_remembered() -> None:
    device = Device()
    device.add(ticket("abcdefghi", limit=0))
    device.drain()
    device.add(ticket("abcdefghi", limit=0, top=1))
    assert pieces(device.tick()) == [("abcdefghi", 0, 8, True)]
    assert len(device.drain()[-1].tops) == 8


def test_what_was_scored_is_there_for_those_that_generate() -> None:
    device = Device()
    device.add(ticket("abcdefghi", limit=0))
    device.drain()
    device.add(ticket("abcdefghijk"))
    assert pieces(device.tick()) == [("abcdefghijk", 8, 10, True)]
    device.drain()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_change_of_version_starts_scores_again(prefix_cache: bool) -> None:
    device = Device(prefix_cache=prefix_cache)
    (sample,) = device.add(ticket("abcdefghijkl", limit=0))
    device.tick()
    assert len(sample.raw_logprobs) == 8
    device.new_version()
    assert pieces(device.tick()) == [("abcdefghijkl", 0, 8, False)]
    device.drain()
    assert sample.versions == [(1, 0)]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_scores_that_are_put_back_start_again(prefix_cache: bool) -> None:
    device = Device(prefix_cache=prefix_cache)
    (sample,) = device.add(ticket("abcdefghijkl", limit=0))
    device.tick()
    assert len(sample.raw_logprobs) == 8
    device.scheduler.put_back()
    assert device.scheduler.live == [] and list(device.scheduler.waiting) == [sample]
    assert pieces(device.tick()) == [("abcdefghijkl", 0, 8, False)]
    assert len(sample.raw_logprobs) == 8  # not those of both beginnings
    assert device.drain() == [sample] and len(sample.raw_logprobs) == 11


# --- all of it at once ---

stems = st.sampled_from(["aaaaaaaaaa", "ababababab", "aabbaabbaa"])
prompts = st.builds(lambda stem, stop, end: stem[:stop] + end, stems, st.integers(1, 10), st.text("ab", max_size=2))
adds = st.tuples(
    st.just("add"),
    st.builds(
        dict,
        prompt=prompts,
        limit=st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5, 6]),
        n=st.integers(1, 3),
        job=st.integers(0, 1),
        priority=st.integers(-1, 1),
        top=st.sampled_from([0, 0, 0, 1]),
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
    """Whatever happens, all reads are right, no page is lost, and everyone who is not cancelled finishes."""
    shapes = Shapes(page_size, num_pages, num_pages * page_size, (16,), block=2, blocks=blocks, max_steps=4)
    device = Device(shapes, max_samples, prefix_cache)
    expected: set[Sample] = set()
    tickets: list[Ticket] = []
    for event, details in events:
        if event == "add":
            prompt, limit = details["prompt"], details["limit"]
            if len(prompt) + limit > shapes.max_length or (limit == 0 and len(prompt) < 2):
                continue  # intake refuses these
            tickets.append(ticket(**details) if limit else ticket(**{**details, "n": 1}))
            expected.update(device.add(tickets[-1]))
        elif event == "cancel" and tickets:
            unwanted = {tickets[-1 - details["which"] % len(tickets)]}
            dropped = device.scheduler.drop(unwanted.__contains__)
            expected -= {s for s in expected if s.ticket in dropped}
        elif event == "put back":
            device.scheduler.put_back(**details)
        elif event == "new version":
            device.new_version()
        elif event == "sleep":
            device.sleep()
        elif event == "tick" and (device.scheduler.live or device.scheduler.waiting):
            device.tick(**details)
        device.check()
    finished = device.drain()
    assert len(finished) == len(set(finished))
    assert expected <= set(finished)
