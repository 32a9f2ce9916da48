"""A trainer's connection to a gateway: the fleet behind it, as the bridge and the publisher see it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence

import grpc

from slipstream.errors import DeadlineExceeded, GatewayLost, ProtocolMismatch
from slipstream.gateway import convert, wire
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.slipstream_pb2_grpc import GatewayStub
from slipstream.gateway.staleness import Bound
from slipstream.types import (
    Berths,
    Checksums,
    CommitReport,
    Completion,
    EngineInfo,
    Failure,
    FleetStatus,
    InFlight,
    MemoryReport,
    MemoryTag,
    Offer,
    Progress,
    Request,
    RolloutGroup,
    Score,
    StageReport,
)

CONTROL_SECONDS = 10.0
GRACE_SECONDS = 5.0
"""The gateway keeps a step's deadline itself and answers with the engine's name; we wait a little longer than that."""


class GatewayFleet:
    """All methods run on the event loop that made it."""

    def __init__(
        self,
        address: str,
        token: str,
        timeout: float,
        max_message_bytes: int,
        trainer: tuple[int, int] = (0, 1),
        ca: str = "",
    ) -> None:
        """`trainer` is the rank of this process among the trainer's processes, and their number. `ca` is the PEM file of who
        signed the gateway's certificate; without one there is no TLS, and no way beyond loopback."""
        self.address, self._timeout, self._ca = address, timeout, ca
        self._metadata = wire.metadata(token)
        self._trainer = (*self._metadata, (wire.TRAINER, f"{trainer[0]}/{trainer[1]}/{secrets.token_hex(8)}"))
        self._channel = wire.channel(address, ca, max_message_bytes)
        self._stub = GatewayStub(self._channel)
        self._engines: tuple[EngineInfo, ...] | None = None
        self._epoch = 0
        self._updates: grpc.aio.StreamStreamCall | None = None

    async def status(self) -> FleetStatus:
        with self._errors("asking for the status"):
            reply = await self._stub.Status(pb.StatusRequest(), timeout=CONTROL_SECONDS, metadata=self._metadata)
        return convert.status_from_pb(reply)

    async def refresh(self) -> tuple[tuple[EngineInfo, ...], int]:
        """The engines that can take part in an update, and the committed version, as of now."""
        try:
            with self._errors("asking for the fleet"):
                reply = await self._stub.Fleet(pb.FleetRequest(), timeout=CONTROL_SECONDS, metadata=self._metadata)
        except GatewayLost as lost:
            raise await wire.explained(lost, self.address, self._ca) from None
        self._engines, self._epoch = tuple(convert.engine_from_pb(e) for e in reply.engines), reply.epoch
        return self._engines, reply.version

    async def generate(
        self, requests: Sequence[Request], engine: str = ""
    ) -> AsyncGenerator[list[Completion | Failure], None]:
        with self._errors("generating"):
            call = self._stub.Generate(convert.requests_to_pb(requests, engine), metadata=self._metadata)
            try:
                async for results in call:
                    yield convert.results_from_pb(results)
            finally:
                call.cancel()

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        with self._errors("generating"):
            call = self._stub.Generate(convert.requests_to_pb(requests), metadata=self._metadata)
            try:
                async for results in call:
                    yield [*convert.progress_from_pb(results), *convert.results_from_pb(results)]
            finally:
                call.cancel()

    async def score(self, sequences: Sequence[Sequence[int]], engine: str = "", top_k: int = 0) -> list[Score]:
        with self._errors("scoring"):
            message = convert.sequences_to_pb(sequences, engine, top_k)
            return convert.scores_from_pb(
                await self._stub.Score(message, timeout=self._timeout, metadata=self._metadata)
            )

    # --- the rollouts of a run ---

    async def submit(self, bound: Bound, requests: Sequence[Request]) -> int:
        message = pb.SubmitRequest(bound=convert.bound_to_pb(bound), prompts=convert.requests_to_pb(requests))
        with self._errors("submitting prompts"):
            reply = await self._stub.Submit(message, timeout=self._timeout, metadata=self._metadata)
        return int(reply.num_new)

    async def take(
        self, bound: Bound, after: int, count: int, timeout: float, saved: int = 0, version: int = 0, more: bool = False
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
            return [convert.group_from_pb(group) async for groups in call for group in wire.apart(groups)]

    # --- pause and sleep ---

    async def pause(self, engine: str = "") -> None:
        await self._control(pb.Control(pause=pb.Pause()), engine)

    async def resume(self, engine: str = "") -> None:
        await self._control(pb.Control(resume=pb.Resume()), engine)

    async def sleep(self, level: int = 1, engine: str = "") -> dict[str, MemoryReport]:
        return await self._control(pb.Control(sleep=pb.Sleep(level=level)), engine)

    async def wake(self, tags: Sequence[MemoryTag] | None = None, engine: str = "") -> dict[str, MemoryReport]:
        if tags is not None and not tags:  # on the wire, naming nothing names all
            return await self.memory(engine)
        return await self._control(pb.Control(wake=pb.Wake(tags=tags or ())), engine)

    async def forget_prefixes(self, engine: str = "") -> None:
        await self._control(pb.Control(forget=pb.Forget()), engine)

    async def memory(self, engine: str = "") -> dict[str, MemoryReport]:
        return await self._control(pb.Control(memory=pb.Memory()), engine)

    async def checksums(self, engine: str = "") -> dict[str, Checksums]:
        reply = await self._ask(pb.Control(verify=pb.Verify()), engine)
        return {name: convert.checksums_from_pb(found) for name, found in reply.checksums.items()}

    async def _control(self, control: pb.Control, engine: str) -> dict[str, MemoryReport]:
        reply = await self._ask(control, engine)
        return {name: convert.memory_from_pb(report) for name, report in reply.engines.items()}

    async def _ask(self, control: pb.Control, engine: str) -> pb.ControlReply:
        request = pb.ControlRequest(control=control, engine=engine, timeout_seconds=self._timeout)
        with self._errors(f"{control.WhichOneof('verb')} on the engines"):
            return await self._stub.Control(request, timeout=self._timeout + GRACE_SECONDS, metadata=self._metadata)

    # --- weight updates: one stream, held open from update to update ---

    async def begin(self, version: int, offers: Mapping[str, Offer], drop_failed: bool) -> None:
        await self._write(pb.UpdateStep(begin=self._begin(version, offers, drop_failed)))

    def _begin(self, version: int, offers: Mapping[str, Offer], drop_failed: bool) -> pb.Begin:
        if self._updates is None or self._updates.done():  # it ended between two updates: a gateway that was restarted
            self._updates = self._stub.Update(metadata=self._trainer)
        begin = pb.Begin(version=version, epoch=self._epoch, drop_failed=drop_failed)
        for name, offer in offers.items():
            begin.offers[name].CopyFrom(convert.offer_to_pb(offer))
        return begin

    async def begun(self) -> dict[str, Berths]:
        reply = await self._read("begin")
        return {name: convert.berths_from_pb(b) for name, b in reply.begun.engines.items()}

    async def stage(self, version: int, manifests: Mapping[str, Sequence[Sequence[bytes]]]) -> None:
        await self._write(pb.UpdateStep(stage=_stage(version, manifests)))

    async def staged(self) -> dict[str, StageReport]:
        return _stage_reports((await self._read("stage")).staged)

    async def commit(self, version: int, in_flight: InFlight) -> None:
        await self._write(pb.UpdateStep(commit=pb.Commit(version=version, in_flight=in_flight)))

    async def committed(self) -> dict[str, CommitReport]:
        return _commit_reports((await self._read("commit")).committed)

    async def swap(
        self,
        version: int,
        offers: Mapping[str, Offer],
        expected: Mapping[str, Berths],
        manifests: Mapping[str, Sequence[Sequence[bytes]]],
        in_flight: InFlight,
    ) -> None:
        swap = pb.Swap(
            begin=self._begin(version, offers, drop_failed=False),
            stage=_stage(version, manifests),
            commit=pb.Commit(version=version, in_flight=in_flight),
        )
        for name, berths in expected.items():
            swap.expected[name].CopyFrom(convert.berths_to_pb(berths))
        await self._write(pb.UpdateStep(swap=swap))

    async def swapped(self) -> tuple[dict[str, StageReport], dict[str, CommitReport]]:
        reply = (await self._read("swap")).swapped
        return _stage_reports(reply.staged), _commit_reports(reply.committed)

    async def rollback(self, version: int) -> None:
        """Never raises: when the gateway cannot be told, closing the stream tells it."""
        try:
            if self._updates is not None:
                await self._write(pb.UpdateStep(rollback=pb.Rollback(version=version)))
                while not (await self._read("rollback")).HasField("rolled_back"):
                    pass  # the answer to a step that was under way
        except Exception:
            self._drop_updates()

    async def _write(self, step: pb.UpdateStep) -> None:
        """A stream that failed is not used again."""
        step.timeout_seconds = self._timeout
        if self._updates is None:
            raise GatewayLost(f"the update's connection to the gateway at {self.address} is gone")
        try:
            with self._errors("updating weights"):
                try:
                    await self._updates.write(step)
                except asyncio.InvalidStateError:  # the stream has ended; its status says why
                    await self._raise_end_of_stream()
        except BaseException:
            self._drop_updates()
            raise

    async def _read(self, step: str) -> pb.UpdateReply:
        """The answer to a step. After an error there may be answers to later steps under way: the stream is dropped, and
        the gateway rolls back what it had begun."""
        if self._updates is None:
            raise GatewayLost(f"the update's connection to the gateway at {self.address} is gone")
        try:
            with self._errors("updating weights"):
                async with asyncio.timeout(self._timeout + GRACE_SECONDS):
                    reply = await self._updates.read()
                if reply is grpc.aio.EOF:
                    await self._raise_end_of_stream()
        except TimeoutError:
            self._drop_updates()
            raise DeadlineExceeded(
                f"the gateway at {self.address} did not answer {step} within {self._timeout:g} s"
            ) from None
        except BaseException:
            self._drop_updates()
            raise
        if reply.HasField("error"):
            self._drop_updates()
            raise convert.error_from_pb(reply.error)
        return reply

    async def _raise_end_of_stream(self) -> None:
        assert self._updates is not None
        code, details = await self._updates.code(), await self._updates.details()
        trailing = await self._updates.trailing_metadata()
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)

    def _drop_updates(self) -> None:
        if self._updates is not None:
            self._updates.cancel()
            self._updates = None

    async def close(self) -> None:
        self._drop_updates()
        await self._channel.close()

    @contextlib.contextmanager
    def _errors(self, doing: str):  # type: ignore[no-untyped-def]
        try:
            yield
        except grpc.aio.AioRpcError as failed:
            raise wire.error_of(failed, self.address, doing) from None
        except asyncio.InvalidStateError:  # gRPC: written to a stream that has ended
            raise GatewayLost(f"{doing}: the gateway at {self.address} closed the connection") from None
        except grpc.aio.UsageError as error:
            raise ProtocolMismatch(f"{doing}: {error}") from None


def _stage(version: int, manifests: Mapping[str, Sequence[Sequence[bytes]]]) -> pb.Stage:
    stage = pb.Stage(version=version)
    for name, ranks in manifests.items():
        stage.manifests[name].CopyFrom(convert.manifests_to_pb(ranks))
    return stage


def _stage_reports(message: pb.Staged) -> dict[str, StageReport]:
    return {name: convert.stage_report_from_pb(report) for name, report in message.engines.items()}


def _commit_reports(message: pb.Committed) -> dict[str, CommitReport]:
    return {name: convert.commit_report_from_pb(report) for name, report in message.engines.items()}
