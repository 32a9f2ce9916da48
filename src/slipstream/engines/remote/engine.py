"""A running inference server behind the engine contract, as far as its HTTP API allows.

    this process       RemoteEngine: requests, versions, the order of an update; a dialect: the server's API
    the server         vLLM (`vllm.py`) or SGLang (`sglang.py`)
    the trainer        sends weights to the server's workers (`weights/transports/servers/gather.py`)

Differences from other engines: weights are replaced in place during the commit, so a failed commit leaves the engine without
weights until a sync brings every tensor; checksums are not compared; `keep` does what `recompute` does, because it is unknown
at which token of a running request the weights changed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.config import RemoteConfig
from slipstream.engines.frontend.checks import check_in_flight, check_sleep, check_tags
from slipstream.engines.frontend.frontend import EngineFrontend
from slipstream.engines.frontend.request_parser import SequenceLimits, read_tokenizer
from slipstream.engines.frontend.step_control import StepControl
from slipstream.engines.remote.dialect import Dialect
from slipstream.engines.remote.http_client import ServerClient
from slipstream.engines.remote.samples import RemoteSampleTasks
from slipstream.engines.remote.sglang import SglangDialect
from slipstream.engines.remote.vllm import VllmDialect
from slipstream.engines.remote.weight_label import WeightLabel
from slipstream.engines.remote.weight_updates import ServerUpdates
from slipstream.errors import DeadlineExceeded, EngineLost, FleetChanged, NotReady, SlipstreamError, Unsupported
from slipstream.model import families
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.config import ModelConfig
from slipstream.types import (
    Checksums,
    CommitReport,
    Destinations,
    EngineInfo,
    InFlight,
    MemoryReport,
    MemoryTag,
    Offer,
    StageReport,
)
from slipstream.weights.rank_image import num_bytes

log = logging.getLogger(__name__)

HEALTH_SECONDS = 5.0
"""Interval between health checks of the server."""
CLOSE_SECONDS = 10.0
"""How long `close` waits for the server to end our requests, and to resume."""


class RemoteEngine(EngineFrontend):
    """See `engines.contract.EngineBackend`.

    engine = await RemoteEngine.start("my-model", options=RemoteConfig(url="http://localhost:8000"))

    For an SGLang server, `dialect="sglang"`.
    """

    def __init__(
        self, model: ModelConfig, dialect: Dialect, *, name: str, tokenizer: Any, options: RemoteConfig
    ) -> None:
        server = dialect.server
        self._dialect, self._server, self._max_num_seqs = dialect, server, options.max_num_seqs
        self._tensors, self._parameters = families.tensors(model), families.parameters(model, 1)
        self._label = WeightLabel(dialect)
        self._samples = RemoteSampleTasks(dialect, options.max_num_seqs, self._label, self._lose)
        length = min(server.max_model_len, options.max_model_len or server.max_model_len)
        limits = SequenceLimits(length, server.block_size, server.num_blocks)
        super().__init__(name, model, tokenizer, limits, self._samples.start, self._samples.cancel)
        self._updates = ServerUpdates(dialect, self._parameters, name)
        self._no_weights = "" if server.has_weights else "has no weights yet"
        """Why the server has no weights of ours; empty if it has."""
        self._steps = StepControl(
            name, dialect.pause, dialect.resume, may_start=lambda: not self._no_weights, is_stopped=server.is_paused
        )
        self._health_checks: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        """Set when the server is gone and this process should exit."""

    @classmethod
    async def start(
        cls, directory: str | Path, *, name: str = "engine", options: RemoteConfig, timeout: float = 60.0
    ) -> RemoteEngine:
        """Connect to the server. `directory` holds the model's `config.json`, and `tokenizer.json` if prompts are text; the
        server has the weights. `timeout` limits each call, except for updates and requests."""
        model, tokenizer = read_config(Path(directory)), read_tokenizer(Path(directory))
        client = ServerClient(options, timeout)
        try:
            connect = SglangDialect.connect if options.dialect == "sglang" else VllmDialect.connect
            dialect: Dialect = await connect(client, model)
            engine = cls(model, dialect, name=name, tokenizer=tokenizer, options=options)
            await dialect.prepare()
            server = dialect.server
            if server.has_weights:
                engine._samples.version = 0
                await engine._label.set("checkpoint")
        except BaseException:
            await client.close()
            raise
        engine._health_checks = asyncio.create_task(engine._check_health())
        log.info(
            "engine %s: %s %s at %s, %d worker(s)%s",
            *(name, client.kind.name, server.version, client.url, server.num_workers),
            "" if server.has_weights else "; its weights are not a checkpoint's, so a sync must bring every tensor",
        )
        return engine

    def describe(self) -> EngineInfo:
        return self._info(
            kind="remote",
            dtype=self._server.dtype,
            num_ranks=1,
            tensors=self._tensors,
            parameters=self._parameters,
            transports=self._dialect.transports,
            max_num_seqs=self._max_num_seqs,
            version=-1 if self._no_weights else self._samples.version,
        )

    def _check_ready(self) -> None:
        if self.ended.is_set():
            raise EngineLost(f"engine {self._name!r} is closed, or {self._dialect.name} is gone")
        if self._no_weights:
            raise self._not_ready()

    def _not_ready(self) -> NotReady:
        return NotReady(f"engine {self._name!r} {self._no_weights}; sync a policy to it")

    # --- weights ---

    async def begin(self, version: int, offer: Offer) -> Destinations:
        return await self._updates.begin(self.describe().version, version, offer)

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        start = time.perf_counter()
        try:
            announced, is_complete = await self._updates.stage(version, manifests)
        except DeadlineExceeded as error:
            self._lose(
                EngineLost(f"engine {self._name!r}: {error}: its workers wait for a trainer. Restart the server")
            )
            raise
        if not is_complete and (self._no_weights or self._steps.asleep.get("weights") == 2):
            reason = self._no_weights or "dropped its weights"
            raise FleetChanged(f"engine {self._name!r} {reason} and needs every tensor")
        return StageReport(announced, time.perf_counter() - start)

    async def commit(self, version: int, in_flight: InFlight = "keep") -> CommitReport:
        check_in_flight(in_flight)
        if not self._no_weights and version == self._samples.version:
            return CommitReport(0.0, 0.0)
        self._updates.check_staged(version)
        if in_flight == "finish":
            await self._finish_running(version)
        # Shielded from cancellation: a half-done update leaves no weights.
        return await asyncio.shield(asyncio.create_task(self._swap(version, in_flight)))

    async def _finish_running(self, version: int) -> None:
        self._steps.check_can_finish(self._samples.running)
        self._samples.gate.clear()
        try:
            await self._samples.drain(lambda: self._updates.check_staged(version))  # raises after a rollback
        except BaseException:
            self._samples.gate.set()
            raise

    async def _swap(self, version: int, in_flight: InFlight) -> CommitReport:
        start = time.perf_counter()
        try:
            async with self._steps.lock:
                async with self._steps.stopped():
                    boundary = time.perf_counter()
                    brings_tensors = self._updates.check_staged(version)
                    self._samples.gate.clear()
                    await self._samples.interrupt_all(keep_tokens=in_flight in ("keep", "recompute"))
                    if brings_tensors:
                        await self._replace_weights(version)
                    else:
                        await self._label.set(version)
                    self._samples.version, self._no_weights = version, ""
                    self._updates.end(version)
                return CommitReport(time.perf_counter() - boundary, boundary - start)
        finally:
            self._samples.gate.set()

    async def _replace_weights(self, version: int) -> None:
        try:
            await self._wake_weights()
            await self._updates.replace_weights(version, self._label.of(version))
            self._label.was_set(version)
        except SlipstreamError as error:
            self._no_weights = (
                f"lost its weights when {self._dialect.name} failed to take version {version} ({error}); "
                "the server stays paused until a sync brings every tensor"
            )
            await self._updates.disconnect()
            self._samples.fail_all(self._not_ready())
            if isinstance(error, (EngineLost, DeadlineExceeded)):  # a worker that waits for a trainer never returns
                self._lose(EngineLost(f"engine {self._name!r} {self._no_weights}. Restart the server"))
            raise

    async def _wake_weights(self) -> None:
        if self._steps.asleep.pop("weights", None):
            await self._dialect.wake(("weights",))
            if self._dialect.resumes_on_wake:
                await self._dialect.pause()

    async def rollback(self, version: int) -> None:
        self._updates.end(version)

    async def release(self) -> None:
        """Nothing to release: trainer and server are connected directly, and the next trainer opens a new connection."""

    async def checksums(self) -> Checksums:
        raise Unsupported(
            f"engine {self._name!r} cannot read its weights back: {self._dialect.name} has no call for it"
        )

    # --- control ---

    async def pause(self) -> None:
        await self._steps.pause()

    async def resume(self) -> None:
        await self._steps.resume()

    async def reset_prefix_cache(self) -> None:
        async with self._steps.lock:
            await self._dialect.reset_prefix_cache()

    async def sleep(self, level: int = 1) -> MemoryReport:
        check_sleep(self._name, level, self._updates.is_updating)
        self._dialect.check_sleep(level)
        async with self._steps.lock:
            if level > self._steps.asleep.get("weights", 0):
                try:
                    if self._dialect.must_be_idle_to_sleep:
                        await self._steps.stop()
                        self._samples.gate.clear()
                        await self._samples.interrupt_all(keep_tokens=True)
                    await self._dialect.sleep(level, tuple(self._steps.asleep))
                    self._steps.is_stopped, self._steps.asleep = True, {"weights": level, "kv_cache": level}
                finally:
                    self._samples.gate.set()
                    await self._steps.start()  # if it failed to fall asleep
            return await self.memory()

    async def wake(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport:
        check_tags(tags)
        async with self._steps.lock:
            if to_wake := self._steps.asleep_among(tags):
                await self._dialect.wake(to_wake)
                for tag in to_wake:
                    del self._steps.asleep[tag]
                if not self._steps.asleep and self._dialect.resumes_on_wake:
                    self._steps.is_stopped = False
                if self._steps.is_paused:
                    await self._steps.stop()
                await self._steps.start()
            return await self.memory()

    async def memory(self) -> MemoryReport:
        """Computed from the model's shape and the server's settings: a server does not report what its workers hold."""
        asleep = self._steps.asleep
        weights = 0 if asleep.get("weights") == 2 else num_bytes(self._parameters, self._server.dtype)
        kv_cache = 0 if "kv_cache" in asleep else self._server.kv_cache_bytes * self._server.num_workers
        return MemoryReport(weights, kv_cache, weights + kv_cache, tuple(sorted(asleep)))

    async def close(self) -> None:
        """Leave the server running with its weights. It stays paused only if an update has failed."""
        was_lost = self.ended.is_set()
        self.ended.set()
        if self._health_checks is not None:
            self._health_checks.cancel()
        self._samples.fail_all(EngineLost(f"engine {self._name!r} was closed before the request finished"))
        await self._samples.wait_finished(CLOSE_SECONDS)
        await self._updates.close()
        if not was_lost and self._steps.is_stopped and not self._no_weights and not self._steps.asleep:
            with contextlib.suppress(SlipstreamError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._dialect.resume()
        await self._dialect.client.close()

    # --- health ---

    async def _check_health(self) -> None:
        """Notice a lost server even while no request is running."""
        while not self.ended.is_set():
            await asyncio.sleep(HEALTH_SECONDS)
            try:
                await self._dialect.check_alive()
            except SlipstreamError as error:
                self._lose(EngineLost(f"engine {self._name!r}: {error}"))

    def _lose(self, error: EngineLost) -> None:
        if not self.ended.is_set():
            log.error("%s", error)
            self.ended.set()
            self._samples.fail_all(error)
