"""Engines that fail without dying: which requests are retried elsewhere, which engines are excluded for a while."""

import asyncio
import contextlib

import pytest

from slipstream.errors import EngineFailure, InvalidPrompt, NotReady, SuspectRequest
from slipstream.gateway import dispatch
from slipstream.gateway.circuit_breaker import FAULTS
from slipstream.gateway.staleness import RolloutBound
from slipstream.observe.doctor import examine_fleet
from slipstream.types import Failure, Score
from tests.gateway.scripted import ScriptedEngine, attached
from tests.gateway.test_gateway import TOKEN, collect, on_the_loop, request


class Failing(ScriptedEngine):
    """Answers each request with `rows`, if that is an error; or ends every call with `calls`."""

    rows = calls = None

    async def generate(self, requests):
        if self.calls is not None:
            self.seen += [r.id for r in requests]
            raise self.calls
        if self.rows is not None:
            self.seen += [r.id for r in requests]
            yield [Failure(r.id, self.rows) for r in requests]
            return
        async for batch in super().generate(requests):
            yield batch

    async def score(self, sequences, top_k=0, adapter=""):
        if self.calls is not None:
            raise self.calls
        return [Score(tuple(s), (-0.5,) * (len(s) - 1), self.version, self.name) for s in sequences]


@contextlib.asynccontextmanager
async def pair(address):
    a, b = Failing("a"), Failing("b")
    async with attached(a, address, TOKEN), attached(b, address, TOKEN):
        yield a, b


def batch(count=6, n=2):
    return [request(str(i), n=n) for i in range(count)]


async def circuits(fleet):
    return {e.info.name: e.circuit for e in (await fleet.status()).engines}


@pytest.fixture
def clock(monkeypatch):
    """The dispatch's clock, moved by hand."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(dispatch, "time", clock)
    return clock


@pytest.mark.parametrize("how", ["rows", "calls"])
def test_what_one_engine_fails_at_another_does_and_each_sample_comes_once(how):
    @on_the_loop
    async def test(address, fleet):
        async with pair(address) as (a, b):
            setattr(a, how, EngineFailure("a kernel panicked"))
            results = await collect(fleet.generate(batch()))
            assert sorted((r.request_id, r.sample_index) for r in results) == [
                (str(i), k) for i in range(6) for k in (0, 1)
            ]
            assert {r.engine for r in results} == {"b"} and a.seen and sorted(b.seen) == [str(i) for i in range(6)]
            status = await fleet.status()
            assert status.num_retried == len(a.seen)
            assert {e.info.name: e.num_faults for e in status.engines} == {"a": 1, "b": 0}, "one call, one fault"

    test()


@on_the_loop
async def test_what_two_engines_fail_at_is_not_given_to_a_third(address, fleet):
    async with pair(address) as (a, b), attached(c := Failing("c"), address, TOKEN):
        for engine in (a, b, c):
            engine.rows = EngineFailure("a poisonous prompt")
        (failure,) = await collect(fleet.generate([request("x")]))
        assert isinstance(failure, Failure) and "poisonous" in str(failure.error)
        assert sorted(len(engine.seen) for engine in (a, b, c)) == [0, 1, 1]


@on_the_loop
async def test_what_two_engines_were_lost_with_is_not_given_to_a_third(address, fleet):
    engines = {name: ScriptedEngine(name) for name in "abc"}
    async with contextlib.AsyncExitStack() as fleet_of_three:
        crashes = {}
        for name, engine in engines.items():
            engine.gate.clear()
            crashes[name] = await fleet_of_three.enter_async_context(contextlib.AsyncExitStack())
            await crashes[name].enter_async_context(attached(engine, address, TOKEN))
        call = asyncio.create_task(collect(fleet.generate([request("x")])))
        for _ in range(2):
            while not (serving := [name for name in crashes if engines[name].seen]):
                await asyncio.sleep(0.01)
            await crashes.pop(serving[0]).aclose()
        (failure,) = await call
        assert isinstance(failure.error, SuspectRequest) and "is lost: its connection broke" in str(failure.error)
        (survivor,) = crashes
        assert not engines[survivor].seen and (await fleet.status()).num_retried == 1
        engines[survivor].gate.set()
        assert len(await collect(fleet.generate([request("y")]))) == 1


@on_the_loop
async def test_a_clients_own_mistake_is_told_at_once_and_trips_nothing(address, fleet):
    async with pair(address) as (a, b):
        for how in ("rows", "calls"):
            setattr(a, how, InvalidPrompt("token 99999 is not in the vocabulary"))
            setattr(b, how, InvalidPrompt("token 99999 is not in the vocabulary"))
            for _ in range(3 * FAULTS):
                (failure,) = await collect(fleet.generate([request("x")]))
                assert isinstance(failure.error, InvalidPrompt)
        assert len(a.seen) + len(b.seen) == 6 * FAULTS, "asked once each"
        status = await fleet.status()
        assert [(e.circuit, e.num_faults) for e in status.engines] == [("closed", 0)] * 2 and not status.num_retried


@on_the_loop
async def test_an_engine_that_is_busy_is_passed_over_without_being_blamed(address, fleet):
    async with pair(address) as (a, _):
        a.rows = NotReady("busy")
        for _ in range(2 * FAULTS):
            assert {r.engine for r in await collect(fleet.generate(batch()))} == {"b"}
        status = await fleet.status()
        assert status.num_retried and [(e.circuit, e.num_faults) for e in status.engines] == [("closed", 0)] * 2


@on_the_loop
async def test_with_nobody_else_the_engines_own_error_is_told(address, fleet):
    a = Failing("a")
    async with attached(a, address, TOKEN):
        a.calls = EngineFailure("out of cheese")
        for _ in range(FAULTS + 2):  # open or not: there is nobody else to ask
            (failure,) = await collect(fleet.generate([request("x")]))
            assert isinstance(failure.error, EngineFailure) and "cheese" in str(failure.error)
        assert await circuits(fleet) == {"a": "open"}
        a.calls = None
        assert len(await collect(fleet.generate([request("x", n=3)]))) == 3
        assert await circuits(fleet) == {"a": "closed"}


@on_the_loop
async def test_a_named_engine_is_the_only_one_asked(address, fleet):
    async with pair(address) as (a, b):
        a.rows = EngineFailure("broken")
        (failure,) = await collect(fleet.generate([request("x")], engine="a"))
        assert isinstance(failure.error, EngineFailure) and not b.seen


def test_a_failing_engine_is_left_alone_then_tried_with_one_request(clock):
    @on_the_loop
    async def test(address, fleet):
        async with pair(address) as (a, _):
            a.rows = EngineFailure("broken")
            while (await circuits(fleet))["a"] == "closed":
                assert len(await collect(fleet.generate(batch()))) == 12
            note = {e.info.name: e.note for e in (await fleet.status()).engines}["a"]
            assert "circuit" in note and "broken" in note
            wrong = {f.subject: f.verdict for f in examine_fleet(await fleet.status())}
            assert wrong["engine a"] == "wrong" and wrong["fleet"] == "ok"
            a.seen.clear()
            assert {r.engine for r in await collect(fleet.generate(batch()))} == {"b"} and not a.seen
            clock.now += 5.0
            assert len(await collect(fleet.generate(batch()))) == 12 and len(a.seen) == 1, (
                "the probe was done elsewhere"
            )
            await collect(fleet.generate(batch()))
            assert len(a.seen) == 1, "and failed: it is left alone again"
            clock.now += 10.0
            a.rows = None
            assert "a" in {r.engine for r in await collect(fleet.generate(batch()))} and len(a.seen) == 2
            assert len(await collect(fleet.generate(batch()))) == 12 and len(a.seen) > 4, "it takes its share again"
            assert {f.verdict for f in examine_fleet(await fleet.status())} == {"ok", "note"}

    test()


@on_the_loop
async def test_scores_are_tried_elsewhere_once(address, fleet):
    async with pair(address) as (a, b):
        a.calls = EngineFailure("broken")
        for _ in range(2 * FAULTS):
            assert (await fleet.score([(1, 2, 3)]))[0].engine == "b"
        assert (await circuits(fleet))["b"] == "closed"
        with pytest.raises(EngineFailure, match="broken"):
            await fleet.score([(1, 2)], engine="a")
        b.calls = EngineFailure("broken too")
        with pytest.raises(EngineFailure, match="broken"):
            await fleet.score([(1, 2)])
        a.calls = InvalidPrompt("no such token")
        with pytest.raises(InvalidPrompt):
            await fleet.score([(1, 2)], engine="a")


@on_the_loop
async def test_an_engine_that_dies_of_its_requests_is_left_alone_when_it_comes_back(address, fleet):
    async with attached(ScriptedEngine("b"), address, TOKEN):
        for _ in range(FAULTS):
            a = ScriptedEngine("a")
            a.gate.clear()
            async with contextlib.AsyncExitStack() as crash:
                await crash.enter_async_context(attached(a, address, TOKEN))
                task = asyncio.create_task(collect(fleet.generate([request(str(i)) for i in range(2)])))
                while not a.seen:
                    await asyncio.sleep(0.01)
                await crash.aclose()
                assert {r.engine for r in await task} == {"b"}
        async with attached(ScriptedEngine("a"), address, TOKEN):
            assert await circuits(fleet) == {"a": "open", "b": "closed"}


@on_the_loop
async def test_prompts_of_a_run_that_start_together_are_shared_out(address, fleet):
    """Each is a call of its own, and all are made in one turn of the gateway's event loop."""
    async with pair(address) as (a, b):
        await fleet.refresh()
        bound = RolloutBound(max_staleness=0, batch=8)
        await fleet.submit(bound, [request(f"prompt-{i}", n=2) for i in range(8)])
        groups = await fleet.take(bound, 0, 8, 10.0)
        assert sorted(g.id for g in groups) == [f"prompt-{i}" for i in range(8)]
        assert len(a.seen) == len(b.seen) == 4
