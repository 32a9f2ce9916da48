"""Engines that return wrong results: none of them is delivered or taken, and the engine is let back in once it is sound."""

import asyncio
import contextlib
import math
from dataclasses import replace

import pytest

from slipstream.config import GatewayConfig
from slipstream.errors import NotReady, UnknownEngine
from slipstream.gateway import engine_watch, quarantine
from slipstream.gateway.client import GatewayFleet
from slipstream.gateway.journal import Journal
from slipstream.gateway.quarantine import Quarantine
from slipstream.gateway.server import running
from slipstream.gateway.service import Service
from slipstream.gateway.staleness import RolloutBound
from slipstream.runtime import event_loop
from slipstream.types import Failure, Request, SamplingParams, Score, TopLogprobs, VersionSpan
from tests.gateway.history import check, events
from tests.gateway.scripted import ScriptedEngine, attached
from tests.gateway.test_gateway import CAP, DEADLINE, LEASE, TOKEN, collect, on_the_loop, request, states, update

VOCAB = 97


class LyingEngine(ScriptedEngine):
    """Samples 16 tokens and scores as it samples, until its lie is set: a function of a completion."""

    lie = staticmethod(lambda row: row)
    num_scored = 0

    def describe(self):
        return replace(super().describe(), vocab_size=VOCAB)

    async def generate(self, requests):
        async for batch in super().generate(requests):
            yield [self.lie(self.sampled(row)) for row in batch]

    def sampled(self, row):
        ids = tuple(10 + (row.token_ids[0] + 7 * i + row.sample_index) % 20 for i in range(16))
        values = tuple(map(self.logprob, ids))
        span = VersionSpan(self.version, 0, 16)
        return replace(row, token_ids=ids, logprobs=values, raw_logprobs=values, spans=(span,))

    @staticmethod
    def logprob(token):
        """A policy under which the first tokens are unlikely, and the next twenty have 90 % of the probability."""
        return -8.0 if token < 10 else math.log(0.045) - token / 1000

    async def score(self, sequences, top_k=0, adapter=""):
        self.num_scored += 1
        top = TopLogprobs(tuple(range(10, 30)), (math.log(0.045),) * 20)
        return [
            Score(
                tuple(s), tuple(map(self.logprob, s[1:])), self.version, self.name, (top,) * (len(s) - 1) * bool(top_k)
            )
            for s in sequences
        ]


def repeated(token, logprob):
    def lie(row):
        return replace(row, token_ids=(token,) * 16, logprobs=(logprob,) * 16, raw_logprobs=(logprob,) * 16)

    return lie


LIES = {
    "NaN": (lambda row: replace(row, logprobs=(math.nan, *row.logprobs[1:])), "16 logprobs, 1 of them not finite"),
    "raw NaN": (lambda row: replace(row, raw_logprobs=(math.inf,) * 16), "16 of them not finite"),
    "vocabulary": (lambda row: replace(row, token_ids=(VOCAB, *row.token_ids[1:])), f"token {VOCAB}, which is outside"),
    "probability": (lambda row: replace(row, logprobs=(0.5,) * 16), "probabilities are at most 1"),
    "lengths": (lambda row: replace(row, logprobs=(-1.0,)), "1 logprobs for 16 tokens"),
    "versions": (lambda row: replace(row, spans=(VersionSpan(0, 0, 9),)), "versions of 9 of them"),
    "unlikely": (lambda row: replace(row, logprobs=(-9.0,) * 16), "mean logprob of -9"),
    "zeros, claimed likely": (repeated(0, -1.0), "differ by 7 nats per token"),
    "zeros, with their logprobs": (repeated(0, -8.0), "tokens that the policy samples with a probability of less than"),
    "a stranger": (lambda row: replace(row, request_id="other"), "a request that it was not given"),
}


@contextlib.asynccontextmanager
async def fleet_of(address, *names):
    engines = [LyingEngine(name) for name in names]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(attached(engine, address, TOKEN))
        yield engines


async def reasons(fleet):
    return {e.info.name: e.note for e in (await fleet.status()).engines if e.state == "quarantined"}


async def kinds(fleet):
    return [(d.kind, d.engine) for d in (await fleet.status()).decisions]


def batch(count=6, **sampling):
    return [request(str(i), n=2, seed=20 + i, **sampling) for i in range(count)]


@pytest.mark.parametrize("lie", LIES)
def test_nothing_of_an_engine_that_lies_is_delivered(lie):
    @on_the_loop
    async def test(address, fleet):
        async with fleet_of(address, "a", "b") as (a, _):
            a.lie, said = LIES[lie]
            results = await collect(fleet.generate(batch()))
            assert sorted((r.request_id, r.sample_index) for r in results) == [
                (str(i), k) for i in range(6) for k in (0, 1)
            ]
            assert {r.engine for r in results} == {"b"} and a.seen
            assert said in (await reasons(fleet))["a"] and await kinds(fleet) == [("quarantine", "a")]
            a.seen.clear()
            assert {r.engine for r in await collect(fleet.generate(batch()))} == {"b"} and not a.seen
            with pytest.raises(NotReady, match="a: quarantined"):
                await collect(fleet.generate([request("x")], engine="a"))

    test()


async def until(condition):
    async with asyncio.timeout(50):
        while not await condition():
            await asyncio.sleep(0.02)


@on_the_loop
async def test_an_engine_is_probed_after_a_sync_and_used_again_if_it_is_sound(address, fleet):
    async with fleet_of(address, "a", "b") as (a, _):
        await fleet.refresh()
        a.lie = LIES["NaN"][0]
        await collect(fleet.generate(batch()))
        engines = (await fleet.refresh()).engines
        assert {e.name: e.weights_epoch for e in engines} == {"a": 1, "b": 0}, "the trainer sends it everything"
        await update(fleet, 1, ["a", "b"])
        await until(lambda: _has(fleet, ("probe", "a")))
        assert "answered a probe with 16 logprobs, 1 of them" in (await reasons(fleet))["a"]
        a.lie = LyingEngine.lie
        await update(fleet, 2, ["a", "b"])
        assert await states(fleet) == {"a": "quarantined", "b": "ready"}, "its second probe takes longer"


async def _has(fleet, decision):
    return decision in await kinds(fleet)


@pytest.mark.parametrize("by", ["sync", "time"])
def test_an_engine_that_passes_a_probe_takes_its_share_again(by, monkeypatch):
    if by == "time":
        monkeypatch.setattr(quarantine, "FIRST_SECONDS", 0.05)

    @on_the_loop
    async def test(address, fleet):
        async with fleet_of(address, "a", "b") as (a, b):
            await fleet.refresh()
            a.lie = LIES["NaN"][0]
            await collect(fleet.generate(batch()))
            a.lie = LyingEngine.lie
            if by == "sync":
                await fleet.refresh()
                await update(fleet, 1, ["a", "b"])
            await until(lambda: _has(fleet, ("release", "a")))
            assert b.num_scored and await states(fleet) == {"a": "ready", "b": "ready"}
            assert {r.engine for r in await collect(fleet.generate(batch()))} == {"a", "b"}

    test()


@on_the_loop
async def test_weights_that_make_every_engine_lie_stop_the_fleet_until_the_next_sync(address, fleet):
    async with fleet_of(address, "a", "b") as engines:
        await fleet.refresh()
        for engine in engines:
            engine.lie = LIES["NaN"][0]
        results = await collect(fleet.generate(batch()))
        assert len(results) == 6 and all(isinstance(r, Failure) and "not finite" in str(r.error) for r in results)
        with pytest.raises(NotReady, match=r"a: quarantined \(it returned.*b: quarantined \(it returned"):
            await collect(fleet.generate(batch()))
        for engine in engines:
            engine.lie = LyingEngine.lie
        await fleet.refresh()
        await update(fleet, 1, ["a", "b"])
        await until(lambda: _has(fleet, ("release", "a")))
        await until(lambda: _has(fleet, ("release", "b")))
        assert len(await collect(fleet.generate(batch()))) == 12


@on_the_loop
async def test_an_engine_that_the_trainer_reports_is_not_used_before_it_has_new_weights(address, fleet):
    async with fleet_of(address, "a", "b") as (a, _):
        with pytest.raises(UnknownEngine, match="zebra"):
            await fleet.quarantine("zebra", "stripes")
        await fleet.quarantine("a", "its logprobs differ from the trainer's by 2 nats")
        note = (await reasons(fleet))["a"]
        assert "differ from the trainer's by 2 nats" in note and "after the next sync or a restart" in note
        assert {r.engine for r in await collect(fleet.generate(batch()))} == {"b"} and not a.seen
        await fleet.refresh()
        await update(fleet, 1, ["a", "b"])
        await until(lambda: _has(fleet, ("release", "a")))
        await fleet.quarantine("a", "again")
    async with attached(LyingEngine("a", 1), address, TOKEN), attached(LyingEngine("b", 1), address, TOKEN):
        assert "again" in (await reasons(fleet))["a"], "another process is not trusted before its probe"


def with_journal(path, test):
    """Run `test(address, fleet, service)` with a gateway whose journal is a file."""

    async def main():
        service = Service(LEASE, path)
        async with running(GatewayConfig(lease_seconds=LEASE), TOKEN, service) as address:
            fleet = GatewayFleet(address, TOKEN, timeout=DEADLINE, max_message_bytes=CAP)
            try:
                await asyncio.wait_for(test(address, fleet, service), 60)
            finally:
                await fleet.close()

    event_loop.run(main())


def test_what_an_engine_that_lies_has_finished_and_nobody_has_taken_is_generated_again(tmp_path):
    path, bound, liar = tmp_path / "journal.sqlite", RolloutBound(1, 4), ""

    async def run(address, fleet, service):
        nonlocal liar

        async def are_finished():
            return service._rollouts._queue.counts["finished"] == 4

        async with fleet_of(address, "a", "b"):
            prompts = [Request(f"p{i}", (i + 1, 50), SamplingParams(n=2, seed=20 + i)) for i in range(12)]
            await fleet.submit(bound, prompts)
            await fleet.take(bound, 0, 4, 10)
            await until(are_finished)
            liar = next(name for name in "ab" if service._rollouts._journal.generated_by(name, 0))
            await fleet.quarantine(liar, "its logprobs are wrong")
            rest = await fleet.take(bound, 4, 4, 10, version=1)
            assert {c.engine for g in rest for c in g.completions} == {"a", "b"} - {liar}

    with_journal(path, run)
    journal = Journal(path)
    renewed = [e for e in events(journal) if e[0] == "renew"]
    assert renewed and check(journal, 1) == [] and journal.quarantined() == {liar: "its logprobs are wrong"}
    journal.close()

    async def after_a_restart(address, fleet, service):
        async with fleet_of(address, "a", "b"):
            assert "its logprobs are wrong" in (await reasons(fleet))[liar]

    with_journal(path, after_a_restart)


@on_the_loop
async def test_a_policy_that_repeats_itself_is_no_reason_for_quarantine(address, fleet):
    async with fleet_of(address, "a", "b") as engines:
        for engine in engines:
            engine.lie = repeated(15, LyingEngine.logprob(15))
        for _ in range(5):
            assert len(await collect(fleet.generate(batch()))) == 12
        num_scored = sum(engine.num_scored for engine in engines)
        assert await kinds(fleet) == [] and num_scored <= 2 * 2 * engine_watch.CLEARED, "it is not asked about forever"


@on_the_loop
async def test_a_healthy_fleet_raises_no_alarm(address, fleet):
    async with fleet_of(address, "a", "b", "c"):
        for start in range(0, 600, 200):
            requests = [request(str(i), n=4, seed=i) for i in range(start, start + 200)]
            assert len(await collect(fleet.generate(requests))) == 800
        assert await kinds(fleet) == [] and set((await states(fleet)).values()) == {"ready"}


@on_the_loop
async def test_scores_that_are_not_numbers_come_from_another_engine(address, fleet):
    async with fleet_of(address, "a", "b") as (a, _):
        a.logprob = lambda token: math.nan
        assert [(await fleet.score([(1, 2, 3)]))[0].engine for _ in range(3)] == ["b"] * 3
        assert "scores that are not numbers" in (await reasons(fleet))["a"]


def test_when_an_engine_is_probed():
    trust = Quarantine()
    assert not trust.wants_probe(0.0) and trust.note(0.0) == ""
    trust.start(100.0, "it lied", needs_weights=False)
    assert not trust.wants_probe(100.0) and "probed in 5 s" in trust.note(100.0)
    assert trust.wants_probe(105.0), "after a cool-down"
    trust.probe_sent()
    assert not trust.wants_probe(105.0), "one at a time"
    trust.failed(105.0, "it lied again")
    assert not trust.wants_probe(114.0) and trust.wants_probe(115.0), "after twice the time"
    trust.renewed()
    assert not trust.wants_probe(110.0), "new weights do not shorten that"
    trust.passed(115.0)
    assert trust.reason == ""
    trust.start(200.0, "the trainer says so", needs_weights=True)
    assert not trust.wants_probe(1e6) and "after the next sync or a restart" in trust.note(200.0)
    trust.renewed()
    assert trust.wants_probe(1e6)
    first = Quarantine()
    first.start(0.0, "it lied", needs_weights=True)
    first.renewed()
    assert first.wants_probe(0.0), "at once, the first time"
