"""Engines that are drained for maintenance: they get no requests, finish or hand back what they have, and return on demand."""

import asyncio

import pytest
from typer.testing import CliRunner

from slipstream.bridge.bridge import Bridge
from slipstream.cli.main import app
from slipstream.config import GatewayConfig
from slipstream.errors import EngineLost, NotReady, RequestError, UnknownEngine
from slipstream.gateway.client import GatewayFleet
from slipstream.gateway.server import running
from slipstream.gateway.service import Service
from slipstream.runtime import event_loop
from tests.gateway.scripted import ScriptedEngine, attached
from tests.gateway.test_gateway import CAP, DEADLINE, LEASE, TOKEN, collect, on_the_loop, request, states, update


async def drain(fleet, engine, timeout=30.0, force=False):
    """Start `bridge.drain`; return its task and the numbers of unfinished requests that it reports."""
    seen, bridge = [], await asyncio.to_thread(Bridge, fleet)
    task = asyncio.to_thread(bridge.drain, engine, timeout, force=force, on_progress=seen.append)
    return asyncio.create_task(task), seen


async def serving(fleet, engine, count=4):
    """Requests that an engine has begun and cannot finish while its gate is closed."""
    engine.gate.clear()
    task = asyncio.create_task(collect(fleet.generate([request(str(i)) for i in range(count)])))
    while not engine.seen:
        await asyncio.sleep(0.01)
    return task


@on_the_loop
async def test_a_drained_engine_finishes_its_requests_and_gets_no_others(address, fleet):
    a, b = ScriptedEngine("a"), ScriptedEngine("b")
    async with attached(a, address, TOKEN), attached(b, address, TOKEN):
        running_ = await serving(fleet, a)
        draining, seen = await drain(fleet, "a")
        while not seen:
            await asyncio.sleep(0.01)
        assert await states(fleet) == {"a": "draining", "b": "ready"}
        begun = len(a.seen)
        assert {c.engine for c in await collect(fleet.generate([request(f"x{i}") for i in range(8)]))} == {"b"}
        assert len(a.seen) == begun and not draining.done()
        a.gate.set()
        assert await draining == 0 and seen[0] == begun and seen[-1] == 0
        assert len(await running_) == 4 and await states(fleet) == {"a": "drained", "b": "ready"}
        with pytest.raises(NotReady, match=r"a: drained .*`slipstream drain ENGINE --undo`"):
            await collect(fleet.generate([request("y")], engine="a"))
        await fleet.refresh()
        await update(fleet, 1, ["a", "b"])
        assert a.version == 1, "it takes part in updates"
        await fleet.drain("a", undo=True)
        assert await states(fleet) == {"a": "ready", "b": "ready"}
        assert {c.engine for c in await collect(fleet.generate([request(f"z{i}") for i in range(8)]))} == {"a", "b"}
        kinds = [(d.kind, d.engine) for d in (await fleet.status()).decisions]
        assert kinds == [("drain", "a"), ("undrain", "a")]


@on_the_loop
async def test_after_the_deadline_others_get_what_is_not_finished(address, fleet):
    a, b = ScriptedEngine("a"), ScriptedEngine("b")
    async with attached(a, address, TOKEN), attached(b, address, TOKEN):
        running_ = await serving(fleet, a)
        begun = len(a.seen)
        draining, _ = await drain(fleet, "a", timeout=0.1)
        assert await draining == begun
        assert len(await running_) == 4 and a.cancelled
        status = {e.info.name: e for e in (await fleet.status()).engines}
        assert status["a"].state == "drained" and status["a"].num_faults == 0


@on_the_loop
async def test_the_last_engine_is_drained_on_demand_only(address, fleet):
    a, b = ScriptedEngine("a"), ScriptedEngine("b")
    async with attached(a, address, TOKEN), attached(b, address, TOKEN):
        with pytest.raises(UnknownEngine, match="zebra"):
            await fleet.drain("zebra")
        with pytest.raises(UnknownEngine, match="zebra"):
            await fleet.drain("zebra", undo=True)
        await fleet.drain("b")
        await fleet.drain("b")  # again
        with pytest.raises(RequestError, match=r"no engine but 'a' takes requests.*--force"):
            await fleet.drain("a")
        assert await states(fleet) == {"a": "ready", "b": "drained"}
        task, _ = await drain(fleet, "a", force=True)
        assert await task == 0
        with pytest.raises(NotReady, match=r"a: drained.*b: drained"):
            await collect(fleet.generate([request("x")]))


def test_an_engine_that_is_restarted_and_a_gateway_that_is_restarted_leave_it_drained(tmp_path):
    async def with_gateway(test):
        async with running(GatewayConfig(lease_seconds=LEASE), TOKEN, Service(LEASE, tmp_path / "journal")) as address:
            fleet = GatewayFleet(address, TOKEN, timeout=DEADLINE, max_message_bytes=CAP)
            async with attached(ScriptedEngine("b"), address, TOKEN):
                await asyncio.wait_for(test(address, fleet), 60)
            await fleet.close()

    async def before(address, fleet):
        a = ScriptedEngine("a")
        async with attached(a, address, TOKEN):
            running_ = await serving(fleet, a)
            draining, seen = await drain(fleet, "a")
            while not seen:
                await asyncio.sleep(0.01)
        with pytest.raises(EngineLost, match=r"engine 'a' was lost while it was drained .*stays drained"):
            await draining
        assert len(await running_) == 4
        async with attached(ScriptedEngine("a"), address, TOKEN):
            assert await states(fleet) == {"a": "drained", "b": "ready"}

    async def after(address, fleet):
        async with attached(ScriptedEngine("a"), address, TOKEN):
            assert await states(fleet) == {"a": "drained", "b": "ready"}
            await fleet.drain("a", undo=True)
            assert await states(fleet) == {"a": "ready", "b": "ready"}

    event_loop.run(with_gateway(before))
    event_loop.run(with_gateway(after))


def test_the_command_waits_and_says_how_far_it_is(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_TOKEN", TOKEN)

    @on_the_loop
    async def test(address, fleet):
        def command(*arguments):
            return asyncio.to_thread(CliRunner().invoke, app, ["drain", *arguments, "--gateway", address])

        a, b = ScriptedEngine("a"), ScriptedEngine("b")
        async with attached(a, address, TOKEN), attached(b, address, TOKEN):
            running_ = await serving(fleet, a)
            result = await command("a", "--seconds", "0.1")
            assert result.exit_code == 0 and "a: 0 request(s) left" in result.output and "a is drained" in result.output
            assert "other engines got them" in result.output and len(await running_) == 4
            result = await command("b")
            assert result.exit_code != 0 and isinstance(result.exception, RequestError)
            result = await command("a", "--undo")
            assert result.exit_code == 0 and (await states(fleet))["a"] == "ready"

    test()
