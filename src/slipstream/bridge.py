"""The trainer's side. The same verbs whether the engines are processes behind a gateway or a library in this one:

with slipstream.launch(model="path/to/model") as bridge:
    report = bridge.sync(params)                            # new weights reach every engine, verified and at once
    completions = bridge.generate(["1+1="], SamplingParams(n=8))
    scores = bridge.score([c.prompt_token_ids + c.token_ids for c in completions])
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, get_args

from slipstream import portal
from slipstream.errors import (
    EngineFailure,
    InvalidPrompt,
    InvalidSampling,
    NotReady,
    RequestError,
    SlipstreamError,
    Unsupported,
    UpdateInProgress,
)
from slipstream.fleet import Fleet, with_engines
from slipstream.gateway.staleness import Bound, Late
from slipstream.rollouts import Rollouts
from slipstream.shared import SharedWeights
from slipstream.types import (
    MAX_TOP_LOGPROBS,
    Completion,
    EngineInfo,
    Failure,
    FleetStatus,
    InFlight,
    MemoryReport,
    MemoryTag,
    Prompt,
    Request,
    SamplingParams,
    Score,
    SyncReport,
    VerifyReport,
    checked_ids,
    plain_ids,
)
from slipstream.weights.publisher import Publisher

ONE_AT_A_TIME = "another sync of this bridge is under way; one update at a time"


class Bridge:
    """Made by `launch`, `connect` or `inprocess`. Synchronous, with twins to await for what takes long (`agenerate`,
    `astream`, `ascore`). All but `sync` may be called from several threads, also while `sync` runs. A context manager:
    leaving it ends what was started for it."""

    def __init__(
        self,
        fleet: Fleet,
        transport: str | None = None,
        run_dir: str = "",
        checksums: bool = True,
        trainer_rank: int = 0,
    ) -> None:
        self.run_dir = run_dir
        """Where logs, address and token of a launched or joined gateway are; empty in-process."""
        self.http_url = ""
        """Where a gateway of this machine speaks HTTP, if it does; the token is in `run_dir`."""
        self._fleet = fleet
        self._on_close: Callable[[], None] | None = None
        self._how = (transport, trainer_rank, checksums)
        self._publisher = Publisher(fleet, *self._how)
        self._known: tuple[tuple[EngineInfo, ...], int] | None = None
        self._syncing = threading.Lock()
        self._version = -1
        try:
            self._version = portal.run(fleet.refresh())[1]
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """The policy version that this bridge committed last (or found when it joined); -1 before there are weights."""
        return self._version

    def sync(
        self,
        params: Any,
        *,
        draft: Any = None,
        in_flight: InFlight = "keep",
        partial: bool = False,
        drop_failed: bool = False,
    ) -> SyncReport:
        """Makes `params` the policy of every engine, as the next version.

        `params` is a pytree whose leaf paths, joined by dots, are the checkpoint's names. All engines stage and verify
        the version before any uses it; if one cannot, all keep the version they have, and the error says why (with
        `drop_failed` the others go on, and `SyncReport.lost` names it). Returns once the new version serves.

        Tensors that did not change are not sent. With `partial`, `params` is a part of the tree (the layers that are
        trained), and the rest stays as it is. `in_flight` says what becomes of requests that are running."""
        begun = self.start_sync(params, draft=draft, in_flight=in_flight, partial=partial, drop_failed=drop_failed)
        return portal.result(begun)

    def start_sync(
        self,
        params: Any,
        *,
        draft: Any = None,
        in_flight: InFlight = "keep",
        partial: bool = False,
        drop_failed: bool = False,
    ) -> Future[SyncReport]:
        """As `sync`, and returns at once: `result()` of what is returned is the report, or raises. Until then `params` must be
        neither donated nor written to, no other sync can begin, and closing the bridge calls it off. For a trainer that goes on
        while engines finish what they are at."""
        self._keep_syncs_away(ONE_AT_A_TIME)
        return portal.start_then(self._sync(params, draft, in_flight, partial, drop_failed), self._syncing.release)

    def _keep_syncs_away(self, otherwise: str) -> None:
        """Until `_syncing` is released. `UpdateInProgress` if one is under way."""
        if not self._syncing.acquire(blocking=False):
            raise UpdateInProgress(otherwise)

    @contextlib.contextmanager
    def _without_syncs(self, otherwise: str) -> Iterator[None]:
        self._keep_syncs_away(otherwise)
        try:
            yield
        finally:
            self._syncing.release()

    async def _sync(self, params: Any, draft: Any, in_flight: InFlight, partial: bool, drop_failed: bool) -> SyncReport:
        async def publish(engines: tuple[EngineInfo, ...], version: int) -> SyncReport:
            report = await self._publisher.publish(params, engines, version + 1, in_flight, partial, drop_failed, draft)
            self._version = report.version
            if not report.lost:
                self._known = (engines, report.version)
            return report

        known, self._known = self._known, None  # unless all goes well, look again next time
        return await with_engines(self._fleet, publish, "to sync to", known)

    def share(self, params: Any, device: int = 0) -> SharedWeights:
        """Makes `params` the policy of every engine, as the next version, in memory that this process and the engines share:
        one copy for all. The versions that follow are written where they are served from; see `SharedWeights`.

        For engines on this host that can (the embedded one, with tp=1); `Unsupported` says what is in the way. `params` must
        have the engines' dtype. Where engines are on a GPU, the memory is that of `device`, which they must see, too. A `sync`
        ends the sharing."""
        if self._how[1]:
            raise Unsupported("a trainer of several processes cannot share its weights; bridge.sync brings them")
        shared = SharedWeights(self._fleet, self._syncing, self._shared_commit, self._how[2])
        shared.start(params, device)
        return shared

    def _shared_commit(self, version: int) -> None:
        self._version, self._known = version, None

    def repair(self, params: Any) -> SyncReport | None:
        """Brings the version that the fleet serves to engines that do not have it, because they have missed an update, or have
        just started. `params` are that version's. None if every engine has it. Versions stay as they are: nothing that was
        generated becomes older. `NotReady` if the fleet serves none."""
        with self._without_syncs(ONE_AT_A_TIME):
            return portal.run(self._repair(params))

    async def _repair(self, params: Any) -> SyncReport | None:
        engines, version = await self._fleet.refresh()
        self._known = None  # who was behind has other links than before
        if version < 0:
            raise NotReady("the fleet has no version to bring anyone up to; sync one")
        behind = tuple(engine for engine in engines if engine.version < version)
        if not behind:
            return None
        publisher = Publisher(self._fleet, *self._how)
        try:
            return await publisher.publish(params, behind, version)
        finally:
            publisher.close()

    def verify(self, params: Any, *, draft: Any = None) -> VerifyReport:
        """Which tensors the engines do not hold as `params` has them, byte for byte in each engine's dtype: for when logprobs
        of trainer and engine disagree. `params` is a whole tree, as for `sync`; of the version that the engines serve, that is,
        what was synced last.

        Every weight is read and hashed on both sides: not for every step. Raises `Unsupported` where no
        engine can read its weights back; engines that cannot beside others that can are in `VerifyReport.unchecked`. Of a
        trainer of several processes, each compares what it holds itself."""
        with self._without_syncs("bridge.sync is under way; compare weights before or after it"):
            return portal.run(self._verify(params, draft))

    async def _verify(self, params: Any, draft: Any) -> VerifyReport:
        self._known = None  # looking at the fleet says to the gateway that we know it: the next sync must, too
        engines, _ = await self._fleet.refresh()
        if not engines:
            raise (await self._fleet.status()).nobody("to compare with")
        return await self._publisher.verify(params, engines, draft)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        engine: str = "",
        priority: int = 0,
    ) -> list[Completion]:
        """Completions in order: the `n` samples of the first prompt, then those of the second, and so on.

        `sampling` is for all prompts, or one per prompt. Of calls that wait for room, the one with the lower `priority`
        goes first. Raises the first failure, if any prompt failed."""
        return portal.run(self._generate(_requests(prompts, sampling, priority), engine))

    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        engine: str = "",
        priority: int = 0,
    ) -> list[Completion]:
        """`generate`, awaited on any event loop."""
        return await portal.arun(self._generate(_requests(prompts, sampling, priority), engine))

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        engine: str = "",
        priority: int = 0,
    ) -> Iterator[Completion | Failure]:
        """As `generate`, each completion as soon as it is finished, failures among them. Leaving it early cancels the rest."""
        for batch in portal.iterate(self._batches(_requests(prompts, sampling, priority), engine)):
            yield from batch

    async def astream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        engine: str = "",
        priority: int = 0,
    ) -> AsyncGenerator[Completion | Failure, None]:
        """`stream`, awaited on any event loop. Closing it cancels the rest."""
        batches = self._batches(_requests(prompts, sampling, priority), engine)
        async with contextlib.aclosing(portal.aiterate(batches)) as found:
            async for batch in found:
                for result in batch:
                    yield result

    async def _generate(self, requests: Sequence[Request], engine: str) -> list[Completion]:
        rows: dict[tuple[int, int], Completion] = {}
        async with contextlib.aclosing(self._batches(requests, engine)) as batches:
            async for batch in batches:
                for result in batch:
                    if isinstance(result, Failure):
                        raise type(result.error)(f"prompt {result.prompt_index} of {len(requests)}: {result.error}")
                    rows[result.prompt_index, result.sample_index] = result
        return [rows[key] for key in sorted(rows)]

    async def _batches(
        self, requests: Sequence[Request], engine: str
    ) -> AsyncGenerator[list[Completion | Failure], None]:
        if not requests:
            return
        owed = sum(r.sampling.n for r in requests)
        async with contextlib.aclosing(self._fleet.generate(requests, engine)) as batches:
            async for batch in batches:
                owed -= sum(1 if isinstance(r, Completion) else _samples(requests, r) for r in batch)
                yield [_with_index(result) for result in batch]
        if owed > 0:
            raise EngineFailure(f"{owed} samples were not answered")

    def rollouts(
        self,
        max_staleness: int = 0,
        batch: int = 32,
        *,
        late: Late = "renew",
        surplus: int | None = None,
        position: int = 0,
        patience: float = 60.0,
    ) -> Rollouts:
        """The rollouts of this run, which are taken exactly once and are never older than `max_staleness` versions when they
        are: 0 is strictly on-policy. `batch` is how many groups (prompts with all their samples) are taken between two
        syncs. A group that has become too old is made anew (`late="renew"`), or delivered with its age (`"deliver"`).
        Engines run ahead as far as `max_staleness` lets them, or by `surplus` groups beyond a batch: the batch is then those
        that finish first, and the stragglers go on for the next one.
        `position` is where a trainer that has crashed goes on; `patience`, how long a gateway may be gone."""
        return Rollouts(self._fleet, Bound(max_staleness, batch, late, surplus), position, patience)

    def score(self, sequences: Sequence[Sequence[int]], top_k: int = 0, *, engine: str = "") -> list[Score]:
        """Raw logprobs of token sequences under the current policy, in order; with `top_k`, also those of the likeliest
        tokens at each position."""
        return portal.run(self._score(_sequences(sequences, top_k), top_k, engine))

    async def ascore(self, sequences: Sequence[Sequence[int]], top_k: int = 0, *, engine: str = "") -> list[Score]:
        """`score`, awaited on any event loop."""
        return await portal.arun(self._score(_sequences(sequences, top_k), top_k, engine))

    async def _score(self, rows: Sequence[tuple[int, ...]], top_k: int, engine: str) -> list[Score]:
        return await self._fleet.score(rows, engine, top_k) if rows else []

    def pause(self, *, engine: str = "") -> None:
        """Once this returns, no engine runs a step until `resume`. Requests wait, the KV cache is kept."""
        portal.run(self._fleet.pause(engine))

    def resume(self, *, engine: str = "") -> None:
        portal.run(self._fleet.resume(engine))

    def sleep(self, level: int = 1, *, engine: str = "") -> dict[str, MemoryReport]:
        """Frees the engines' device memory, for a trainer that needs it; what each holds then, by engine.

        Level 1 moves the weights to host memory and drops the KV cache. Level 2 drops both, and the next `sync`, which
        must be of all weights, brings new ones. Requests wait, and go on after `wake` with the tokens they have."""
        if level not in (1, 2):
            raise Unsupported(f"sleep has the levels 1 (weights to host memory) and 2 (weights dropped), got {level!r}")
        with self._without_syncs("bridge.sync is under way; engines sleep before or after it"):
            if level == 2:
                self._publisher.close()  # the engines hold nothing any more, so everything must be sent
            return portal.run(self._fleet.sleep(level, engine))

    def wake(self, tags: MemoryTag | Sequence[MemoryTag] | None = None, *, engine: str = "") -> dict[str, MemoryReport]:
        """Brings back `weights`, `kv_cache`, or all that is asleep. A trainer that is short of memory wakes the weights, or
        syncs, and wakes the KV cache once its own memory is free."""
        return portal.run(self._fleet.wake(_tags(tags), engine))

    def forget_prefixes(self, *, engine: str = "") -> None:
        """Drops what the engines have cached of prompts and completions, for a measurement, say. After a sync there is no need:
        what an older version has computed is never found."""
        portal.run(self._fleet.forget_prefixes(engine))

    def memory(self, *, engine: str = "") -> dict[str, MemoryReport]:
        """What each engine holds on its devices."""
        return portal.run(self._fleet.memory(engine))

    def status(self) -> FleetStatus:
        return portal.run(self._fleet.status())

    def on_close(self, call: Callable[[], None]) -> None:
        """What ends with the bridge."""
        self._on_close = call

    def close(self) -> None:
        """Ends the connection, and the processes or engine that were started for this bridge. May be called twice."""
        self._publisher.close()
        try:
            portal.run(self._fleet.close())
        finally:
            on_close, self._on_close = self._on_close, None
            if on_close is not None:
                on_close()

    def __enter__(self) -> Bridge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _requests(
    prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None, priority: int
) -> list[Request]:
    if isinstance(prompts, str):
        raise InvalidPrompt("prompts is one string; pass a list of prompts")
    if sampling is None or isinstance(sampling, SamplingParams):
        sampling = [sampling or SamplingParams()] * len(prompts)
    if len(sampling) != len(prompts):
        raise InvalidSampling(
            f"{len(sampling)} sampling parameters for {len(prompts)} prompts; pass one, or one per prompt"
        )
    if not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise InvalidSampling(f"priority must be an integer of 32 bits, lower going first; got {priority!r}")
    call = secrets.token_hex(6)
    requests = []
    for index, (prompt, params) in enumerate(zip(prompts, sampling)):
        if params.seed is None:
            params = params.with_seed(secrets.randbits(63))
        try:
            prompt = prompt if isinstance(prompt, str) else plain_ids(prompt)
            requests.append(Request(f"{call}/{index}", prompt, params, priority))
        except SlipstreamError as error:
            raise type(error)(f"prompt {index} of {len(prompts)}: {error}") from None
    return requests


def _prompt_index(request_id: str) -> int:
    return int(request_id.rpartition("/")[2])


def _with_index(result: Completion | Failure) -> Completion | Failure:
    return dataclasses.replace(result, prompt_index=_prompt_index(result.request_id))


def _samples(requests: Sequence[Request], failure: Failure) -> int:
    return requests[_prompt_index(failure.request_id)].sampling.n


def _sequences(sequences: Sequence[Sequence[int]], top_k: int) -> list[tuple[int, ...]]:
    if not isinstance(top_k, int) or not 0 <= top_k <= MAX_TOP_LOGPROBS:
        raise InvalidSampling(f"top_k of score must be an integer from 0 to {MAX_TOP_LOGPROBS}, got {top_k!r}")
    return [checked_ids(sequence) for sequence in sequences]


def _tags(tags: MemoryTag | Sequence[MemoryTag] | None) -> Sequence[MemoryTag] | None:
    if isinstance(tags, str):
        tags = (tags,)
    for tag in tags or ():
        if tag not in get_args(MemoryTag):
            raise RequestError(f"wake takes {' and '.join(map(repr, get_args(MemoryTag)))}, got {tag!r}")
    return tags
