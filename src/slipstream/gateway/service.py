"""The gateway's gRPC methods: thin shells around the registry, dispatch, updates and rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError

from slipstream.config import MAX_BUFFERED_BYTES, MAX_REQUESTS
from slipstream.errors import (
    EngineDrained,
    EngineLost,
    JournalUnavailable,
    ProtocolMismatch,
    SlipstreamError,
    UpdateInProgress,
)
from slipstream.gateway import channels, convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.admission import Admission, Ticket
from slipstream.gateway.commit_canary import CommitCanary
from slipstream.gateway.control import control
from slipstream.gateway.dispatch import Dispatch, score
from slipstream.gateway.engine_stream import EngineLink
from slipstream.gateway.engine_watch import EngineWatch
from slipstream.gateway.journal import Journal
from slipstream.gateway.mapping_file import MappingFile
from slipstream.gateway.prefix_affinity import PrefixAffinity
from slipstream.gateway.registry import Registry
from slipstream.gateway.rollout_queue import RolloutQueue, RolloutRun, prompts_by_id
from slipstream.gateway.slipstream_pb2_grpc import GatewayServicer
from slipstream.gateway.trainer_group import MAX_STEP_SECONDS, TrainerGroup
from slipstream.gateway.transaction import FleetUpdate
from slipstream.gateway.update_history import UpdateHistory
from slipstream.observe.recorder.fleet_recorder import STATUS_SECONDS, FleetRecorder
from slipstream.types import FleetStatus

log = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 4
SCORE_SECONDS = 600.0
MAX_TRAINERS = 1 << 16
LEAVE_SECONDS = 10.0
"""How long a trainer's new stream waits for its old one to end."""
MAX_TAKE_SECONDS = 3600.0
MAX_ACTIVITY = 80
"""Characters kept of what an engine says it does."""


class Service(GatewayServicer):
    """All methods run on one event loop, so the registry and the links need no locks."""

    def __init__(
        self,
        lease_seconds: float,
        journal: Path | None = None,
        admission: Admission | None = None,
        mapping: MappingFile | None = None,
        recorder: FleetRecorder | None = None,
    ) -> None:
        """`journal` is the file of the rollout journal; without it the journal is kept in memory. Without a `recorder` nothing
        is recorded."""
        self._recorder = recorder or FleetRecorder()
        self.mapping = mapping or MappingFile()
        self.directory = journal.parent if journal is not None else None
        """The run directory, where further journals are kept; None keeps them in memory."""
        opened = Journal(journal)
        self._registry = Registry(lease_seconds, opened.quarantined(), opened.drained())
        self._admission = admission or Admission(MAX_REQUESTS, MAX_BUFFERED_BYTES, "the gateway")
        self._rollouts = RolloutRun(opened, self._generate)
        if opened.num_groups():
            # An earlier gateway died in the middle of a run: engines without its version are stale.
            self._registry.version = self._rollouts.version
            self._registry.burn(self._rollouts.last_begun)
        self._links: dict[str, EngineLink] = {}
        self._watch = EngineWatch(self._registry, self._links, self._on_decision, self._drop_results)
        self._canary = CommitCanary(self._registry, self._links, self._watch, self._rollouts.hold)
        self._trainers: TrainerGroup | None = None
        self._trainer_left = asyncio.Event()
        """Set whenever a trainer's stream ends."""
        self._affinity = PrefixAffinity()
        self._updates = UpdateHistory()
        self._num_completions = self._num_retried = 0
        self._started = time.monotonic()

    @property
    def position(self) -> int:
        """Position of the last group that the journal knows to be taken."""
        return self._rollouts.position

    async def write_mapping(self) -> None:
        await self.mapping.follow(lambda: [member.info for member in self._registry.alive()])

    async def record_status(self) -> None:
        """Record the state of the fleet once a second."""
        while self._recorder.is_on:
            await asyncio.sleep(STATUS_SECONDS)
            self._recorder.status(self._registry.statuses(time.monotonic()), self._registry.version)

    async def watch_leases(self) -> None:
        seconds = self._registry.lease_seconds / HEARTBEATS_PER_LEASE
        while True:
            due = time.monotonic() + seconds
            await asyncio.sleep(seconds)
            if time.monotonic() > due + seconds:
                continue  # this process was stopped or busy: heartbeats have arrived that were not read yet
            for name in self._registry.expire(time.monotonic()):
                self._lose(name, self._registry.get(name).lost)
            for name in self._registry.forget(time.monotonic()):
                self._links.pop(name, None)
            self._watch.start_probes()
            self._canary.start()

    # --- clients ---

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.FleetStatus:
        now = time.monotonic()
        engines = self._registry.statuses(now)
        version, uptime = self._registry.version, now - self._started
        decisions = self._watch.decisions(now)
        status = FleetStatus(
            version,
            uptime,
            self._num_completions,
            engines,
            self._num_retried,
            decisions,
            rollouts=self._rollouts.status(),
            updates=self._updates.recent(now),
            update_totals=self._updates.totals,
            decision_counts=self._watch.decision_counts,
        )
        return convert.status_to_pb(status)

    async def Fleet(self, request: pb.FleetRequest, context: grpc.aio.ServicerContext) -> pb.FleetReply:
        engines = [convert.engine_to_pb(m.info) for m in self._registry.alive()]
        registry = self._registry
        return pb.FleetReply(
            engines=engines, version=registry.version, epoch=registry.epoch, next_version=registry.next_version
        )

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.Results]:
        async with _TypedErrors(context), contextlib.aclosing(self.generate(request, context.peer())) as batches:
            async for results in batches:
                yield results

    async def generate(self, message: pb.GenerateRequest, caller: str) -> AsyncGenerator[pb.Results, None]:
        """Generate on the engine that the message names, or on any. Raises `Overloaded` if there is no room for them."""
        with self._admission.ticket(caller) as ticket:
            ticket.take(len(message.requests), message.ByteSize())
            async with contextlib.aclosing(self._generate(message, ticket)) as batches:
                async for results in batches:
                    yield results

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreReply:
        async with _TypedErrors(context):
            with self._admission.ticket(context.peer()) as ticket:
                ticket.take(len(request.sequences), request.ByteSize())
                return await score(self._registry, self._links, self._watch, request, SCORE_SECONDS)

    async def Control(self, request: pb.ControlRequest, context: grpc.aio.ServicerContext) -> pb.ControlReply:
        async with _TypedErrors(context):
            members = [self._registry.get(request.engine)] if request.engine else self._registry.alive()
            if not members:
                raise self._registry.not_ready()
            links = {member.info.name: self._links[member.info.name] for member in members}
            seconds, verb = request.timeout_seconds, request.control.WhichOneof("verb")
            if verb == "pause":  # before the answers: an engine that does not answer may have paused
                self._registry.set_paused(links, True)

            def on_done(names: Collection[str]) -> None:
                if verb == "resume":
                    self._registry.set_paused(names, False)

            timeout = seconds if 0 < seconds < MAX_STEP_SECONDS else MAX_STEP_SECONDS
            return await control(links, request.control, timeout, on_done)

    async def Quarantine(self, request: pb.QuarantineRequest, context: grpc.aio.ServicerContext) -> pb.QuarantineReply:
        async with _TypedErrors(context):
            since = request.since if request.HasField("since") else None
            self._watch.quarantine(request.engine, request.reason or "no reason given", since, needs_weights=True)
            return pb.QuarantineReply()

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainReply:
        async with _TypedErrors(context):
            name = request.engine
            if request.undo and self._registry.undrain(name):
                self._watch.decide("undrain", name, "an operator lets it take requests again")
            if not request.undo and self._registry.drain(name, request.force):
                self._watch.decide("drain", name, "an operator gives it no more requests")
                self._affinity.forget(name)
            if request.hand_back and not request.undo:
                self._links[name].interrupt(EngineDrained(f"engine {name!r} is drained and gave the request back"))
            return pb.DrainReply()

    async def Update(self, messages: AsyncIterator[pb.UpdateMessage], context: grpc.aio.ServicerContext) -> None:
        try:
            process = _trainer_process(context)
            group = await self._join(process, context.peer())
        except SlipstreamError as refused:
            # Reply to each message instead of ending the stream: a client that is writing to a stream that ends may get
            # gRPC's own error in place of our status (https://github.com/grpc/grpc/issues/36066).
            async for _ in messages:
                await context.write(pb.UpdateReply(error=convert.error_to_pb(refused)))
            return
        try:
            async with _TypedErrors(context):
                async for message in messages:
                    await context.write(await group.handle(process.index, message))
        finally:
            await asyncio.shield(self._leave(group, process.index))

    async def _leave(self, group: TrainerGroup, index: int) -> None:
        await group.leave(index)
        if group.is_empty and self._trainers is group:
            self._trainers = None
        self._trainer_left.set()

    async def _join(self, process: pb.TrainerProcess, peer: str) -> TrainerGroup:
        """Add a trainer process to the group. Its new stream may arrive before its old one has ended here; wait for that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                while self._trainers is not None and self._trainers.has(process):
                    self._trainer_left.clear()
                    await self._trainer_left.wait()
        if self._trainers is None:
            update = FleetUpdate(
                self._registry,
                self._links,
                self._rollouts.before_commit,
                self._on_commit,
                self._updates,
                self._recorder,
            )
            self._trainers = TrainerGroup(update, process.count, peer)
        if self._trainers.count != process.count or not self._trainers.join(process):
            raise UpdateInProgress(
                f"another trainer ({self._trainers.peer}, {self._trainers.count} process(es)) holds this fleet's updates; "
                "close it first"
            )
        return self._trainers

    # --- rollouts ---

    async def Submit(self, request: pb.SubmitRequest, context: grpc.aio.ServicerContext) -> pb.SubmitReply:
        async with _TypedErrors(context):
            queue = self._queue(request.bound)
            traces = {row.id: row.traceparent for row in request.prompts.requests if row.traceparent}
            prompts = prompts_by_id(convert.requests_from_pb(request.prompts))
            return pb.SubmitReply(num_new=queue.submit(prompts, traces))

    async def Take(self, request: pb.TakeRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.TakenGroup]:
        async with _TypedErrors(context):
            queue = self._queue(request.bound)
            timeout = min(request.timeout_seconds, MAX_TAKE_SECONDS)
            groups = await queue.take(
                request.after, request.count, timeout, request.saved, request.version, request.more
            )
            for packed in channels.packed(map(convert.taken_to_pb, groups)):
                yield packed

    def _queue(self, message: pb.RolloutBound) -> RolloutQueue:
        bound = convert.bound_from_pb(message)
        if self._registry.version < 0:
            raise self._registry.not_ready()
        return self._rollouts.queue(bound, self._registry.version)

    async def _generate(
        self, message: pb.GenerateRequest, ticket: Ticket | None = None
    ) -> AsyncGenerator[pb.Results, None]:
        dispatch = Dispatch(
            self._registry, self._links, self._watch, message.engine, self._affinity, ticket, self._recorder
        )
        try:
            async with contextlib.aclosing(dispatch.run(message)) as batches:
                async for results in batches:
                    self._num_completions += len(results.completions)
                    yield results
        finally:
            self._num_retried += dispatch.num_retried

    async def close(self) -> None:
        await self._canary.close()
        await self._watch.close()
        await self._rollouts.close()
        self._recorder.close()

    def _on_decision(self, kind: str, engine: str, reason: str, version: int) -> None:
        self._recorder.event(kind, engine, reason, version)
        self._rollouts.on_decision(kind, engine, reason, version)

    def _on_commit(self, version: int) -> None:
        self._rollouts.on_commit(version)
        self._watch.start_probes()
        self._canary.start()

    def _drop_results(self, engine: str, since: int, reason: str) -> None:
        """An engine is not trusted any more."""
        self._affinity.forget(engine)
        self._rollouts.drop(engine, since, reason)

    # --- engines ---

    async def Attach(self, messages: AsyncIterator[pb.FromEngine], context: grpc.aio.ServicerContext) -> None:
        async with _TypedErrors(context):
            first = await anext(messages, None)
            if first is None or not first.HasField("register"):
                raise ProtocolMismatch("an engine's first message must register it")
            info = convert.engine_from_pb(first.register)
            version = self._registry.version
            self._registry.register(info, time.monotonic())
            if info.name in self._links:
                self._links[info.name].lose("it registered again")
            link = self._links[info.name] = EngineLink(info.name, self._recorder)
            self._recorder.joined(info)
            if 0 <= version < self._registry.version:  # it committed a version that a killed gateway did not record
                self._on_commit(self._registry.version)
            self.mapping.on_register()
            log.info("engine %s registered: %s, %s, pid %d", info.name, info.model, info.weights, info.pid)
            seconds = self._registry.lease_seconds / HEARTBEATS_PER_LEASE
            welcome = pb.Registered(heartbeat_seconds=seconds, fleet_version=self._registry.version)
            link.outgoing.put_nowait(pb.ToEngine(registered=welcome))
            writer = asyncio.create_task(_write(link, context))
            try:
                async for message in messages:
                    member = self._registry.get(info.name)
                    if member.lost:
                        raise EngineLost(
                            f"engine {info.name!r} was declared lost: {member.lost}; it may register again"
                        )
                    member.last_heard = time.monotonic()
                    for part in channels.unpacked(message):
                        if part.HasField("memory"):
                            self._registry.set_asleep(info.name, convert.memory_from_pb(part.memory).asleep)
                        elif part.HasField("heartbeat"):
                            member.looked_up_tokens = part.heartbeat.looked_up_tokens
                            member.hit_tokens = part.heartbeat.hit_tokens
                            member.kv_use = part.heartbeat.kv_use
                            member.activity = part.heartbeat.activity[:MAX_ACTIVITY]
                            member.adapters = tuple(part.heartbeat.adapters[:])
                            self._note_version(info.name, part.heartbeat.version)
                        link.deliver(part)
            finally:
                writer.cancel()
                if self._links.get(info.name) is link:
                    self._lose(info.name, "its connection broke")

    def _note_version(self, name: str, version: int) -> None:
        """Note the version that an engine says it serves. It may have committed one and failed before it could report that."""
        known, fleet_version = self._registry.get(name).info.version, self._registry.version
        if version < 0:
            self._registry.set_empty(name)
        elif version > known and version >= fleet_version and not self._registry.is_committing:
            log.warning("engine %s serves version %d, whose commit it did not report", name, version)
            self._registry.commit(version, [name])
            self._recorder.committed(version, name)
            if version > fleet_version:
                self._on_commit(version)

    def _lose(self, name: str, reason: str) -> None:
        log.warning("engine %s lost: %s", name, reason)
        self._recorder.event("lost", name, reason, self._registry.version)
        self._registry.lose(name, reason)
        self._links[name].lose(reason)
        self._affinity.forget(name)


def _trainer_process(context: grpc.aio.ServicerContext) -> pb.TrainerProcess:
    """Read which trainer process opened the stream; without metadata it is the only one."""
    data = next((v for k, v in context.invocation_metadata() or () if k == channels.TRAINER_PROCESS), None)
    if data is None:
        return pb.TrainerProcess(index=0, count=1)
    try:
        process = pb.TrainerProcess.FromString(data)
    except DecodeError:
        raise ProtocolMismatch(f"{channels.TRAINER_PROCESS} is not a TrainerProcess message") from None
    if not process.index < process.count <= MAX_TRAINERS:
        raise ProtocolMismatch(
            f"a trainer must have process_index < process_count <= {MAX_TRAINERS}, got {process.index} and {process.count}"
        )
    return process


async def _write(link: EngineLink, context: grpc.aio.ServicerContext) -> None:
    async for message in channels.drain(link.outgoing):
        await context.write(message)


class _TypedErrors:
    """Ends the call with the class and text of a Slipstream error. Any other exception is a bug and becomes INTERNAL."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, SlipstreamError):
            error = JournalUnavailable(f"the gateway cannot write to its disk: {error.strerror}; is it full?")
        if isinstance(error, SlipstreamError):
            await self._context.abort(*channels.status_of(error))
