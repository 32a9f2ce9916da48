"""The speed of engines: measured against their peers, a share of the work in proportion, and none when far below."""

import asyncio
import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.gateway import quarantine
from slipstream.gateway.router import route
from slipstream.gateway.speed import LEAST, SLOW, VALID_SECONDS, SpeedMeter, relative_speeds, share_of_work
from slipstream.types import Request, SamplingParams
from tests.gateway.scripted import attached
from tests.gateway.test_engine_watch import LyingEngine, kinds
from tests.gateway.test_gateway import TOKEN, collect, on_the_loop


def measured(rates):
    """A meter that has seen one window of answers at each of these rates, of 8 at a time that took a second each."""
    meter, now = SpeedMeter(), 0.0
    for rate in rates:
        meter.add(now, 4 * rate, 4.0, answers=4)
        meter.add(now + 1, 4 * rate, 4.0, answers=4)
        now += 1.5
    return meter


def test_requests_that_one_stall_holds_up_are_one_window():
    meter = measured([10.0] * 5)
    for i in range(40):
        meter.add(10.0 + i / 100, 10.0, 3.0)  # a second's work, and two of compilation
    assert meter.rate(11.0) == pytest.approx(10.0)


def test_a_speed_is_known_after_a_while_and_one_stall_does_not_change_it():
    assert measured([10.0, 10.0]).rate(9.0) is None
    assert measured([10.0] * 4).rate(6.0) == pytest.approx(10.0)
    assert measured([10.0] * 4).rate(6.0 + VALID_SECONDS) is None
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


class TimedEngine(LyingEngine):
    """Tells the truth, in this time."""

    seconds = 0.02

    async def generate(self, requests):
        await asyncio.sleep(self.seconds)
        async for batch in super().generate(requests):
            yield batch


def prompts(count):
    return [Request(f"p{i}", (i + 1,), SamplingParams(max_tokens=2, seed=i)) for i in range(count)]


async def generate_until(fleet, decision):
    """Send eight requests at a time; return how many until the gateway decided something."""
    async with asyncio.timeout(30):
        for calls in itertools.count(1):
            assert len(await collect(fleet.generate(prompts(8)))) == 8
            if decision in await kinds(fleet):
                return 8 * calls


def test_an_engine_that_is_far_slower_than_its_peers_is_quarantined_until_it_is_not(monkeypatch):
    monkeypatch.setattr(quarantine, "FIRST_SECONDS", 0.5)

    @on_the_loop
    async def test(address, fleet):
        slow, quick = TimedEngine("slow"), TimedEngine("quick")
        async with attached(slow, address, TOKEN), attached(quick, address, TOKEN):
            for _ in range(20):
                await collect(fleet.generate(prompts(8)))
            assert await kinds(fleet) == []
            slow.seconds, before = 0.6, len(slow.seen)
            await generate_until(fleet, ("slow", "slow"))
            assert len(slow.seen) - before <= 64
            status = {e.info.name: e for e in (await fleet.status()).engines}
            assert status["slow"].state == "quarantined" and "of the speed of its peers" in status["slow"].note
            slow.seen.clear()
            assert {c.engine for c in await collect(fleet.generate(prompts(8)))} == {"quick"} and not slow.seen
        async with attached(slow, address, TOKEN):
            assert len(await collect(fleet.generate(prompts(8)))) == 8, "an engine that is slow is better than none"
        async with attached(quick, address, TOKEN), attached(slow, address, TOKEN):
            slow.seconds = 0.02
            await generate_until(fleet, ("not slow", "slow"))
            assert {c.engine for c in await collect(fleet.generate(prompts(8)))} == {"quick", "slow"}

    test()


@on_the_loop
async def test_an_engine_whose_requests_are_slow_and_not_itself_is_used_on(address, fleet):
    """It compiles, or has longer requests: it answers the canary as quickly as its peer."""

    class Compiling(TimedEngine):
        async def generate(self, requests):
            self.seconds = 0.02 if requests[0].id == "probe" else 0.2
            async for batch in super().generate(requests):
                yield batch

    async with attached(Compiling("a"), address, TOKEN), attached(TimedEngine("b"), address, TOKEN):
        for _ in range(20):
            assert len(await collect(fleet.generate(prompts(8)))) == 8
        assert await kinds(fleet) == []
