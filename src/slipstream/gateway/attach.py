"""The stream between an engine and the gateway, both halves.

The engine dials in and registers; from then on the gateway calls it over that one stream, so that an engine listens on
nothing and its death is seen the moment its connection breaks. What waits to be sent is sent together
(`wire.together`). Every call has an id that its answers carry:

    gateway: EngineLink.ask / .results ── ToEngine(call=7, …) ──►  engine: EngineSession
                                       ◄─ FromEngine(call=7, …) ─
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import grpc

from slipstream.errors import (
    DeadlineExceeded,
    EngineLost,
    GatewayLost,
    NameInUse,
    ProtocolMismatch,
    SlipstreamError,
    TlsError,
    wants_elsewhere,
)
from slipstream.gateway import convert, wire
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.slipstream_pb2_grpc import GatewayStub

if TYPE_CHECKING:
    from slipstream.engines.base import Engine
    from slipstream.types import MemoryReport

log = logging.getLogger(__name__)

REGISTER_SECONDS = 10.0
ORPHAN_SECONDS = 60.0
RESULTS_PER_MESSAGE = 64


# --- the gateway's half -----------------------------------------------------------------------------------------------


class EngineLink:
    """Calls to one engine. When it is lost, every open call ends with `EngineLost`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.outgoing: asyncio.Queue[pb.ToEngine] = asyncio.Queue()
        self.load = 0
        """Tokens that the engine has been asked to generate and has not answered."""
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Queue[pb.FromEngine]] = {}
        self._lost: EngineLost | None = None

    async def ask(self, message: pb.ToEngine, timeout: float, doing: str) -> pb.FromEngine:
        """One question, one answer; an error that the engine answers is raised."""
        with self._call(message) as answers:
            try:
                async with asyncio.timeout(timeout):  # before Python 3.12, `wait_for` makes a task
                    return _checked(await answers.get())
            except TimeoutError:
                raise DeadlineExceeded(f"engine {self.name!r} did not {doing} within {timeout:g} s") from None

    async def results(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.Results, None]:
        """Results as they come. Leaving the iterator early cancels the rest on the engine."""
        message = pb.ToEngine(generate=request)
        done = False
        with self._call(message) as answers:
            try:
                while True:
                    answer = await answers.get()
                    done = answer.WhichOneof("message") in ("done", "error")
                    if _checked(answer).HasField("done"):
                        return
                    yield answer.results
            finally:
                if not done and self._lost is None:
                    self.outgoing.put_nowait(pb.ToEngine(call=message.call, cancel=pb.Cancel()))

    def deliver(self, answer: pb.FromEngine) -> None:
        """An answer came; one to a call that nobody waits for any more is dropped."""
        if answer.call in self._calls:
            self._calls[answer.call].put_nowait(answer)

    def lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = EngineLost(f"engine {self.name!r} is lost: {why}")
            for answers in self._calls.values():
                answers.put_nowait(self._lost_answer())

    def _lost_answer(self) -> pb.FromEngine:
        assert self._lost is not None
        return pb.FromEngine(error=convert.error_to_pb(self._lost))

    @contextlib.contextmanager
    def _call(self, message: pb.ToEngine):  # type: ignore[no-untyped-def]
        message.call = next(self._ids)
        answers = self._calls[message.call] = asyncio.Queue()
        if self._lost is not None:
            answers.put_nowait(self._lost_answer())
        self.outgoing.put_nowait(message)
        try:
            yield answers
        finally:
            del self._calls[message.call]


def _checked(answer: pb.FromEngine) -> pb.FromEngine:
    if answer.HasField("error"):
        raise convert.error_from_pb(answer.error)
    return answer


# --- the engine's half ------------------------------------------------------------------------------------------------


async def serve_engine(
    engine: Engine,
    address: str,
    token: str,
    patience: float,
    max_message_bytes: int,
    on_registered: Callable[[], None] | None = None,
    ca: str = "",
) -> None:
    """Keeps an engine attached to its gateway until cancelled. A gateway that restarts within `patience` seconds finds
    the engine again, and so does one that gave it up for lost; after that, `GatewayLost`. As long, it waits for its name, which
    is still that of its predecessor where a machine went down unseen. One that is there and has another token or CA is not
    tried again."""
    last_contact, said = time.monotonic(), ""
    async with wire.channel(address, ca, max_message_bytes) as channel:
        while True:
            session = EngineSession(engine, GatewayStub(channel), token, address, on_registered)
            try:
                await session.run()
            # No gateway, or one that gave up on us (a stopped engine goes on), or has not yet given up our predecessor.
            except (GatewayLost, EngineLost, NameInUse) as lost:
                if session.last_contact > last_contact:
                    last_contact, said = session.last_contact, ""
                if time.monotonic() - last_contact > patience:
                    if isinstance(lost, NameInUse):
                        raise
                    raise GatewayLost(
                        f"engine {engine.describe().name!r} gives up after {patience:g} s: {lost}"
                    ) from None
                if isinstance(lost, GatewayLost) and isinstance(
                    why := await wire.explained(lost, address, ca), TlsError
                ):
                    raise why from None
                if str(lost) != said:
                    said = str(lost)
                    log.warning("%s; trying again for %g s", lost, patience)
                await asyncio.sleep(0.2)


async def knock(address: str, token: str, max_message_bytes: int, ca: str = "") -> None:
    """Raises what a gateway has against us: a wrong token or CA is worth knowing before a model is loaded. One that is not
    there, or not yet, is no reason."""
    async with wire.channel(address, ca, max_message_bytes) as channel:
        try:
            await GatewayStub(channel).Status(
                pb.StatusRequest(), timeout=REGISTER_SECONDS, metadata=wire.metadata(token)
            )
        except grpc.aio.AioRpcError as failed:
            error = wire.error_of(failed, address, "asking to be let in")
            if isinstance(error, GatewayLost):
                error = await wire.explained(error, address, ca)
            if not isinstance(error, GatewayLost | DeadlineExceeded):
                raise error from None


@runtime_checkable
class Counting(Protocol):
    """An engine that can tell how much of its prompts it had computed before."""

    def stats(self) -> Mapping[str, Any]: ...


class EngineSession:
    """One connection: register, then answer calls, each in a task of its own, until the stream ends."""

    def __init__(
        self, engine: Engine, stub: GatewayStub, token: str, address: str, on_registered: Callable[[], None] | None
    ) -> None:
        self._engine, self._stub, self._token, self._address = engine, stub, token, address
        self._on_registered = on_registered
        self._outgoing: asyncio.Queue[pb.FromEngine] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._updating: set[asyncio.Task[None]] = set()
        self._begun: int | None = None
        self._asleep = False
        self.last_contact = 0.0

    async def run(self) -> None:
        stream = self._stub.Attach(metadata=wire.metadata(self._token))
        helpers: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(REGISTER_SECONDS):
                await stream.write(pb.FromEngine(register=convert.engine_to_pb(self._engine.describe())))
                welcome = await stream.read()
            if welcome is grpc.aio.EOF or not welcome.HasField("registered"):
                raise ProtocolMismatch(f"the gateway at {self._address} did not answer a registration as expected")
            log.info("registered with the gateway at %s", self._address)
            self.last_contact = time.monotonic()
            if self._on_registered is not None:
                self._on_registered()
            helpers = [
                asyncio.create_task(self._write(stream)),
                asyncio.create_task(self._heartbeat(welcome.registered.heartbeat_seconds)),
                asyncio.create_task(self._tell_memory()),  # a gateway that is new does not know who sleeps
            ]
            while (message := await stream.read()) is not grpc.aio.EOF:
                self.last_contact = time.monotonic()
                for part in wire.apart(message):
                    self._take(part)
            raise GatewayLost(f"the gateway at {self._address} closed the connection")
        except grpc.aio.AioRpcError as failed:
            raise wire.error_of(failed, self._address, "attaching an engine") from None
        except TimeoutError:
            raise GatewayLost(f"the gateway at {self._address} did not answer within {REGISTER_SECONDS:g} s") from None
        except asyncio.InvalidStateError:  # gRPC: written to a stream that has ended
            raise GatewayLost(f"the gateway at {self._address} closed the connection") from None
        except asyncio.CancelledError:  # the engine is shutting down: nothing is worth waiting for
            for task in self._updating:
                task.cancel()
            raise
        finally:
            stream.cancel()
            for task in (*helpers, *self._tasks.values()):
                if task not in self._updating:
                    task.cancel()
            await self._roll_back_orphan()

    async def _roll_back_orphan(self) -> None:
        """An update under way cannot be finished through a connection that is gone. A step that is running ends first:
        cancelled in the middle, it would go on in its thread and leave an update begun that nobody knows of."""
        if self._updating:
            await asyncio.wait(self._updating, timeout=ORPHAN_SECONDS)
        if self._begun is not None:
            await self._engine.rollback(self._begun)
            self._begun = None

    async def _write(self, stream: grpc.aio.StreamStreamCall) -> None:
        with contextlib.suppress(
            grpc.aio.AioRpcError, asyncio.InvalidStateError
        ):  # the reader sees the same, and says so
            async for message in wire.together(self._outgoing):
                await stream.write(message)

    async def _heartbeat(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            self._beat()

    def _beat(self) -> None:
        beat = pb.Heartbeat(version=self._engine.describe().version)
        if isinstance(self._engine, Counting):
            counts = self._engine.stats()
            beat.looked_up_tokens, beat.hit_tokens = counts["looked_up_tokens"], counts["hit_tokens"]
        self._outgoing.put_nowait(pb.FromEngine(heartbeat=beat))

    async def _tell_memory(self) -> None:
        with contextlib.suppress(SlipstreamError):  # it cannot tell, and need not
            self._outgoing.put_nowait(self._memory_answer(await self._engine.memory()))

    def _memory_answer(self, report: MemoryReport) -> pb.FromEngine:
        self._asleep = bool(report.asleep)
        return pb.FromEngine(memory=convert.memory_to_pb(report))

    def _take(self, message: pb.ToEngine) -> None:
        kind = message.WhichOneof("message")
        if kind == "cancel":
            if message.call in self._tasks:
                self._tasks[message.call].cancel()
            return
        verb: Callable[[pb.ToEngine], Awaitable[pb.FromEngine]] | None = getattr(self, f"_on_{kind}", None)
        if verb is None:
            error = ProtocolMismatch(f"this engine does not understand the gateway's call {kind!r}")
            self._outgoing.put_nowait(pb.FromEngine(call=message.call, error=convert.error_to_pb(error)))
            return
        task = self._tasks[message.call] = asyncio.create_task(self._answer(verb, message))
        if kind in ("begin", "stage", "commit", "swap", "rollback"):
            self._updating.add(task)
            task.add_done_callback(self._updating.discard)

    async def _answer(self, verb: Callable[[pb.ToEngine], Awaitable[pb.FromEngine]], message: pb.ToEngine) -> None:
        try:
            answer = await verb(message)
        except SlipstreamError as error:
            answer = pb.FromEngine(error=convert.error_to_pb(error))
        except Exception as error:
            log.exception("call failed")
            answer = pb.FromEngine(error=convert.error_to_pb(error))
        finally:
            self._tasks.pop(message.call, None)
        answer.call = message.call
        self._outgoing.put_nowait(answer)

    async def _on_generate(self, message: pb.ToEngine) -> pb.FromEngine:
        requests = convert.requests_from_pb(message.generate)
        async with contextlib.aclosing(self._engine.generate(requests)) as batches:
            async for batch in batches:
                # In parts, so that while one is made here the one before is already read at the other end.
                for start in range(0, len(batch), RESULTS_PER_MESSAGE):
                    results = convert.results_to_pb(batch[start : start + RESULTS_PER_MESSAGE])
                    self._outgoing.put_nowait(pb.FromEngine(call=message.call, results=results))
                    await asyncio.sleep(0)
        return pb.FromEngine(done=pb.Done())

    async def _on_score(self, message: pb.ToEngine) -> pb.FromEngine:
        scores = await self._engine.score(convert.sequences_from_pb(message.score), message.score.top_k)
        return pb.FromEngine(scores=convert.scores_to_pb(scores))

    async def _on_control(self, message: pb.ToEngine) -> pb.FromEngine:
        match message.control.WhichOneof("verb"):
            case "pause":
                await self._engine.pause()
            case "resume":
                await self._engine.resume()
            case "sleep":
                return self._memory_answer(await self._engine.sleep(message.control.sleep.level))
            case "wake":
                tags: Any = tuple(message.control.wake.tags)  # the engine knows which there are
                return self._memory_answer(await self._engine.wake(tags or None))
            case "forget":
                await self._engine.forget_prefixes()
            case "memory":
                return self._memory_answer(await self._engine.memory())
            case "verify":
                return pb.FromEngine(checksums=convert.checksums_to_pb(await self._engine.checksums()))
            case verb:
                raise ProtocolMismatch(f"this engine does not understand the gateway's control {verb!r}")
        return pb.FromEngine(done=pb.Done())

    async def _on_begin(self, message: pb.ToEngine) -> pb.FromEngine:
        return pb.FromEngine(begun=await self._begin(message.begin))

    async def _on_stage(self, message: pb.ToEngine) -> pb.FromEngine:
        return pb.FromEngine(staged=await self._stage(message.stage))

    async def _on_commit(self, message: pb.ToEngine) -> pb.FromEngine:
        return pb.FromEngine(committed=await self._commit(message.commit))

    async def _on_swap(self, message: pb.ToEngine) -> pb.FromEngine:
        swap = message.swap
        if await self._begin(swap.begin) != swap.expected:
            raise wants_elsewhere(self._engine.describe().name)
        swapped = pb.EngineSwapped(staged=await self._stage(swap.stage), committed=await self._commit(swap.commit))
        return pb.FromEngine(swapped=swapped)

    async def _begin(self, begin: pb.EngineBegin) -> pb.Berths:
        berths = await self._engine.begin(begin.version, convert.offer_from_pb(begin.offer))
        self._begun = begin.version
        return convert.berths_to_pb(berths)

    async def _stage(self, stage: pb.EngineStage) -> pb.StageReport:
        report = await self._engine.stage(stage.version, convert.manifests_from_pb(stage.manifests))
        return convert.stage_report_to_pb(report)

    async def _commit(self, commit: pb.Commit) -> pb.CommitReport:
        report = await self._engine.commit(commit.version, convert.in_flight_from_pb(commit.in_flight))
        self._begun = None
        if self._asleep:  # the weights are awake now
            await self._tell_memory()
        return convert.commit_report_to_pb(report)

    async def _on_rollback(self, message: pb.ToEngine) -> pb.FromEngine:
        await self._engine.rollback(message.rollback.version)
        self._begun = None
        self._beat()  # whether there is a policy still, before anyone hears that this is done
        return pb.FromEngine(done=pb.Done())

    async def _on_release(self, message: pb.ToEngine) -> pb.FromEngine:
        await self._engine.release()
        return pb.FromEngine(done=pb.Done())
