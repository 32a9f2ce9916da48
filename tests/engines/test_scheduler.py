"""Slots, queue and bookkeeping, without JAX."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.engines.embedded.scheduler import (
    Failed,
    Prefill,
    Sample,
    Scheduler,
    Ticket,
    bucket,
    plan_prefill,
    plan_scoring,
)
from slipstream.types import SamplingParams, VersionSpan


class Mailbox:
    def deliver(self, outcomes: list[Sample | Failed]) -> None:
        raise AssertionError("the scheduler carries jobs, it does not call them")


def ticket(name: str = "r", prompt: tuple[int, ...] = (5, 6), n: int = 1, limit: int = 3, stop: Any = ()) -> Ticket:
    return Ticket(name, prompt, SamplingParams(n=n), seed=0, limit=limit, stop=frozenset(stop), job=Mailbox())


def step(scheduler: Scheduler, token: int = 7, version: int = 0, num_slots: int = 8) -> list[Sample]:
    return scheduler.record([token] * num_slots, [-1.0] * num_slots, [-2.0] * num_slots, version)


def test_first_come_first_served_into_the_lowest_slots() -> None:
    scheduler = Scheduler(3)
    scheduler.add(ticket("a", n=2).samples())
    scheduler.add(ticket("b", n=2).samples())
    admitted = scheduler.admit(1000)
    assert [(s.ticket.request_id, s.sample_index, s.slot) for s in admitted] == [("a", 0, 0), ("a", 1, 1), ("b", 0, 2)]
    assert [s.ticket.request_id for s in scheduler.waiting] == ["b"]
    assert scheduler.admit(1000) == []


def test_a_finished_sample_frees_its_slot_for_the_next() -> None:
    scheduler = Scheduler(2)
    scheduler.add([*ticket("short", limit=1).samples(), *ticket("long").samples(), *ticket("next").samples()])
    scheduler.admit(1000)
    (finished,) = step(scheduler)
    assert (finished.ticket.request_id, finished.finish_reason) == ("short", "length")
    (admitted,) = scheduler.admit(1000)
    assert (admitted.ticket.request_id, admitted.slot) == ("next", 0)
    assert sorted(scheduler.running) == [0, 1]


def test_a_stop_token_ends_and_is_kept_and_wins_over_length() -> None:
    scheduler = Scheduler(2)
    scheduler.add(ticket(limit=2, stop=(9,)).samples())
    scheduler.admit(1000)
    assert step(scheduler, token=7) == []
    (finished,) = step(scheduler, token=9)
    assert (finished.tokens, finished.finish_reason) == ([7, 9], "stop")


def test_each_slot_gets_its_own_token() -> None:
    scheduler = Scheduler(3)
    scheduler.add(ticket(n=3, limit=1).samples())
    scheduler.admit(1000)
    finished = scheduler.record([10, 11, 12], [-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0], 0)
    assert [(s.slot, s.tokens, s.logprobs, s.raw_logprobs) for s in finished] == [
        (0, [10], [-1.0], [-4.0]),
        (1, [11], [-2.0], [-5.0]),
        (2, [12], [-3.0], [-6.0]),
    ]


def test_spans_follow_the_version_of_each_step() -> None:
    scheduler = Scheduler(1)
    scheduler.add(ticket(limit=5).samples())
    (sample,) = scheduler.admit(1000)
    for version in (3, 3, 4, 6, 6):
        step(scheduler, version=version)
    assert sample.spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3), VersionSpan(6, 3, 5))


def test_admission_stops_where_the_prefill_would_be_too_large() -> None:
    scheduler = Scheduler(8)
    short, long = (1, 2, 3, 4), tuple(range(20))
    scheduler.add([*ticket("a", short, n=5).samples(), *ticket("b", long).samples(), *ticket("c", short).samples()])
    # Five samples of one prompt count once; a long prompt would pad the short ones.
    assert [s.ticket.request_id for s in scheduler.admit(30)] == ["a"] * 5
    assert [s.ticket.request_id for s in scheduler.admit(10)] == ["b"]  # alone, whatever it costs
    assert [s.ticket.request_id for s in scheduler.admit(10)] == ["c"]


def test_drop_removes_running_and_waiting_samples_of_a_ticket() -> None:
    scheduler = Scheduler(2)
    unwanted, wanted = ticket("unwanted", n=2), ticket("wanted", n=2)
    scheduler.add([unwanted.samples()[0], *wanted.samples(), unwanted.samples()[1]])
    scheduler.admit(1000)
    assert scheduler.drop(lambda t: t is unwanted) == [unwanted]
    assert [s.ticket for s in scheduler.running.values()] == [wanted]
    assert [s.ticket for s in scheduler.waiting] == [wanted]
    assert scheduler.free == [0]
    assert scheduler.drop(lambda t: t is unwanted) == []


def test_slots_are_never_shared_nor_lost() -> None:
    scheduler = Scheduler(3)
    tickets = [ticket(str(i), n=1 + i % 3, limit=1 + i % 4) for i in range(20)]
    for t in tickets:
        scheduler.add(t.samples())
    finished = []
    for round_ in range(100):
        scheduler.admit(1000)
        if round_ == 3:
            scheduler.drop(lambda t: t in tickets[10:12])
        assert sorted([*scheduler.free, *scheduler.running]) == [0, 1, 2]
        assert all(slot == sample.slot for slot, sample in scheduler.running.items())
        finished += step(scheduler)
    expected = [t.request_id for t in tickets for _ in range(t.sampling.n) if t not in tickets[10:12]]
    assert sorted(s.ticket.request_id for s in finished) == sorted(expected)
    assert all(len(s.tokens) == s.ticket.limit for s in finished)


def test_prefill_computes_each_prompt_once_and_leaves_out_its_last_token() -> None:
    scheduler = Scheduler(8)
    scheduler.add(
        [*ticket("a", (1, 2, 3), n=3).samples(), *ticket("b", (4,)).samples(), *ticket("c", (9, 8)).samples()]
    )
    scheduler.add(ticket("d", (1, 2, 7)).samples())  # another prompt, but the same but for its last token
    work = plan_prefill(scheduler.admit(1000))
    assert work == Prefill(prompts=((1, 2), (9,)), slots=(0, 4), copies=((0, 1), (0, 2), (0, 5)))
    assert work.longest == 2


def test_one_token_prompts_need_no_prefill() -> None:
    scheduler = Scheduler(2)
    scheduler.add(ticket(prompt=(4,), n=2).samples())
    assert plan_prefill(scheduler.admit(1000)) == Prefill((), (), ())


def test_scoring_chunks_hold_like_lengths_and_stay_small() -> None:
    chunks = plan_scoring([30, 5, 6, 100, 5], max_tokens=20)
    assert chunks == [[1, 4, 2], [0], [3]]
    assert plan_scoring([], 20) == []


@pytest.mark.parametrize(
    ("size", "expected"), [(0, 8), (1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (33, 50), (50, 50)]
)
def test_buckets_are_powers_of_two_within_bounds(size: int, expected: int) -> None:
    assert bucket(size, 8, 50) == expected
