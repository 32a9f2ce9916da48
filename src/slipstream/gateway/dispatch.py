"""Requests to engines and results back, each sample delivered once.

An engine that dies has its unanswered samples sent elsewhere. Seeds travel with requests, so a repeated sample is the
same sample, and one that was delivered before is dropped. Prompts and completions pass through as they came, unpacked by
nobody here: the gateway is one process for all trainers and engines."""

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
from slipstream.types import Failure

MAX_ATTEMPTS = 3
"""A request that three engines died of is not given to a fourth."""


@dataclass
class _Ended:
    """A share of the requests has come to its end on one engine."""

    share: Sequence[str]
    """Ids."""
    error: SlipstreamError | None


class Dispatch:
    """One `Generate` call: its requests, who runs them, and which samples are still owed."""

    def __init__(self, registry: Registry, links: Mapping[str, EngineLink], only: str = "") -> None:
        self._registry, self._links, self._only = registry, links, only
        self._asked: dict[str, pb.Request] = {}
        self._samplings: Sequence[pb.Sampling] = ()
        self._weights: dict[str, int] = {}
        self._owed: dict[str, set[int]] = {}
        self._attempts: Counter[str] = Counter()
        self._arrived: asyncio.Queue[pb.Results | _Ended] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, message: pb.GenerateRequest) -> AsyncGenerator[pb.Results, None]:
        """Raises `NotReady` when no engine can take them; later failures are `Failure`s among the results."""
        samplings = convert.samplings_from_pb(message)
        self._asked, self._samplings = {row.id: row for row in message.requests}, message.sampling
        self._weights = {id: weight(sampling) for id, sampling in zip(self._asked, samplings)}
        self._owed = {id: set(range(sampling.n)) for id, sampling in zip(self._asked, samplings)}
        try:
            self._send(self._weights)
            while self._owed:
                arrived = await self._arrived.get()
                results = self._after(arrived) if isinstance(arrived, _Ended) else arrived
                if fresh := self._fresh(results):
                    yield fresh
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, weights: Mapping[str, int]) -> None:
        loads = {m.info.name: self._links[m.info.name].load for m in self._registry.takers(self._only)}
        for name, share in route(weights, loads).items():
            self._attempts.update(share)
            task = asyncio.create_task(self._follow(name, share))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _follow(self, name: str, share: Sequence[str]) -> None:
        """Runs a share on one engine and reports how it ended."""
        link, member, work = self._links[name], self._registry.get(name), sum(self._weights[id] for id in share)
        message = pb.GenerateRequest(sampling=self._samplings, requests=[self._asked[id] for id in share])
        ended = _Ended(share, None)
        link.load += work
        member.num_requests += len(share)
        try:
            async with contextlib.aclosing(link.results(message)) as batches:
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
        unanswered = [id for id in ended.share if id in self._owed]
        error = ended.error or EngineLost("the engine ended the call without answering every request")
        if isinstance(ended.error, EngineLost):
            again = {id: self._weights[id] for id in unanswered if self._attempts[id] < MAX_ATTEMPTS}
            with contextlib.suppress(NotReady):
                self._send(again)
                unanswered = [id for id in unanswered if id not in again]
        return convert.results_to_pb([Failure(id, error) for id in unanswered])

    def _fresh(self, results: pb.Results) -> pb.Results | None:
        """Without what was delivered before. A failed request owes nothing more."""
        completions = [c for c in results.completions if self._is_owed(c)]
        failures = [f for f in results.failures if self._owed.pop(f.request_id, None)]
        progress = [p for p in results.progress if p.sample_index in self._owed.get(p.request_id, ())]
        num_fresh = len(completions) + len(failures) + len(progress)
        if num_fresh == len(results.completions) + len(results.failures) + len(results.progress):
            return results if num_fresh else None  # as it came: nothing is copied
        fresh = pb.Results(completions=completions, failures=failures, progress=progress)
        return fresh if num_fresh else None

    def _is_owed(self, completion: pb.Completion) -> bool:
        """If so, it is no longer."""
        owed = self._owed.get(completion.request_id, set())
        if completion.sample_index not in owed:
            return False
        owed.discard(completion.sample_index)
        if not owed:
            del self._owed[completion.request_id]
        return True
