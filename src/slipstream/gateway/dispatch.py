"""Requests to engines and results back, each sample delivered once.

An engine that dies has its unanswered samples sent elsewhere. What an engine fails at, or cannot do just now, another
tries once; what a client asked wrongly is nobody's to repeat. Seeds travel with requests, so a repeated sample is the
same sample, and one that was delivered before is dropped. Prompts and completions pass through as they came, unpacked
by nobody here: the gateway is one process for all trainers and engines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from slipstream.errors import EngineLost, NotReady, SlipstreamError
from slipstream.gateway import convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.affinity import Affinity, Prefix, prefixes
from slipstream.gateway.attach import EngineLink
from slipstream.gateway.breaker import Breaker, blame
from slipstream.gateway.registry import Member, Registry
from slipstream.gateway.router import route, weight
from slipstream.types import Failure

MAX_ATTEMPTS = 3
"""A request that three engines died of is not given to a fourth."""
MAX_TRIES = 2
"""And one that two engines failed at, without dying, is not given to a third."""


@dataclass
class _Share:
    """The requests that one engine was sent at once."""

    name: str
    ids: Sequence[str]
    is_probe: bool = False
    has_completed: bool = False
    """It has answered at least one sample."""
    fault: str = ""
    """The last that one of its requests failed with by the engine's doing."""


@dataclass
class _Ended:
    """A share has come to its end."""

    share: _Share
    error: SlipstreamError | None


class Dispatch:
    """One `Generate` call: its requests, who runs them, and which samples are still owed."""

    def __init__(
        self,
        registry: Registry,
        links: Mapping[str, EngineLink],
        only: str = "",
        affinity: Affinity | None = None,
    ) -> None:
        self._registry, self._links, self._only, self._affinity = registry, links, only, affinity or Affinity()
        self.num_retried = 0
        """Requests that were sent to another engine."""
        self._asked: dict[str, pb.Request] = {}
        self._samplings: Sequence[pb.Sampling] = ()
        self._weights: dict[str, int] = {}
        self._beginnings: dict[str, tuple[Prefix, ...]] = {}
        self._owed: dict[str, set[int]] = {}
        self._attempts: Counter[str] = Counter()
        self._holders: dict[str, _Share] = {}
        self._arrived: asyncio.Queue[tuple[_Share, pb.Results] | _Ended] = asyncio.Queue()
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
                results = self._after(arrived) if isinstance(arrived, _Ended) else self._settled(*arrived)
                if fresh := self._fresh(results):
                    yield fresh
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, weights: Mapping[str, int], avoid: str = "") -> None:
        """To whoever can take them, but for `avoid`. Raises `NotReady` when there is nobody."""
        takers, probes = admitted(self._registry, self._only, avoid)
        rest = dict(weights)
        for member in probes[: len(rest)]:
            self._start(_Share(member.info.name, [rest.popitem()[0]], is_probe=True))
        loads = {m.info.name: self._links[m.info.name].load for m in takers}
        if len(loads) > 1:
            self._affinity.at(self._registry.version)
            for id in rest.keys() - self._beginnings.keys():
                self._beginnings[id] = prefixes(convert.prompt_start(self._asked[id]))
        for name, ids in route(rest, loads, self._beginnings, self._affinity).items():
            self._start(_Share(name, ids))

    def _start(self, share: _Share) -> None:
        self._attempts.update(share.ids)
        self._holders.update(dict.fromkeys(share.ids, share))
        if share.is_probe:
            self._registry.get(share.name).breaker.tried()
        link, member = self._links[share.name], self._registry.get(share.name)
        work = sum(self._weights[id] for id in share.ids)
        # At once: who routes the next request, in this turn of the event loop even, is to see it.
        link.load += work
        member.num_requests += len(share.ids)

        def over(task: asyncio.Task[None]) -> None:
            link.load -= work
            member.num_requests -= len(share.ids)
            self._tasks.discard(task)

        task = asyncio.create_task(self._follow(share, link, member))
        self._tasks.add(task)
        task.add_done_callback(over)

    async def _follow(self, share: _Share, link: EngineLink, member: Member) -> None:
        """Runs a share on one engine and reports how it ended."""
        message = pb.GenerateRequest(sampling=self._samplings, requests=[self._asked[id] for id in share.ids])
        ended = _Ended(share, None)
        try:
            async with contextlib.aclosing(link.results(message)) as batches:
                async for results in batches:
                    self._judge(share, results, member.breaker)
                    self._arrived.put_nowait((share, results))
        except SlipstreamError as error:
            ended.error = error
            if blame(error) == "engine":
                share.fault, share.has_completed = str(error), False
        finally:
            if share.is_probe:
                member.breaker.unanswered()
            if share.fault and not share.has_completed:  # also if others did it meanwhile, and nobody waits for us
                member.breaker.faulted(time.monotonic(), share.fault)
        self._arrived.put_nowait(ended)

    def _judge(self, share: _Share, results: pb.Results, breaker: Breaker) -> None:
        """What they say of the engine."""
        if results.completions and not share.has_completed:
            share.has_completed = True
            breaker.succeeded()
        for failure in results.failures:
            if blame(error := convert.error_from_pb(failure.error)) == "engine":
                share.fault = str(error)

    def _settled(self, share: _Share, results: pb.Results) -> pb.Results:
        """Without the failures that another engine is asked to make good."""
        if not results.failures:
            return results
        failed = {f.request_id: convert.error_from_pb(f.error) for f in results.failures}
        again = self._try_elsewhere(share, failed)
        final = [f for f in results.failures if f.request_id not in again]
        return pb.Results(completions=results.completions, failures=final, progress=results.progress)

    def _after(self, ended: _Ended) -> pb.Results:
        """What a share still owes goes to another engine, or has failed."""
        share = ended.share
        error = ended.error or EngineLost(f"engine {share.name!r} ended the call without answering every request")
        failed = {id: error for id in share.ids if id in self._owed and self._holders[id] is share}
        again = self._try_elsewhere(share, failed)
        return convert.results_to_pb([Failure(id, error) for id in failed if id not in again])

    def _try_elsewhere(self, share: _Share, failed: Mapping[str, SlipstreamError]) -> Mapping[str, int]:
        """Sends to other engines what may be repeated; by id."""
        again = {id: self._weights[id] for id, e in failed.items() if id in self._owed and self._may_repeat(id, e)}
        if not again:
            return {}
        try:
            self._send(again, avoid=share.name)
        except NotReady:
            return {}
        self.num_retried += len(again)
        return again

    def _may_repeat(self, id: str, error: SlipstreamError) -> bool:
        most = MAX_ATTEMPTS if isinstance(error, EngineLost) else MAX_TRIES
        return blame(error) != "client" and self._attempts[id] < most

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


def admitted(registry: Registry, only: str = "", avoid: str = "") -> tuple[list[Member], list[Member]]:
    """Those who may be sent anything, and those who are to be tried with one request. Where every circuit is open, all are sent
    to as if none were: an error of the engine's own says more than that nobody was asked."""
    now = time.monotonic()
    takers = [m for m in registry.takers(only) if m.info.name != avoid]
    if not takers:
        raise registry.why_not_ready()
    closed = [m for m in takers if m.breaker.state(now) == "closed"]
    probes = [m for m in takers if m.breaker.wants_probe(now) and not avoid]  # what is repeated takes no chances
    return (closed, probes) if closed else (takers, [])


async def score(
    registry: Registry, links: Mapping[str, EngineLink], request: pb.ScoreRequest, timeout: float
) -> pb.ScoreReply:
    """By the least busy engine; by another, if that one fails."""
    failed: SlipstreamError | None = None
    avoid = ""
    while True:
        try:
            takers, probes = admitted(registry, request.engine, avoid)
        except NotReady as nobody:
            raise failed or nobody from None
        member = probes[0] if probes else min(takers, key=lambda m: links[m.info.name].load)
        if probes:
            member.breaker.tried()
        try:
            answer = await links[member.info.name].ask(pb.ToEngine(score=request), timeout, "score")
            member.breaker.succeeded()
            return answer.scores
        except SlipstreamError as error:
            if blame(error) == "engine":
                member.breaker.faulted(time.monotonic(), str(error))
            if blame(error) == "client" or failed is not None:
                raise
            failed, avoid = error, member.info.name
        finally:
            if probes:
                member.breaker.unanswered()
