"""The speed of engines: measured against their peers, flagged when far below, and a share of the work in proportion."""

import asyncio
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.gateway import speed
from slipstream.gateway.router import route
from slipstream.gateway.speed import LEAST, SLOW, VALID_SECONDS, SpeedMeter, relative_speeds, share_of_work
from slipstream.types import Request, SamplingParams
from tests.gateway.scripted import ScriptedEngine, attached
from tests.gateway.test_gateway import TOKEN, collect, on_the_loop


def measured(rates, seconds=1.0, start=0.0):
    """A meter that has seen one second of answers at each of these rates, four at a time."""
    meter, now = SpeedMeter(), start
    for rate in rates:
        for _ in range(5):
            meter.add(now, 4 * rate * seconds, 4 * seconds, answers=4)
            now += 0.3
    return meter


def test_a_speed_is_known_after_a_while_and_one_stall_does_not_change_it():
    assert measured([10.0, 10.0]).rate(9.0) is None
    assert measured([10.0] * 4).rate(9.0) == pytest.approx(10.0)
    assert measured([10.0] * 4).rate(9.0 + VALID_SECONDS) is None
    assert measured([10.0, 10.0, 0.1, 10.0, 10.0]).rate(9.0) == pytest.approx(10.0)
    assert measured([10.0] * 5 + [1.0] * 5).rate(9.0) == pytest.approx(1.0)


def test_engines_are_compared_with_the_others():
    assert relative_speeds({"a": 5.0, "b": None}) == {}
    assert relative_speeds({"a": 1.0, "b": 10.0, "c": 10.0, "d": None}) == pytest.approx(
        {"a": 0.1, "b": 10 / 5.5, "c": 10 / 5.5}
    )
    assert [share_of_work(s) for s in (2.0, 1.0, 0.6, 0.3, 0.0)] == [1.0, 1.0, 1.0, 0.3, LEAST]


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 7.0]), min_size=2, max_size=7))
def test_relative_speeds_are_to_the_median_of_the_others(rates):
    found = relative_speeds({str(i): rate for i, rate in enumerate(rates)})
    for i, rate in enumerate(rates):
        assert found[str(i)] == pytest.approx(rate / statistics.median(rates[:i] + rates[i + 1 :]))


def test_healthy_engines_are_never_flagged():
    random_ = random.Random(0)
    for _ in range(500):
        rates = {name: measured([random_.lognormvariate(0, 0.4) for _ in range(5)]).rate(9.0) for name in "abcd"}
        assert min(relative_speeds(rates).values()) > SLOW


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_work_is_shared_out_in_proportion(share):
    weights = {str(i): 64 for i in range(230)}
    routed = route(weights, {"a": 0, "b": 0, "c": 0}, shares={"a": share})
    total = 2 + share
    assert len(routed["a"]) == pytest.approx(230 * share / total, abs=1.5)
    assert len(routed["b"]) == pytest.approx(230 / total, abs=1.5)


class SlowEngine(ScriptedEngine):
    async def generate(self, requests):
        await asyncio.sleep(0.4)
        async for batch in super().generate(requests):
            yield batch


def test_an_engine_that_is_far_slower_than_its_peers_is_flagged_and_gets_less(monkeypatch):
    monkeypatch.setattr(speed, "WINDOW_SECONDS", 0.0)

    def prompts(count):
        return [Request(f"p{i}", (i + 1,), SamplingParams(max_tokens=2, seed=i)) for i in range(count)]

    @on_the_loop
    async def test(address, fleet):
        slow, quick = SlowEngine("slow"), ScriptedEngine("quick")
        async with attached(slow, address, TOKEN), attached(quick, address, TOKEN):
            for _ in range(3):
                assert len(await collect(fleet.generate(prompts(8)))) == 8
            assert len(slow.seen) == 12
            status = await fleet.status()
            engine = {e.info.name: e for e in status.engines}["slow"]
            assert engine.state == "ready" and 0 < engine.speed < SLOW and "slow: " in engine.note
            assert [(d.kind, d.engine) for d in status.decisions] == [("slow", "slow")]
            slow.seen.clear()
            assert len(await collect(fleet.generate(prompts(40)))) == 40
            assert 0 < len(slow.seen) <= 8

    test()
