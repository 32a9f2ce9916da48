"""vLLM behind the engine contract. This process hosts vLLM's asynchronous engine; our `WorkerExtension` runs in its workers.

    this process        VllmEngine ── AsyncLLM                   requests, versions, shared memory for weights
    vLLM's processes    EngineCore ── workers (WorkerExtension)  steps; between two of them: token counts, new weights

A version is swapped in between two steps. At that moment the workers report how many tokens each request has drawn, so version
spans are exact. The prefix cache is keyed by version: entries of an older version never match."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.config import VllmConfig
from slipstream.engines.frontend.checks import (
    check_in_flight,
    check_sleep,
    check_tags,
    half_written,
    unloaded_adapter,
    weights_asleep,
)
from slipstream.engines.frontend.frontend import EngineFrontend
from slipstream.engines.frontend.request_parser import SequenceLimits, read_tokenizer
from slipstream.engines.frontend.step_control import StepControl
from slipstream.engines.vllm import compat
from slipstream.engines.vllm.adapters import VllmAdapters
from slipstream.engines.vllm.direct_loader import DirectLoader, last_line
from slipstream.engines.vllm.engine_args import make_llm
from slipstream.engines.vllm.in_place import InPlaceUpdates
from slipstream.engines.vllm.reload_loader import ReloadLoader
from slipstream.engines.vllm.samples import VllmSampleTasks
from slipstream.engines.vllm.weight_loading import WORKER_WAIT_SECONDS, WeightsPending
from slipstream.engines.vllm.worker_memory import WorkerMemory
from slipstream.errors import (
    ConfigError,
    EngineFailure,
    EngineLost,
    NotReady,
    SlipstreamError,
    UnknownVersion,
    Unsupported,
    UpdateInProgress,
)
from slipstream.model import families
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.checkpoints.hub import model_directory
from slipstream.model.checkpoints.served_model import ServedModel, served_model
from slipstream.model.families.vllm_parameters import has_layout, vllm_parameters, written_parameters
from slipstream.model.lora import adapter_support
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
    TensorSpec,
)
from slipstream.vllm_arguments import not_held
from slipstream.weights.transports.shared.host_memory import ENGINE_NAME
from slipstream.weights.update.publisher import DRAFT

log = logging.getLogger(__name__)

WORKER_CALL_SECONDS = 600.0
"""Timeout of a call to the workers."""

PENDING_SECONDS = 30.0
"""A commit may arrive before its weights; wait at most this long."""


class VllmEngine(EngineFrontend):
    """See `engines.contract.EngineBackend`.

    engine = await VllmEngine.start("my-model", options=VllmConfig())
    """

    def __init__(self, model: ServedModel, llm: Any, *, name: str, tokenizer: Any, options: VllmConfig) -> None:
        self._served, self._llm, self._options, self._on_gpu = model, llm, options, not compat.is_cpu()
        support = adapter_support(options.adapters, model.tensors) if options.adapters else None
        self._adapters = VllmAdapters(name, support, options.dtype, self._call_workers)
        self._samples = VllmSampleTasks(llm, self._failure, options.max_num_seqs, self._adapters)
        length, cache = int(llm.vllm_config.model_config.max_model_len), llm.vllm_config.cache_config
        limits = SequenceLimits(length, int(cache.block_size), int(cache.num_gpu_blocks))
        super().__init__(name, model, tokenizer, limits, self._samples.start, self._samples.cancel)
        self._loader: ReloadLoader | DirectLoader
        self._memory: WorkerMemory
        self._in_place = InPlaceUpdates(name, self._call_workers)
        self._changed: tuple[str, ...] | None = None
        """The adapters that the present update changes, or the last did; None if it changes the base model."""
        self._steps = StepControl(
            name,
            lambda: compat.stop_stepping(llm),
            lambda: llm.resume_generation(),
            may_start=lambda: self._in_place.version < 0,
        )
        self.ended = asyncio.Event()
        """Set when vLLM is gone and this process should exit."""

    @classmethod
    async def start(
        cls, directory: str | Path, *, name: str = "engine", options: VllmConfig | None = None
    ) -> VllmEngine:
        """Start vLLM on an HF directory with a `config.json` and, if present, `tokenizer.json` and weights."""
        directory, options = Path(directory), options or VllmConfig()
        families.load_plugins(options.plugins)
        model, tokenizer = served_model(directory), read_tokenizer(directory)
        options = options.resolve_dtype(model.dtype)
        has_weights = any(directory.glob("*.safetensors"))
        draft = _draft_tensors(options)
        os.environ[compat.OWNER_VARIABLE] = str(os.getpid())
        llm = make_llm(directory, model, options, has_weights)
        vocab_size = int(llm.vllm_config.model_config.get_vocab_size())
        model = replace(model, vocab_size=vocab_size, tensors=model.tensors + draft)
        engine = cls(model, llm, name=name, tokenizer=tokenizer, options=options)
        engine._samples.version = 0 if has_weights else -1
        specs = [(t.name, list(t.shape)) for t in model.tensors]
        workers = await engine._call_workers("slipstream_install", specs)
        await engine._adapters.install()
        engine._memory = WorkerMemory(engine._call_workers, engine._on_gpu, workers)
        engine._loader = await engine._make_loader(has_weights)
        return engine

    async def _make_loader(self, has_weights: bool) -> ReloadLoader | DirectLoader:
        model, dtype, call = self._served, self._options.dtype, self._call_workers
        if not self._on_gpu:
            return ReloadLoader(self._name, model.tensors, dtype, call, has_weights, self._adapters)
        vllm, failed = self._llm.vllm_config, dict[str, str]()
        parallel = vllm.parallel_config
        tp, pp = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
        shared = (dtype, tp * pp, call, has_weights, self._adapters)
        if model.config is None or not has_layout(model.config) or vllm.quant_config is not None:
            if self._options.draft_model:
                raise ConfigError(
                    f"engine {self._name!r}: on a GPU, a draft model needs a policy whose layout in vLLM is known; this one "
                    f"({model.kind}) goes through vLLM's loader"
                )
            why = f"quantizes them ({vllm.model_config.quantization})" if vllm.quant_config else "has its own layout"
            log.info("engine %s: weights go through vLLM's loader, as vLLM %s", self._name, why)
            whole, names = families.whole_parameters(model.tensors, tp * pp), {t.name for t in model.tensors}
            return DirectLoader(self._name, model.tensors, whole, names, None, *shared)
        for answer in await call("slipstream_check_mapping", str(vllm.model_config.model), has_weights):
            failed |= answer
        for parameter, reason in failed.items():
            if parameter.startswith(DRAFT):
                raise ConfigError(f"engine {self._name!r}: updates cannot write {parameter} in vLLM: {reason}")
            log.warning("engine %s: %s is loaded by vLLM, not written directly: %s", self._name, parameter, reason)
        parameters, reloaded = written_parameters(model.config, tp, failed, pp, bool(parallel.enable_expert_parallel))
        if self._options.draft_model:
            draft = vllm_parameters(read_config(model_directory(self._options.draft_model)), tp)
            parameters += families.prefixed(draft, DRAFT)
        return DirectLoader(self._name, model.tensors, parameters, reloaded, failed, *shared)

    def describe(self) -> EngineInfo:
        return self._info(
            kind="vllm",
            dtype=self._options.dtype,
            num_ranks=self._loader.num_ranks,
            tensors=self._served.tensors,
            parameters=self._loader.parameters,
            transports=(*self._loader.transports, *([ENGINE_NAME] if self._can_share else [])),
            takes_all=self._loader.takes_all,
            max_num_seqs=self._options.max_num_seqs,
            version=self._samples.version,
            devices=self._options.device_names,
            not_held=not_held(self._options.vllm),
            adapters=self._adapters.support,
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._adapters.names

    async def unload_adapter(self, name: str) -> None:
        self._adapters.unload(name)
        self._samples.fail_all(unloaded_adapter(self._name, name), of=lambda request: request.adapter == name)

    @property
    def _can_share(self) -> bool:
        """Whether a trainer can write the live parameters: they are all our own, and in memory that can be exported."""
        return self._options.share_weights and isinstance(self._loader, DirectLoader) and self._loader.writes_all

    def _check_ready(self) -> None:
        if self.ended.is_set():
            raise EngineLost(f"engine {self._name!r} is closed, or its vLLM has died")
        if self._samples.version < 0:
            raise NotReady(f"engine {self._name!r} has no weights yet; sync a policy to it first")

    # --- weights ---

    async def begin(self, version: int, offer: Offer) -> Destinations:
        if offer.adapters:
            self._adapters.check(self.describe(), offer, self._steps.asleep.get("weights", 0))
        if offer.transport == ENGINE_NAME:
            if not self._can_share:
                raise Unsupported(
                    f"engine {self._name!r} cannot share its weights; start it with VllmConfig(share_weights=True) on a GPU"
                )
            if self._loader.is_updating:
                raise UpdateInProgress(f"engine {self._name!r} is receiving another update; retry when it has ended")
            destinations = await self._in_place.begin(self._steps, self._samples.version, version)
            self._changed = None
            return destinations
        destinations = await self._loader.begin(self._samples.version, version, offer)
        self._changed = tuple(lora.name for lora in offer.adapters) if offer.only_adapters else None
        return destinations

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        if version == self._in_place.version:
            return StageReport(0, 0.0)
        return await self._loader.stage(version, manifests)

    async def commit(self, version: int, in_flight: InFlight = "keep") -> CommitReport:
        check_in_flight(in_flight)
        report = CommitReport(0.0, 0.0)
        if version == self._in_place.version:
            return await asyncio.shield(asyncio.create_task(self._commit_in_place(version, in_flight)))
        if version != self._samples.version:
            self._loader.check_staged(version)
            if in_flight == "recompute" and self._changed is not None:
                raise Unsupported(
                    f'engine {self._name!r} cannot commit an adapter with in_flight="recompute": vLLM computes the KV cache of '
                    'all requests again, or of none. Use "keep", "requeue" or "finish"'
                )
            if in_flight == "finish":
                self._steps.check_can_finish(self._samples.running)
                self._samples.gate.clear()
            try:
                if in_flight == "finish":
                    await self._finish_running(version)
                # Shielded from cancellation: otherwise the workers and our version might disagree.
                report = await asyncio.shield(asyncio.create_task(self._swap(version, in_flight)))
            finally:
                self._samples.gate.set()
        with contextlib.suppress(UnknownVersion):  # committed before, or ended by a late rollback
            self._loader.finish(version)
        return report

    async def _finish_running(self, version: int) -> None:
        """Wait for the samples that have drawn a token. The others go back behind the gate and start under the new
        version."""
        async with self._steps.lock, self._steps.stopped():
            counts: dict[str, int] = (await self._call_workers("slipstream_drawn"))[-1][0]
            for attempt in self._samples.running:
                if not counts.get(attempt.id):
                    attempt.interrupt()
        await self._samples.drain(lambda: self._loader.check_staged(version))  # raises after a rollback

    async def _swap(self, version: int, in_flight: InFlight) -> CommitReport:
        """Load the version, retrying while its weights are in transit. vLLM steps between two tries."""
        start, stopped_seconds = time.perf_counter(), 0.0
        while True:
            try:
                report = await self._try_swap(version, in_flight, start)
                return replace(report, pause_seconds=report.pause_seconds + stopped_seconds)
            except WeightsPending as pending:
                stopped_seconds += pending.seconds
                if time.perf_counter() > start + PENDING_SECONDS:
                    raise self._failure(f"loading version {version}", pending) from None
            await asyncio.sleep(WORKER_WAIT_SECONDS)

    async def _try_swap(self, version: int, in_flight: InFlight, start: float) -> CommitReport:
        # vLLM makes every call to its workers between two steps. If one call does it all, and nothing is left to do before
        # the next step, stepping is not stopped.
        stops = not self._loader.is_single_call or in_flight == "recompute"
        async with self._steps.lock, self._steps.stopped() if stops else self._samples.outputs_held():
            boundary, has_draws = time.perf_counter(), self._has_draws
            self._loader.check_staged(version)
            try:
                if "weights" in self._steps.asleep:  # their memory must exist to be written
                    await self._memory.wake("weights")
                (counts, rate), seconds = await self._loader.load(version)
            except WeightsPending:
                raise
            except Exception as error:
                await self._restore()
                raise self._failure(f"loading version {version}", error) from error
            self._steps.asleep.pop("weights", None)
            redrawn = await self._serve(version, in_flight, counts)
            swapped = time.perf_counter()
        lost = rate if has_draws else 0.0, redrawn
        if stops:
            return CommitReport(swapped - boundary, boundary - start, seconds, *lost)
        return CommitReport(seconds, swapped - start - seconds, seconds, *lost)

    @property
    def _has_draws(self) -> bool:
        """Whether a commit keeps requests from drawing tokens."""
        is_off = self._steps.is_paused or self._steps.asleep
        return not is_off and any(not attempt.sample.request.is_scoring for attempt in self._samples.running)

    async def _serve(self, version: int, in_flight: InFlight, counts: Mapping[str, int]) -> int:
        """Note that the next step uses this version. `counts` are the tokens that each sample has drawn. Return how many will
        be drawn again."""
        redrawn = 0
        self._samples.set_version(version, self._changed)
        for attempt in self._samples.running:
            count, request = counts.get(attempt.id, 0), attempt.sample.request
            is_changed = self._changed is None or request.adapter in self._changed
            if is_changed and (in_flight == "requeue" or request.is_scoring or not count):
                attempt.interrupt()
                redrawn += count
            else:
                attempt.versions.append((version, count))
        if in_flight == "recompute":
            await self._llm.reset_prefix_cache(reset_running_requests=True)
        return redrawn

    async def _commit_in_place(self, version: int, in_flight: InFlight) -> CommitReport:
        async with self._steps.lock:
            ((counts, rate),) = await self._call_workers("slipstream_drawn")
            has_draws = self._has_draws
            assert isinstance(self._loader, DirectLoader)
            self._loader.weights_written()
            redrawn = await self._serve(version, in_flight, counts)
            pause = await self._in_place.end(self._steps)
            return CommitReport(pause, 0.0, 0.0, rate if has_draws else 0.0, redrawn)

    async def _restore(self) -> None:
        try:
            await self._loader.restore()
        except Exception:
            self.ended.set()  # neither version can be served
            raise

    async def rollback(self, version: int) -> None:
        if version != self._in_place.version:
            return await self._loader.rollback(version)
        self._samples.version = -1
        self._loader.weights_dropped()
        self._samples.fail_all(half_written(self._name, version))
        async with self._steps.lock:
            await self._in_place.end(self._steps)

    async def release(self) -> None:
        await self._loader.release()

    async def checksums(self) -> Checksums:
        self._check_ready()
        async with self._steps.lock:  # no version is swapped in meanwhile; steps run between calls to the workers
            if "weights" in self._steps.asleep:
                raise weights_asleep(self._name)
            return Checksums(self._samples.version, await self._loader.checksums())

    # --- control ---

    async def pause(self) -> None:
        await self._steps.pause()

    async def resume(self) -> None:
        await self._steps.resume()

    async def reset_prefix_cache(self) -> None:
        async with self._steps.lock:
            await self._llm.reset_prefix_cache(reset_running_requests=True)

    async def sleep(self, level: int = 1) -> MemoryReport:
        check_sleep(self._name, level, self._loader.is_updating or self._in_place.version >= 0)
        if level == 2 and self._options.draft_model:
            raise Unsupported(
                f"engine {self._name!r} cannot sleep at level 2: it would lose its draft model; use level 1"
            )
        if self._options.share_weights and self._on_gpu:
            raise Unsupported(
                f"engine {self._name!r} cannot sleep: with share_weights=True its weights stay where a trainer may map them"
            )
        async with self._steps.lock:
            asleep = self._steps.asleep
            await self._steps.stop()
            if "kv_cache" not in asleep:
                await self._llm.reset_prefix_cache(reset_running_requests=True)
            await self._memory.sleep(level, asleep)
            if level == 2:
                self._loader.weights_dropped()
            self._steps.asleep = {"kv_cache": level, "weights": max(level, asleep.get("weights", 0))}
            return await self.memory()

    async def wake(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport:
        check_tags(tags)
        async with self._steps.lock:
            for tag in self._steps.asleep_among(tags):
                await self._memory.wake(tag)
                del self._steps.asleep[tag]
            await self._steps.start()
            return await self.memory()

    async def memory(self) -> MemoryReport:
        return await self._memory.report(self._loader.num_bytes, self._steps.asleep)

    async def close(self) -> None:
        self.ended.set()
        self._samples.fail_all(EngineLost(f"engine {self._name!r} was closed before the request finished"))
        await asyncio.to_thread(self._llm.shutdown)
        self._loader.close()

    # --- vLLM's workers ---

    async def _call_workers(self, method: str, *args: Any) -> list[Any]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            results: list[Any] = await self._llm.collective_rpc(method, timeout=WORKER_CALL_SECONDS, args=args)
            return results
        except EngineDeadError as error:
            raise self._failure(method, error) from None

    def _failure(self, doing: str, error: Exception) -> SlipstreamError:
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError):
            self.ended.set()
            return EngineLost(f"the vLLM of engine {self._name!r} died while {doing}: {error}")
        log.error("engine %s failed %s", self._name, doing, exc_info=error)
        return EngineFailure(f"engine {self._name!r} failed {doing}: {type(error).__name__}: {last_line(error)}")


def _draft_tensors(options: VllmConfig) -> tuple[TensorSpec, ...]:
    """The tensors of the draft model, as updates bring them; none without one. Raise `ConfigError` if it has no weights."""
    if not options.draft_model:
        return ()
    directory = model_directory(options.draft_model)
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"the draft model {options.draft_model!r} of vllm.speculative_config has no weights (safetensors)"
        )
    return tuple(replace(tensor, name=DRAFT + tensor.name) for tensor in served_model(directory).tensors)
