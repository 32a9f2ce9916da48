"""The stream between an engine and the gateway, both halves.

The engine dials in and registers; from then on the gateway calls it over that stream. So an engine listens on no port, and the
gateway notices its death as soon as the connection breaks. Messages that wait to be sent are packed together
(`channels.drain`). Every call has an id, which its answers carry:

    gateway: EngineLink.ask / .results ── ToEngine(call=7, …) ──►  engine: EngineSession
                                       ◄─ FromEngine(call=7, …) ─
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from slipstream.errors import (
    DeadlineExceeded,
    EngineFailure,
    EngineLost,
    GatewayLost,
    NameInUse,
    ProtocolMismatch,
    SlipstreamError,
    TlsError,
    Unauthorized,
)
from slipstream.gateway import channels, convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.request_traces import GenerateTraces
from slipstream.gateway.slipstream_pb2_grpc import GatewayStub
from slipstream.gateway.update_steps import run_steps
from slipstream.observe.recorder.fleet_recorder import FleetRecorder
from slipstream.runtime.failpoints import step
from slipstream.runtime.tls import ANONYMOUS, Identity

if TYPE_CHECKING:
    from slipstream.engines.contract import EngineBackend
    from slipstream.types import MemoryReport

log = logging.getLogger(__name__)

REGISTER_SECONDS = 10.0
ORPHAN_SECONDS = 60.0
RESULTS_PER_MESSAGE = 64
MAX_SERVED_TOKENS = 256
"""Tokens that are remembered of a prompt, for a canary."""


# --- the gateway's half -----------------------------------------------------------------------------------------------


class EngineLink:
    """Calls to one engine. When the engine is lost, every open call ends with `EngineLost`."""

    def __init__(self, name: str, recorder: FleetRecorder | None = None) -> None:
        self.name, self._recorder = name, recorder or FleetRecorder()
        self.outgoing: asyncio.Queue[pb.ToEngine] = asyncio.Queue()
        self.load = 0
        """Tokens the engine was asked to generate and has not delivered."""
        self.has_answered = False
        """Whether it has generated anything, so that its programs are compiled."""
        self.last_prompt: Sequence[int] = ()
        """The beginning of a prompt that it served, which is probably in its prefix cache."""
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Queue[pb.FromEngine]] = {}
        self._generating: set[int] = set()
        self._lost: pb.FromEngine | None = None
        """The answer to every call once the engine is lost."""

    async def ask(self, message: pb.ToEngine, timeout: float, doing: str) -> pb.FromEngine:
        """Send a call and return its answer. Raises the engine's error, or `DeadlineExceeded`."""
        started = time.perf_counter()
        with self._call(message) as answers:
            try:
                async with asyncio.timeout(timeout):  # before Python 3.12, `wait_for` makes a task
                    answer = await answers.get()
            except TimeoutError:
                self._recorder.event("fault", self.name, f"did not {doing} within {timeout:g} s")
                raise DeadlineExceeded(f"engine {self.name!r} did not {doing} within {timeout:g} s") from None
        kind = message.WhichOneof("message")
        if kind != "update":  # `transaction.py` notes its steps
            verb = message.control.WhichOneof("verb") if kind == "control" else kind
            self._recorder.span(self.name, verb, started, time.perf_counter())
        return _checked(answer)

    async def results(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.Results, None]:
        """Yield results as they arrive. Closing the iterator early cancels the rest on the engine."""
        message = pb.ToEngine(generate=request)
        done = False
        with self._call(message) as answers:
            self._generating.add(message.call)
            try:
                while True:
                    answer = await answers.get()
                    done = answer.WhichOneof("message") in ("done", "error")
                    if _checked(answer).HasField("done"):
                        return
                    self.has_answered = True
                    yield answer.results
            finally:
                self._generating.discard(message.call)
                if not done and self._lost is None:
                    self.outgoing.put_nowait(pb.ToEngine(call=message.call, cancel=pb.Cancel()))

    async def completion(self, request: pb.GenerateRequest) -> pb.Completion:
        """Return the completion of a request for one sample. Raises `EngineFailure` if it fails."""
        rows: list[pb.Completion] = []
        async with contextlib.aclosing(self.results(request)) as batches:
            async for results in batches:
                if results.failures:
                    raise EngineFailure(results.failures[0].error.message)
                rows += results.completions
        if len(rows) != 1:
            raise EngineFailure(f"it answered with {len(rows)} completions")
        return rows[0]

    def interrupt(self, error: SlipstreamError) -> None:
        """End all generations with an error, here and on the engine."""
        for call in self._generating:
            self._calls[call].put_nowait(pb.FromEngine(error=convert.error_to_pb(error)))
            self.outgoing.put_nowait(pb.ToEngine(call=call, cancel=pb.Cancel()))

    def deliver(self, answer: pb.FromEngine) -> None:
        """Hand an answer to its call; drop it if the call has ended."""
        if answer.call in self._calls:
            self._calls[answer.call].put_nowait(answer)

    def lose(self, reason: str) -> None:
        if self._lost is None:
            error = EngineLost(f"engine {self.name!r} is lost: {reason}")
            self._lost = pb.FromEngine(error=convert.error_to_pb(error))
            for answers in self._calls.values():
                answers.put_nowait(self._lost)

    @contextlib.contextmanager
    def _call(self, message: pb.ToEngine) -> Iterator[asyncio.Queue[pb.FromEngine]]:
        message.call = next(self._call_ids)
        answers = self._calls[message.call] = asyncio.Queue()
        if self._lost is not None:
            answers.put_nowait(self._lost)
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
    engine: EngineBackend,
    address: str,
    token: channels.Token,
    patience: float,
    max_message_bytes: int,
    on_registered: Callable[[], None] | None = None,
    ca: str = "",
    identity: Identity = ANONYMOUS,
) -> None:
    """Keep an engine attached to its gateway until cancelled.

    Retries for `patience` seconds when the gateway is gone, has declared the engine lost, or still has the engine's name
    registered for its predecessor (a machine that went down unnoticed). Then raises `GatewayLost` or `NameInUse`. A wrong token
    or CA is not retried, unless the token has been replaced meanwhile."""
    last_contact, last_warning = time.monotonic(), ""
    async with channels.channel(address, ca, max_message_bytes, identity) as channel:
        while True:
            session = EngineSession(engine, GatewayStub(channel), token, address, on_registered)
            credentials = channels.metadata(token)
            try:
                await session.run()
            except Unauthorized:
                if channels.metadata(token) == credentials:
                    raise
            except (GatewayLost, EngineLost, NameInUse) as lost:
                if session.last_contact > last_contact:
                    last_contact, last_warning = session.last_contact, ""
                if time.monotonic() - last_contact > patience:
                    if isinstance(lost, NameInUse):
                        raise
                    raise GatewayLost(
                        f"engine {engine.describe().name!r} gives up after {patience:g} s: {lost}"
                    ) from None
                if isinstance(lost, GatewayLost) and isinstance(
                    error := await channels.explained(lost, address, ca, identity), TlsError
                ):
                    raise error from None
                if str(lost) != last_warning:
                    last_warning = str(lost)
                    log.warning("%s; retrying for %g s", lost, patience)
                await asyncio.sleep(0.2)


async def check_access(
    address: str, token: channels.Token, max_message_bytes: int, ca: str = "", identity: Identity = ANONYMOUS
) -> None:
    """Raise if the gateway refuses the token or the CA, before a model is loaded. A gateway that is not up yet is no error."""
    async with channels.channel(address, ca, max_message_bytes, identity) as channel:
        try:
            await GatewayStub(channel).Status(
                pb.StatusRequest(), timeout=REGISTER_SECONDS, metadata=channels.metadata(token)
            )
        except grpc.aio.AioRpcError as failed:
            error = channels.error_of(failed, address, "checking access")
            if isinstance(error, GatewayLost):
                error = await channels.explained(error, address, ca, identity)
            if not isinstance(error, GatewayLost | DeadlineExceeded):
                raise error from None


class EngineSession:
    """One connection: registers, then answers calls, each in its own task, until the stream ends."""

    def __init__(
        self,
        engine: EngineBackend,
        stub: GatewayStub,
        token: channels.Token,
        address: str,
        on_registered: Callable[[], None] | None,
    ) -> None:
        self._engine, self._stub, self._token, self._address = engine, stub, token, address
        self._on_registered = on_registered
        self._outgoing: asyncio.Queue[pb.FromEngine] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._updating: set[asyncio.Task[None]] = set()
        self._begun_versions: set[int] = set()
        """Updates that were neither committed nor rolled back."""
        self._asleep = False
        self.last_contact = 0.0

    async def run(self) -> None:
        stream = self._stub.Attach(metadata=channels.metadata(self._token))
        helpers: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(REGISTER_SECONDS):
                await stream.write(pb.FromEngine(register=convert.engine_to_pb(self._engine.describe())))
                welcome = await stream.read()
            if welcome is grpc.aio.EOF or not welcome.HasField("registered"):
                raise ProtocolMismatch(f"the gateway at {self._address} did not confirm the registration")
            log.info("registered with the gateway at %s", self._address)
            self.last_contact = time.monotonic()
            step("launch.register", engine=self._engine.describe().name, version=self._engine.describe().version)
            if self._on_registered is not None:
                self._on_registered()
            helpers = [
                asyncio.create_task(self._write(stream)),
                asyncio.create_task(self._heartbeat(welcome.registered.heartbeat_seconds)),
                # A restarted gateway does not know whether the engine sleeps.
                asyncio.create_task(self._report_memory()),
            ]
            while (message := await stream.read()) is not grpc.aio.EOF:
                self.last_contact = time.monotonic()
                for part in channels.unpacked(message):
                    self._dispatch(part)
            raise GatewayLost(f"the gateway at {self._address} closed the connection")
        except grpc.aio.AioRpcError as failed:
            raise channels.error_of(failed, self._address, "attaching an engine") from None
        except TimeoutError:
            raise GatewayLost(f"the gateway at {self._address} did not answer within {REGISTER_SECONDS:g} s") from None
        except asyncio.InvalidStateError:  # gRPC raises it for a write to a stream that has ended
            raise GatewayLost(f"the gateway at {self._address} closed the connection") from None
        except asyncio.CancelledError:  # the engine is shutting down; do not wait for updates
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
        """Roll back an update that the broken connection leaves unfinished.

        Wait for a running step first: cancelled, it would continue in its thread and leave an update that nothing ends."""
        if self._updating:
            await asyncio.wait(self._updating, timeout=ORPHAN_SECONDS)
        for version in list(self._begun_versions):
            await self._engine.rollback(version)
        self._begun_versions.clear()

    async def _write(self, stream: grpc.aio.StreamStreamCall) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # `run` reads the same error
            async for message in channels.drain(self._outgoing):
                await stream.write(message)

    async def _heartbeat(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        heartbeat = pb.Heartbeat(version=self._engine.describe().version, adapters=self._engine.adapters)
        if stats := getattr(self._engine, "stats", None):  # not every engine counts prefix cache hits
            counts = stats()
            heartbeat.looked_up_tokens, heartbeat.hit_tokens = counts["looked_up_tokens"], counts["hit_tokens"]
            heartbeat.kv_use, heartbeat.activity = 1 - counts["free_pages"] / counts["num_pages"], counts["activity"]
        self._outgoing.put_nowait(pb.FromEngine(heartbeat=heartbeat))

    async def _report_memory(self) -> None:
        with contextlib.suppress(SlipstreamError):  # not every engine reports its memory
            self._outgoing.put_nowait(self._memory_answer(await self._engine.memory()))

    def _memory_answer(self, report: MemoryReport) -> pb.FromEngine:
        self._asleep = bool(report.asleep)
        return pb.FromEngine(memory=convert.memory_to_pb(report))

    def _dispatch(self, message: pb.ToEngine) -> None:
        kind = message.WhichOneof("message")
        if kind == "cancel":
            if message.call in self._tasks:
                self._tasks[message.call].cancel()
            return
        handler: Callable[[pb.ToEngine], Awaitable[pb.FromEngine]] | None = getattr(self, f"_on_{kind}", None)
        if handler is None:
            error = ProtocolMismatch(f"this engine does not understand the gateway's call {kind!r}")
            self._outgoing.put_nowait(pb.FromEngine(call=message.call, error=convert.error_to_pb(error)))
            return
        task = self._tasks[message.call] = asyncio.create_task(self._answer(handler, message))
        if kind in ("update", "rollback"):
            self._updating.add(task)
            task.add_done_callback(self._updating.discard)

    async def _answer(self, handler: Callable[[pb.ToEngine], Awaitable[pb.FromEngine]], message: pb.ToEngine) -> None:
        try:
            answer = await handler(message)
        except Exception as error:
            if not isinstance(error, SlipstreamError):
                log.exception("call failed")
            answer = pb.FromEngine(error=convert.error_to_pb(error))
        finally:
            self._tasks.pop(message.call, None)
        answer.call = message.call
        self._outgoing.put_nowait(answer)

    async def _on_generate(self, message: pb.ToEngine) -> pb.FromEngine:
        requests = convert.requests_from_pb(message.generate)
        step("engine.generate", requests=len(requests))
        generating = contextlib.aclosing(self._engine.generate(requests))
        with contextlib.closing(GenerateTraces(requests, self._engine.describe().name)) as traces:
            async with generating as batches:
                async for batch in batches:
                    traces.see(batch)
                    step("engine.sample", samples=len(batch))
                    # In chunks, so that the gateway reads one chunk while the next is serialized here.
                    for start in range(0, len(batch), RESULTS_PER_MESSAGE):
                        results = convert.results_to_pb(batch[start : start + RESULTS_PER_MESSAGE])
                        self._outgoing.put_nowait(pb.FromEngine(call=message.call, results=results))
                        await asyncio.sleep(0)
        return pb.FromEngine(done=pb.Done())

    async def _on_score(self, message: pb.ToEngine) -> pb.FromEngine:
        request = message.score
        scores = await self._engine.score(convert.sequences_from_pb(request), request.top_k, request.adapter)
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
                tags: Any = tuple(message.control.wake.tags)  # the engine checks them
                return self._memory_answer(await self._engine.wake(tags or None))
            case "reset_prefix_cache":
                await self._engine.reset_prefix_cache()
            case "unload_adapter":
                await self._engine.unload_adapter(message.control.unload_adapter.name)
                self._send_heartbeat()  # the gateway knows before it gets the answer
            case "memory":
                return self._memory_answer(await self._engine.memory())
            case "verify":
                return pb.FromEngine(checksums=convert.checksums_to_pb(await self._engine.checksums()))
            case verb:
                raise ProtocolMismatch(f"this engine does not understand the gateway's control {verb!r}")
        return pb.FromEngine(done=pb.Done())

    async def _on_update(self, message: pb.ToEngine) -> pb.FromEngine:
        steps = convert.steps_from_pb(message.update)
        if steps.offer is not None:
            self._begun_versions.add(steps.version)
        reports = await run_steps(self._engine, steps)
        if steps.in_flight is not None:
            self._begun_versions.discard(steps.version)
            if self._asleep:  # the commit woke the weights
                await self._report_memory()
            if self._engine.adapters:
                self._send_heartbeat()  # likewise, of a new one
        return pb.FromEngine(updated=convert.reports_to_pb(reports))

    async def _on_rollback(self, message: pb.ToEngine) -> pb.FromEngine:
        await self._engine.rollback(message.rollback.version)
        self._begun_versions.discard(message.rollback.version)
        self._send_heartbeat()  # a rollback may leave no policy; the gateway must know before it gets the answer
        return pb.FromEngine(done=pb.Done())

    async def _on_release(self, message: pb.ToEngine) -> pb.FromEngine:
        await self._engine.release()
        return pb.FromEngine(done=pb.Done())
