"""The trainer's side. The same verbs whether the engines are processes behind a gateway or a library in this one:

with slipstream.launch(model="path/to/model") as bridge:
    report = bridge.sync(params)                            # new weights reach every engine, verified and at once
    completions = bridge.generate(["1+1="], SamplingParams(n=8))
    scores = bridge.score([c.prompt_token_ids + c.token_ids for c in completions])
"""

from __future__ import annotations

import dataclasses
import operator
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

from slipstream import portal
from slipstream.errors import (
    EngineFailure,
    FleetChanged,
    InvalidPrompt,
    InvalidSampling,
    NotReady,
    SlipstreamError,
    UpdateInProgress,
)
from slipstream.types import (
    Completion,
    EngineInfo,
    Failure,
    FleetStatus,
    InFlight,
    Prompt,
    Request,
    SamplingParams,
    Score,
    SyncReport,
    check_prompt,
)
from slipstream.weights.publisher import Fleet as UpdateFleet
from slipstream.weights.publisher import Publisher

MAX_LOOKS = 5


class Fleet(UpdateFleet, Protocol):
    """The engines as the bridge sees them: `gateway.client.GatewayFleet`, or `engines.local.LocalFleet`."""

    async def status(self) -> FleetStatus: ...

    async def refresh(self) -> tuple[tuple[EngineInfo, ...], int]: ...

    def generate(
        self, requests: Sequence[Request], engine: str = ""
    ) -> AsyncGenerator[list[Completion | Failure], None]: ...

    async def score(self, sequences: Sequence[Sequence[int]], engine: str = "") -> list[Score]: ...

    async def close(self) -> None: ...


class Bridge:
    """Made by `launch`, `connect` or `inprocess`. Synchronous; `generate` and `score` may be called from several threads,
    also while `sync` runs. A context manager: leaving it ends what was started for it."""

    def __init__(
        self,
        fleet: Fleet,
        transport: str | None = None,
        on_close: Callable[[], None] | None = None,
        run_dir: str = "",
        checksums: bool = True,
        trainer_rank: int = 0,
    ) -> None:
        self.run_dir = run_dir
        """Where logs, address and token of a launched or joined gateway are; empty in-process."""
        self._fleet, self._publisher, self._on_close = (
            fleet,
            Publisher(fleet, transport, trainer_rank, checksums),
            on_close,
        )
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
        self, params: Any, *, in_flight: InFlight = "keep", partial: bool = False, drop_failed: bool = False
    ) -> SyncReport:
        """Makes `params` the policy of every engine, as the next version.

        `params` is a pytree whose leaf paths, joined by dots, are the checkpoint's names. All engines stage and verify
        the version before any uses it; if one cannot, all keep the version they have, and the error says why (with
        `drop_failed` the others go on, and `SyncReport.lost` names it). Returns once the new version serves.

        Tensors that did not change are not sent. With `partial`, `params` is a part of the tree (the layers that are
        trained), and the rest stays as it is. `in_flight` says what becomes of requests that are running."""
        if not self._syncing.acquire(blocking=False):
            raise UpdateInProgress("another thread is in bridge.sync; one update at a time")
        try:
            return portal.run(self._sync(params, in_flight, partial, drop_failed))
        finally:
            self._syncing.release()

    async def _sync(self, params: Any, in_flight: InFlight, partial: bool, drop_failed: bool) -> SyncReport:
        for _ in range(MAX_LOOKS):
            engines, version = self._known or await self._fleet.refresh()
            self._known = None  # unless all goes well, look again next time
            if not engines:
                raise NotReady(
                    "no engine has registered, so there is nobody to sync to; `slipstream status` shows the fleet"
                )
            try:
                report = await self._publisher.publish(params, engines, version + 1, in_flight, partial, drop_failed)
            except FleetChanged:
                continue
            self._version = report.version
            if not report.lost:
                self._known = (engines, report.version)
            return report
        raise FleetChanged(f"engines came or went during each of {MAX_LOOKS} attempts to sync; see `slipstream status`")

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        engine: str = "",
    ) -> list[Completion]:
        """Completions in order: the `n` samples of the first prompt, then those of the second, and so on.

        `sampling` is for all prompts, or one per prompt. Raises the first failure, if any prompt failed."""
        rows: dict[tuple[int, int], Completion] = {}
        for result in self.stream(prompts, sampling, engine=engine):
            if isinstance(result, Failure):
                index = _prompt_index(result.request_id)
                raise type(result.error)(f"prompt {index} of {len(prompts)}: {result.error}")
            rows[result.prompt_index, result.sample_index] = result
        return [rows[key] for key in sorted(rows)]

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        engine: str = "",
    ) -> Iterator[Completion | Failure]:
        """As `generate`, each completion as soon as it is finished, failures among them. Leaving it early cancels the rest."""
        requests = _requests(prompts, sampling)
        if not requests:
            return
        for batch in portal.iterate(self._batches(requests, engine)):
            for result in batch:
                if isinstance(result, Completion):
                    result = dataclasses.replace(result, prompt_index=_prompt_index(result.request_id))
                yield result

    async def _batches(
        self, requests: Sequence[Request], engine: str
    ) -> AsyncGenerator[list[Completion | Failure], None]:
        owed = sum(r.sampling.n for r in requests)
        async for batch in self._fleet.generate(requests, engine):
            owed -= sum(1 if isinstance(r, Completion) else _samples(requests, r) for r in batch)
            yield batch
        if owed > 0:
            raise EngineFailure(f"{owed} samples were not answered")

    def score(self, sequences: Sequence[Sequence[int]], *, engine: str = "") -> list[Score]:
        """Raw logprobs of token sequences under the current policy, in order."""
        rows = [_token_ids(sequence) for sequence in sequences]
        return portal.run(self._fleet.score(rows, engine)) if rows else []

    def status(self) -> FleetStatus:
        return portal.run(self._fleet.status())

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


def _requests(prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None) -> list[Request]:
    if isinstance(prompts, str):
        raise InvalidPrompt("prompts is one string; pass a list of prompts")
    if sampling is None or isinstance(sampling, SamplingParams):
        sampling = [sampling or SamplingParams()] * len(prompts)
    if len(sampling) != len(prompts):
        raise InvalidSampling(
            f"{len(sampling)} sampling parameters for {len(prompts)} prompts; pass one, or one per prompt"
        )
    call = secrets.token_hex(6)
    requests = []
    for index, (prompt, params) in enumerate(zip(prompts, sampling)):
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(63))
        try:
            requests.append(
                Request(f"{call}/{index}", prompt if isinstance(prompt, str) else _token_ids(prompt), params)
            )
        except SlipstreamError as error:
            raise type(error)(f"prompt {index} of {len(prompts)}: {error}") from None
    return requests


def _prompt_index(request_id: str) -> int:
    return int(request_id.rpartition("/")[2])


def _samples(requests: Sequence[Request], failure: Failure) -> int:
    return requests[_prompt_index(failure.request_id)].sampling.n


def _token_ids(tokens: Sequence[int]) -> tuple[int, ...]:
    """Plain ints, from lists, numpy or JAX arrays."""
    try:
        ids = tuple(operator.index(t) for t in tokens)
    except TypeError:
        raise InvalidPrompt(f"token ids must be integers, got {tokens!r:.80}") from None
    check_prompt(ids)
    return ids
