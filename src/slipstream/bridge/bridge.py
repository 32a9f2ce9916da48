"""The trainer's API. The same calls work with engine processes behind a gateway and with an engine in this process:

with slipstream.launch(model="path/to/model") as bridge:
    report = bridge.sync(params)                            # new weights on every engine, verified and switched at once
    completions = bridge.generate(["1+1="], SamplingParams(n=8))
    scores = bridge.score([c.prompt_token_ids + c.token_ids for c in completions])
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, get_args

from slipstream.bridge.adapter_syncs import AdapterSyncs
from slipstream.bridge.background_repair import BackgroundRepair, UpdateLock
from slipstream.bridge.chat_prompts import ChatPrompts, Tools, is_conversation
from slipstream.bridge.chat_tokenizer import ChatTokenizer
from slipstream.bridge.fleet import Fleet, with_engines
from slipstream.bridge.incremental_text import IncrementalDetokenizer
from slipstream.bridge.local_queue import LocalQueue, Send
from slipstream.bridge.rollouts import Adapters, Rollouts, Sampling, make_request, per_prompt
from slipstream.bridge.shared_weights import SharedWeights
from slipstream.bridge.status_words import engines_in_words
from slipstream.bridge.trainer_canary import TrainerCanary, TrainerScore
from slipstream.config import SyncOptions
from slipstream.engines.frontend.checks import check_in_flight
from slipstream.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineFailure,
    EngineLost,
    InvalidSampling,
    NotReady,
    RequestError,
    SlipstreamError,
    Unsupported,
)
from slipstream.gateway.staleness import Late, RolloutBound
from slipstream.runtime import event_loop, tracing
from slipstream.runtime.failpoints import step
from slipstream.runtime.waiting import waiting_for
from slipstream.types import (
    MAX_TOP_LOGPROBS,
    Completion,
    Completions,
    EngineInfo,
    Failure,
    FleetMembers,
    FleetStatus,
    InFlight,
    Lora,
    MemoryReport,
    MemoryTag,
    Progress,
    Prompts,
    Request,
    Score,
    SyncReport,
    TokenEvent,
    VerifyReport,
    checked_ids,
)
from slipstream.weights.sources.torch_shards import wait_until_computed
from slipstream.weights.update.publisher import Publisher

GENERATE_SECONDS = 3600.0
"""Longest time that a generation may take from one result to the next, unless the caller says otherwise."""
DRAIN_SECONDS = 0.2
"""Time between two looks at an engine that is drained."""


class Bridge:
    """Made by `launch`, `connect` or `inprocess`.

    Methods are synchronous; the slow ones have async versions (`agenerate`, `astream`, `astream_tokens`, `ascore`). All methods
    but `sync` may be called from several threads at once, also while `sync` runs. As a context manager, it closes itself at the
    end."""

    def __init__(
        self,
        fleet: Fleet,
        sync: SyncOptions | None = None,
        run_dir: str = "",
        read_tokenizer: Callable[[], ChatTokenizer] = ChatTokenizer,
    ) -> None:
        """`read_tokenizer` reads the model's tokenizer, on first use; without it there are no conversations, and streamed text
        comes at the end."""
        self.run_dir = run_dir
        """Directory with the logs, address and token of the gateway; empty in-process."""
        self.http_url = ""
        """URL of the gateway's HTTP server, if it runs one on this machine; the token is in `run_dir`."""
        self._fleet, self._options = fleet, sync or SyncOptions()
        self._on_close: Callable[[], None] | None = None
        self._publisher = Publisher(fleet, self._options)
        self._adapters = AdapterSyncs(fleet, self._options)
        self._chats = ChatPrompts(read_tokenizer, self._max_length)
        self._known_fleet: FleetMembers | None = None
        """Engines and version after the last sync, if nothing has questioned them since."""
        self._syncing = UpdateLock()
        self._background = BackgroundRepair(self._is_repair_needed, self._repair_kept, self._syncing)
        self._version = -1
        self._queues: list[LocalQueue] = []
        """Rollout queues in this process."""
        self._least_version = 0
        """The next version is at least this: journals of queues in this process know older ones."""
        tracing.start("trainer")
        try:
            self._version = event_loop.run(fleet.refresh()).version
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Policy version that this bridge committed last, or found when it connected; -1 before there are weights."""
        return self._version

    @property
    def process_count(self) -> int:
        """Number of trainer processes that take part in every sync."""
        return self._options.process_count

    def sync(
        self,
        params: Any,
        *,
        draft: Any = None,
        in_flight: InFlight = "keep",
        partial: bool = False,
        drop_failed: bool = False,
        canary: TrainerScore | None = None,
        adapter: Lora | None = None,
    ) -> SyncReport:
        """Make `params` the policy of every engine, as the next version. Returns once the new version serves.

        All engines stage and verify the version before any engine uses it. If one fails, all keep the version they have and
        the error says why. Tensors that did not change are not sent. An engine that starts or comes back later gets the same
        version without another call, also during a training step (`SyncOptions.snapshot`).

        Args:
            params: A pytree whose leaf paths, joined by dots, are the checkpoint's tensor names.
            draft: The tree of a draft model, for engines that decode speculatively.
            in_flight: What happens to running requests.
            partial: `params` is part of the tree, such as the trained layers; the rest stays as it is.
            drop_failed: Continue without engines that fail; `SyncReport.lost` names them.
            canary: Compare what the engines compute with what the trainer does. Called with a few token sequences, it returns
                the logprobs of their tokens but the first under `params`. `EngineSync.canary_gap` has the result, and an engine
                that disagrees is quarantined, unless all do. (Engines are compared with each other after every sync.)
            adapter: `params` are the weights of this LoRA adapter, which engines load, or replace, beside their base model
                (docs/lora.md). What they compute with the base model or other adapters does not change.
        """
        future = self.start_sync(
            params,
            draft=draft,
            in_flight=in_flight,
            partial=partial,
            drop_failed=drop_failed,
            canary=canary,
            adapter=adapter,
        )
        with waiting_for(
            "weights to reach every engine", lambda: f"{self._publisher.phase}; {self._how_engines_are()}"
        ):
            return event_loop.result(future)

    def _how_engines_are(self) -> str:
        return engines_in_words(self.status())

    def start_sync(
        self,
        params: Any,
        *,
        draft: Any = None,
        in_flight: InFlight = "keep",
        partial: bool = False,
        drop_failed: bool = False,
        canary: TrainerScore | None = None,
        adapter: Lora | None = None,
    ) -> Future[SyncReport]:
        """Start a sync and return its future, for a trainer that continues while engines finish their work.

        Until the future is done, `params` must be neither donated nor written to, and no other sync can start. Closing the
        bridge cancels the sync."""
        check_in_flight(in_flight)
        if adapter is not None and (partial or draft is not None):
            raise ConfigError("an adapter is synced alone and whole: without draft and partial")
        wait_until_computed(params)
        self._syncing.acquire("another sync of this bridge is in progress; run one at a time")
        known, self._known_fleet = self._known_fleet, None  # set again on success

        async def publish(engines: tuple[EngineInfo, ...], version: int) -> SyncReport:
            version = max(version, self._least_version)
            step("sync.call", version=version)
            expected = None if canary is None else await asyncio.to_thread(TrainerCanary, engines[0], canary)
            lacking = [] if known is not None and engines is known.engines else self._lacking(engines)
            if adapter is not None:
                await self._bring_base(lacking)
                report = await self._adapters.publish(params, adapter, engines, version, in_flight, drop_failed)
                if (kept := self._publisher.kept) is not None:
                    self._publisher.kept = kept._replace(version=report.version)
            elif lacking and self._adapters.kept and not partial:
                self._publisher.close()  # it would not know what engines hold after this update
                report, self._publisher.kept = await self._adapters.publish_with(
                    params, engines, version, in_flight, drop_failed, draft
                )
            else:
                report = await self._publisher.publish(params, engines, version, in_flight, partial, drop_failed, draft)
            self._committed(report.version)
            if self._fleet.is_elastic and self._publisher.kept is not None:
                self._background.start()
            step("sync.done", version=report.version, engines=[sync.engine for sync in report.engines])
            if not report.lost:
                self._known_fleet = FleetMembers(engines, version, version + 1)
            return report if expected is None else await expected.compare(self._fleet, engines, report)

        return event_loop.start_then(with_engines(self._fleet, publish, "to sync to", known), self._syncing.release)

    def _lacking(self, engines: Sequence[EngineInfo]) -> list[EngineInfo]:
        """Return the engines that do not serve the present version: they lack the base model, adapters, or both."""
        version = max(self._version, *(engine.version for engine in engines))
        return [engine for engine in engines if engine.version < max(version, 0)]

    async def _bring_base(self, lacking: Sequence[EngineInfo]) -> None:
        """Bring the present version to engines that lack it, before an adapter is added to it."""
        if not lacking:
            return
        kept = self._publisher.kept
        if kept is None or kept.version < self._version:
            names = ", ".join(engine.name for engine in lacking)
            raise NotReady(
                f"an adapter needs the base model, and {names} has no present one (the fleet serves version "
                f"{self._version}); sync it first: bridge.sync(params)"
            )
        await self._repair(kept.tensors, kept.version)

    def unload_adapter(self, name: str) -> None:
        """Free an adapter's place on every engine. Its unfinished requests fail with `UnknownAdapter`."""
        with self._without_syncs("bridge.sync is in progress; unload the adapter before or after it"):
            self._adapters.kept.pop(name, None)
            event_loop.run(self._fleet.unload_adapter(name))

    @contextlib.contextmanager
    def _without_syncs(self, error: str) -> Iterator[None]:
        self._syncing.acquire(error)
        try:
            yield
        finally:
            self._syncing.release()

    def share(self, params: Any, device: int = 0) -> SharedWeights:
        """Make `params` the policy of every engine, as the next version, in memory shared by this process and the engines.

        There is one copy for all, and the trainer writes later versions into it; see `SharedWeights`. The engines must run on
        this host with tensor_parallel_size=1, be embedded engines or vLLM on a GPU with `share_weights`, and `params` must
        have their dtype; otherwise raises `Unsupported` or `MappingError`. For engines on a GPU, the memory is on this
        process's GPU `device`, which the engines must see too. A `sync` ends the sharing."""
        if self._options.process_count > 1:
            raise Unsupported("a trainer of several processes cannot share its weights; use bridge.sync")
        shared = SharedWeights(self._fleet, self._syncing, self._on_shared_commit, self._options)
        shared.start(params, device)
        return shared

    def _on_shared_commit(self, version: int) -> None:
        self._known_fleet, self._publisher.kept = None, None
        self._committed(version)

    def repair(self, params: Any) -> SyncReport | None:
        """Send the fleet's version to engines that lack it, because they missed an update or have just started.

        The bridge does so by itself, with what it keeps of the last sync (`SyncOptions.snapshot`). This is for weights that it
        cannot keep, and for trainers of several processes, all of which must call it. `params` must be the weights of that
        version. Returns None if every engine has it. The version number stays, so no rollout becomes older. Raises `NotReady`
        if the fleet serves no version."""
        wait_until_computed(params)
        with self._without_syncs("another sync of this bridge is in progress; run one at a time"):
            return event_loop.run(self._repair(params))

    async def _repair(self, params: Any, kept: int = -1) -> SyncReport | None:
        """Send the fleet's version to engines that lack it. `kept` is the version of weights that the bridge has kept. If all
        engines and the gateway were restarted, the fleet gets it back. If another trainer synced a later one, none is sent."""
        engines, version, _ = await self._fleet.refresh()
        self._known_fleet = None  # repaired engines get new links
        if kept < 0 and version < 0:
            raise NotReady("the fleet serves no version yet; sync one first")
        target = version if kept < 0 else kept
        behind = tuple(engine for engine in engines if engine.version < target)
        if not behind or target < version:
            return None
        if self._adapters.kept:
            return (await self._adapters.publish_with(params, behind, target, drop_failed=kept >= 0))[0]
        # The trainer does not know of a repair in the background, and may donate an array that another process reads.
        publisher = Publisher(self._fleet, dataclasses.replace(self._options, delta="never"), through_host=kept >= 0)
        try:
            return await publisher.publish(params, behind, target, drop_failed=kept >= 0)
        finally:
            publisher.close()

    async def _is_repair_needed(self) -> bool:
        if (kept := self._publisher.kept) is None:
            return False
        status = await self._fleet.status()
        return status.version <= kept.version and any(e.info.version < kept.version for e in status.present)

    async def _repair_kept(self) -> SyncReport | None:
        if (kept := self._publisher.kept) is None:
            return None
        if kept.are_donated:
            raise NotReady(
                f"the arrays of version {kept.version} were donated, so engines without it wait for the next sync; with "
                "snapshot='copy' the bridge keeps a copy"
            )
        return await self._repair(kept.tensors, kept.version)

    def verify(self, params: Any, *, draft: Any = None) -> VerifyReport:
        """Compare the engines' weights with `params`, byte for byte in each engine's dtype; report the tensors that differ.

        For when the logprobs of trainer and engine disagree. `params` is a whole tree of the version that the engines serve,
        that is, the last one synced. Reads and hashes every weight on both sides, so it is not for every step. Raises
        `Unsupported` if no engine can read its weights back; if some cannot, `VerifyReport.unchecked` names them. In a trainer
        of several processes, each process compares what it holds."""
        with self._without_syncs("bridge.sync is in progress; verify before or after it"):
            return event_loop.run(self._verify(params, draft))

    async def _verify(self, params: Any, draft: Any) -> VerifyReport:
        self._known_fleet = None  # `refresh` changes the epoch that this client has seen
        engines = (await self._fleet.refresh()).engines
        if not engines:
            raise (await self._fleet.status()).no_engines("to compare with")
        return await self._publisher.verify(params, engines, draft)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        *,
        tools: Tools = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        engine: str = "",
        adapter: Adapters = "",
        priority: int = 0,
        timeout: float = GENERATE_SECONDS,
    ) -> Completions:
        """Generate completions; return them in order: the `n` samples of the first prompt, then those of the second, and so on.

        Args:
            prompts: Texts, lists of token ids, or conversations, which the model's chat template renders. A conversation is a
                list of messages, `[{"role": "user", "content": "Hi"}]`; one of them may stand in place of the list of prompts.
            sampling_params: For all prompts, or one per prompt.
            tools: JSON schemas of the tools that the chat template offers to the model. Tool calls come back as text.
            chat_template_kwargs: Further variables of the chat template, such as `enable_thinking`.
            engine: Name of the engine to use; empty uses all of them.
            adapter: Name of the adapter to compute with, for all prompts or one per prompt; empty is the base model.
            priority: Requests with a lower priority go first when requests wait for room.
            timeout: Longest time in seconds without a result; then raises `DeadlineExceeded`.

        Raises the first failure, if any prompt failed. `.by_prompt()` of the result gives one list per prompt."""
        requests = self._requests(prompts, sampling_params, adapter, priority, tools, chat_template_kwargs)
        return event_loop.run(self._generate(requests, engine, timeout))

    async def agenerate(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        *,
        tools: Tools = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        engine: str = "",
        adapter: Adapters = "",
        priority: int = 0,
        timeout: float = GENERATE_SECONDS,
    ) -> Completions:
        """Awaitable version of `generate`, for any event loop. Cancelling it cancels the unfinished requests."""
        requests = await self._arequests(prompts, sampling_params, adapter, priority, tools, chat_template_kwargs)
        return await event_loop.arun(self._generate(requests, engine, timeout))

    def stream(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        *,
        tools: Tools = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        engine: str = "",
        adapter: Adapters = "",
        priority: int = 0,
        timeout: float = GENERATE_SECONDS,
    ) -> Iterator[Completion | Failure]:
        """Like `generate`, but yield completions and `Failure`s as they finish. Closing it early cancels the rest."""
        requests = self._requests(prompts, sampling_params, adapter, priority, tools, chat_template_kwargs)
        batches = self._batches(requests, engine, timeout)
        for batch in event_loop.iterate(batches):
            yield from batch

    async def astream(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        *,
        tools: Tools = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        engine: str = "",
        adapter: Adapters = "",
        priority: int = 0,
        timeout: float = GENERATE_SECONDS,
    ) -> AsyncGenerator[Completion | Failure, None]:
        """Async version of `stream`, for any event loop. Closing it cancels the rest."""
        requests = await self._arequests(prompts, sampling_params, adapter, priority, tools, chat_template_kwargs)
        batches = self._batches(requests, engine, timeout)
        async with contextlib.aclosing(event_loop.aiterate(batches)) as results:
            async for batch in results:
                for result in batch:
                    yield result

    def stream_tokens(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        *,
        tools: Tools = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        engine: str = "",
        adapter: Adapters = "",
        priority: int = 0,
        timeout: float = GENERATE_SECONDS,
    ) -> Iterator[TokenEvent | Failure]:
        """Like `stream`, but yield tokens as they are drawn. The last event of a sample has its `finish_reason`.

        Closing the iterator early, or leaving its loop, cancels the unfinished requests on the engines."""
        requests = self._requests(
            prompts, sampling_params, adapter, priority, tools, chat_template_kwargs, progress=True
        )
        for batch in event_loop.iterate(self._token_events(requests, engine, timeout)):
            yield from batch

    async def astream_tokens(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        *,
        tools: Tools = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        engine: str = "",
        adapter: Adapters = "",
        priority: int = 0,
        timeout: float = GENERATE_SECONDS,
    ) -> AsyncGenerator[TokenEvent | Failure, None]:
        """Async version of `stream_tokens`, for any event loop. Closing it cancels the rest."""
        requests = await self._arequests(
            prompts, sampling_params, adapter, priority, tools, chat_template_kwargs, progress=True
        )
        batches = self._token_events(requests, engine, timeout)
        async with contextlib.aclosing(event_loop.aiterate(batches)) as results:
            async for batch in results:
                for event in batch:
                    yield event

    def _requests(
        self,
        prompts: Prompts,
        sampling_params: Sampling,
        adapter: Adapters,
        priority: int,
        tools: Tools,
        template_kwargs: Mapping[str, Any] | None,
        progress: bool = False,
    ) -> list[Request]:
        rows = self._chats.render(prompts, tools, template_kwargs)
        params = per_prompt(sampling_params, len(rows))
        if len(params) != len(rows):
            raise InvalidSampling(
                f"got {len(params)} sampling_params for {len(rows)} prompts; pass one, or one per prompt"
            )
        if not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
            raise InvalidSampling(f"priority must be a 32-bit integer, got {priority!r}")
        adapters = [adapter] * len(rows) if isinstance(adapter, str) else adapter
        if len(adapters) != len(rows):
            raise RequestError(f"got {len(adapters)} adapters for {len(rows)} prompts; pass one, or one per prompt")
        call, count = secrets.token_hex(6), len(rows)
        return [
            make_request(
                *(f"{call}/{i}", rows[i], params[i], secrets.randbits(63), f"{i} of {count}", priority, progress),
                adapter=adapters[i],
            )
            for i in range(count)
        ]

    async def _arequests(
        self,
        prompts: Prompts,
        sampling_params: Sampling,
        adapter: Adapters,
        priority: int,
        tools: Tools,
        template_kwargs: Mapping[str, Any] | None,
        progress: bool = False,
    ) -> list[Request]:
        """Rendering takes a while, and asks the fleet: it must not hold up the caller's event loop."""
        make = partial(self._requests, prompts, sampling_params, adapter, priority, tools, template_kwargs, progress)
        if is_conversation(prompts) or any(map(is_conversation, prompts)):
            return await event_loop.arun(asyncio.to_thread(make))
        return make()

    def _max_length(self) -> int:
        status = self.status()
        if not status.present:
            raise status.no_engines("to render a conversation for")
        return min(engine.info.max_model_len for engine in status.present)

    async def _generate(self, requests: Sequence[Request], engine: str, timeout: float) -> Completions:
        completions: list[Completion] = []
        async with contextlib.aclosing(self._batches(requests, engine, timeout)) as batches:
            async for batch in batches:
                for result in batch:
                    if isinstance(result, Failure):
                        raise type(result.error)(f"prompt {result.prompt_index} of {len(requests)}: {result.error}")
                    completions.append(result)
        return Completions(sorted(completions, key=lambda c: (c.prompt_index, c.sample_index)))

    async def _batches(
        self, requests: Sequence[Request], engine: str, timeout: float
    ) -> AsyncGenerator[list[Completion | Failure], None]:
        """Yield results as they arrive, with the index of their prompt."""
        async with contextlib.aclosing(self._results(requests, engine, timeout)) as batches:
            async for batch in batches:
                yield [result for result in batch if not isinstance(result, Progress)]

    async def _token_events(
        self, requests: Sequence[Request], engine: str, timeout: float
    ) -> AsyncGenerator[list[TokenEvent | Failure], None]:
        tokenizer = await asyncio.to_thread(lambda: self._chats.tokenizer)
        texts = {
            (i, sample): IncrementalDetokenizer(tokenizer, request.sampling.stop)
            for i, request in enumerate(requests)
            for sample in range(request.sampling.n)
        }
        async with contextlib.aclosing(self._results(requests, engine, timeout)) as batches:
            async for batch in batches:
                yield [event for result in batch if (event := _token_event(result, texts)) is not None]

    async def _results(
        self, requests: Sequence[Request], engine: str, timeout: float
    ) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        """Yield what arrives, with the index of its prompt, until every sample is answered."""
        if not requests:
            return
        index_of = {request.id: index for index, request in enumerate(requests)}
        num_samples = num_missing = sum(request.sampling.n for request in requests)
        async with contextlib.aclosing(self._fleet.generate(requests, engine)) as batches:
            while True:
                try:
                    # Around each wait: every one may run in a task of its own.
                    samples = f"{num_missing} of {num_samples} samples"
                    with waiting_for(samples, self._how_engines_are):
                        async with asyncio.timeout(timeout):
                            batch = await anext(batches, None)
                except TimeoutError as error:
                    if isinstance(error, SlipstreamError):  # `DeadlineExceeded` is both
                        raise
                    raise DeadlineExceeded(
                        f"no result within {timeout:g} s; {num_missing} samples are missing. Are the engines paused?"
                    ) from None
                if batch is None:
                    break
                results: list[Completion | Failure | Progress] = []
                for result in batch:
                    index = index_of[result.request_id]
                    if isinstance(result, Completion):
                        num_missing -= 1
                    elif isinstance(result, Failure):
                        num_missing -= requests[index].sampling.n
                    results.append(dataclasses.replace(result, prompt_index=index))
                yield results
        if num_missing > 0:
            raise EngineFailure(f"{num_missing} samples were not answered")

    def rollouts(
        self,
        max_staleness: int = 0,
        batch: int = 32,
        *,
        late: Late = "renew",
        surplus: int | None = None,
        position: int = 0,
        patience: float = 60.0,
        generate: Send | None = None,
        journal: Path | None = None,
        adapter: str = "",
    ) -> Rollouts:
        """Open the rollout queue of this run: prompts go in, groups of completions come out, each exactly once.

        Args:
            max_staleness: Oldest age of a group in versions when it is taken; 0 is strictly on-policy.
            batch: Groups (prompts with all their samples) taken between two syncs.
            late: What happens to a group that becomes too old: "renew" generates it again, "deliver" delivers it with its age.
            surplus: Groups beyond a batch that may run; None is as many as `max_staleness` allows. A batch is then the groups
                that finish first, and the others continue for the next one.
            position: Where a restarted trainer continues (`Rollouts.position`).
            patience: Seconds to wait for a gateway that is gone.
            generate: What generates the samples of a prompt, with engines and more than engines (`rl/agents/player.py`). The
                queue is then in this process.
            journal: With `generate`, the file of that queue's journal; by default it is in memory.
            adapter: Name of the adapter that generates; empty is the base model.
        """
        bound = RolloutBound(max_staleness, batch, late, surplus)
        if generate is None:
            return Rollouts(self._fleet, bound, position, patience, self._chats, self.status, adapter)
        queue = LocalQueue(journal, generate, lambda: self._version)
        self._queues.append(queue)
        self._least_version = max(self._least_version, event_loop.run(queue.journaled_version()) + 1)
        find_status = lambda: dataclasses.replace(self.status(), rollouts=queue.status())  # noqa: E731
        return Rollouts(queue, bound, position, patience, self._chats, find_status, adapter)

    def _committed(self, version: int) -> None:
        self._version = version
        for queue in self._queues:
            event_loop.loop().call_soon_threadsafe(queue.on_commit, version)  # before the result of the sync is visible

    def score(
        self, sequences: Sequence[Sequence[int]], top_k: int = 0, *, engine: str = "", adapter: str = ""
    ) -> list[Score]:
        """Return the raw logprobs of token sequences under the current policy, in order. With `top_k`, also return those of the
        most likely tokens at each position.

        A model for sequence classification returns outputs of its labels instead: append the label to a sequence, and the last
        number is the label's output for it (`rl/rewards/reward_model.py`)."""
        return event_loop.run(self._score(_sequences(sequences, top_k), top_k, engine, adapter))

    async def ascore(
        self, sequences: Sequence[Sequence[int]], top_k: int = 0, *, engine: str = "", adapter: str = ""
    ) -> list[Score]:
        """Awaitable version of `score`, for any event loop."""
        return await event_loop.arun(self._score(_sequences(sequences, top_k), top_k, engine, adapter))

    async def _score(self, sequences: Sequence[tuple[int, ...]], top_k: int, engine: str, adapter: str) -> list[Score]:
        return await self._fleet.score(sequences, engine, top_k, adapter) if sequences else []

    def pause(self, *, engine: str = "") -> None:
        """Pause the engines. Once this returns, none runs a step until `resume`; requests wait and the KV cache is kept."""
        event_loop.run(self._fleet.pause(engine))

    def resume(self, *, engine: str = "") -> None:
        event_loop.run(self._fleet.resume(engine))

    def sleep(self, level: int = 1, *, engine: str = "") -> dict[str, MemoryReport]:
        """Free the engines' device memory for the trainer; return what each engine still holds.

        Level 1 moves the weights to host memory and drops the KV cache. Level 2 drops both, and the next `sync` must send all
        weights. Requests wait, and continue after `wake` with the tokens they have."""
        if level not in (1, 2):
            raise Unsupported(f"sleep level must be 1 (weights to host memory) or 2 (weights dropped), got {level!r}")
        with self._without_syncs("bridge.sync is in progress; sleep before or after it"):
            if level == 2:
                self._publisher.close()  # the engines hold no weights any more, so the next sync sends everything
            return event_loop.run(self._fleet.sleep(level, engine))

    def wake(self, tags: MemoryTag | Sequence[MemoryTag] | None = None, *, engine: str = "") -> dict[str, MemoryReport]:
        """Bring back `weights`, `kv_cache`, or everything that is asleep. A trainer short of memory wakes the weights, or
        syncs, and wakes the KV cache once its own memory is free."""
        return event_loop.run(self._fleet.wake(_tags(tags), engine))

    def reset_prefix_cache(self, *, engine: str = "") -> None:
        """Drop the prefix caches, for example before a measurement. Caches of older versions are never used anyway."""
        event_loop.run(self._fleet.reset_prefix_cache(engine))

    def memory(self, *, engine: str = "") -> dict[str, MemoryReport]:
        """Return what each engine holds on its devices."""
        return event_loop.run(self._fleet.memory(engine))

    def quarantine(self, engine: str, reason: str, since: int | None = None) -> None:
        """Stop using an engine whose results are wrong, for example because its logprobs disagree with the trainer's.

        It gets no requests until it has new weights and passes a probe. What it generated with version `since` or later (by
        default the present one) and nobody has taken from `rollouts` is generated again by other engines."""
        event_loop.run(self._fleet.quarantine(engine, reason, since))

    def drain(
        self,
        engine: str,
        timeout: float = 600.0,
        *,
        force: bool = False,
        on_progress: Callable[[int], None] = lambda num_requests: None,
    ) -> int:
        """Give an engine no new requests and wait until it has finished those that it has, so that it can be stopped.

        After `timeout` seconds, other engines get the unfinished ones, and the same samples are generated there. Returns their
        number. The engine takes part in syncs, and stays drained, also over a restart, until `undrain`. `on_progress` is called
        with the number of unfinished requests when it changes. Unless `force` is set, raises `RequestError` if no other engine
        takes requests; raises `EngineLost` if the engine dies meanwhile."""
        return event_loop.run(self._drain(engine, timeout, force, on_progress))

    async def _drain(self, engine: str, timeout: float, force: bool, on_progress: Callable[[int], None]) -> int:
        await self._fleet.drain(engine, force=force)
        clock, handed_back, last = asyncio.get_running_loop().time, 0, -1
        deadline = clock() + timeout
        while True:
            found = next(e for e in (await self._fleet.status()).engines if e.info.name == engine)
            if found.state == "lost":
                raise EngineLost(f"engine {engine!r} was lost while it was drained ({found.note}); it stays drained")
            if found.num_requests != last:
                last = found.num_requests
                on_progress(last)
            if not last:
                return handed_back
            if clock() >= deadline:
                handed_back, deadline = max(handed_back, last), clock() + timeout
                await self._fleet.drain(engine, hand_back=True, force=force)
            await asyncio.sleep(DRAIN_SECONDS)

    def undrain(self, engine: str) -> None:
        """Let a drained engine take requests again."""
        event_loop.run(self._fleet.drain(engine, undo=True))

    def status(self) -> FleetStatus:
        return event_loop.run(self._fleet.status())

    def on_close(self, call: Callable[[], None]) -> None:
        """Register a function to call when the bridge closes."""
        self._on_close = call

    def close(self) -> None:
        """Close the connection and stop the processes or the engine started for this bridge. May be called twice."""
        self._background.close()
        self._publisher.kept = None
        self._publisher.close()
        self._adapters.close()
        self._known_fleet = None
        try:
            for queue in self._queues:
                event_loop.run(queue.close())
            event_loop.run(self._fleet.close())
        finally:
            on_close, self._on_close = self._on_close, None
            if on_close is not None:
                on_close()

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _token_event(
    result: Completion | Failure | Progress, texts: Mapping[tuple[int, int], IncrementalDetokenizer]
) -> TokenEvent | Failure | None:
    if isinstance(result, Failure):
        return result
    text, completion = texts[result.prompt_index, result.sample_index], None
    if isinstance(result, Completion):
        delta, version, completion = text.finish(result), result.spans[-1].version, result
    elif (added := text.add(result)) is not None:
        delta, version = added, result.version
    else:
        return None
    return TokenEvent(
        result.request_id,
        result.prompt_index,
        result.sample_index,
        delta.token_ids,
        delta.text,
        delta.logprobs,
        version,
        delta.top_logprobs,
        delta.restarted,
        completion,
    )


def _sequences(sequences: Sequence[Sequence[int]], top_k: int) -> list[tuple[int, ...]]:
    if not isinstance(top_k, int) or not 0 <= top_k <= MAX_TOP_LOGPROBS:
        raise InvalidSampling(f"top_k of score must be an integer from 0 to {MAX_TOP_LOGPROBS}, got {top_k!r}")
    return [checked_ids(sequence) for sequence in sequences]


def _tags(tags: MemoryTag | Sequence[MemoryTag] | None) -> Sequence[MemoryTag] | None:
    if isinstance(tags, str):
        tags = (tags,)
    for tag in tags or ():
        if tag not in get_args(MemoryTag):
            raise RequestError(f"tags of wake must be among {', '.join(map(repr, get_args(MemoryTag)))}, got {tag!r}")
    return tags
