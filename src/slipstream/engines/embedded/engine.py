"""The embedded JAX engine: the asynchronous face of the compute thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from slipstream.config import EngineConfig
from slipstream.engines.checks import (
    check_in_flight,
    check_sleep,
    check_tags,
    half_written,
    not_staged,
    weights_asleep,
    weights_dropped,
)
from slipstream.engines.desk import Desk
from slipstream.engines.embedded.executor import Executor, Policy
from slipstream.engines.embedded.placement import lies_at
from slipstream.engines.embedded.scheduler import Scheduler
from slipstream.engines.embedded.setup import (
    check_draft,
    draft_parameters,
    draft_tensors,
    keep_freed_memory,
    programs_for,
    shapes_for,
    split_draft,
)
from slipstream.engines.embedded.worker import Worker
from slipstream.engines.intake import Intake, Room, read_tokenizer
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
from slipstream.model import checkpoint
from slipstream.model.config import ModelConfig
from slipstream.model.decoder import Params
from slipstream.model.tree import flatten
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
    Parameter,
    ParameterChecksums,
    Progress,
    Request,
    Score,
    StageReport,
)
from slipstream.weights import families
from slipstream.weights.image import num_bytes
from slipstream.weights.publisher import DRAFT
from slipstream.weights.transfer import Inbox
from slipstream.weights.transports import TRANSPORTS, host_identity, is_quick
from slipstream.weights.transports.shared import CUDA_NAME, NAME, is_shared
from slipstream.weights.transports.tcp import Listen
from slipstream.weights.verify import hash_parameters

log = logging.getLogger(__name__)

MAX_READS = 3
"""Times that `checksums` begins anew because a version was committed meanwhile."""

T = TypeVar("T")


class EmbeddedEngine:
    """See `engines.base.Engine`. `params` are copied; without them the engine waits for its first update.

    engine = EmbeddedEngine.from_directory("my-model", options=EngineConfig(max_concurrency=64))
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
        options: EngineConfig | None = None,
        version: int | None = None,
        draft: ModelConfig | None = None,
        draft_params: Params | None = None,
    ) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer`, needed for prompts and completions as text only. `version` is the
        version of `params`, 0 unless given. `draft` and its weights are for `speculation="draft"`."""
        if params is None and version is not None:
            raise ConfigError(f"version {version} was given without params: an engine without weights has no version")
        if version is not None and version < 0:
            raise ConfigError(f"version must be 0 or more, got {version}")
        options = options or EngineConfig()
        if options.kind != "embedded":
            raise ConfigError(
                f"an engine of kind {options.kind!r} is a process of its own; start it with slipstream.launch(engine=…)"
            )
        self._model, self._name, self._options = model, name, options
        self._draft = draft
        keep_freed_memory()
        shapes = shapes_for(model, options)
        programs = programs_for(model, options, shapes)
        drafts = None if draft is None else programs_for(draft, options, shapes)
        self._placement, self._draft_placement = programs.placement, drafts.placement if drafts else None
        self._shapes = shapes
        self._tensors, self._parameters = families.tensors(model), families.parameters(model, options.tp)
        if draft is not None:
            check_draft(model, draft)
            self._tensors += draft_tensors(draft)
            self._parameters += draft_parameters(draft, options.tp)
        listen = Listen(options.listen, options.certificate, options.key)
        self._inbox = Inbox(self._parameters, options.dtype, name, listen)
        self._num_bytes = num_bytes(self._parameters, options.dtype)
        self._quick = False
        """The update under way is too small for a thread to be worth it."""
        self._shadow: Policy | None = None
        """A version that is staged and not committed."""
        self._offered = self._memory = ""
        """Transport of the update under way; memory that a trainer shares, as an offer names it, if the policy lies there."""
        self._letting_go = asyncio.Lock()
        self._rewritten: int | None = None
        """The version that a trainer is writing into the memory that serves."""
        policy = None
        if params is not None:
            drafted = None
            if self._draft_placement is not None:
                if draft_params is None:
                    raise ConfigError(
                        "the draft model came without weights, and the policy with: give both, or neither"
                    )
                drafted = self._draft_placement.place(draft_params)
            policy = Policy(self._placement.place(params), version or 0, drafted)
        executor = Executor(programs, drafts, shapes.guesses)
        scheduler = Scheduler(shapes, options.max_concurrency, options.prefix_cache)
        self._worker = Worker(executor, scheduler, policy, name)
        intake = Intake(model, tokenizer, Room(shapes.max_length, shapes.page_size, shapes.num_pages), name)
        self._desk = Desk(intake, self._worker.add, self._worker.cancel, self._check_ready)
        log.info(
            "engine %s: %d pages of %d tokens, at most %d programs (decode %s rows, prefill %s blocks of %d)",
            name, shapes.num_pages, shapes.page_size, shapes.num_programs, shapes.rows, shapes.blocks, shapes.block,
        )  # fmt: skip

    @classmethod
    def from_directory(
        cls, directory: str | Path, *, name: str = "engine", options: EngineConfig | None = None
    ) -> EmbeddedEngine:
        """From an HF directory: `config.json`, and `tokenizer.json` and weights where they are there."""
        directory, options = Path(directory), options or EngineConfig()
        model, tokenizer = ModelConfig.read(directory), read_tokenizer(directory)
        draft = ModelConfig.read(options.draft_model) if options.draft_model else None
        return cls(
            model,
            _weights(directory, model),
            name=name,
            tokenizer=tokenizer,
            options=options,
            draft=draft,
            draft_params=None if draft is None else _weights(Path(options.draft_model), draft),
        )

    def describe(self) -> EngineInfo:
        return EngineInfo(
            name=self._name,
            kind="embedded",
            model=self._model.fingerprint(),
            dtype=self._options.dtype,
            num_ranks=self._options.tp,
            tensors=self._tensors,
            parameters=self._parameters,
            transports=(*TRANSPORTS, *self._shares),
            host=host_identity(),
            max_model_len=self._shapes.max_length,
            max_concurrency=self._options.max_concurrency,
            version=self._worker.version,
            pid=os.getpid(),
        )

    # --- rollouts ---

    def generate(self, requests: Sequence[Request]) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        return self._desk.generate(requests)

    async def score(self, sequences: Sequence[Sequence[int]], top_k: int = 0) -> list[Score]:
        return await self._desk.score(sequences, top_k)

    def _check_ready(self) -> None:
        if self._worker.version < 0:
            dropped = self._worker.dropped
            raise NotReady(str(dropped or f"engine {self._name!r} has no weights yet; sync a policy to it first"))

    # --- weights ---

    async def begin(self, version: int, offer: Offer) -> Berths:
        async with self._letting_go:
            if is_shared(offer.transport):
                self._check_share(offer)
            rewrites = offer.transport == self._memory
            self._quick = rewrites or is_quick(offer.transport, self._num_bytes)
            berths = await self._do(partial(self._inbox.begin, self._worker.version, version, offer))
            self._offered = offer.transport
            if rewrites:
                self._rewritten = version
                await asyncio.wrap_future(self._worker.hold())
            return berths

    @property
    def _shares(self) -> tuple[str, ...]:
        """How its arrays can be a trainer's memory. Only whole tensors are what a trainer's module has."""
        if self._options.tp > 1 or self._draft is not None:
            return ()
        return {"cpu": (NAME,), "gpu": (CUDA_NAME,)}.get(self._placement.platform, ())

    def _check_share(self, offer: Offer) -> None:
        if offer.transport.partition(":")[0] not in self._shares:
            raise Unsupported(
                f"engine {self._name!r} cannot serve from memory of this kind: it takes the host's on CPU, and a GPU's on "
                f"that GPU, with tp=1 and without a draft model (here: {self._placement.platform}, tp={self._options.tp}"
                f"{', with one' if self._draft else ''})"
            )
        policy, places = self._worker.policy, self._inbox.addresses()
        served = offer.transport == self._memory and policy is not None and lies_at(policy.params, places)
        if not offer.fresh and not served:
            raise FleetChanged(f"engine {self._name!r} does not serve from the memory that the trainer shares")

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        def receive() -> tuple[Policy, StageReport]:
            arrays, report = self._inbox.receive(version, manifests)
            if arrays and is_shared(self._offered):
                return Policy(self._placement.adopt(self._inbox.foreign(arrays)), version), report
            return self._assemble(arrays, version), report

        policy, report = await self._do(receive)
        self._inbox.check(version)  # a rollback may have come meanwhile
        self._shadow = policy
        return report

    def _assemble(self, arrays: Mapping[str, Sequence[np.ndarray]], version: int) -> Policy:
        """A policy of what came; what did not come is that of the policy that serves. (Unless that lies in memory that a
        trainer may write to: who takes its place must bring everything.)"""
        serving = self._worker.policy
        if serving is not None and self._memory not in ("", self._offered):
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
            why = shared if self._memory else dropped
            raise FleetChanged(f"engine {self._name!r} {why} and needs every tensor: {error}") from None

    async def _do(self, work: Callable[[], T]) -> T:
        """In a thread, unless that would take longer than the work."""
        return work() if self._quick else await asyncio.to_thread(work)

    async def commit(self, version: int, in_flight: InFlight = "keep") -> CommitReport:
        check_in_flight(in_flight)
        report = CommitReport(0.0, 0.0)
        if version != self._worker.version:
            if self._shadow is None or self._shadow.version != version:
                raise not_staged(self._name, version)
            report = await asyncio.wrap_future(self._worker.swap(self._shadow, in_flight))
            self._memory, self._rewritten = self._offered if is_shared(self._offered) else "", None
            if self._memory:
                self._placement.leave_landings()
        self._drop_shadow(version)
        with contextlib.suppress(UnknownVersion):  # committed before, or a rollback came too late and ended it
            self._inbox.finish(version)
        return report

    async def rollback(self, version: int) -> None:
        with contextlib.suppress(EngineLost):
            await asyncio.wrap_future(self._worker.forget_swap(version))
            if self._rewritten == version:
                await asyncio.wrap_future(self._worker.drop_policy(half_written(self._name, version)))
                self._memory, self._rewritten = "", None
        self._drop_shadow(version)
        self._inbox.rollback(version)

    async def release(self) -> None:
        """What landed is what serves, and the next trainer brings landings of its own. Only memory that the trainer shares is
        not ours to keep: should it live on without us, it may do with it what it likes."""
        async with self._letting_go:
            if self._memory and self._rewritten is None:
                with contextlib.suppress(EngineLost):
                    await asyncio.wrap_future(self._worker.copy_policy())
                self._memory = ""
                self._inbox.leave()

    def _drop_shadow(self, version: int) -> None:
        if self._shadow is not None and self._shadow.version == version:
            self._shadow = None

    async def checksums(self) -> Checksums:
        """In a thread, while steps run. Memory that a version left is written to by the one after the next, so what was read
        counts only if the same version still serves."""
        for _ in range(MAX_READS):
            self._check_ready()
            policy = self._worker.policy
            assert policy is not None
            if policy.params is None:
                raise weights_dropped(self._name)
            if "weights" in self._worker.memory().asleep:
                raise weights_asleep(self._name)
            if self._rewritten is None:
                found = await asyncio.to_thread(self._hash, policy)
                if self._worker.policy is policy and self._rewritten is None:
                    return Checksums(policy.version, found)
        raise UpdateInProgress(
            f"engine {self._name!r}: a version came during each of {MAX_READS} attempts to read the weights; ask between two "
            "syncs"
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
        await asyncio.wrap_future(self._worker.pause(True))

    async def resume(self) -> None:
        await asyncio.wrap_future(self._worker.pause(False))

    async def forget_prefixes(self) -> None:
        await asyncio.wrap_future(self._worker.forget_prefixes())

    async def sleep(self, level: int = 1) -> MemoryReport:
        check_sleep(self._name, level, self._inbox.is_updating)
        return await asyncio.wrap_future(self._worker.sleep(level))

    async def wake(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport:
        check_tags(tags)
        return await asyncio.wrap_future(self._worker.wake(tags))

    async def memory(self) -> MemoryReport:
        return self._worker.memory()

    def stats(self) -> dict[str, Any]:
        """Counters since the start: tokens computed, hits of the prefix cache, preemptions, seconds by phase, programs."""
        return self._worker.stats()

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.close)
        self._inbox.close()


def _weights(directory: Path, model: ModelConfig) -> Params | None:
    if not checkpoint.has_weights(directory):
        return None
    return checkpoint.unflatten(checkpoint.read_arrays(directory, model))
