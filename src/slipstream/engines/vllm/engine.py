"""vLLM behind the engine contract: this process hosts its asynchronous engine, our `Extension` lives in its workers.

    this process            VllmEngine ── AsyncLLM             requests, versions, the memory in which weights land
    vLLM's own processes    EngineCore ── workers (Extension)  steps; between two of them: how far is who, new weights

A version is swapped in between two steps. Which tokens were drawn before is asked of the workers at that very moment, so
that spans are right to the token. The prefix cache is keyed by version: what an older one computed is never found again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.config import EngineConfig
from slipstream.engines.checks import (
    check_in_flight,
    check_not_dropped,
    check_sleep,
    check_tags,
    never_finish,
    weights_asleep,
)
from slipstream.engines.desk import Desk
from slipstream.engines.intake import Intake, Room, read_tokenizer
from slipstream.engines.vllm import compat
from slipstream.engines.vllm.delivery import PATIENCE_SECONDS, Delivery, Direct, NotHere, Reloaded
from slipstream.engines.vllm.runs import Runs
from slipstream.engines.vllm.setup import make_llm
from slipstream.errors import (
    EngineFailure,
    EngineLost,
    NotReady,
    SlipstreamError,
    UnknownVersion,
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
from slipstream.weights.transports import host_identity

log = logging.getLogger(__name__)

LOAD_SECONDS = 600.0
"""Of a call to the workers."""

LATE_SECONDS = 30.0
"""An order to load is sent together with the news of what, and may overtake it; by no more than this."""


class VllmEngine:
    """See `engines.base.Engine`.

    engine = await VllmEngine.start("my-model", options=EngineConfig(kind="vllm"))
    """

    def __init__(self, model: ModelConfig, llm: Any, *, name: str, tokenizer: Any, options: EngineConfig) -> None:
        self._model, self._llm, self._name, self._options = model, llm, name, options
        config = llm.vllm_config
        self._on_gpu = not compat.is_cpu()
        self._max_length = int(config.model_config.max_model_len)
        cache = config.cache_config
        room = Room(self._max_length, int(cache.block_size), int(cache.num_gpu_blocks))
        self._runs = Runs(llm, self._failure)
        intake = Intake(model, tokenizer, room, name)
        self._desk = Desk(intake, self._runs.start, self._runs.cancel, self._check_ready)
        self._tensors = families.tensors(model)
        self._delivery: Delivery
        self._workers: list[dict[str, int]] = []
        """Of each: its pid, and the bytes of its KV cache."""
        self._turn = asyncio.Lock()
        """Of whatever stops the engine's steps."""
        self._paused = self._is_still = False
        self._asleep: dict[MemoryTag, int] = {}
        """What has been given up, and at which level."""
        self.ended = asyncio.Event()
        """vLLM is gone, and this process had better go too."""

    @classmethod
    async def start(
        cls, directory: str | Path, *, name: str = "engine", options: EngineConfig | None = None
    ) -> VllmEngine:
        """From an HF directory: `config.json`, and `tokenizer.json` and weights where they are there."""
        directory, options = Path(directory), options or EngineConfig(kind="vllm")
        model, tokenizer = ModelConfig.read(directory), read_tokenizer(directory)
        has_weights = any(directory.glob("*.safetensors"))
        llm = make_llm(directory, model, options, has_weights)
        engine = cls(model, llm, name=name, tokenizer=tokenizer, options=options)
        engine._runs.version = 0 if has_weights else -1
        names = [t.name for t in engine._tensors]
        engine._workers = await engine._on_workers("slipstream_install", os.getpid(), names)
        engine._delivery = await engine._make_delivery(has_weights)
        return engine

    async def _make_delivery(self, has_weights: bool) -> Delivery:
        call, dtype, tp = self._on_workers, self._options.dtype, self._options.tp
        if not self._on_gpu:
            return Reloaded(self._name, self._model, dtype, call, has_weights)
        failed: dict[str, str] = {}
        for answer in await call("slipstream_prove", str(self._llm.vllm_config.model_config.model), has_weights):
            failed |= answer
        for parameter, why in failed.items():
            log.warning("engine %s: %s is not written to directly: %s", self._name, parameter, why)
        return Direct(self._name, self._model, dtype, tp, call, failed, has_weights)

    def describe(self) -> EngineInfo:
        return EngineInfo(
            name=self._name,
            kind="vllm",
            model=self._model.fingerprint(),
            dtype=self._options.dtype,
            num_ranks=self._delivery.num_ranks,
            tensors=self._tensors,
            parameters=self._delivery.parameters,
            transports=self._delivery.transports,
            host=host_identity(),
            max_model_len=self._max_length,
            max_concurrency=self._options.max_concurrency,
            version=self._runs.version,
            pid=os.getpid(),
        )

    # --- rollouts ---

    def generate(self, requests: Sequence[Request]) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        return self._desk.generate(requests)

    async def score(self, sequences: Sequence[Sequence[int]], top_k: int = 0) -> list[Score]:
        return await self._desk.score(sequences, top_k)

    def _check_ready(self) -> None:
        if self.ended.is_set():
            raise EngineLost(f"engine {self._name!r} is closed, or its vLLM has died")
        if self._runs.version < 0:
            raise NotReady(f"engine {self._name!r} has no weights yet; sync a policy to it first")

    # --- weights ---

    async def begin(self, version: int, offer: Offer) -> Berths:
        return await self._delivery.begin(self._runs.version, version, offer)

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        return await self._delivery.stage(version, manifests)

    async def commit(self, version: int, in_flight: InFlight = "keep") -> CommitReport:
        check_in_flight(in_flight)
        report = CommitReport(0.0, 0.0)
        if version != self._runs.version:
            self._delivery.check_staged(version)
            if in_flight == "finish":
                self._check_can_finish()
                self._runs.gate.clear()
            try:
                if in_flight == "finish":
                    await self._finish_running(version)
                # Begun, it goes to its end, whatever becomes of the caller: else workers and version might disagree.
                report = await asyncio.shield(asyncio.create_task(self._swap(version, in_flight)))
            finally:
                self._runs.gate.set()
        with contextlib.suppress(UnknownVersion):  # committed before, or a rollback came too late and ended it
            self._delivery.finish(version)
        return report

    def _check_can_finish(self) -> None:
        if (self._paused or self._asleep) and self._runs.running:
            raise never_finish(self._name, self._paused)

    async def _finish_running(self, version: int) -> None:
        """Those that have begun to draw end first; the others go back behind the gate, and begin under the new version."""
        async with self._turn, self._still():
            drawn = await self._drawn()
            for run in self._runs.running.values():
                if not drawn.get(run.id):
                    run.restart()
        while self._runs.running:
            await asyncio.wait([run.task for run in self._runs.running.values()], timeout=0.05)
            self._delivery.check_staged(version)  # a rollback calls it off

    async def _swap(self, version: int, in_flight: InFlight) -> CommitReport:
        """What is still on its way is tried again; in between vLLM takes its steps, and answers."""
        called, still = time.perf_counter(), 0.0
        while True:
            try:
                report = await self._try_to_swap(version, in_flight, called)
                return replace(report, pause_seconds=report.pause_seconds + still) if still else report
            except NotHere as late:
                still += late.seconds
                if time.perf_counter() > called + LATE_SECONDS:
                    raise self._failure(f"loading version {version}", late) from None
            await asyncio.sleep(PATIENCE_SECONDS)

    async def _try_to_swap(self, version: int, in_flight: InFlight, called: float) -> CommitReport:
        # A call to the workers falls between two steps anyway. Where one call does it all, and nothing is left to do before
        # the next step, the steps are not stopped.
        stop = not self._delivery.is_one_call or in_flight == "recompute"
        async with self._turn, self._still() if stop else self._runs.held_back():
            boundary = time.perf_counter()
            self._delivery.check_staged(version)
            try:
                if self._on_gpu and "weights" in self._asleep:  # there must be something to write to
                    await self._on_workers("slipstream_wake", ["weights"])
                drawn, seconds = await self._delivery.load(version)
            except NotHere:
                raise
            except Exception as error:
                await self._restore()
                raise self._failure(f"loading version {version}", error) from error
            self._runs.version = version
            self._asleep.pop("weights", None)
            for run in self._runs.running.values():
                count = drawn.get(run.id, 0)
                if in_flight == "requeue" or run.sample.ticket.is_scoring or not count:
                    run.restart()
                else:
                    run.versions.append((version, count))
            if in_flight == "recompute":
                await self._llm.reset_prefix_cache(reset_running_requests=True)
            swapped = time.perf_counter()
        if stop:
            return CommitReport(swapped - boundary, boundary - called, seconds)
        return CommitReport(seconds, swapped - called - seconds, seconds)

    async def _restore(self) -> None:
        try:
            await self._delivery.restore()
        except Exception:
            self.ended.set()  # neither version can be served
            raise

    async def rollback(self, version: int) -> None:
        await self._delivery.rollback(version)

    async def release(self) -> None:
        await self._delivery.release()

    async def checksums(self) -> Checksums:
        self._check_ready()
        async with (
            self._turn
        ):  # no version is swapped in meanwhile; steps run between one call to the workers and the next
            if "weights" in self._asleep:
                raise weights_asleep(self._name)
            return Checksums(self._runs.version, await self._delivery.checksums())

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
            await self._llm.reset_prefix_cache(reset_running_requests=True)

    async def sleep(self, level: int = 1) -> MemoryReport:
        check_sleep(self._name, level, self._delivery.is_updating)
        async with self._turn:
            await self._stop()
            if "kv_cache" not in self._asleep:
                await self._llm.reset_prefix_cache(reset_running_requests=True)
            awake = "kv_cache" not in self._asleep or level > self._asleep.get("weights", 0)
            if awake and self._on_gpu:
                await self._on_workers("slipstream_sleep", level)
            elif awake:  # level 1 keeps weights in host memory, which on CPU is where they are
                tags = ["kv_cache"] * ("kv_cache" not in self._asleep) + ["weights"] * (level == 2)
                await self._on_workers("slipstream_shrink", tags)
            if awake and level == 2:
                self._delivery.dropped()
            self._asleep = {"kv_cache": level, "weights": max(level, self._asleep.get("weights", 0))}
            return await self.memory()

    async def wake(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport:
        check_tags(tags)
        async with self._turn:
            check_not_dropped(self._name, tags, self._asleep)
            dropped = self._asleep.get("weights") == 2
            for tag in tuple(self._asleep) if tags is None else tags:
                if tag in self._asleep and not (tag == "weights" and dropped):
                    if self._on_gpu:
                        await self._on_workers("slipstream_wake", [tag])
                    elif tag == "kv_cache":
                        await self._on_workers("slipstream_grow", tag)
                    del self._asleep[tag]
            await self._go_on()
            return await self.memory()

    async def memory(self) -> MemoryReport:
        # Level 1 moves weights to host memory: on CPU, that is where they are anyway.
        gone = self._asleep.get("weights", 0) >= (1 if self._on_gpu else 2)
        weights = 0 if gone else self._delivery.num_bytes
        kv_cache = 0 if "kv_cache" in self._asleep else sum(worker["kv_cache"] for worker in self._workers)
        if self._on_gpu:
            in_use = sum(await self._on_workers("slipstream_in_use"))
        else:
            in_use = sum(_resident(worker["pid"]) for worker in self._workers)
        return MemoryReport(weights, kv_cache, in_use, tuple(sorted(self._asleep)))

    async def close(self) -> None:
        self.ended.set()
        self._runs.fail(EngineLost(f"engine {self._name!r} was closed before this was finished"))
        await asyncio.to_thread(self._llm.shutdown)
        self._delivery.close()

    # --- steps ---

    @contextlib.asynccontextmanager
    async def _still(self):  # type: ignore[no-untyped-def]
        """No step runs inside; afterwards they do, unless something else holds them."""
        await self._stop()
        try:
            yield
        finally:
            await self._go_on()

    async def _stop(self) -> None:
        if not self._is_still:
            await compat.stop_stepping(self._llm)
            self._is_still = True

    async def _go_on(self) -> None:
        if self._is_still and not (self._paused or self._asleep):
            await compat.go_on_stepping(self._llm)
            self._is_still = False

    async def _drawn(self) -> dict[str, int]:
        """Tokens of each running sample, between two steps."""
        found: dict[str, int] = (await self._on_workers("slipstream_drawn"))[0]
        return found

    async def _on_workers(self, method: str, *args: Any) -> list[Any]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            results: list[Any] = await self._llm.collective_rpc(method, timeout=LOAD_SECONDS, args=args)
            return results
        except EngineDeadError as error:
            raise self._failure(method, error) from None

    def _failure(self, doing: str, error: Exception) -> SlipstreamError:
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError):
            self.ended.set()
            return EngineLost(f"the vLLM of engine {self._name!r} died while {doing}: {error}")
        return EngineFailure(f"engine {self._name!r} failed {doing}: {type(error).__name__}: {error}")


def _resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
