"""After a commit, the gateway compares what the engines compute."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from slipstream.config import EmbeddedConfig
from slipstream.engines import canary
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.gateway import commit_canary
from slipstream.types import Completion, VersionSpan
from tests.engines.subjects import CONFIG, OPTIONS
from tests.gateway.scripted import ScriptedEngine, attached
from tests.gateway.test_gateway import LEASE, TOKEN, collect, on_the_loop, request, states, update
from tests.tiny import random_params


class Computing(ScriptedEngine):
    """Says what vocabulary it has, and computes `logprob` for every token."""

    logprob = -1.0
    stale_prompt = ()
    """A prompt for which it uses old keys and values."""
    answers_as = None
    """The version that its answers carry, if it is another than its own."""

    def __init__(self, name, version=-1):
        super().__init__(name, version)
        self.asked = []
        """Versions for which it answered a canary."""

    def describe(self):
        return replace(super().describe(), vocab_size=100)

    def computed(self, prompt):
        return -2.0 if tuple(prompt) == self.stale_prompt else self.logprob

    async def generate(self, requests):
        if requests[0].id == "canary":
            self.asked.append(self.version)
            assert all(
                max(r.prompt) < 100 and (r.sampling.temperature, r.sampling.max_tokens) == (0, 1) for r in requests
            )
        await self.gate.wait()
        yield [
            Completion(
                *(r.id, 0, r.prompt, (7,), "", *((self.computed(r.prompt),),) * 2, "length"),
                (VersionSpan(self.version if self.answers_as is None else self.answers_as, 0, 1),),
                self.name,
            )
            for r in requests
        ]


@contextlib.asynccontextmanager
async def engines(address, fleet, names, version=0):
    """Engines that have answered a request, unless they are without weights."""
    async with contextlib.AsyncExitStack() as stack:
        made = [Computing(name, version) for name in names]
        for engine in made:
            await stack.enter_async_context(attached(engine, address, TOKEN))
            if version >= 0:
                await use(fleet, engine.name)
        await fleet.refresh()
        yield made


async def use(fleet, name):
    await collect(fleet.generate([request("r", max_tokens=1)], name))


async def until(condition):
    while not await condition():
        await asyncio.sleep(0.02)


async def decisions(fleet):
    return [(d.kind, d.engine) for d in (await fleet.status()).decisions]


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(commit_canary, "INTERVAL_SECONDS", 0.01)


@on_the_loop
async def test_an_engine_that_computes_something_else_is_quarantined_until_its_next_weights(address, fleet):
    async with engines(address, fleet, "abc") as (a, b, c):
        await update(fleet, 1, "abc")
        await until(lambda: answered((a, b, c), 1))
        assert await decisions(fleet) == []
        c.logprob = -1.6
        await update(fleet, 2, "abc")
        await until(lambda: in_state(fleet, "c", "quarantined"))
        (decision,) = (await fleet.status()).decisions
        assert (decision.kind, decision.engine, decision.version) == ("quarantine", "c", 2)
        assert "it answered a canary with logprobs that differ by 0.6 nats from those of a, b" in decision.reason
        served = {
            completion.engine for completion in await collect(fleet.generate([request(str(i)) for i in range(12)]))
        }
        assert served == {"a", "b"}
        c.logprob = -1.0
        await fleet.refresh()
        await update(fleet, 3, "abc")
        await until(lambda: in_state(fleet, "c", "ready"))


@on_the_loop
async def test_an_engine_with_stale_keys_and_values_for_what_it_served_is_not_let_back(address, fleet):
    async with engines(address, fleet, "abc") as (a, b, c):
        await until(lambda: answered((a, b, c), 0))
        c.stale_prompt = (1, 2)  # which all of them have served
        await update(fleet, 1, "abc")
        await until(lambda: in_state(fleet, "c", "quarantined"))
        await fleet.refresh()
        await update(fleet, 2, "abc")
        await until(lambda: is_decided(fleet, 2))
        assert await decisions(fleet) == [("quarantine", "c"), ("probe", "c")], "a prompt of its own shows nothing"


@on_the_loop
async def test_a_real_engine_with_other_weights_is_noticed(address, fleet):
    async with contextlib.AsyncExitStack() as stack:
        for seed, name in enumerate("ab"):
            params, options = random_params(CONFIG, seed), EmbeddedConfig(**OPTIONS)
            engine = EmbeddedEngine(CONFIG, params, name=name, options=options)
            stack.push_async_callback(engine.close)
            await stack.enter_async_context(attached(engine, address, TOKEN))
            await use(fleet, name)
        await until(lambda: is_decided(fleet, 2))
        assert await decisions(fleet) == [("suspect", "a"), ("suspect", "b")]


async def answered(engines, version, count=canary.NUM_PROMPTS + 1):
    """Whether the engines have answered all prompts of a version's canary, the fixed ones and a served one, or `count`."""
    return all(engine.asked.count(version) >= count for engine in engines)


async def in_state(fleet, name, state):
    return (await states(fleet))[name] == state


@on_the_loop
async def test_two_that_disagree_are_reported_and_stay_in_use(address, fleet):
    async with engines(address, fleet, "ab") as (a, b):
        await until(lambda: answered((a, b), 0))
        b.logprob = -2.0
        await update(fleet, 1, "ab")
        await until(lambda: is_decided(fleet, 2))
        assert await decisions(fleet) == [("suspect", "a"), ("suspect", "b")]
        assert await states(fleet) == {"a": "ready", "b": "ready"}
        b.logprob = float("nan")
        await update(fleet, 2, "ab")
        await until(lambda: in_state(fleet, "b", "quarantined"))


async def is_decided(fleet, count):
    return len(await decisions(fleet)) >= count


@on_the_loop
async def test_answers_of_another_version_and_of_one_engine_say_nothing(address, fleet):
    async with engines(address, fleet, "ab") as (a, b):
        await update(fleet, 1, "ab")
        await until(lambda: answered((a, b), 1))
        b.gate.clear()  # its answer comes under the next version
        b.logprob = -2.0
        await update(fleet, 2, "ab")
        await until(lambda: answered((a, b), 2, 1))
        await update(fleet, 3, "ab")
        b.logprob = -1.0
        b.gate.set()
        await until(lambda: answered((a, b), 3))
        b.logprob, b.answers_as = -2.0, 5
        await update(fleet, 4, "ab")
        await until(lambda: answered((a, b), 4))
        await asyncio.sleep(0.1)
        assert await decisions(fleet) == []
    async with engines(address, fleet, "c", -1) as (c,):
        await update(fleet, 5, "c")
        await use(fleet, "c")
        assert (c.asked, await decisions(fleet)) == ([], [])


@on_the_loop
async def test_a_repaired_engine_is_compared_too(address, fleet):
    async with engines(address, fleet, "ab") as (a, b):
        await update(fleet, 1, "ab")
        await until(lambda: answered((a, b), 1))
        async with engines(address, fleet, "c", -1) as (c,):
            c.logprob = -2.0
            await update(fleet, 1, "c")
            await asyncio.sleep(LEASE / 2)
            assert c.asked == [], "before its first request it would have to compile"
            await use(fleet, "c")
            await until(lambda: in_state(fleet, "c", "quarantined"))
