"""A server that somebody else started behind the engine contract, as far as its HTTP interface goes.

    this process       RemoteEngine: requests, versions, the order of an update; a dialect: the server's words
    the server         vLLM (`vllm.py`) or SGLang (`sglang.py`)
    the trainer        sends weights to the server's workers (`weights/transports/gathering.py`)

What differs from other engines: weights are replaced in place and with the commit, so a commit that fails leaves none, and a
sync with every tensor must follow; checksums are not compared; `keep` does what `recompute` does, because nobody can tell at
which token of a running request the weights changed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from slipstream.config import EngineConfig
from slipstream.engines.checks import check_in_flight, check_not_dropped, check_sleep, check_tags, never_finish
from slipstream.engines.desk import Desk
from slipstream.engines.intake import Intake, Room, read_tokenizer
from slipstream.engines.remote.client import Client
from slipstream.engines.remote.dialect import Dialect, Label
from slipstream.engines.remote.runs import Runs
from slipstream.engines.remote.sglang import SglangDialect
from slipstream.engines.remote.vllm import VllmDialect
from slipstream.engines.remote.weights import Arrivals
from slipstream.errors import (
    DeadlineExceeded,
    EngineLost,
    FleetChanged,
    NotReady,
    SlipstreamError,
    Unsupported,
)
from slipstream.model.config import ModelConfig
from slipstream.types import (
    Berths,
    Checksums,
    CommitReport,
    Completion,
    EngineInfo,
    Failure,
    InFlight,
    MemoryReport,
    MemoryTag,
    Offer,
    Progress,
    Request,
    Score,
    StageReport,
)
from slipstream.weights import families
from slipstream.weights.image import num_bytes
from slipstream.weights.transports import host_identity

log = logging.getLogger(__name__)

HEALTH_SECONDS = 5.0
"""Between two looks at the server."""
CLOSE_SECONDS = 10.0
"""Within which requests have been ended in the server, or are left to it."""


class RemoteEngine:
    """See `engines.base.Engine`.

    engine = await RemoteEngine.start("my-model", options=EngineConfig(kind="remote", url="http://localhost:8000"))

    For an SGLang server, `dialect="sglang"`.
    """

    def __init__(
        self, model: ModelConfig, dialect: Dialect, *, name: str, tokenizer: Any, options: EngineConfig
    ) -> None:
        server = dialect.server
        self._model, self._dialect, self._server, self._name = model, dialect, server, name
        self._max_length = min(server.max_model_len, options.max_model_len or server.max_model_len)
        self._max_concurrency = options.max_concurrency
        self._tensors, self._parameters = families.tensors(model), families.parameters(model, 1)
        self._label = Label(dialect)
        self._runs = Runs(dialect, options.max_concurrency, self._label.of, self._verify, self._lose)
        room = Room(self._max_length, server.block_size, server.num_blocks)
        self._desk = Desk(Intake(model, tokenizer, room, name), self._runs.start, self._runs.cancel, self._check_ready)
        self._arrivals = Arrivals(dialect, self._parameters, name)
        self._turn = asyncio.Lock()
        """Of whatever stops the server's steps."""
        self._paused = False
        self._is_still = server.is_paused
        self._asleep: dict[MemoryTag, int] = {}
        """What has been given up, and at which level."""
        self._empty = "" if server.has_weights else "has no weights yet"
        """Why nothing can be generated."""
        self._proof: asyncio.Task[None] | None = None
        self._proving = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        """The server is gone, and this process had better go too."""

    @classmethod
    async def start(
        cls, directory: str | Path, *, name: str = "engine", options: EngineConfig, seconds: float = 60.0
    ) -> RemoteEngine:
        """`directory` holds the model's `config.json`, and `tokenizer.json` where prompts are text; the weights are the
        server's. `seconds` bounds each call that changes little."""
        model, tokenizer = ModelConfig.read(Path(directory)), read_tokenizer(Path(directory))
        client = Client(options, seconds)
        try:
            meet = SglangDialect.meet if options.dialect == "sglang" else VllmDialect.meet
            dialect: Dialect = await meet(client, model)
            engine = cls(model, dialect, name=name, tokenizer=tokenizer, options=options)
            await dialect.settle()
            server = dialect.server
            if server.has_weights:
                engine._runs.version = 0
                await engine._label.put("checkpoint")
        except BaseException:
            await client.close()
            raise
        engine._watch = asyncio.create_task(engine._look_after())
        log.info(
            "engine %s: %s %s at %s, %d worker(s)%s",
            *(name, client.maker.name, server.version, client.url, server.num_workers),
            "" if server.has_weights else "; its weights are not those of a checkpoint, so a sync must bring all",
        )
        return engine

    def describe(self) -> EngineInfo:
        return EngineInfo(
            name=self._name,
            kind="remote",
            model=self._model.fingerprint(),
            dtype=self._server.dtype,
            num_ranks=1,
            tensors=self._tensors,
            parameters=self._parameters,
            transports=self._dialect.transports,
            host=host_identity(),
            max_model_len=self._max_length,
            max_concurrency=self._max_concurrency,
            version=-1 if self._empty else self._runs.version,
            pid=os.getpid(),
        )

    # --- rollouts ---

    def generate(self, requests: Sequence[Request]) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        return self._desk.generate(requests)

    async def score(self, sequences: Sequence[Sequence[int]], top_k: int = 0) -> list[Score]:
        return await self._desk.score(sequences, top_k)

    def _check_ready(self) -> None:
        if self.ended.is_set():
            raise EngineLost(f"engine {self._name!r} is closed, or {self._dialect.where} is gone")
        if self._empty:
            raise self._not_ready()

    def _not_ready(self) -> NotReady:
        return NotReady(f"engine {self._name!r} {self._empty}; sync a policy to it")

    async def _verify(self, carried: str | None) -> None:
        """The server still holds our weights: by the label that its answer carried, or asked for after a request has ended,
        once for all that end meanwhile."""
        if carried is not None:
            self._label.check(carried)
            return
        if self._proof is None:
            self._proof = asyncio.create_task(self._prove())
            self._proof.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._proof)

    async def _prove(self) -> None:
        async with self._proving:
            self._proof = None  # whoever comes from now on needs another one
            await self._label.ask()

    # --- weights ---

    async def begin(self, version: int, offer: Offer) -> Berths:
        return await self._arrivals.begin(self.describe().version, version, offer)

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        start = time.perf_counter()
        try:
            num_bytes, is_all = await self._arrivals.stage(version, manifests)
        except DeadlineExceeded as error:
            self._lose(
                EngineLost(f"engine {self._name!r}: {error}: its workers wait for a trainer. Restart the server")
            )
            raise
        if not is_all and (self._empty or self._asleep.get("weights") == 2):
            raise FleetChanged(f"engine {self._name!r} {self._empty or 'dropped its weights'} and needs every tensor")
        return StageReport(num_bytes, time.perf_counter() - start)

    async def commit(self, version: int, in_flight: InFlight = "keep") -> CommitReport:
        check_in_flight(in_flight)
        if not self._empty and version == self._runs.version:
            return CommitReport(0.0, 0.0)
        self._arrivals.staged(version)
        if in_flight == "finish":
            await self._finish_running(version)
        # Begun, it goes to its end, whatever becomes of the caller.
        return await asyncio.shield(asyncio.create_task(self._swap(version, in_flight)))

    async def _finish_running(self, version: int) -> None:
        if (self._paused or self._asleep) and self._runs.running:
            raise never_finish(self._name, self._paused)
        self._runs.gate.clear()
        try:
            while self._runs.running:
                await asyncio.wait([run.task for run in self._runs.running], timeout=0.05)
                self._arrivals.staged(version)  # a rollback calls it off
        except BaseException:
            self._runs.gate.set()
            raise

    async def _swap(self, version: int, in_flight: InFlight) -> CommitReport:
        called = time.perf_counter()
        try:
            async with self._turn:
                await self._stop()
                boundary = time.perf_counter()
                brings = self._arrivals.staged(version)
                self._runs.gate.clear()
                await self._runs.cut_off(keep=in_flight in ("keep", "recompute"))
                if brings:
                    await self._replace(version)
                else:
                    await self._label.put(version)
                self._runs.version, self._empty = version, ""
                self._arrivals.end(version)
                await self._go_on()
                return CommitReport(time.perf_counter() - boundary, boundary - called)
        finally:
            self._runs.gate.set()

    async def _replace(self, version: int) -> None:
        try:
            await self._wake_weights()
            await self._arrivals.replace(version, self._label.of(version))
            self._label.was_put(version)
        except SlipstreamError as error:
            self._empty = (
                f"lost its weights when {self._dialect.where} failed to take version {version} ({error}); "
                "the server stays paused until a sync brings every tensor"
            )
            await self._arrivals.disconnect()
            self._runs.fail(self._not_ready())
            if isinstance(error, (EngineLost, DeadlineExceeded)):  # a worker that waits for a trainer waits for ever
                self._lose(EngineLost(f"engine {self._name!r} {self._empty}. Restart the server"))
            raise

    async def _wake_weights(self) -> None:
        if self._asleep.pop("weights", None):
            await self._dialect.wake(("weights",))
            if self._dialect.steps_when_awake:
                await self._dialect.pause()

    async def rollback(self, version: int) -> None:
        self._arrivals.end(version)

    async def release(self) -> None:
        """The connection is between the trainer and the server; the next trainer makes another."""

    async def checksums(self) -> Checksums:
        raise Unsupported(
            f"engine {self._name!r} cannot tell what it holds: {self._dialect.where} has no call that reads its weights back"
        )

    # --- control ---

    async def pause(self) -> None:
        async with self._turn:
            self._paused = True
            await self._stop()

    async def resume(self) -> None:
        async with self._turn:
            self._paused = False
            await self._go_on()

    async def forget_prefixes(self) -> None:
        async with self._turn:
            await self._dialect.forget_prefixes()

    async def sleep(self, level: int = 1) -> MemoryReport:
        check_sleep(self._name, level, self._arrivals.is_updating)
        self._dialect.check_sleep(level)
        async with self._turn:
            if level > self._asleep.get("weights", 0):
                try:
                    if self._dialect.idle_to_sleep:
                        await self._hand_back()
                    await self._dialect.sleep(level, tuple(self._asleep))
                    self._is_still, self._asleep = True, {"weights": level, "kv_cache": level}
                finally:
                    self._runs.gate.set()
                    await self._go_on()  # unless it sleeps
            return await self.memory()

    async def _hand_back(self) -> None:
        """What runs is taken out of the server's hands, and taken up again when it can."""
        await self._stop()
        self._runs.gate.clear()
        await self._runs.cut_off(keep=True)

    async def wake(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport:
        check_tags(tags)
        async with self._turn:
            check_not_dropped(self._name, tags, self._asleep)
            dropped = self._asleep.get("weights") == 2
            named = [tag for tag in (self._asleep if tags is None else tags) if tag in self._asleep]
            wanted = [tag for tag in named if not (tag == "weights" and dropped)]
            if wanted:
                await self._dialect.wake(wanted)
                for tag in wanted:
                    del self._asleep[tag]
                if not self._asleep and self._dialect.steps_when_awake:
                    self._is_still = False
                if self._paused:
                    await self._stop()
                await self._go_on()
            return await self.memory()

    async def memory(self) -> MemoryReport:
        """By the model's shape and the server's settings: it does not say what its workers hold."""
        whole = num_bytes(self._parameters, self._server.dtype)
        weights = 0 if self._asleep.get("weights") == 2 else whole
        kv_cache = 0 if "kv_cache" in self._asleep else self._server.kv_cache_bytes * self._server.num_workers
        return MemoryReport(weights, kv_cache, weights + kv_cache, tuple(sorted(self._asleep)))

    async def close(self) -> None:
        """The server goes on, under the weights that it has; paused, if an update has failed."""
        was_lost = self.ended.is_set()
        self.ended.set()
        if self._watch is not None:
            self._watch.cancel()
        self._runs.fail(EngineLost(f"engine {self._name!r} was closed before this was finished"))
        await self._runs.over(CLOSE_SECONDS)
        await self._arrivals.close()
        if not was_lost and self._is_still and not self._empty and not self._asleep:
            with contextlib.suppress(SlipstreamError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._dialect.resume()
        await self._dialect.client.close()

    # --- steps ---

    async def _stop(self) -> None:
        if not self._is_still:
            await self._dialect.pause()
            self._is_still = True

    async def _go_on(self) -> None:
        if self._is_still and not (self._paused or self._asleep or self._empty):
            await self._dialect.resume()
            self._is_still = False

    async def _look_after(self) -> None:
        """A server that is gone is noticed, also while nothing is asked of it."""
        while not self.ended.is_set():
            await asyncio.sleep(HEALTH_SECONDS)
            try:
                await self._dialect.check_alive()
            except SlipstreamError as error:
                self._lose(EngineLost(f"engine {self._name!r}: {error}"))

    def _lose(self, lost: EngineLost) -> None:
        if not self.ended.is_set():
            log.error("%s", lost)
            self.ended.set()
            self._runs.fail(lost)
