"""The embedded JAX engine: the engine contract on top of the compute thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np

from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.assembly import (
    check_memory,
    keep_freed_memory,
    programs_for,
    shapes_for,
    split_draft,
    tensors_and_parameters,
)
from slipstream.engines.embedded.compute.adapter_slots import AdapterSlots
from slipstream.engines.embedded.compute.executor import Executor, Policy, StagedUpdate
from slipstream.engines.embedded.compute.placement import is_backed_by
from slipstream.engines.embedded.compute_thread import ComputeThread
from slipstream.engines.embedded.scheduling.scheduler import Scheduler
from slipstream.engines.frontend.checks import (
    check_adapters,
    check_in_flight,
    check_sleep,
    check_tags,
    half_written,
    not_staged,
    weights_asleep,
    weights_dropped,
)
from slipstream.engines.frontend.frontend import EngineFrontend
from slipstream.engines.frontend.request_parser import SequenceLimits, read_tokenizer
from slipstream.errors import (
    ConfigError,
    EngineLost,
    FleetChanged,
    MappingError,
    NotReady,
    UnknownVersion,
    Unsupported,
    UpdateInProgress,
)
from slipstream.model import families
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.checkpoints.hub import model_directory
from slipstream.model.config import ModelConfig
from slipstream.model.transformer.decoder import Params
from slipstream.model.tree import flatten
from slipstream.types import (
    Checksums,
    CommitReport,
    Destinations,
    EngineInfo,
    InFlight,
    MemoryReport,
    MemoryTag,
    Offer,
    Parameter,
    ParameterChecksums,
    StageReport,
)
from slipstream.weights import adapters as layouts
from slipstream.weights.transports.device import DEVICE_TRANSPORTS, LOCAL
from slipstream.weights.transports.host.tcp import ListenConfig
from slipstream.weights.transports.shared.host_memory import CUDA_NAME, NAME, is_shared
from slipstream.weights.update.adapter_inboxes import AdapterInboxes
from slipstream.weights.update.device_inbox import DeviceInbox
from slipstream.weights.update.publisher import DRAFT
from slipstream.weights.update.transfer import Inbox
from slipstream.weights.update.transport_choice import TRANSPORTS, is_quick
from slipstream.weights.update.verify import hash_parameters

log = logging.getLogger(__name__)

MAX_READS = 3
"""Attempts of `checksums` to read the weights without a commit in between."""

T = TypeVar("T")


class EmbeddedEngine(EngineFrontend):
    """Implements `engines.contract.EngineBackend`. `params` are copied; without them the engine waits for its first update.

    engine = EmbeddedEngine.from_directory("my-model", options=EmbeddedConfig(max_num_seqs=64))
    async for batch in engine.generate(requests): ...
    await engine.close()
    """

    def __init__(
        self,
        model: ModelConfig,
        params: Params | None,
        *,
        name: str = "engine",
        tokenizer: Any = None,
        options: EmbeddedConfig | None = None,
        version: int | None = None,
        draft: ModelConfig | None = None,
        draft_params: Params | None = None,
    ) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer`, needed only for prompts and completions as text. `version` is that of
        `params`, by default 0. `draft` and `draft_params` are the draft model of `speculation="draft"`."""
        if params is None and version is not None:
            raise ConfigError(f"version {version} was given without params: an engine without weights has no version")
        if version is not None and version < 0:
            raise ConfigError(f"version must be 0 or more, got {version}")
        options = _checked(options).resolve_dtype(model.dtype)
        self._options = options
        keep_freed_memory()
        shapes = shapes_for(model, options)
        programs = programs_for(model, options, shapes)
        draft_programs = None if draft is None else programs_for(draft, options.replace(record_routes=False), shapes)
        check_memory([programs, draft_programs] if draft_programs else [programs], options)
        self._placement = programs.placement
        self._draft_placement = draft_programs.placement if draft_programs else None
        self._tensors, self._parameters = tensors_and_parameters(model, draft, options.tensor_parallel_size)
        listen = ListenConfig(options.listen, options.certificate, options.key)
        self._host_inbox = Inbox(self._parameters, options.dtype, name, listen)
        self._device_inbox = DeviceInbox(
            self._parameters, options.dtype, name, self._placement.devices, self._placement.shardings
        )
        self._inbox: Inbox | DeviceInbox = self._host_inbox
        """The one that receives the current update, or received the last one."""
        self._is_small_update = False
        """The current update is too small to be worth a thread."""
        self._staged: StagedUpdate | None = None
        """A version that is staged and not committed."""
        self._offer = Offer(b"", "", "")
        """That of the current update."""
        self._slots = AdapterSlots(model, self._placement, options.adapters) if options.adapters else None
        self._adapter_inboxes = AdapterInboxes(self._tensors, self._parameters, options.dtype, name, listen)
        self._shared_memory = ""
        """The transport that names a trainer's shared memory, if the serving policy is in it."""
        self._sharing_lock = asyncio.Lock()
        """Serializes `begin` and `release`."""
        self._overwriting: int | None = None
        """The version that a trainer is writing over the serving one, in shared memory."""
        policy = None
        if params is not None:
            drafted = None
            if self._draft_placement is not None:
                if draft_params is None:
                    raise ConfigError(
                        "the policy has weights and the draft model came without weights: give both or neither"
                    )
                drafted = self._draft_placement.place(draft_params)
            policy = Policy(self._placement.place(params), version or 0, drafted)
        executor = Executor(programs, draft_programs, self._slots)
        scheduler = Scheduler(shapes, options.max_num_seqs, options.enable_prefix_caching)
        self._compute = ComputeThread(executor, scheduler, policy, name)
        limits = SequenceLimits(shapes.max_length, shapes.page_size, shapes.num_pages)
        super().__init__(name, model, tokenizer, limits, self._compute.add, self._compute.cancel)
        log.info(
            "engine %s: %d pages of %d tokens, at most %d programs (decode %s rows, prefill %s blocks of %d)",
            name, shapes.num_pages, shapes.page_size, shapes.num_programs, shapes.rows, shapes.blocks, shapes.block,
        )  # fmt: skip

    @classmethod
    def from_directory(
        cls, directory: str | Path, *, name: str = "engine", options: EmbeddedConfig | None = None
    ) -> EmbeddedEngine:
        """Create an engine from an HF directory: `config.json`, and `tokenizer.json` and weights if present."""
        directory, options = Path(directory), _checked(options)
        families.load_plugins(options.plugins)
        model, tokenizer = read_config(directory), read_tokenizer(directory)
        draft_directory = model_directory(options.draft_model)
        draft = read_config(draft_directory) if options.draft_model else None
        return cls(
            model,
            _weights(directory, model),
            name=name,
            tokenizer=tokenizer,
            options=options,
            draft=draft,
            draft_params=None if draft is None else _weights(draft_directory, draft),
        )

    def describe(self) -> EngineInfo:
        return self._info(
            kind="embedded",
            dtype=self._options.dtype,
            num_ranks=self._options.tensor_parallel_size,
            tensors=self._tensors,
            parameters=self._parameters,
            transports=(*TRANSPORTS, LOCAL, *self._device_transports, *self._shared_transports),
            max_num_seqs=self._options.max_num_seqs,
            version=self._compute.version,
            devices=self._options.device_names,
            adapters=None if self._slots is None else self._slots.support,
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        return () if self._slots is None else self._slots.names

    async def unload_adapter(self, name: str) -> None:
        await self._compute.unload_adapter(name)

    def _check_ready(self) -> None:
        if self._compute.version < 0:
            reason = self._compute.drop_reason
            raise NotReady(str(reason or f"engine {self._name!r} has no weights yet; sync a policy to it first"))

    # --- weights ---

    async def begin(self, version: int, offer: Offer) -> Destinations:
        async with self._sharing_lock:
            if is_shared(offer.transport):
                self._check_shared(offer)
            overwrites = offer.transport == self._shared_memory
            inbox = (
                self._inbox if self._inbox.is_updating else self._inbox_for(offer)
            )  # the one that is updating raises
            self._is_small_update = overwrites or (
                isinstance(inbox, Inbox) and is_quick(offer.transport, inbox.num_bytes)
            )
            destinations = await self._run(partial(inbox.begin, self._compute.version, version, offer))
            self._inbox, self._offer = inbox, offer
            if overwrites:
                self._overwriting = version
                await self._compute.hold()
            return destinations

    def _inbox_for(self, offer: Offer) -> Inbox | DeviceInbox:
        """Return the inbox with the layout of an update; one of its own for the base model together with adapters."""
        if not offer.adapters:
            return self._device_inbox if offer.transport in (*DEVICE_TRANSPORTS, LOCAL) else self._host_inbox
        check_adapters(self.describe(), offer, self.adapters)
        return self._adapter_inboxes.choose(offer)

    @functools.cached_property
    def _device_transports(self) -> tuple[str, ...]:
        """Transports from the GPU of another process."""
        has_driver = self._placement.platform == "gpu" and importlib.util.find_spec("cuda") is not None
        return ("cuda",) if has_driver else ()

    @property
    def _shared_transports(self) -> tuple[str, ...]:
        """Transports by which the engine can serve from a trainer's memory. Needs whole tensors, as a trainer's module has."""
        if self._options.tensor_parallel_size > 1 or self._draft_placement is not None:
            return ()
        return {"cpu": (NAME,), "gpu": (CUDA_NAME,)}.get(self._placement.platform, ())

    def _check_shared(self, offer: Offer) -> None:
        if offer.transport.partition(":")[0] not in self._shared_transports:
            raise Unsupported(
                f"engine {self._name!r} cannot serve from memory of this kind: an engine on CPU serves from host memory, one "
                "on a GPU from memory of that GPU, both with tensor_parallel_size=1 and without a draft model (here: "
                f"{self._placement.platform}, tensor_parallel_size={self._options.tensor_parallel_size}, "
                f"{'with' if self._draft_placement else 'without'} a draft model)"
            )
        policy, addresses = self._compute.policy, self._host_inbox.addresses()
        is_served = (
            offer.transport == self._shared_memory and policy is not None and is_backed_by(policy.params, addresses)
        )
        if not offer.fresh and not is_served:
            raise FleetChanged(f"engine {self._name!r} does not serve from the memory that the trainer shares")

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        def receive() -> tuple[StagedUpdate, StageReport]:
            received, report = self._inbox.receive(version, manifests)
            arrays = cast("Mapping[str, Sequence[np.ndarray | jax.Array]]", received)
            if arrays and is_shared(self._offer.transport):
                shared = Policy(self._placement.adopt(self._host_inbox.foreign(arrays)), version)
                return StagedUpdate(version, shared), report
            base, brought = layouts.split(arrays, self._offer.adapters)
            adapters = [
                self._slots.prepare(lora, np.asarray(packed))
                for lora, (packed,) in brought.items()
                if self._slots is not None
            ]
            policy = None if self._offer.only_adapters else self._assemble(base, version)
            return StagedUpdate(version, policy, adapters), report

        staged, report = await self._run(receive)
        self._inbox.check(version)  # raises if the version was rolled back meanwhile
        self._staged = staged
        return report

    def _assemble(self, arrays: Mapping[str, Sequence[np.ndarray | jax.Array]], version: int) -> Policy:
        """Build a policy from the received arrays and, for the other tensors, the serving policy. If that is in memory that a
        trainer may write to, every tensor must be received."""
        serving = self._compute.policy
        if serving is not None and self._shared_memory not in ("", self._offer.transport):
            serving = serving._replace(params=None)
        policy, draft = split_draft(arrays)
        try:
            params = self._placement.assemble(policy, serving.params if serving else None)
            if self._draft_placement is None:
                return Policy(params, version)
            return Policy(params, version, self._draft_placement.assemble(draft, serving.draft if serving else None))
        except MappingError as error:
            if serving is None or serving.params is not None:
                raise
            shared, dropped = "serves from memory that a trainer shares", "has dropped its weights (sleep level 2)"
            reason = shared if self._shared_memory else dropped
            raise FleetChanged(f"engine {self._name!r} {reason} and needs every tensor: {error}") from None

    async def _run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, unless starting one would take longer than the work."""
        return work() if self._is_small_update else await asyncio.to_thread(work)

    async def commit(self, version: int, in_flight: InFlight = "keep") -> CommitReport:
        check_in_flight(in_flight)
        report = CommitReport(0.0, 0.0)
        if version != self._compute.version:
            if self._staged is None or self._staged.version != version:
                raise not_staged(self._name, version)
            report = await self._compute.swap(self._staged, in_flight)
            if self._staged.policy is not None:
                self._use_base()
        self._drop_staged(version)
        with contextlib.suppress(UnknownVersion):  # committed before, or ended by a rollback that came too late
            self._inbox.finish(version)
            self._adapter_inboxes.close_passing()
        return report

    def _use_base(self) -> None:
        """Note where the base model is that was just committed."""
        transport = self._offer.transport
        self._shared_memory, self._overwriting = transport if is_shared(transport) else "", None
        if self._shared_memory or self._inbox is not self._host_inbox:
            self._placement.release_buffers()
        # What the other inboxes have received is not in use any longer.
        for inbox in (self._device_inbox, self._host_inbox):
            if inbox is not self._inbox:
                inbox.release()

    async def rollback(self, version: int) -> None:
        with contextlib.suppress(EngineLost):
            await self._compute.cancel_swap(version)
            if self._overwriting == version:
                await self._compute.drop_policy(half_written(self._name, version))
                self._shared_memory, self._overwriting = "", None
        self._drop_staged(version)
        self._inbox.rollback(version)

    async def release(self) -> None:
        """Copy the policy out of memory that the trainer shares, since a disconnected trainer may still write to it. Receive
        buffers are kept: the serving weights are in them."""
        async with self._sharing_lock:
            if self._shared_memory and self._overwriting is None:
                with contextlib.suppress(EngineLost):
                    await self._compute.copy_policy()
                self._shared_memory = ""
                self._host_inbox.release()

    def _drop_staged(self, version: int) -> None:
        if self._staged is not None and self._staged.version == version:
            self._staged = None

    async def checksums(self) -> Checksums:
        """Read and hash in a thread while steps run. The memory of a replaced version is reused by a later update, so the
        result is valid only if the same version still serves afterwards."""
        for _ in range(MAX_READS):
            self._check_ready()
            policy = self._compute.policy
            assert policy is not None
            if policy.params is None:
                raise weights_dropped(self._name)
            if "weights" in self._compute.memory().asleep:
                raise weights_asleep(self._name)
            if self._overwriting is None:
                checksums = await asyncio.to_thread(self._hash, policy)
                if self._compute.policy is policy and self._overwriting is None:
                    return Checksums(policy.version, checksums)
        raise UpdateInProgress(
            f"engine {self._name!r}: a new version was committed during each of {MAX_READS} attempts to read the weights; "
            "retry between two syncs"
        )

    def _hash(self, policy: Policy) -> tuple[ParameterChecksums, ...]:
        assert policy.params is not None
        leaves = flatten(policy.params)
        if policy.draft is not None:
            leaves |= {DRAFT + name: leaf for name, leaf in flatten(policy.draft).items()}

        def local(parameter: Parameter) -> np.ndarray:
            return self._placement.shard(leaves[parameter.name], parameter.rank)

        return hash_parameters(self._parameters, local)

    # --- control ---

    async def pause(self) -> None:
        await self._compute.pause(True)

    async def resume(self) -> None:
        await self._compute.pause(False)

    async def reset_prefix_cache(self) -> None:
        await self._compute.reset_prefix_cache()

    async def sleep(self, level: int = 1) -> MemoryReport:
        check_sleep(self._name, level, self._inbox.is_updating)
        return await self._compute.sleep(level)

    async def wake(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport:
        check_tags(tags)
        return await self._compute.wake(tags)

    async def memory(self) -> MemoryReport:
        return self._compute.memory()

    def stats(self) -> dict[str, Any]:
        """Counters since the start: tokens, prefix-cache hits, preemptions, seconds by phase, compiled programs."""
        return self._compute.stats()

    async def close(self) -> None:
        await asyncio.to_thread(self._compute.close)
        for inbox in (self._host_inbox, self._device_inbox, self._adapter_inboxes):
            inbox.close()


def _checked(options: EmbeddedConfig | None) -> EmbeddedConfig:
    if not isinstance(options, EmbeddedConfig | None):
        raise ConfigError(
            f"an engine in this process needs an EmbeddedConfig, got {type(options).__name__}; other backends run in their own "
            "process: slipstream.launch(engine=...)"
        )
    return options or EmbeddedConfig()


def _weights(directory: Path, model: ModelConfig) -> Params | None:
    if not hf_weights.has_weights(directory):
        return None
    return hf_weights.unflatten(hf_weights.read_arrays(directory, model))
