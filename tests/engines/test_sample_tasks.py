"""Samples of engines that delegate generation: how many are in the server at once, and in which order the others follow."""

from __future__ import annotations

import asyncio

from slipstream.engines.frontend.sample_tasks import Attempt, SampleTasks
from slipstream.engines.frontend.sequence import EngineRequest, ResultSink
from slipstream.errors import EngineFailure, SlipstreamError
from slipstream.types import SamplingParams


class Server(SampleTasks):
    """Generates nothing until the test finishes an attempt."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.started: list[str] = []

    async def _generate(self, attempt: Attempt) -> None:
        self.started.append(attempt.sample.request.request_id)
        await asyncio.Event().wait()

    def _failure(self, error: Exception) -> SlipstreamError:
        return EngineFailure(str(error))

    def attempt(self, name: str) -> Attempt:
        return next(a for a in self.running if a.sample.request.request_id == name)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def request(name: str, sink: ResultSink, priority: int = 0) -> EngineRequest:
    return EngineRequest(name, (1,), SamplingParams(), 0, 4, (), sink, priority)


def test_samples_beyond_the_limit_wait_by_priority_and_fair_between_callers() -> None:
    async def scenario() -> None:
        server, crowd, one, urgent = Server(2), ResultSink(), ResultSink(), ResultSink()
        server.start([request(f"crowd {i}", crowd) for i in range(4)])
        server.start([request("one", one), request("urgent", urgent, -1)])
        await settle()
        assert server.started == ["crowd 0", "crowd 1"]
        for name, following in (("crowd 0", "urgent"), ("crowd 1", "crowd 2"), ("urgent", "one")):
            server.attempt(name).task.cancel()
            await settle()
            assert server.started[-1] == following and len(server.running) == 2
        server.cancel(crowd)  # one running, one waiting
        await settle()
        assert [a.sample.request.request_id for a in server.running] == ["one"]
        server.start([request("late", urgent)])
        await settle()
        assert server.started[-1] == "late" and "crowd 3" not in server.started

    asyncio.run(scenario())


def test_a_commit_interrupts_only_samples_in_the_server_and_they_keep_their_places() -> None:
    async def scenario() -> None:
        server, sink = Server(2), ResultSink()
        server.version = 1
        server.start([request(f"{i}", sink) for i in range(4)])
        await settle()
        server.version = 2
        for attempt in list(server.running):
            attempt.interrupt()
        await settle()
        assert server.started[:2] == ["0", "1"] and sorted(server.started[2:]) == ["0", "1"]
        assert [a.version for a in server.running] == [2, 2]

    asyncio.run(scenario())
