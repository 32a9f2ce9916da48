"""The gateway over real gRPC, with engines that count instead of computing: routing, transactions, faults."""

import asyncio
import contextlib
import re
import shutil
from dataclasses import replace
from typing import get_args

import grpc
import numpy as np
import pytest

from slipstream import errors
from slipstream.config import GatewayConfig
from slipstream.errors import (
    DeadlineExceeded,
    EngineFailure,
    EngineLost,
    FleetChanged,
    GatewayLost,
    InvalidSampling,
    MappingError,
    MessageTooLarge,
    NameInUse,
    NotReady,
    ProtocolMismatch,
    RequestError,
    SlipstreamError,
    TransferError,
    Unauthorized,
    UnknownEngine,
    UnknownVersion,
    Unsupported,
    UpdateInProgress,
    VersionError,
)
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.client import GatewayFleet
from slipstream.gateway.journal import Journal
from slipstream.gateway.server import SERVICE, running
from slipstream.gateway.service import Service
from slipstream.gateway.slipstream_pb2_grpc import GatewayStub
from slipstream.runtime import event_loop
from slipstream.types import (
    Checksums,
    CommitReport,
    Completion,
    Destinations,
    Failure,
    InFlight,
    Offer,
    ParameterChecksums,
    Progress,
    Request,
    SamplingParams,
    StageReport,
    UpdateReports,
    UpdateSteps,
)
from slipstream.weights.update.publisher import Publisher
from tests.gateway.scripted import ScriptedEngine, attached

TOKEN = "secret"
CAP = 1 << 20
LEASE, DEADLINE = 2.5, 3.0
"""Longer than a busy machine keeps anyone waiting."""


def on_the_loop(test):
    """Runs an async test on the process's one event loop, with a gateway: `async def test(address, fleet)`."""

    def run():
        async def main():
            config = GatewayConfig(lease_seconds=LEASE, max_message_bytes=CAP)
            async with running(config, TOKEN) as address:
                fleet = GatewayFleet(address, TOKEN, timeout=DEADLINE, max_message_bytes=64 * CAP)
                try:
                    await asyncio.wait_for(test(address, fleet), 60)
                finally:
                    await fleet.close()

        event_loop.run(main())

    run.__name__ = test.__name__
    return run


def request(id, n=1, seed=5, **sampling):
    return Request(id, (1, 2), SamplingParams(n=n, seed=seed, **sampling))


async def collect(stream):
    return [result async for batch in stream for result in batch]


@contextlib.asynccontextmanager
async def pair(address, version=0):
    """Two engines, `a` and `b`, both attached."""
    a, b = ScriptedEngine("a", version), ScriptedEngine("b", version)
    async with attached(a, address, TOKEN), attached(b, address, TOKEN):
        yield a, b


async def states(fleet):
    return {e.info.name: e.state for e in (await fleet.status()).engines}


OFFER = Offer(b"p", "f", "memory")


async def send(fleet, names, steps, drop_failed=False):
    await fleet.send_steps(dict.fromkeys(names, steps), drop_failed)
    return await fleet.receive_reports()


async def begin(fleet, version, names, drop_failed=False):
    return await send(fleet, names, UpdateSteps(version, OFFER), drop_failed)


async def stage(fleet, version, names):
    return await send(fleet, names, UpdateSteps(version, manifests=[[b"m"]]))


async def commit(fleet, version, names, in_flight="keep"):
    return await send(fleet, names, UpdateSteps(version, in_flight=in_flight))


async def update(fleet, version, names, drop_failed=False):
    """The steps of an update, one message each."""
    begun = await begin(fleet, version, names, drop_failed)
    return await commit(fleet, version, await stage(fleet, version, begun))


# --- rollouts ---------------------------------------------------------------------------------------------------------


@on_the_loop
async def test_requests_are_shared_out_and_every_sample_comes_once(address, fleet):
    async with pair(address) as (a, b):
        results = await collect(fleet.generate([request(str(i), n=3, seed=i) for i in range(10)]))
    assert sorted((r.request_id, r.sample_index) for r in results) == sorted(
        (str(i), k) for i in range(10) for k in range(3)
    )
    assert all(r.token_ids[0] == int(r.request_id) for r in results)
    assert len(a.seen) == len(b.seen) == 5
    assert {r.engine for r in results} == {"a", "b"}


@on_the_loop
async def test_one_engine_can_be_asked_by_name(address, fleet):
    async with pair(address):
        results = await collect(fleet.generate([request("x"), request("y")], engine="b"))
        assert {r.engine for r in results} == {"b"}
        with pytest.raises(UnknownEngine, match="'zebra'"):
            await collect(fleet.generate([request("x")], engine="zebra"))
        with pytest.raises(UnknownEngine, match="'zebra'"):
            await fleet.score([(1, 2)], engine="zebra")
        assert (await fleet.score([(1, 2, 3)], engine="a"))[0].engine == "a"


@on_the_loop
async def test_what_a_dead_engine_owed_is_done_by_another_and_nothing_comes_twice(address, fleet):
    a, b = ScriptedEngine("a"), ScriptedEngine("b")
    a.gate.clear()  # it answers all but its last sample, then hangs
    async with attached(b, address, TOKEN), contextlib.AsyncExitStack() as crash:
        await crash.enter_async_context(attached(a, address, TOKEN))
        results = []
        async for batch in fleet.generate([request(str(i), n=2) for i in range(6)]):
            results += batch
            if len(results) == 11:
                await crash.aclose()
    assert sorted((r.request_id, r.sample_index) for r in results) == sorted(
        (str(i), k) for i in range(6) for k in range(2)
    )


@on_the_loop
async def test_with_no_engine_left_requests_fail_by_name(address, fleet):
    a = ScriptedEngine("a")
    a.gate.clear()
    async with contextlib.AsyncExitStack() as crash:
        await crash.enter_async_context(attached(a, address, TOKEN))
        results = []
        async for batch in fleet.generate([request("0"), request("1")]):
            results += batch
            await crash.aclose()
    completion, failure = results
    assert isinstance(completion, Completion) and isinstance(failure, Failure)
    assert isinstance(failure.error, EngineLost) and "'a'" in str(failure.error) and failure.request_id == "1"
    with pytest.raises(NotReady, match="a: lost"):
        await collect(fleet.generate([request("2")]))


@on_the_loop
async def test_leaving_early_cancels_on_the_engine(address, fleet):
    a = ScriptedEngine("a")
    a.gate.clear()
    async with attached(a, address, TOKEN):
        async with contextlib.aclosing(fleet.generate([request("0", n=2)])) as batches:
            await anext(batches)
        for _ in range(100):
            if a.cancelled:
                break
            await asyncio.sleep(0.02)
        assert a.cancelled == 1
        status = await fleet.status()
        assert status.engines[0].num_requests == 0


@on_the_loop
async def test_no_engine_and_no_weights_are_said_apart(address, fleet):
    with pytest.raises(NotReady, match="no engine has registered"):
        await collect(fleet.generate([request("0")]))
    async with attached(ScriptedEngine("a", version=-1), address, TOKEN):
        with pytest.raises(NotReady, match="a: empty"):
            await collect(fleet.generate([request("0")]))
        with pytest.raises(NotReady, match="a: empty"):
            await fleet.score([(1, 2)])


@on_the_loop
async def test_a_silent_engine_loses_its_lease(address, fleet):
    channel = grpc.aio.insecure_channel(address)
    stream = GatewayStub(channel).Attach(metadata=(("authorization", f"Bearer {TOKEN}"),))
    from slipstream.gateway import convert

    await stream.write(pb.FromEngine(register=convert.engine_to_pb(ScriptedEngine("mute").describe())))
    assert (await stream.read()).HasField("registered")
    assert (await fleet.status()).engines[0].state == "ready"
    async with asyncio.timeout(20):
        while (await fleet.status()).engines[0].state == "ready":
            await asyncio.sleep(0.1)
    (engine,) = (await fleet.status()).engines
    assert engine.state == "lost" and "no heartbeat" in engine.note
    await channel.close()


@on_the_loop
async def test_all_settings_reach_the_engine_and_the_likeliest_tokens_come_back(address, fleet):
    sampling = SamplingParams(
        seed=3, stop=("a", "bc"), max_tokens=9, min_tokens=2, min_p=0.1, repetition_penalty=1.2, presence_penalty=-0.5,
        frequency_penalty=0.25, logit_bias={3: -1.5}, top_logprobs=4,
    )  # fmt: skip
    a = ScriptedEngine("a")
    async with attached(a, address, TOKEN):
        (row,) = await collect(fleet.generate([Request("x", "text", sampling, priority=-7)]))
        assert a.requests == [Request("x", "text", sampling, priority=-7)]
        assert [len(top.token_ids) for top in row.top_logprobs] == [4, 4]
        (score,) = await fleet.score([(1, 2, 3)], top_k=5)
        assert [top.token_ids for top in score.top_logprobs] == [(0, 1, 2, 3, 4)] * 2


# --- pause and sleep --------------------------------------------------------------------------------------------------


@on_the_loop
async def test_control_reaches_all_engines_or_the_one_named(address, fleet):
    async with pair(address) as (a, b):
        await fleet.pause()
        assert a.paused and b.paused
        await fleet.resume(engine="b")
        assert a.paused and not b.paused
        assert {name: r.weights for name, r in (await fleet.memory()).items()} == {"a": 80, "b": 80}
        reports = await fleet.sleep(level=2)
        assert {name: (r.in_use, r.asleep) for name, r in reports.items()} == dict.fromkeys(
            "ab", (0, ("weights", "kv_cache"))
        )
        assert a.history[-1] == ("sleep", 2)
        assert (await fleet.wake(["weights"], engine="a"))["a"].asleep == ("kv_cache",)
        assert (await fleet.wake([]))["a"].asleep == ("kv_cache",)  # nothing named, nothing woken
        assert {r.asleep for r in (await fleet.wake()).values()} == {()}
        assert a.history[-1] == b.history[-1] == ("wake", None)


@on_the_loop
async def test_sleeping_engines_get_no_requests_while_others_are_awake_but_take_part_in_updates(address, fleet):
    async with pair(address):
        await fleet.sleep(engine="a")
        assert await states(fleet) == {"a": "asleep", "b": "ready"}
        assert {r.engine for r in await collect(fleet.generate([request(str(i)) for i in range(6)]))} == {"b"}
        assert (await fleet.score([(1, 2)]))[0].engine == "b"
        await fleet.sleep(engine="b")  # now all sleep: requests are theirs to keep until they wake
        assert {r.engine for r in await collect(fleet.generate([request(str(i)) for i in range(6)]))} == {"a", "b"}
        await fleet.refresh()
        assert set(await update(fleet, 1, ["a", "b"])) == {"a", "b"}
        notes = {e.note for e in (await fleet.status()).engines}  # the update has brought the weights back
        assert await states(fleet) == {"a": "asleep", "b": "asleep"} and notes == {
            "asleep: kv_cache released; bridge.wake brings them back"
        }
        await fleet.wake()
        assert await states(fleet) == {"a": "ready", "b": "ready"}


@on_the_loop
async def test_a_fleet_is_known_to_be_paused(address, fleet):
    async with pair(address) as (a, b):
        await fleet.pause(engine="a")
        assert {e.info.name: e.is_paused for e in (await fleet.status()).engines} == {"a": True, "b": False}
        await fleet.pause()
        assert (a.paused, b.paused) == (True, True)
        a.fail_control = True
        with pytest.raises(Unsupported):
            await fleet.resume()
        assert {e.info.name: e.is_paused for e in (await fleet.status()).engines} == {"a": True, "b": False}
        a.fail_control = False
        await fleet.resume()
        assert not any(e.is_paused for e in (await fleet.status()).engines)
        await fleet.reset_prefix_cache()
        assert ("forget",) in a.history and ("forget",) in b.history


@on_the_loop
async def test_progress_comes_to_who_asked_for_it(address, fleet):
    async with pair(address):
        asked = replace(request("asked", n=2), progress=True)
        found = await collect(fleet.generate([asked, request("silent")]))
        told = [r for r in found if isinstance(r, Progress)]
        assert sorted((p.request_id, p.sample_index) for p in told) == [("asked", 0), ("asked", 1)]
        rows = {(c.request_id, c.sample_index): c for c in found if isinstance(c, Completion)}
        assert len(rows) == 3
        for one in told:
            assert rows[one.request_id, one.sample_index].token_ids[:1] == one.token_ids


@on_the_loop
async def test_an_engine_that_registers_again_is_still_known_to_sleep(address, fleet):
    a = ScriptedEngine("a")
    async with attached(a, address, TOKEN):
        await fleet.sleep()
    async with attached(a, address, TOKEN):
        for _ in range(100):
            (known,) = (await fleet.status()).engines
            if known.state == "asleep":
                break
            await asyncio.sleep(0.02)
        assert (known.info.name, known.state) == ("a", "asleep")


@on_the_loop
async def test_one_engine_that_cannot_is_named_and_the_others_have_done_it(address, fleet):
    async with pair(address) as (_, b):
        b.fail_control = True
        with pytest.raises(Unsupported, match=r"sleep failed on b; done on a. \[b\] this engine cannot"):
            await fleet.sleep()
        assert await states(fleet) == {"a": "asleep", "b": "ready"}
        b.fail_control = False
        await fleet.sleep()
        assert await states(fleet) == {"a": "asleep", "b": "asleep"}


@on_the_loop
async def test_control_has_a_deadline_that_names_the_engine(address, fleet):
    async with pair(address) as (a, b):
        b.hang_control = True
        with pytest.raises(DeadlineExceeded, match=r"done on a.*engine 'b' did not pause within 3 s"):
            await fleet.pause()
        assert a.paused and not b.paused


@on_the_loop
async def test_control_of_engines_that_are_not_there(address, fleet):
    with pytest.raises(NotReady, match="no engine has registered"):
        await fleet.pause()
    assert "there is no engine to ask: none has registered" in str((await fleet.status()).no_engines("to ask"))
    async with attached(ScriptedEngine("a", version=-1), address, TOKEN):
        await fleet.pause()  # needs no weights
        with pytest.raises(UnknownEngine, match="'zebra'"):
            await fleet.sleep(engine="zebra")
        assert [engine.info.name for engine in (await fleet.status()).present] == ["a"]
    async with asyncio.timeout(20):
        while (await fleet.status()).present:
            await asyncio.sleep(0.02)
    with pytest.raises(EngineLost, match="'a' is lost"):
        await fleet.sleep(engine="a")
    assert re.search("there is no engine to ask: all are lost .*a: ", str((await fleet.status()).no_engines("to ask")))


@on_the_loop
async def test_checksums_come_from_all_engines_or_the_one_named(address, fleet):
    async with pair(address, version=3) as (_, b):
        expected = Checksums(3, (ParameterChecksums("w", 0, (2**64 - 4,)),))
        assert await fleet.checksums() == {"a": expected, "b": expected}
        assert await fleet.checksums(engine="b") == {"b": expected}
        assert await states(fleet) == {"a": "ready", "b": "ready"}
        b.fail_control = True
        with pytest.raises(Unsupported, match=r"verify failed on b; done on a. \[b\] this engine cannot"):
            await fleet.checksums()
        b.fail_control, b.hang_control = False, True
        with pytest.raises(DeadlineExceeded, match="engine 'b' did not verify within 3 s"):
            await fleet.checksums(engine="b")
        with pytest.raises(UnknownEngine, match="'zebra'"):
            await fleet.checksums(engine="zebra")


@on_the_loop
async def test_verifying_names_the_engine_that_differs_and_the_one_that_cannot_tell(address, fleet):
    async with pair(address) as (_, b):
        engines = (await fleet.refresh()).engines
        publisher = Publisher(fleet)
        report = await publisher.verify({"w": np.zeros(2, np.float32)}, engines)
        assert [(d.engine, d.rank, d.parameter, d.tensor) for d in report.differences] == [
            ("a", 0, "w", "w"),
            ("b", 0, "w", "w"),
        ]
        b.fail_control = True
        report = await publisher.verify({"w": np.zeros(2, np.float32)}, engines)
        assert report.versions == (("a", 0),) and {d.engine for d in report.differences} == {"a"}
        assert [(u.engine, u.tensor) for u in report.unchecked] == [("b", "")]
        with pytest.raises(Unsupported, match="this engine cannot"):
            await publisher.verify({"w": np.zeros(2, np.float32)}, engines[1:])
        with pytest.raises(MappingError, match=r"engine 'a'(.|\n)*expects shape"):
            await publisher.verify({"w": np.zeros(3, np.float32)}, engines)


@on_the_loop
async def test_control_without_a_verb_is_refused(address, fleet):
    async with attached(ScriptedEngine("a"), address, TOKEN), grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="without a verb"):
            metadata = (("authorization", f"Bearer {TOKEN}"),)
            await GatewayStub(channel).Control(pb.ControlRequest(), metadata=metadata)


# --- updates ----------------------------------------------------------------------------------------------------------


@on_the_loop
async def test_an_update_reaches_all_and_counts_up(address, fleet):
    async with pair(address, version=-1) as (a, b):
        for version in range(3):
            engines, current, _ = await fleet.refresh()
            assert current == version - 1
            assert set(await update(fleet, version, [e.name for e in engines])) == {"a", "b"}
        assert a.history == b.history == [(step, v) for v in range(3) for step in ("begin", "stage", "commit")]
        assert {(e.state, e.info.version) for e in (await fleet.status()).engines} == {("ready", 2)}


@on_the_loop
async def test_one_engine_that_cannot_stage_rolls_all_back(address, fleet):
    async with pair(address) as (a, b):
        b.fail_stage = True
        await fleet.refresh()
        with pytest.raises(TransferError, match=r"stays at version 0.*\[b\].*tensor w is torn"):
            await update(fleet, 1, ["a", "b"])
        assert ("rollback", 1) in a.history and ("rollback", 1) in b.history and ("commit", 1) not in a.history
        assert await states(fleet) == {"a": "ready", "b": "ready"}
        b.fail_stage = False
        await update(fleet, 1, ["a", "b"])
        assert a.version == b.version == 1


@on_the_loop
async def test_an_engine_that_fails_can_be_left_behind(address, fleet):
    async with pair(address) as (a, b):
        b.fail_stage = True
        await fleet.refresh()
        assert set(await update(fleet, 1, ["a", "b"], drop_failed=True)) == {"a"}
        assert await states(fleet) == {"a": "ready", "b": "stale"}
        assert b.history[-1] == ("rollback", 1)
        a.fail_stage = True
        with pytest.raises(TransferError):  # nobody is left to go on
            await update(fleet, 2, ["a", "b"], drop_failed=True)
        a.fail_stage = b.fail_stage = False
        await update(fleet, 2, ["a", "b"])
        assert await states(fleet) == {"a": "ready", "b": "ready"}


@on_the_loop
async def test_a_trainer_leaves_behind_an_engine_that_it_cannot_reach(address, fleet):
    async with pair(address) as (_, b):
        b.gate.clear()
        await fleet.refresh()
        await begin(fleet, 1, ["a", "b"])
        with pytest.raises(UnknownVersion, match="this message has no step for it"):
            await stage(fleet, 1, ["a"])
        running = asyncio.create_task(collect(fleet.generate([request("0"), request("1")])))
        while not b.seen:
            await asyncio.sleep(0.01)
        await begin(fleet, 1, ["a", "b"], drop_failed=True)
        await stage(fleet, 1, ["a"])
        assert set(await commit(fleet, 1, ["a"])) == {"a"}
        assert await states(fleet) == {"a": "ready", "b": "stale"}
        assert b.history[-1] == ("rollback", 1)
        assert {c.engine for c in await running} == {"a"}


@on_the_loop
async def test_an_engine_that_hangs_is_named_within_the_deadline(address, fleet):
    async with pair(address) as (a, b):
        b.hang_stage = True
        await fleet.refresh()
        with pytest.raises(DeadlineExceeded, match="engine 'b' did not stage version 1 within 3 s"):
            await update(fleet, 1, ["a", "b"])
        assert ("rollback", 1) in a.history
        b.hang_stage = False
        while ("rollback", 1) not in b.history:
            await asyncio.sleep(0.01)


@on_the_loop
async def test_requests_of_an_engine_that_hangs_move_when_it_is_left_behind(address, fleet):
    async with pair(address) as (a, b):
        a.gate.clear()
        b.gate.clear()
        running = asyncio.create_task(collect(fleet.generate([request("0"), request("1")])))
        while not (a.seen and b.seen):
            await asyncio.sleep(0.01)
        b.hang_stage = True
        await fleet.refresh()
        assert set(await update(fleet, 1, ["a", "b"], drop_failed=True)) == {"a"}
        a.gate.set()
        assert {c.engine for c in await running} == {"a"}


@on_the_loop
async def test_an_engine_that_does_not_commit_is_stale_until_the_next_update(address, fleet):
    async with pair(address) as (_, b):
        b.hang_commit = True
        await fleet.refresh()
        assert set(await update(fleet, 1, ["a", "b"])) == {"a"}
        assert await states(fleet) == {"a": "ready", "b": "stale"}
        results = await collect(fleet.generate([request(str(i)) for i in range(4)]))
        assert {r.engine for r in results} == {"a"}
        b.hang_commit = False
        await update(fleet, 2, ["a", "b"])
        assert await states(fleet) == {"a": "ready", "b": "ready"}


@on_the_loop
async def test_an_engine_that_refuses_to_commit_forgets_the_update(address, fleet):
    a = ScriptedEngine("a")
    a.fail_commit = True
    async with attached(a, address, TOKEN):
        await fleet.refresh()
        with pytest.raises(Unsupported, match=r"\[a\] requests are running"):
            await update(fleet, 1, ["a"])
        assert a.history[-1] == ("rollback", 1)


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_a_version_whose_commit_no_engine_reported_is_not_made_again(names):
    """Its engines serve it, and would refuse it for ever."""

    @on_the_loop
    async def test(address, fleet):
        engines = [ScriptedEngine(name) for name in names]
        async with contextlib.AsyncExitStack() as stack:
            for engine in engines:
                engine.fail_after_commit = True
                await stack.enter_async_context(attached(engine, address, TOKEN))
            await fleet.refresh()
            with pytest.raises(EngineFailure, match="the report of a commit is lost"):
                await update(fleet, 1, names)
            while (await fleet.refresh()).version < 1 or any(
                e.state != "ready" for e in (await fleet.status()).engines
            ):
                await asyncio.sleep(0.05)
            for engine in engines:
                engine.fail_after_commit = False
            await update(fleet, 2, names)
            assert [engine.version for engine in engines] == [2] * len(names)

    test()


@on_the_loop
async def test_the_number_of_a_version_that_a_lost_engine_may_have_committed_is_not_used_again(address, fleet):
    a, b = ScriptedEngine("a"), ScriptedEngine("b")
    async with attached(a, address, TOKEN):
        await fleet.refresh()
        a.hang_commit = True
        updating = asyncio.create_task(update(fleet, 1, ["a"]))
        while a.history[-1:] != [("stage", 1)]:
            await asyncio.sleep(0.01)
    with pytest.raises(EngineLost):
        await updating
    async with attached(b, address, TOKEN):
        assert (await fleet.refresh()).next_version == 2
        with pytest.raises(
            VersionError, match="version 1 may be committed by an engine that has not reported it; use 2"
        ):
            await update(fleet, 1, ["b"])
        await update(fleet, 2, ["b"])
        assert (await fleet.refresh())[1:] == (2, 3)


def test_the_number_of_a_version_is_not_used_again_after_gateway_and_engines_have_died(tmp_path):
    """An engine may have committed it, and nobody is left who knows."""

    def next_version(copy):
        shutil.copytree(tmp_path / "run", copy)  # what is on disk if all of them die now
        return Service(LEASE, copy / "journal")._registry.next_version

    async def main():
        async with running(
            GatewayConfig(lease_seconds=LEASE), TOKEN, Service(LEASE, tmp_path / "run" / "journal")
        ) as address:
            fleet, a = GatewayFleet(address, TOKEN, timeout=DEADLINE, max_message_bytes=CAP), ScriptedEngine("a", 0)
            async with attached(a, address, TOKEN):
                await fleet.refresh()
                a.hang_commit = True
                assert next_version(tmp_path / "before") == 0
                updating = asyncio.create_task(update(fleet, 1, ["a"]))
                while not a.hangs:
                    await asyncio.sleep(0.01)
                assert next_version(tmp_path / "meanwhile") == 2
            with pytest.raises(EngineLost):
                await updating
            await fleet.close()

    (tmp_path / "run").mkdir()
    journal = Journal(tmp_path / "run" / "journal")
    journal.accept({"a group, so that a run is in progress": (b"", 1)})
    journal.close()
    event_loop.run(asyncio.wait_for(main(), 60))


@on_the_loop
async def test_every_policy_for_running_requests_reaches_the_engine(address, fleet):
    a = ScriptedEngine("a")
    async with attached(a, address, TOKEN):
        for version, policy in enumerate(get_args(InFlight), start=1):
            await fleet.refresh()
            await stage(fleet, version, await begin(fleet, version, ["a"]))
            await commit(fleet, version, ["a"], policy)
        assert a.policies == ["keep", "finish", "recompute", "requeue"]


@on_the_loop
async def test_a_trainer_that_vanishes_is_rolled_back(address, fleet):
    a = ScriptedEngine("a")
    async with attached(a, address, TOKEN):
        await fleet.refresh()
        await begin(fleet, 1, ["a"])
        await stage(fleet, 1, ["a"])
        await fleet.close()
        for _ in range(100):
            if ("release",) in a.history:
                break
            await asyncio.sleep(0.02)
        assert a.history[-2:] == [("rollback", 1), ("release",)] and a.version == 0


DESTINATIONS = Destinations(((b"link", b""),), b"\x00")


def bundle(version, expected=DESTINATIONS, in_flight="keep"):
    """All steps of an update in one message."""
    return UpdateSteps(version, OFFER, expected, [[b"m"]], in_flight)


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_a_bundle_runs_begin_stage_and_commit(names):
    @on_the_loop
    async def check(address, fleet):
        async with contextlib.AsyncExitStack() as stack:
            engines = [ScriptedEngine(name) for name in names]
            for engine in engines:
                await stack.enter_async_context(attached(engine, address, TOKEN))
            await fleet.refresh()
            for version in (1, 2):
                reports = await send(fleet, names, bundle(version, in_flight="requeue"))
                expected = UpdateReports(None, StageReport(8, 0.002), CommitReport(0.0, 0.0))
                assert reports == dict.fromkeys(names, expected)
            for engine in engines:
                assert engine.history == [(step, v) for v in (1, 2) for step in ("begin", "stage", "commit")]
                assert engine.policies == ["requeue"] * 2
            assert {(e.state, e.info.version) for e in (await fleet.status()).engines} == {("ready", 2)}

    check()


@on_the_loop
async def test_with_several_engines_none_commits_a_bundle_before_all_have_staged(address, fleet):
    async with pair(address) as (a, b):
        b.fail_stage = True
        await fleet.refresh()
        with pytest.raises(TransferError, match=r"stays at version 0.*\[b\].*tensor w is torn"):
            await send(fleet, ["a", "b"], bundle(1))
        assert a.history == [("begin", 1), ("stage", 1), ("rollback", 1)] and ("commit", 1) not in b.history


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_unexpected_destinations_commit_nothing(names):
    @on_the_loop
    async def check(address, fleet):
        async with pair(address) as (a, b):
            await fleet.refresh()
            with pytest.raises(FleetChanged, match=r"engine '[ab]' wants its weights elsewhere"):
                await send(fleet, names, bundle(1, Destinations(((b"link", b""),), b"\x01")))
            for engine in (a, b)[: len(names)]:
                assert engine.history == [("begin", 1), ("rollback", 1)]
            await send(fleet, names, bundle(1))
            assert a.version == 1

    check()


@pytest.mark.parametrize("step", ["stage", "commit"])
def test_an_engine_that_fails_a_bundle_forgets_the_update(step):
    @on_the_loop
    async def check(address, fleet):
        a = ScriptedEngine("a")
        setattr(a, f"fail_{step}", True)
        async with attached(a, address, TOKEN):
            await fleet.refresh()
            with pytest.raises(errors.SlipstreamError, match=r"version 1 was not committed.*version 0\. \[a\]"):
                await send(fleet, ["a"], bundle(1))
            assert a.history[-1] == ("rollback", 1) and a.version == 0
            setattr(a, f"fail_{step}", False)
            await send(fleet, ["a"], bundle(1))
            assert await states(fleet) == {"a": "ready"} and a.version == 1

    check()


@on_the_loop
async def test_a_bundle_has_a_deadline(address, fleet):
    a = ScriptedEngine("a")
    a.hang_stage = True
    async with attached(a, address, TOKEN):
        await fleet.refresh()
        with pytest.raises(
            DeadlineExceeded, match="engine 'a' did not begin and stage and commit version 1 within 3 s"
        ):
            await send(fleet, ["a"], bundle(1))


@on_the_loop
async def test_a_bundle_that_has_started_ends_even_if_the_trainer_vanishes(address, fleet):
    """Else the fleet's version and the engine's might disagree."""
    a = ScriptedEngine("a")
    going = asyncio.Event()

    async def slow(version, in_flight="keep"):
        await going.wait()
        return await ScriptedEngine.commit(a, version, in_flight)

    a.commit = slow
    async with attached(a, address, TOKEN):
        await fleet.refresh()
        await fleet.send_steps({"a": bundle(1)})
        while ("stage", 1) not in a.history:
            await asyncio.sleep(0.01)
        fleet._drop_updates()
        await asyncio.sleep(0.2)
        going.set()
        while ("commit", 1) not in a.history:
            await asyncio.sleep(0.01)
        for _ in range(100):
            if (await fleet.status()).version == 1:
                break
            await asyncio.sleep(0.02)
        assert (await fleet.status()).version == 1 and ("rollback", 1) not in a.history


@on_the_loop
async def test_a_fleet_that_changed_is_looked_at_again(address, fleet):
    a, b = ScriptedEngine("a"), ScriptedEngine("b")
    async with attached(a, address, TOKEN):
        await fleet.refresh()
        async with attached(b, address, TOKEN):
            with pytest.raises(FleetChanged):
                await update(fleet, 1, ["a"])
            await fleet.refresh()
            await update(fleet, 1, ["a", "b"])
            assert b.version == 1


@on_the_loop
async def test_a_second_trainer_must_wait(address, fleet):
    other = GatewayFleet(address, TOKEN, 1.0, CAP)
    async with attached(ScriptedEngine("a"), address, TOKEN):
        await fleet.refresh(), await other.refresh()
        await begin(fleet, 1, ["a"])
        await stage(fleet, 1, ["a"])
        with pytest.raises(UpdateInProgress, match="another trainer"):
            await update(other, 1, ["a"])
        await commit(fleet, 1, ["a"])
    await other.close()


@on_the_loop
async def test_a_second_trainer_hears_why_though_it_is_still_writing(address, fleet):
    """Its steps are more than gRPC sends before the gateway has read some of it, and all of them are taken."""
    other, large = GatewayFleet(address, TOKEN, 5.0, CAP), replace(OFFER, plan=b"p" * (CAP - 1000))
    async with attached(ScriptedEngine("a"), address, TOKEN):
        await fleet.refresh(), await other.refresh()
        await begin(fleet, 1, ["a"])
        for _ in range(5):
            await other.send_steps({"a": UpdateSteps(1, large)})
            await other.send_steps({"a": UpdateSteps(1, manifests=[[b"m" * (CAP - 1000)]])})
            with pytest.raises(UpdateInProgress, match="another trainer"):
                await other.receive_reports()
        await stage(fleet, 1, ["a"])
        await commit(fleet, 1, ["a"])
    await other.close()


@on_the_loop
async def test_wrong_steps_of_an_update_are_typed_errors(address, fleet):
    async with attached(ScriptedEngine("a"), address, TOKEN):
        await fleet.refresh()
        with pytest.raises(VersionError, match="0 is not newer"):
            await update(fleet, 0, ["a"])
        with pytest.raises(UnknownEngine, match="'zebra'"):
            await update(fleet, 1, ["zebra"])
        await begin(fleet, 1, ["a"])
        with pytest.raises(UnknownVersion, match="version 2 was not begun"):
            await stage(fleet, 2, ["a"])
        await begin(fleet, 1, ["a"])
        with pytest.raises(UnknownVersion, match="engine 'a' began version 1, and this message has no step for it"):
            await stage(fleet, 1, ["b"])
        for steps in (UpdateSteps(1), UpdateSteps(1, OFFER, in_flight="keep")):
            await begin(fleet, 1, ["a"])
            with pytest.raises(ProtocolMismatch, match="consecutive steps"):
                await send(fleet, ["a"], steps)
        with pytest.raises(ProtocolMismatch, match="same version and steps for every engine"):
            await fleet.send_steps({"a": UpdateSteps(1, OFFER), "b": UpdateSteps(2, OFFER)})
            await fleet.receive_reports()
        with pytest.raises(SlipstreamError):
            await commit(fleet, 1, ["a"])
        await fleet.rollback(1)
        await update(fleet, 1, ["a"])


# --- bad peers --------------------------------------------------------------------------------------------------------


@on_the_loop
async def test_every_method_needs_the_token(address, fleet):
    async with attached(ScriptedEngine("a"), address, TOKEN):
        for token in ("", "wrong"):
            stranger = GatewayFleet(address, token, 1.0, CAP)
            for call in (
                lambda s: s.status(),
                lambda s: s.refresh(),
                lambda s: s.score([(1, 2)]),
                lambda s: collect(s.generate([request("0")])),
                lambda s: update(s, 1, ["a"]),
            ):
                with pytest.raises(Unauthorized, match="token"):
                    await call(stranger)
            await stranger.close()
        for token in ("secret\n", "sécret"):
            with pytest.raises(Unauthorized, match="characters"):
                GatewayFleet(address, token, 1.0, CAP)
        with pytest.raises(Unauthorized):
            async with attached(ScriptedEngine("b"), address, "wrong"):
                pass
        assert len((await fleet.status()).engines) == 1


@on_the_loop
async def test_health_and_reflection(address, fleet):
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]),
            metadata=(("authorization", f"Bearer {TOKEN}"),),
        )
        listed = [s.name async for reply in call for s in reply.list_services_response.service]
        assert SERVICE in listed


@on_the_loop
async def test_oversized_and_malformed_messages_leave_the_gateway_alive(address, fleet):
    async with attached(ScriptedEngine("a"), address, TOKEN):
        with pytest.raises(MessageTooLarge, match="larger than the gateway"):
            await collect(fleet.generate([Request("0", (1,) * (2 * CAP), SamplingParams(seed=1))]))
        async with grpc.aio.insecure_channel(address) as channel:
            for method in ("Status", "Generate", "Score"):
                call = (
                    channel.unary_unary(f"/{SERVICE}/{method}")
                    if method != "Generate"
                    else channel.unary_stream(f"/{SERVICE}/{method}")
                )
                for junk in (b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f"):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        reply = call(junk, metadata=(("authorization", f"Bearer {TOKEN}"),))
                        await reply if method != "Generate" else await reply.read()
                    assert caught.value.code() is not grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/Nothing")(b"", metadata=(("authorization", f"Bearer {TOKEN}"),))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert len(await collect(fleet.generate([request("0")]))) == 1


@on_the_loop
async def test_bad_sampling_from_a_foreign_client_is_a_typed_error(address, fleet):
    stub = GatewayStub(grpc.aio.insecure_channel(address))
    good = dict(max_tokens=4, temperature=1.0, top_p=1.0, n=1)
    async with attached(ScriptedEngine("a"), address, TOKEN):
        for bad, kind in (
            (pb.Sampling(**{**good, "n": 0}), "InvalidSampling"),
            (pb.Sampling(**{**good, "temperature": float("nan")}), "InvalidSampling"),
            (pb.Sampling(**{**good, "top_p": 0.0}), "InvalidSampling"),
            (pb.Sampling(**{**good, "max_tokens": 0}), "InvalidSampling"),
            (None, "ProtocolMismatch"),
        ):
            message = pb.GenerateRequest(sampling=[bad] if bad else [], requests=[pb.Request(id="0", text="x")])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(message, metadata=(("authorization", f"Bearer {TOKEN}"),)).read()
            assert dict(caught.value.trailing_metadata())["slipstream-error"] == kind
        twice = pb.GenerateRequest(sampling=[pb.Sampling(**good)], requests=[pb.Request(id="0", text="x")] * 2)
        with pytest.raises(grpc.aio.AioRpcError, match="same id"):
            await stub.Generate(twice, metadata=(("authorization", f"Bearer {TOKEN}"),)).read()
    with pytest.raises(InvalidSampling):
        request("0", max_tokens=-1)


@on_the_loop
async def test_engines_that_do_not_fit_are_refused_with_the_reason(address, fleet):
    old = ScriptedEngine("old")
    info = old.describe()
    async with attached(ScriptedEngine("a"), address, TOKEN):
        import dataclasses

        namesake = ScriptedEngine("a")
        elsewhere = dataclasses.replace(namesake.describe(), pid=info.pid + 1)
        namesake.describe = lambda: elsewhere
        with pytest.raises(RequestError, match="registered already"):
            async with attached(namesake, address, TOKEN):
                pass
        old.describe = lambda: dataclasses.replace(info, protocol=0)
        with pytest.raises(ProtocolMismatch, match="protocol 0"):
            async with attached(old, address, TOKEN):
                pass


@on_the_loop
async def test_an_engine_waits_for_the_name_of_its_predecessor(address, fleet):
    """One that was started again on another machine may come before the gateway knows that the first is gone."""
    import dataclasses

    successor = ScriptedEngine("a", version=2)
    elsewhere = dataclasses.replace(successor.describe(), pid=successor.describe().pid + 1)
    successor.describe = lambda: elsewhere
    async with contextlib.AsyncExitStack() as stack:
        async with attached(ScriptedEngine("a", version=2), address, TOKEN):
            with pytest.raises(NameInUse, match=r"'a' is registered already"):
                async with attached(successor, address, TOKEN, patience=0.3):
                    pass
            coming = asyncio.create_task(stack.enter_async_context(attached(successor, address, TOKEN, patience=20)))
            assert not (await asyncio.wait({coming}, timeout=0.5))[0]
        await asyncio.wait_for(coming, 10)
        assert [(e.info.pid, e.state) for e in (await fleet.status()).engines] == [(elsewhere.pid, "ready")]


def test_an_engine_looks_for_a_gateway_that_restarts():
    async def main():
        config = GatewayConfig(lease_seconds=2.0)
        engine = ScriptedEngine("a", version=7)
        async with contextlib.AsyncExitStack() as stack:
            async with running(config, TOKEN) as address:
                task = await stack.enter_async_context(attached(engine, address, TOKEN, patience=20))
            port = int(address.rpartition(":")[2])
            async with running(GatewayConfig(port=port, lease_seconds=2.0), TOKEN) as again:
                fleet = GatewayFleet(again, TOKEN, 2.0, CAP)
                for _ in range(200):
                    if (await fleet.status()).engines:
                        break
                    await asyncio.sleep(0.05)
                assert [e.info.version for e in (await fleet.status()).engines] == [7]
                assert len(await collect(fleet.generate([request("0")]))) == 1
                await fleet.close()
            assert not task.done()

    event_loop.run(asyncio.wait_for(main(), 60))


def test_an_engine_gives_up_on_a_gateway_that_is_gone():
    async def main():
        async with running(GatewayConfig(), TOKEN) as address:
            context = attached(ScriptedEngine("a"), address, TOKEN, patience=0.3)
            task = await context.__aenter__()
        with pytest.raises(GatewayLost, match="gives up"):
            await asyncio.wait_for(task, 30)

    event_loop.run(main())


def test_a_gateway_that_is_not_there():
    async def main():
        fleet = GatewayFleet("127.0.0.1:9", TOKEN, 1.0, CAP)
        with pytest.raises((GatewayLost, errors.DeadlineExceeded), match=r"127\.0\.0\.1:9"):
            await fleet.status()
        await fleet.close()

    event_loop.run(main())


# --- trainers of several processes ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def trainers(address, count, timeout=DEADLINE):
    fleets = [
        GatewayFleet(address, TOKEN, timeout, CAP, process_index=rank, process_count=count) for rank in range(count)
    ]
    try:
        for one in fleets:
            await one.refresh()
        yield fleets
    finally:
        for one in fleets:
            await one.close()


@on_the_loop
async def test_the_processes_of_a_trainer_step_together(address, fleet):
    a = ScriptedEngine("a")
    async with attached(a, address, TOKEN), trainers(address, 3) as ranks:
        for version in (1, 2):
            answers = await asyncio.gather(*(update(one, version, ["a"]) for one in ranks))
            assert [set(answer) for answer in answers] == [{"a"}] * 3
        assert a.history == [(step, v) for v in (1, 2) for step in ("begin", "stage", "commit")]
        with pytest.raises(UpdateInProgress, match="3 process"):
            await update(fleet, 3, ["a"])


@on_the_loop
async def test_the_processes_of_a_trainer_send_a_bundle_together(address, fleet):
    a = ScriptedEngine("a")
    seen = []

    async def staging(version, manifests):
        seen.append([list(ranks) for ranks in manifests])
        return await ScriptedEngine.stage(a, version, manifests)

    a.stage = staging
    async with attached(a, address, TOKEN), trainers(address, 2) as ranks:
        answers = await asyncio.gather(*(send(one, ["a"], bundle(1)) for one in ranks))
        assert [set(reports) for reports in answers] == [{"a"}] * 2
        assert a.history == [("begin", 1), ("stage", 1), ("commit", 1)] and seen == [[[b"m", b"m"]]]


@on_the_loop
async def test_a_process_that_does_not_come_is_named(address, fleet):
    a = ScriptedEngine("a")
    async with attached(a, address, TOKEN), trainers(address, 2) as ranks:
        with pytest.raises(DeadlineExceeded, match=r"trainer process\(es\) \[1\] of 2 did not send the same step"):
            await update(ranks[0], 1, ["a"])
        assert a.history == []
        await asyncio.gather(*(update(one, 1, ["a"]) for one in ranks))
        assert a.version == 1


@on_the_loop
async def test_a_process_that_dies_in_mid_update_ends_it_for_all(address, fleet):
    a = ScriptedEngine("a")
    async with attached(a, address, TOKEN), trainers(address, 2, timeout=5.0) as ranks:
        await asyncio.gather(*(begin(one, 1, ["a"]) for one in ranks))
        waiting = asyncio.create_task(stage(ranks[0], 1, ["a"]))
        await asyncio.sleep(0.1)
        await ranks[1].close()
        with pytest.raises(errors.PeerError, match="trainer process 1 of 2 is gone"):
            await waiting
        assert a.history == [("begin", 1), ("rollback", 1)]


@on_the_loop
async def test_processes_that_disagree_are_told(address, fleet):
    a = ScriptedEngine("a")
    async with attached(a, address, TOKEN), trainers(address, 2) as ranks:
        other = Offer(b"p", "another plan", "memory")

        async def wrong():
            return await send(ranks[1], ["a"], UpdateSteps(1, other))

        outcomes = await asyncio.gather(begin(ranks[0], 1, ["a"]), wrong(), return_exceptions=True)
        assert all(isinstance(o, errors.PlanMismatch) and "sharded alike" in str(o) for o in outcomes)
        assert a.history == []
