"""The gateway's gRPC methods: thin shells around the registry, dispatch and updates."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from pathlib import Path

import grpc

from slipstream.errors import EngineLost, ProtocolMismatch, SlipstreamError, UpdateInProgress
from slipstream.gateway import convert, wire
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.affinity import Affinity
from slipstream.gateway.attach import EngineLink
from slipstream.gateway.dispatch import Dispatch, score
from slipstream.gateway.fanout import control
from slipstream.gateway.journal import Journal
from slipstream.gateway.registry import Registry
from slipstream.gateway.rollouts import Desk, Rollouts, by_id
from slipstream.gateway.slipstream_pb2_grpc import GatewayServicer
from slipstream.gateway.trainers import MAX_STEP_SECONDS, TrainerGroup
from slipstream.gateway.updates import FleetUpdate
from slipstream.types import FleetStatus

log = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 4
SCORE_SECONDS = 600.0
MAX_TRAINERS = 1 << 16
LEAVE_SECONDS = 10.0
"""How long a trainer's new stream waits for the end of its old one."""
MAX_TAKE_SECONDS = 3600.0


class Service(GatewayServicer):
    """All methods run on one event loop, so the registry and the links need no locks."""

    def __init__(self, lease_seconds: float, journal: Path | None = None) -> None:
        """`journal` is the file that rollouts are written down in; without one they live as long as the gateway."""
        self._registry = Registry(lease_seconds)
        written = Journal(journal)
        self._desk = Desk(written, self._send)
        if written.num_groups():
            # A gateway before us died in the midst of a run: what engines hold is judged by what it committed.
            self._registry.version = self._desk.version
        self._links: dict[str, EngineLink] = {}
        self._trainers: TrainerGroup | None = None
        self._left = asyncio.Event()
        """Set whenever a trainer's stream has ended."""
        self._affinity = Affinity()
        self._num_completions = self._num_retried = 0
        self._started = time.monotonic()

    async def watch_leases(self) -> None:
        while True:
            await asyncio.sleep(self._registry.lease_seconds / HEARTBEATS_PER_LEASE)
            for name in self._registry.expire(time.monotonic()):
                self._lose(name, f"no heartbeat for {self._registry.lease_seconds:g} s")
            for name in self._registry.forget(time.monotonic()):
                self._links.pop(name, None)

    # --- clients ---

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.FleetStatus:
        now = time.monotonic()
        engines = self._registry.statuses(now)
        version, uptime = self._registry.version, now - self._started
        status = FleetStatus(version, uptime, self._num_completions, engines, self._num_retried)
        return convert.status_to_pb(status)

    async def Fleet(self, request: pb.FleetRequest, context: grpc.aio.ServicerContext) -> pb.FleetReply:
        engines = [convert.engine_to_pb(m.info) for m in self._registry.alive()]
        return pb.FleetReply(engines=engines, version=self._registry.version, epoch=self._registry.epoch)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.Results]:
        async with _typed_errors(context), contextlib.aclosing(self._send(request)) as batches:
            async for results in batches:
                yield results

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreReply:
        async with _typed_errors(context):
            return await score(self._registry, self._links, request, SCORE_SECONDS)
        raise AssertionError("aborted above")

    async def Control(self, request: pb.ControlRequest, context: grpc.aio.ServicerContext) -> pb.ControlReply:
        async with _typed_errors(context):
            names = [request.engine] if request.engine else [m.info.name for m in self._registry.alive()]
            if not names:
                raise self._registry.why_not_ready()
            links = {name: self._links[self._registry.get(name).info.name] for name in names}
            seconds, verb = request.timeout_seconds, request.control.WhichOneof("verb")
            if verb == "pause":  # also those that do not answer: who knows whether they have
                self._note_pause(names, True)

            def done(names: Collection[str]) -> None:
                if verb == "resume":
                    self._note_pause(names, False)

            timeout = seconds if 0 < seconds < MAX_STEP_SECONDS else MAX_STEP_SECONDS
            return await control(links, request.control, timeout, done)
        raise AssertionError("aborted above")

    def _note_pause(self, names: Collection[str], is_paused: bool) -> None:
        for name in names:
            self._registry.paused(name, is_paused)

    async def Update(self, steps: AsyncIterator[pb.UpdateStep], context: grpc.aio.ServicerContext) -> None:
        try:
            rank, world, who = _trainer_of(context)
            group = await self._join(rank, world, who, context.peer())
        except SlipstreamError as refused:
            # In answer to its steps, and not by ending the stream: a client that is just writing to one that ends may
            # find gRPC's own error where our status was (https://github.com/grpc/grpc/issues/36066).
            async for _ in steps:
                await context.write(pb.UpdateReply(error=convert.error_to_pb(refused)))
            return
        try:
            async with _typed_errors(context):
                async for step in steps:
                    await context.write(await group.step(rank, step))
        finally:
            await asyncio.shield(self._leave(group, rank))

    async def _leave(self, group: TrainerGroup, rank: int) -> None:
        await group.leave(rank)
        if group.is_empty and self._trainers is group:
            self._trainers = None
        self._left.set()

    async def _join(self, rank: int, world: int, who: str, peer: str) -> TrainerGroup:
        """Of one trainer, a new stream may come before the end of its old one is known here: that is waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                while self._trainers is not None and self._trainers.has(rank, who):
                    self._left.clear()
                    await self._left.wait()
        if self._trainers is None:
            self._trainers = TrainerGroup(FleetUpdate(self._registry, self._links, self._desk.synced), world, peer)
        if self._trainers.world != world or not self._trainers.join(rank, who):
            raise UpdateInProgress(
                f"another trainer ({self._trainers.peer}, {self._trainers.world} process(es)) holds this fleet's updates; "
                "close it first"
            )
        return self._trainers

    # --- rollouts ---

    async def Submit(self, request: pb.SubmitRequest, context: grpc.aio.ServicerContext) -> pb.SubmitReply:
        async with _typed_errors(context):
            rollouts = self._run(request.bound)
            prompts = convert.requests_from_pb(request.prompts)
            rows = [(r.id, convert.request_bytes(r), r.sampling.n) for r in prompts]
            return pb.SubmitReply(num_new=rollouts.submit(by_id(rows)))
        raise AssertionError("aborted above")

    async def Take(self, request: pb.TakeRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.TakenGroup]:
        async with _typed_errors(context):
            rollouts = self._run(request.bound)
            timeout = min(request.timeout_seconds, MAX_TAKE_SECONDS)
            taken = await rollouts.take(
                request.after, request.count, timeout, request.saved, request.version, request.more
            )
            for groups in wire.packed(map(convert.taken_to_pb, taken)):
                yield groups

    def _run(self, bound: pb.RolloutBound) -> Rollouts:
        wanted = convert.bound_from_pb(bound)
        if self._registry.version < 0:
            raise self._registry.why_not_ready()
        return self._desk.rollouts(wanted, self._registry.version)

    async def _send(self, message: pb.GenerateRequest) -> AsyncGenerator[pb.Results, None]:
        """To the engine that it names, or to whichever there are."""
        dispatch = Dispatch(self._registry, self._links, message.engine, self._affinity)
        try:
            async with contextlib.aclosing(dispatch.run(message)) as batches:
                async for results in batches:
                    self._num_completions += len(results.completions)
                    yield results
        finally:
            self._num_retried += dispatch.num_retried

    async def close(self) -> None:
        await self._desk.close()

    # --- engines ---

    async def Attach(self, messages: AsyncIterator[pb.FromEngine], context: grpc.aio.ServicerContext) -> None:
        async with _typed_errors(context):
            first = await anext(messages, None)
            if first is None or not first.HasField("register"):
                raise ProtocolMismatch("an engine's first message must register it")
            info = convert.engine_from_pb(first.register)
            self._registry.register(info, time.monotonic())
            if info.name in self._links:
                self._links[info.name].lose("it has registered anew")
            link = self._links[info.name] = EngineLink(info.name)
            log.info("engine %s registered: %s, version %d, pid %d", info.name, info.model, info.version, info.pid)
            seconds = self._registry.lease_seconds / HEARTBEATS_PER_LEASE
            welcome = pb.Registered(heartbeat_seconds=seconds, fleet_version=self._registry.version)
            link.outgoing.put_nowait(pb.ToEngine(registered=welcome))
            writer = asyncio.create_task(_write(link, context))
            try:
                async for message in messages:
                    if why := self._registry.get(info.name).lost:
                        raise EngineLost(f"engine {info.name!r} was given up: {why}; it may register again")
                    self._registry.heard(info.name, time.monotonic())
                    for part in wire.apart(message):
                        if part.HasField("memory"):
                            self._registry.slept(info.name, convert.memory_from_pb(part.memory).asleep)
                        elif part.HasField("heartbeat"):
                            self._beat(info.name, part.heartbeat)
                        link.deliver(part)
            finally:
                writer.cancel()
                if self._links.get(info.name) is link:
                    self._lose(info.name, "its connection broke")

    def _beat(self, name: str, beat: pb.Heartbeat) -> None:
        self._registry.counted(name, beat.looked_up_tokens, beat.hit_tokens)
        if beat.version < 0:
            self._registry.emptied(name)

    def _lose(self, name: str, why: str) -> None:
        log.warning("engine %s lost: %s", name, why)
        self._registry.lose(name, why)
        self._links[name].lose(why)
        self._affinity.forget(name)


def _trainer_of(context: grpc.aio.ServicerContext) -> tuple[int, int, str]:
    """`(rank, world, who)` of the trainer's process; 0 of 1 unless it says otherwise. `who` is the same for all its streams."""
    text = next((v for k, v in context.invocation_metadata() or () if k == wire.TRAINER), "0/1")
    rank, world, who = [*str(text).split("/", 2), "", ""][:3]
    if not (rank.isdigit() and world.isdigit() and int(rank) < int(world) <= MAX_TRAINERS):
        raise ProtocolMismatch(f"a trainer calls itself {text!r}; expected its rank and the number of ranks, like 0/1")
    return int(rank), int(world), who


async def _write(link: EngineLink, context: grpc.aio.ServicerContext) -> None:
    async for message in wire.together(link.outgoing):
        await context.write(message)


@contextlib.asynccontextmanager
async def _typed_errors(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """A Slipstream error ends the call with its class and text; anything else is a bug and becomes INTERNAL."""
    try:
        yield
    except SlipstreamError as error:
        await context.abort(*wire.status_of(error))
