"""A trainer's connection to a gateway; implements `bridge.fleet.Fleet`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

import grpc

from slipstream.errors import (
    BridgeClosed,
    DeadlineExceeded,
    GatewayLost,
    Overloaded,
    ProtocolMismatch,
    SlipstreamError,
)
from slipstream.gateway import channels, convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.slipstream_pb2_grpc import GatewayStub
from slipstream.gateway.staleness import RolloutBound
from slipstream.runtime import tracing
from slipstream.runtime.tls import ANONYMOUS, Identity
from slipstream.types import (
    Checksums,
    Completion,
    EngineInfo,
    Failure,
    FleetMembers,
    FleetStatus,
    MemoryReport,
    MemoryTag,
    Progress,
    Request,
    RolloutGroup,
    Score,
    UpdateReports,
    UpdateSteps,
)

CONTROL_SECONDS = 10.0
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.1, 5.0
"""Time between two attempts while the gateway is overloaded: the first, which doubles, and the longest."""
GRACE_SECONDS = 5.0
"""The gateway enforces a step's deadline and names the engine that missed it; the client waits this much longer."""


class GatewayFleet:
    """The engines behind a gateway. All methods run on the event loop that created it."""

    is_elastic = True

    def __init__(
        self,
        address: str,
        token: channels.Token,
        timeout: float,
        max_message_bytes: int,
        process_index: int = 0,
        process_count: int = 1,
        ca: str = "",
        identity: Identity = ANONYMOUS,
    ) -> None:
        """`process_index` and `process_count` identify this process among the trainer's. `ca` is the PEM file of the CA that
        signed the gateway's certificate; without it the client uses no TLS and connects to loopback only. `identity` is what
        this side shows to a gateway with `mutual_tls`."""
        self.address, self._timeout, self._ca, self._identity = address, timeout, ca, identity
        self._token, self._is_closed = token, False
        channels.metadata(token)  # raises if it cannot be a token
        process = pb.TrainerProcess(index=process_index, count=process_count, id=secrets.token_hex(8))
        self._process = (channels.TRAINER_PROCESS, process.SerializeToString())
        self._channel = channels.channel(address, ca, max_message_bytes, identity)
        self._stub = GatewayStub(self._channel)
        self._engines: tuple[EngineInfo, ...] | None = None
        self._epoch = 0
        self._updates: grpc.aio.StreamStreamCall | None = None

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return channels.metadata(self._token)

    async def status(self) -> FleetStatus:
        with self._errors("asking for the status"):
            reply = await self._stub.Status(pb.StatusRequest(), timeout=CONTROL_SECONDS, metadata=self._metadata)
        return convert.status_from_pb(reply)

    async def refresh(self) -> FleetMembers:
        try:
            with self._errors("asking for the fleet"):
                reply = await self._stub.Fleet(pb.FleetRequest(), timeout=CONTROL_SECONDS, metadata=self._metadata)
        except GatewayLost as lost:
            raise await channels.explained(lost, self.address, self._ca, self._identity) from None
        self._engines, self._epoch = tuple(convert.engine_from_pb(e) for e in reply.engines), reply.epoch
        return FleetMembers(self._engines, reply.version, reply.next_version)

    async def generate(
        self, requests: Sequence[Request], engine: str = ""
    ) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        """A gateway that has no room for the requests is asked again, for as long as any other call may take."""
        message, clock = convert.requests_to_pb(tracing.traced(requests), engine), asyncio.get_running_loop().time
        deadline, delay, has_begun = clock() + self._timeout, FIRST_RETRY_SECONDS, False
        while True:
            try:
                with self._errors("generating"):
                    call = self._stub.Generate(message, metadata=self._metadata)
                    try:
                        async for results in call:
                            has_begun = True
                            yield [*convert.progress_from_pb(results), *convert.results_from_pb(results)]
                        return
                    finally:
                        call.cancel()
            except Overloaded:
                if has_begun or clock() + delay > deadline:
                    raise
            await asyncio.sleep(delay * random.uniform(0.5, 1))
            delay = min(2 * delay, LAST_RETRY_SECONDS)

    async def score(
        self, sequences: Sequence[Sequence[int]], engine: str = "", top_k: int = 0, adapter: str = ""
    ) -> list[Score]:
        with self._errors("scoring"):
            message = convert.sequences_to_pb(sequences, engine, top_k, adapter)
            return convert.scores_from_pb(
                await self._stub.Score(message, timeout=self._timeout, metadata=self._metadata)
            )

    # --- rollout queue ---

    async def submit(self, bound: RolloutBound, requests: Sequence[Request]) -> int:
        message = pb.SubmitRequest(bound=convert.bound_to_pb(bound), prompts=convert.requests_to_pb(requests))
        with self._errors("submitting prompts"):
            reply = await self._stub.Submit(message, timeout=self._timeout, metadata=self._metadata)
        return int(reply.num_new)

    async def take(
        self,
        bound: RolloutBound,
        after: int,
        count: int,
        timeout: float,
        saved: int = 0,
        version: int = 0,
        more: bool = False,
    ) -> list[RolloutGroup]:
        request = pb.TakeRequest(
            bound=convert.bound_to_pb(bound),
            after=after,
            count=count,
            timeout_seconds=timeout,
            saved=saved,
            version=version,
            more=more,
        )
        with self._errors("taking rollouts"):
            call = self._stub.Take(request, timeout=timeout + GRACE_SECONDS, metadata=self._metadata)
            return [convert.group_from_pb(group) async for groups in call for group in channels.unpacked(groups)]

    # --- pause and sleep ---

    async def pause(self, engine: str = "") -> None:
        await self._control(pb.Control(pause=pb.Pause()), engine)

    async def resume(self, engine: str = "") -> None:
        await self._control(pb.Control(resume=pb.Resume()), engine)

    async def sleep(self, level: int = 1, engine: str = "") -> dict[str, MemoryReport]:
        return await self._control(pb.Control(sleep=pb.Sleep(level=level)), engine)

    async def wake(self, tags: Sequence[MemoryTag] | None = None, engine: str = "") -> dict[str, MemoryReport]:
        if tags is not None and not tags:  # an empty list in the message means all tags
            return await self.memory(engine)
        return await self._control(pb.Control(wake=pb.Wake(tags=tags or ())), engine)

    async def reset_prefix_cache(self, engine: str = "") -> None:
        await self._control(pb.Control(reset_prefix_cache=pb.ResetPrefixCache()), engine)

    async def unload_adapter(self, name: str) -> None:
        await self._control(pb.Control(unload_adapter=pb.UnloadAdapter(name=name)), "")

    async def memory(self, engine: str = "") -> dict[str, MemoryReport]:
        return await self._control(pb.Control(memory=pb.Memory()), engine)

    async def quarantine(self, engine: str, reason: str, since: int | None = None) -> None:
        request = pb.QuarantineRequest(engine=engine, reason=reason, since=since)
        with self._errors(f"quarantining engine {engine!r}"):
            await self._stub.Quarantine(request, timeout=CONTROL_SECONDS, metadata=self._metadata)

    async def drain(self, engine: str, *, undo: bool = False, hand_back: bool = False, force: bool = False) -> None:
        request = pb.DrainRequest(engine=engine, undo=undo, hand_back=hand_back, force=force)
        with self._errors("draining an engine"):
            await self._stub.Drain(request, timeout=CONTROL_SECONDS, metadata=self._metadata)

    async def checksums(self, engine: str = "") -> dict[str, Checksums]:
        reply = await self._ask(pb.Control(verify=pb.Verify()), engine)
        return {name: convert.checksums_from_pb(checksums) for name, checksums in reply.checksums.items()}

    async def _control(self, control: pb.Control, engine: str) -> dict[str, MemoryReport]:
        reply = await self._ask(control, engine)
        return {name: convert.memory_from_pb(report) for name, report in reply.engines.items()}

    async def _ask(self, control: pb.Control, engine: str) -> pb.ControlReply:
        request = pb.ControlRequest(control=control, engine=engine, timeout_seconds=self._timeout)
        with self._errors(f"{control.WhichOneof('verb')} on the engines"):
            return await self._stub.Control(request, timeout=self._timeout + GRACE_SECONDS, metadata=self._metadata)

    # --- weight updates: one stream, held open from update to update ---

    async def send_steps(self, steps: Mapping[str, UpdateSteps], drop_failed: bool = False) -> None:
        message = pb.UpdateMessage()
        for name, engine_steps in steps.items():
            message.engines[name].CopyFrom(convert.steps_to_pb(engine_steps))
        if any(engine_steps.offer is not None for engine_steps in steps.values()):
            message.epoch, message.drop_failed = self._epoch, drop_failed
            # The first update, or the gateway restarted since the last one.
            if self._updates is None or self._updates.done():
                self._updates = self._stub.Update(metadata=(*self._metadata, self._process))
        await self._write(message)

    async def receive_reports(self) -> dict[str, UpdateReports]:
        reply = await self._read()
        return {name: convert.reports_from_pb(reports) for name, reports in reply.engines.items()}

    async def rollback(self, version: int) -> None:
        """Roll back a version. Never raises: if the gateway cannot be told, closing the stream tells it."""
        try:
            if self._updates is not None:
                await self._write(pb.UpdateMessage(rollback=pb.Rollback(version=version)))
                while not (await self._read()).rolled_back:
                    pass  # a reply to an earlier message
        except Exception:
            self._drop_updates()

    async def _write(self, message: pb.UpdateMessage) -> None:
        """Write to the update stream; drop the stream on failure."""
        message.timeout_seconds = self._timeout
        stream = self._stream()
        try:
            with self._errors("updating weights"):
                try:
                    await stream.write(message)
                except asyncio.InvalidStateError:  # the stream has ended; its status says why
                    await _raise_end(stream)
        except BaseException:
            self._drop_updates()
            raise

    async def _read(self) -> pb.UpdateReply:
        """Read the next reply. After an error, replies to later messages may still be in flight: drop the stream, and the
        gateway rolls back what was begun."""
        stream = self._stream()
        try:
            with self._errors("updating weights"):
                async with asyncio.timeout(self._timeout + GRACE_SECONDS):
                    reply = await stream.read()
                if reply is grpc.aio.EOF:
                    await _raise_end(stream)
            if reply.HasField("error"):
                raise convert.error_from_pb(reply.error)
            return reply
        except BaseException as error:
            self._drop_updates()
            if isinstance(error, TimeoutError) and not isinstance(error, SlipstreamError):  # DeadlineExceeded is both
                raise DeadlineExceeded(
                    f"the gateway at {self.address} did not answer an update step within {self._timeout:g} s"
                ) from None
            raise

    def _stream(self) -> grpc.aio.StreamStreamCall:
        if self._updates is None:
            raise GatewayLost(f"the update stream to the gateway at {self.address} is gone")
        return self._updates

    def _drop_updates(self) -> None:
        if self._updates is not None:
            self._updates.cancel()
            self._updates = None

    async def close(self) -> None:
        self._is_closed = True
        self._drop_updates()
        await self._channel.close()

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        if self._is_closed:
            raise BridgeClosed(f"{doing}: the connection to the gateway at {self.address} was closed; connect again")
        try:
            yield
        except grpc.aio.AioRpcError as failed:
            raise channels.error_of(failed, self.address, doing) from None
        except asyncio.InvalidStateError:  # gRPC raises it for a write to a stream that has ended
            raise GatewayLost(f"{doing}: the gateway at {self.address} closed the connection") from None
        except grpc.aio.UsageError as error:
            raise ProtocolMismatch(f"{doing}: {error}") from None


async def _raise_end(stream: grpc.aio.StreamStreamCall) -> None:
    """Raise the status that ended a stream."""
    code, details, trailing = await stream.code(), await stream.details(), await stream.trailing_metadata()
    raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)
