"""Sends requests to engines and returns results, each sample exactly once.

Unanswered samples of an engine that dies go to another engine, but not to a third: the request may be what kills engines. A
request that an engine fails, or cannot serve at the moment, is tried on one other engine; a bad request is not repeated. Seeds
travel with requests, so a repeated sample is the same sample, and duplicates are dropped. Prompts and completions pass through
serialized: the gateway is one process for all trainers and engines and does not unpack them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from slipstream.errors import EngineDrained, EngineLost, EngineQuarantined, NotReady, SlipstreamError, SuspectRequest
from slipstream.gateway import convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.admission import Ticket
from slipstream.gateway.circuit_breaker import CircuitBreaker, blame
from slipstream.gateway.engine_stream import MAX_SERVED_TOKENS, EngineLink
from slipstream.gateway.engine_watch import EngineWatch
from slipstream.gateway.prefix_affinity import Prefix, PrefixAffinity, prefixes
from slipstream.gateway.registry import Member, Registry
from slipstream.gateway.router import route, weight
from slipstream.gateway.speed import PROMPT_SHARE
from slipstream.observe.recorder.fleet_recorder import FleetRecorder
from slipstream.types import Failure

MAX_LOSSES = 2
"""A request that this many engines served when they were lost fails with `SuspectRequest`."""
MAX_TRIES = 2
"""Engines that a request is sent to while they fail without dying."""


@dataclass
class EngineBatch:
    """The requests sent to one engine in one message."""

    engine: str
    ids: Sequence[str]
    is_probe: bool = False
    """It tests an engine whose circuit breaker is half-open."""
    has_completed: bool = False
    """The engine has answered at least one sample."""
    fault: str = ""
    """The last failure of a request that is the engine's fault."""
    sent_at: float = 0.0
    num_stops: int = 0
    """`Member.num_stops` when it was sent."""


class Dispatch:
    """One `Generate` call: its requests, the engines that run them, and the samples still missing."""

    def __init__(
        self,
        registry: Registry,
        links: Mapping[str, EngineLink],
        watch: EngineWatch,
        only: str = "",
        affinity: PrefixAffinity | None = None,
        ticket: Ticket | None = None,
        recorder: FleetRecorder | None = None,
    ) -> None:
        """`only` restricts the call to one engine. `ticket` bounds the results that wait for the caller to read them."""
        self._registry, self._links, self._only, self._affinity = registry, links, only, affinity or PrefixAffinity()
        self._watch, self._ticket, self._recorder = watch, ticket, recorder or FleetRecorder()
        self.num_retried = 0
        """Requests that were sent to a second engine."""
        self._requests: dict[str, pb.Request] = {}
        self._sampling: Sequence[pb.Sampling] = ()
        self._weights: dict[str, int] = {}
        self._prefixes: dict[str, tuple[Prefix, ...]] = {}
        self._missing: dict[str, set[int]] = {}
        """By request: the samples that have not been delivered."""
        self._attempts: Counter[str] = Counter()
        self._lost_engines: dict[str, list[str]] = {}
        """By request: the engines that served it when they were lost."""
        self._batch_of: dict[str, EngineBatch] = {}
        """By request: the batch that it was sent in last."""
        self._events: asyncio.Queue[tuple[EngineBatch, pb.Results | SlipstreamError | None]] = asyncio.Queue()
        """What a batch's engine sent; last the error that ended the batch, or None."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, message: pb.GenerateRequest) -> AsyncGenerator[pb.Results, None]:
        """Yield results until every sample is delivered or failed. Raises `NotReady` if no engine can take the requests; later
        failures are `Failure`s among the results."""
        samplings = convert.samplings_from_pb(message)
        self._requests, self._sampling = {request.id: request for request in message.requests}, message.sampling
        self._weights = {id: weight(sampling) for id, sampling in zip(self._requests, samplings)}
        self._missing = {id: set(range(sampling.n)) for id, sampling in zip(self._requests, samplings)}
        try:
            self._send(self._weights)
            while self._missing:
                batch, event = await self._events.get()
                if not isinstance(event, pb.Results):
                    results = self._on_ended(batch, event)
                elif (trust := self._registry.get(batch.engine).quarantine).reason and not trust.is_slow:
                    results = pb.Results()  # it arrived before the engine was found to be wrong
                else:
                    results = self._on_results(batch, event)
                if new := self._without_duplicates(results):
                    yield new
                if self._ticket is not None and isinstance(event, pb.Results):
                    self._ticket.give_back(num_bytes=event.ByteSize())
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, weights: Mapping[str, int], avoid: str = "") -> None:
        """Send requests to the engines that can take them, except `avoid`. Raises `NotReady` if there are none."""
        members, probes = admitted(self._registry, self._only, avoid)
        remaining = dict(weights)
        for member in probes[: len(remaining)]:
            self._start(EngineBatch(member.info.name, [remaining.popitem()[0]], is_probe=True))
        loads = {m.info.name: self._links[m.info.name].load for m in members}
        shares = self._registry.shares(time.monotonic())
        if len(loads) > 1:
            self._affinity.set_version(self._registry.version)
            for id in remaining.keys() - self._prefixes.keys():
                self._prefixes[id] = prefixes(convert.prompt_start(self._requests[id]), self._requests[id].adapter)
        for name, ids in route(remaining, loads, self._prefixes, self._affinity, shares).items():
            self._start(EngineBatch(name, ids))

    def _start(self, batch: EngineBatch) -> None:
        self._attempts.update(batch.ids)
        self._batch_of.update(dict.fromkeys(batch.ids, batch))
        link, member = self._links[batch.engine], self._registry.get(batch.engine)
        batch.sent_at, batch.num_stops = time.monotonic(), member.num_stops
        if batch.is_probe:
            member.breaker.probe_sent()
        load = sum(self._weights[id] for id in batch.ids)
        # Counted before the task starts, for requests routed in the same turn of the event loop.
        link.load += load
        member.num_requests += len(batch.ids)
        self._recorder.started(batch.engine, len(batch.ids))

        def done(task: asyncio.Task[None]) -> None:
            self._recorder.ended(batch.engine, len(batch.ids))
            link.load -= load
            member.num_requests -= len(batch.ids)
            self._tasks.discard(task)

        task = asyncio.create_task(self._run_batch(batch, link, member))
        self._tasks.add(task)
        task.add_done_callback(done)

    async def _run_batch(self, batch: EngineBatch, link: EngineLink, member: Member) -> None:
        message = pb.GenerateRequest(sampling=self._sampling, requests=[self._requests[id] for id in batch.ids])
        ended_by: SlipstreamError | None = None
        try:
            async with contextlib.aclosing(link.results(message)) as batches:
                async for results in batches:
                    await self._watch.inspect(batch.engine, results, self._sampling_of)
                    self._judge(batch, results, member.breaker)
                    self._measure(batch, results, member)
                    member.num_tokens += sum(len(row.token_ids) for row in results.completions)
                    if results.completions:
                        link.last_prompt = results.completions[-1].prompt_token_ids[:MAX_SERVED_TOKENS]
                    if self._ticket is not None:
                        self._ticket.take(num_bytes=results.ByteSize())
                    self._events.put_nowait((batch, results))
        except SlipstreamError as error:
            ended_by = error
            if blame(error) == "engine":
                batch.fault, batch.has_completed = str(error), False
        finally:
            if batch.is_probe:
                member.breaker.probe_ended()
            if batch.fault and not batch.has_completed:  # also when cancelled because other engines answered first
                member.breaker.faulted(time.monotonic(), batch.fault)
        self._events.put_nowait((batch, ended_by))

    def _sampling_of(self, id: str) -> pb.Sampling | None:
        return self._sampling[self._requests[id].sampling] if id in self._requests else None

    def _measure(self, batch: EngineBatch, results: pb.Results, member: Member) -> None:
        """Note how fast the engine answered, unless it was stopped meanwhile."""
        rows, now = results.completions, time.monotonic()
        self._recorder.tokens(batch.engine, sum(len(row.token_ids) for row in rows))
        if rows and member.num_stops == batch.num_stops and not (member.is_paused or member.asleep):
            work = sum(len(row.token_ids) + PROMPT_SHARE * len(row.prompt_token_ids) for row in rows)
            self._watch.measure(batch.engine, now, work, len(rows) * (now - batch.sent_at), len(rows))

    def _judge(self, batch: EngineBatch, results: pb.Results, breaker: CircuitBreaker) -> None:
        """Update the engine's circuit breaker with its results."""
        if results.completions and not batch.has_completed:
            batch.has_completed = True
            breaker.succeeded()
        for failure in results.failures:
            if blame(error := convert.error_from_pb(failure.error)) == "engine":
                batch.fault = str(error)

    def _on_results(self, batch: EngineBatch, results: pb.Results) -> pb.Results:
        """Return results without the failures that are retried on another engine."""
        if not results.failures:
            return results
        failed = {f.request_id: convert.error_from_pb(f.error) for f in results.failures}
        final = convert.results_to_pb(self._retry(batch, failed))
        return pb.Results(completions=results.completions, failures=final.failures, progress=results.progress)

    def _on_ended(self, batch: EngineBatch, ended_by: SlipstreamError | None) -> pb.Results:
        """Retry a batch's unanswered requests on other engines; return failures for those that cannot be."""
        error = ended_by or EngineLost(f"engine {batch.engine!r} ended the call without answering every request")
        failed = {id: error for id in batch.ids if id in self._missing and self._batch_of[id] is batch}
        return convert.results_to_pb(self._retry(batch, failed))

    def _retry(self, batch: EngineBatch, failed: Mapping[str, SlipstreamError]) -> list[Failure]:
        """Send failed requests to other engines if they may be repeated; return the failures of those that were not sent."""
        for id, error in failed.items():
            if isinstance(error, EngineLost):
                self._lost_engines.setdefault(id, []).append(batch.engine)
        retried = {id: self._weights[id] for id, e in failed.items() if id in self._missing and self._may_retry(id, e)}
        try:
            if retried:
                self._send(retried, avoid=batch.engine)
        except NotReady:
            retried = {}
        self.num_retried += len(retried)
        if retried:
            reason = next(iter(failed.values()))
            self._recorder.event("retry", batch.engine, f"{len(retried)} request(s) sent to others: {reason}")
        return [Failure(id, self._final_error(id, error)) for id, error in failed.items() if id not in retried]

    def _may_retry(self, id: str, error: SlipstreamError) -> bool:
        if isinstance(error, EngineLost):
            return len(self._lost_engines[id]) < MAX_LOSSES
        if isinstance(error, (EngineQuarantined, EngineDrained)):
            return True  # it ends when no engine is left
        return blame(error) != "client" and self._attempts[id] < MAX_TRIES

    def _final_error(self, id: str, error: SlipstreamError) -> SlipstreamError:
        lost = self._lost_engines.get(id, ())
        if len(lost) < MAX_LOSSES:
            return error
        return SuspectRequest(
            f"engines {' and '.join(map(repr, lost))} were lost while they served this request, which may be the reason, so it "
            f"is not given to another one. If they were lost for another reason, send it again. Last: {error}"
        )

    def _without_duplicates(self, results: pb.Results) -> pb.Results | None:
        """Return the results that were not delivered before, and mark them as delivered. A failure ends its request."""
        completions = [c for c in results.completions if self._deliver(c)]
        failures = [f for f in results.failures if self._missing.pop(f.request_id, None)]
        progress = [p for p in results.progress if p.sample_index in self._missing.get(p.request_id, ())]
        num_new = len(completions) + len(failures) + len(progress)
        if not num_new:
            return None
        if num_new == len(results.completions) + len(results.failures) + len(results.progress):
            return results  # nothing is copied
        return pb.Results(completions=completions, failures=failures, progress=progress)

    def _deliver(self, completion: pb.Completion) -> bool:
        """Mark a sample as delivered. Return False if it already was."""
        missing = self._missing.get(completion.request_id, set())
        if completion.sample_index not in missing:
            return False
        missing.discard(completion.sample_index)
        if not missing:
            del self._missing[completion.request_id]
        return True


def admitted(registry: Registry, only: str = "", avoid: str = "") -> tuple[list[Member], list[Member]]:
    """Return the engines that may be sent anything, and those to probe with one request.

    If every circuit is open, requests go to all engines as if none were: an engine's own error says more than `NotReady`."""
    now = time.monotonic()
    available = [m for m in registry.available(only) if m.info.name != avoid]
    if not available:
        raise registry.not_ready()
    closed = [m for m in available if m.breaker.state(now) == "closed"]
    probes = [m for m in available if m.breaker.wants_probe(now) and not avoid]  # a retry is no probe
    return (closed, probes) if closed else (available, [])


async def score(
    registry: Registry,
    links: Mapping[str, EngineLink],
    watch: EngineWatch,
    request: pb.ScoreRequest,
    timeout: float,
) -> pb.ScoreReply:
    """Score on the least busy engine, and on one other engine if that fails."""
    failed: SlipstreamError | None = None
    avoid = ""
    while True:
        try:
            members, probes = admitted(registry, request.engine, avoid)
        except NotReady as not_ready:
            raise failed or not_ready from None
        member = probes[0] if probes else min(members, key=lambda m: links[m.info.name].load)
        if probes:
            member.breaker.probe_sent()
        try:
            answer = await links[member.info.name].ask(pb.ToEngine(score=request), timeout, "score")
            watch.inspect_scores(member.info.name, answer.scores)
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
                member.breaker.probe_ended()
