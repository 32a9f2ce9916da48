"""The circuit breaker: which events open it, close it, or are ignored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import errors
from slipstream.errors import EngineFailure, SlipstreamError
from slipstream.gateway.circuit_breaker import FAULTS, FIRST_SECONDS, MOST_SECONDS, CircuitBreaker, blame

EVENTS = st.lists(st.tuples(st.sampled_from(["fault", "success", "try", "unanswered"]), st.floats(0, 40)), max_size=60)


def play(breaker, events, now=0.0):
    for event, seconds in events:
        now += seconds
        match event:
            case "fault":
                breaker.faulted(now, "it broke")
            case "success":
                breaker.succeeded()
            case "try" if breaker.wants_probe(now):
                breaker.probe_sent()
            case "unanswered":
                breaker.probe_ended()
    return now


def opened():
    breaker = CircuitBreaker()
    play(breaker, [("fault", 0.0)] * FAULTS)
    assert breaker.state(0.0) == "open"
    return breaker


def test_it_opens_after_faults_in_a_row_and_closes_with_a_probe_that_succeeds():
    breaker = CircuitBreaker()
    play(breaker, [("fault", 0.0)] * (FAULTS - 1) + [("success", 0.0)] + [("fault", 0.0)] * (FAULTS - 1))
    assert breaker.state(0.0) == "closed" and breaker.note(0.0) == ""
    breaker.faulted(0.0, "Traceback\n  RuntimeError: out of cheese")
    assert breaker.state(0.0) == "open" and not breaker.wants_probe(0.0)
    assert "probed in 5 s" in breaker.note(0.0) and "out of cheese" in breaker.note(0.0)
    assert breaker.wants_probe(FIRST_SECONDS) and breaker.state(FIRST_SECONDS) == "half-open"
    breaker.probe_sent()
    assert not breaker.wants_probe(FIRST_SECONDS) and "one request" in breaker.note(FIRST_SECONDS)
    breaker.succeeded()
    assert breaker.state(FIRST_SECONDS) == "closed" and breaker.num_faults == 2 * FAULTS - 1


def test_a_probe_that_fails_doubles_the_wait_up_to_a_limit_and_one_that_is_cancelled_makes_room_for_another():
    breaker, now, waits = opened(), 0.0, []
    for _ in range(6):
        start = now
        while not breaker.wants_probe(now):
            now += 1.0
        waits.append(now - start)
        breaker.probe_sent()
        breaker.probe_ended()
        assert breaker.wants_probe(now)
        breaker.probe_sent()
        breaker.faulted(now, "still broken")
    assert waits == [5.0, 10.0, 20.0, 40.0, MOST_SECONDS, MOST_SECONDS]


def test_faults_of_requests_that_were_under_way_do_not_make_it_wait_longer():
    breaker = opened()
    play(breaker, [("fault", 0.1)] * 10)
    assert breaker.state(FIRST_SECONDS) == "half-open" and breaker.num_faults == FAULTS + 10


@given(EVENTS)
def test_it_always_comes_back(events):
    breaker = CircuitBreaker()
    now = play(breaker, events)
    breaker.probe_ended()
    assert breaker.state(now) == "closed" or breaker.wants_probe(now + MOST_SECONDS)
    breaker.succeeded()
    assert breaker.state(now) == "closed" and not breaker.wants_probe(now)


@given(EVENTS)
def test_without_faults_it_never_opens(events):
    breaker = CircuitBreaker()
    now = play(breaker, [(event, seconds) for event, seconds in events if event != "fault"])
    assert breaker.state(now) == "closed" and breaker.num_faults == 0


@given(EVENTS)
def test_while_it_waits_for_one_request_no_other_is_asked_for(events):
    breaker = CircuitBreaker()
    now = play(breaker, events) + MOST_SECONDS
    if breaker.wants_probe(now):
        breaker.probe_sent()
        assert not breaker.wants_probe(now + 1e6)


@pytest.mark.parametrize(
    ("kind", "whose"),
    [
        ("InvalidPrompt", "client"), ("InvalidSampling", "client"), ("OutOfPages", "client"), ("Unsupported", "client"),
        ("MessageTooLarge", "client"), ("Overloaded", "client"), ("NotReady", "moment"), ("UpdateInProgress", "moment"),
        ("EngineFailure", "engine"), ("EngineLost", "engine"), ("DeadlineExceeded", "engine"),
        ("ProtocolMismatch", "engine"), ("Unauthorized", "engine"), ("SomethingNew", "engine"),
    ],
)  # fmt: skip
def test_whose_doing_an_error_is(kind, whose):
    assert blame(errors.from_wire(kind, "said")) == whose


def test_every_error_is_somebodys():
    def tree(root):
        return [root, *(found for child in root.__subclasses__() for found in tree(child))]

    assert {blame(kind("x")) for kind in tree(SlipstreamError)} == {"client", "moment", "engine"}
    assert blame(EngineFailure("x")) == "engine"
