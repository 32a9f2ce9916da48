"""Requests to engines and results back, each sample delivered once.

An engine that dies has its unanswered samples sent elsewhere. Seeds travel with requests, so a repeated sample is the
same sample, and one that was delivered before is dropped."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from slipstream.errors import EngineLost, NotReady, SlipstreamError
from slipstream.gateway import convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.attach import EngineLink
from slipstream.gateway.registry import Registry
from slipstream.gateway.router import route, weight
from slipstream.types import Failure, Request

MAX_ATTEMPTS = 3
"""A request that three engines died of is not given to a fourth."""


@dataclass
class _Ended:
    """A share of the requests has come to its end on one engine."""

    share: Sequence[Request]
    error: SlipstreamError | None


class Dispatch:
    """One `Generate` call: its requests, who runs them, and which samples are still owed."""

    def __init__(self, registry: Registry, links: Mapping[str, EngineLink], only: str = "") -> None:
        self._registry, self._links, self._only = registry, links, only
        self._owed: dict[str, set[int]] = {}
        self._attempts: Counter[str] = Counter()
        self._arrived: asyncio.Queue[pb.Results | _Ended] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[pb.Results, None]:
        """Raises `NotReady` when no engine can take them; later failures are `Failure`s among the results."""
        self._owed = {r.id: set(range(r.sampling.n)) for r in requests}
        try:
            self._send(requests)
            while self._owed:
                arrived = await self._arrived.get()
                results = self._after(arrived) if isinstance(arrived, _Ended) else arrived
                if fresh := self._fresh(results):
                    yield fresh
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, requests: Sequence[Request]) -> None:
        loads = {m.info.name: self._links[m.info.name].load for m in self._registry.takers(self._only)}
        for name, share in route(requests, loads).items():
            self._attempts.update(r.id for r in share)
            task = asyncio.create_task(self._follow(name, share))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _follow(self, name: str, share: Sequence[Request]) -> None:
        """Runs a share on one engine and reports how it ended."""
        link, member, work = self._links[name], self._registry.get(name), sum(map(weight, share))
        ended = _Ended(share, None)
        link.load += work
        member.num_requests += len(share)
        try:
            async with contextlib.aclosing(link.results(convert.requests_to_pb(share))) as batches:
                async for results in batches:
                    self._arrived.put_nowait(results)
        except SlipstreamError as error:
            ended.error = error
        finally:
            link.load -= work
            member.num_requests -= len(share)
        self._arrived.put_nowait(ended)

    def _after(self, ended: _Ended) -> pb.Results:
        """What a share still owes goes to another engine if its own died; else it has failed."""
        unanswered = [r for r in ended.share if r.id in self._owed]
        error = ended.error or EngineLost("the engine ended the call without answering every request")
        if isinstance(ended.error, EngineLost):
            again = [r for r in unanswered if self._attempts[r.id] < MAX_ATTEMPTS]
            with contextlib.suppress(NotReady):
                self._send(again)
                unanswered = [r for r in unanswered if r not in again]
        return convert.results_to_pb([Failure(r.id, error) for r in unanswered])

    def _fresh(self, results: pb.Results) -> pb.Results | None:
        """Without what was delivered before. A failed request owes nothing more."""
        fresh = pb.Results()
        for completion in results.completions:
            owed = self._owed.get(completion.request_id, set())
            if completion.sample_index in owed:
                owed.discard(completion.sample_index)
                fresh.completions.append(completion)
                if not owed:
                    del self._owed[completion.request_id]
        for failure in results.failures:
            if self._owed.pop(failure.request_id, None):
                fresh.failures.append(failure)
        for progress in results.progress:
            if progress.sample_index in self._owed.get(progress.request_id, ()):
                fresh.progress.append(progress)
        return fresh if fresh.completions or fresh.failures or fresh.progress else None
