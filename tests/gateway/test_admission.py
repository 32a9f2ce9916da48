"""What a server holds for its callers is bounded, and shared fairly; over gRPC, too."""

import asyncio
import contextlib
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import GatewayConfig
from slipstream.errors import MessageTooLarge, Overloaded
from slipstream.gateway import client
from slipstream.gateway.admission import Admission
from slipstream.gateway.client import GatewayFleet
from slipstream.gateway.server import running
from slipstream.runtime import event_loop
from slipstream.types import Completion, Failure, VersionSpan
from tests.gateway.scripted import ScriptedEngine, attached
from tests.gateway.test_gateway import TOKEN, collect, on_the_loop, request

LIMIT = 12
SPANS = (VersionSpan(0, 0, 1),)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8), st.integers(1, 6))))
def test_what_is_held_is_bounded_and_nobody_without_anything_is_refused_before_twice_the_limit(events):
    """Each event is a caller, what its call takes, and which of the open calls ends after it."""
    admission, held = Admission(LIMIT, 1000, "it"), []
    with contextlib.ExitStack() as everything:
        for caller, more, end in events:
            stack = everything.enter_context(contextlib.ExitStack())
            ticket = stack.enter_context(admission.ticket(str(caller)))
            own = sum(count for name, count, _ in held if name == caller)
            total = sum(count for _, count, _ in held)
            callers = len({name for name, count, _ in held if count} | {caller})
            fits = total + more <= LIMIT or (own + more <= LIMIT / callers and total + more <= 2 * LIMIT)
            try:
                ticket.take(more)
                assert fits or not more
                held.append((caller, more, stack))
            except Overloaded:
                assert not fits
            assert admission.held[0] == sum(count for _, count, _ in held) <= 2 * LIMIT
            if len(held) > end:
                held.pop(end)[2].close()
    assert admission.held == (0, 0)


def test_a_call_that_never_fits_is_told_so():
    admission = Admission(LIMIT, 1000, "the gateway")
    with admission.ticket("a") as ticket:
        with pytest.raises(MessageTooLarge, match=r"13 requests, and the gateway takes at most 12 \(max_requests\)"):
            ticket.take(LIMIT + 1)
        ticket.take(1, 1000)
        with pytest.raises(MessageTooLarge, match="max_buffered_bytes"):
            ticket.take(num_bytes=1)
        ticket.give_back(num_bytes=1)
        ticket.take(num_bytes=1)
    assert admission.held == (0, 0)


@contextlib.asynccontextmanager
async def small_gateway(timeout, **limits):
    async with running(GatewayConfig(**limits), TOKEN) as address:
        fleet = GatewayFleet(address, TOKEN, timeout, 1 << 26)
        try:
            yield address, fleet
        finally:
            await fleet.close()


def test_a_full_gateway_makes_its_caller_wait_then_refuses():
    async def main():
        async with small_gateway(0.3, max_requests=4) as (address, impatient):
            patient, engine = GatewayFleet(address, TOKEN, 60.0, 1 << 26), ScriptedEngine("a")
            engine.gate.clear()
            async with attached(engine, address, TOKEN):
                first = asyncio.create_task(collect(patient.generate([request(str(i)) for i in range(4)])))
                while len(engine.seen) < 4:
                    await asyncio.sleep(0.01)
                later = asyncio.create_task(collect(patient.generate([request("later")])))
                with pytest.raises(Overloaded, match="4 of 4 requests"):
                    await collect(impatient.generate([request("refused")]))
                with pytest.raises(MessageTooLarge, match="split it"):
                    await collect(impatient.generate([request(str(i)) for i in range(5)]))
                assert len(engine.seen) == 4
                engine.gate.set()
                assert len(await first) == 4 and len(await later) == 1
            await patient.close()

    event_loop.run(main())


class Verbose(ScriptedEngine):
    """Answers with a quarter of a megabyte per sample."""

    async def generate(self, requests):
        try:
            for index in range(requests[0].sampling.n):
                text = "x" * (1 << 18)
                yield [
                    Completion(requests[0].id, index, (1,), (5,), text, (-1.0,), (-1.0,), "length", SPANS, self.name)
                ]
                await asyncio.sleep(0)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise


def test_results_that_nobody_reads_are_not_kept_without_limit():
    async def main():
        async with small_gateway(60.0, max_buffered_bytes=4 << 20) as (address, fleet):
            engine = Verbose("a")
            async with (
                attached(engine, address, TOKEN),
                contextlib.aclosing(fleet.generate([request("0", n=256)])) as batches,
            ):
                results = await anext(batches)
                while not engine.cancelled:  # meanwhile nothing is read
                    await asyncio.sleep(0.01)
                results += [result async for batch in batches for result in batch]
                *completions, failure = results
                assert isinstance(failure, Failure) and isinstance(failure.error, MessageTooLarge)
                assert 0 < len(completions) < 256 and (await fleet.status()).engines[0].num_faults == 0
                assert len(await collect(fleet.generate([request("1", n=2)]))) == 2

    event_loop.run(main())


@on_the_loop
async def test_calls_that_arrive_all_at_once_are_answered(address, fleet):
    """gRPC itself cancels calls at random when more than a thousand wait, unless it is told otherwise."""
    with mock.patch.object(client, "CONTROL_SECONDS", 55.0):  # for a slow machine
        assert len(await asyncio.gather(*(fleet.status() for _ in range(1500)))) == 1500
