"""The trainer's view of the rollout queue: prompts go in, groups of completions come out, each exactly once.

    rollouts = bridge.rollouts(max_staleness=2, batch=32)
    rollouts.submit(ids, prompts, sampling_params) engines start as soon as the staleness bound allows
    groups = rollouts.take()                       32 groups, none older than two versions; train on them
    groups += rollouts.take(8, more=True)          more before the sync, for example to replace uninformative groups
    rollouts.expect(bridge.version + 1)            request the next groups while that version is being synced
    bridge.sync(params)
    position = rollouts.position                   save it; after a crash, continue behind it
    rollouts.saved(position)                       earlier prompts and completions may be deleted

`submit` and `take` are idempotent, and `expect` is optional. While the gateway is gone, calls wait for it; its journal keeps
what it accepted."""

from __future__ import annotations

import dataclasses
import reprlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import xxhash

from slipstream.bridge.status_words import engines_in_words, queue_in_words
from slipstream.errors import (
    DeadlineExceeded,
    GatewayLost,
    InvalidSampling,
    JournalUnavailable,
    NotReady,
    RolloutError,
    SlipstreamError,
)
from slipstream.gateway.staleness import RolloutBound
from slipstream.runtime import event_loop, tracing
from slipstream.runtime.failpoints import is_recording, step
from slipstream.runtime.waiting import waiting_for
from slipstream.types import FleetStatus, Messages, Prompt, Request, RolloutGroup, SamplingParams, plain_ids

if TYPE_CHECKING:
    from slipstream.bridge.chat_prompts import ChatPrompts, Tools

T = TypeVar("T")

Sampling: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
"""For all prompts, or one per prompt."""
Adapters: TypeAlias = str | Sequence[str]
"""For all prompts, or one per prompt. Empty names the base model."""

RETRY_SECONDS = 0.2
EXPECT_SECONDS = 600.0
"""How long the gateway holds an `expect` for a version that does not arrive."""
SUBMIT_PROMPTS = 256
"""Prompts per message."""


class PromptQueue(Protocol):
    """A fleet with its gateway, or a `LocalQueue`."""

    async def submit(self, bound: RolloutBound, requests: Sequence[Request]) -> int: ...

    async def take(
        self,
        bound: RolloutBound,
        after: int,
        count: int,
        timeout: float,
        saved: int = 0,
        version: int = 0,
        more: bool = False,
    ) -> list[RolloutGroup]: ...


class Rollouts:
    """Made by `Bridge.rollouts`. For one thread."""

    def __init__(
        self,
        fleet: PromptQueue,
        bound: RolloutBound,
        position: int,
        patience: float,
        chats: ChatPrompts,
        find_status: Callable[[], FleetStatus],
        adapter: str = "",
    ) -> None:
        self._adapter = adapter
        self._fleet, self._patience, self._chats, self._find_status = fleet, patience, chats, find_status
        self.bound = bound
        self.position = position
        """Position of the last group taken."""
        self._saved = 0
        self._version = 0
        """Version that groups were last taken ahead for. Later groups are not taken for an older one."""
        self._traces: dict[str, str] = {}
        """By id: the trace contexts of prompts that are traced and not taken."""
        self._expected: tuple[int, int, Future[list[RolloutGroup]]] | None = None
        """Groups requested ahead of the next `take`: their number, version and future."""

    def submit(
        self,
        ids: Sequence[str],
        prompts: Sequence[Prompt | Messages],
        sampling_params: Sampling = None,
        *,
        tools: Tools = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Submit prompts, each with an id that is unique in the run; return how many are new.

        A prompt that was submitted before is not generated again. A prompt without a seed gets one derived from its id. `tools`
        and `chat_template_kwargs` are for conversations, as in `Bridge.generate`."""
        prompts = self._chats.render(prompts, tools, chat_template_kwargs)
        params = per_prompt(sampling_params, len(prompts))
        if not len(ids) == len(prompts) == len(params):
            raise InvalidSampling(
                f"got {len(ids)} ids, {len(prompts)} prompts and {len(params)} sampling_params; pass as many of each, "
                "or one SamplingParams for all"
            )
        seeds = [xxhash.xxh3_64_intdigest(id.encode()) >> 1 for id in ids]
        rows = zip(ids, prompts, params, seeds, map(repr, ids))
        requests = [make_request(*row, adapter=self._adapter) for row in rows]
        if tracing.is_on():
            requests = list(map(self._traced, requests))
        chunks = [requests[i : i + SUBMIT_PROMPTS] for i in range(0, len(requests), SUBMIT_PROMPTS)]
        step("rollout.submit", ids=list(ids))
        return sum(self._retry(partial(self._fleet.submit, self.bound, chunk)) for chunk in chunks)

    def _traced(self, request: Request) -> Request:
        """Return a prompt with the beginning of its trace."""
        if request.id not in self._traces:  # otherwise it is submitted again
            span = tracing.begin("rollout.submit", "", prompt=request.id)
            self._traces[request.id] = span.traceparent
            span.end()
        return dataclasses.replace(request, traceparent=self._traces[request.id])

    def take(self, count: int | None = None, timeout: float = 600.0, *, more: bool = False) -> list[RolloutGroup]:
        """Wait for the next groups and return them: `bound.batch` groups, or `count`, in submission order as far as they finish
        in that order. After `timeout` seconds raises `DeadlineExceeded` and takes none.

        Engines generate a batch per sync, and ahead as far as the bound allows. To take more than a batch before the next sync,
        pass `more`."""
        count = self.bound.batch if count is None else count
        if count < 1:
            raise RolloutError(f"take needs a count of at least 1, got {count}")
        after, began = self.position, time.time_ns()
        step("rollout.take", after=after, count=count)
        with waiting_for(f"{count} groups of rollouts", self._how_they_are):
            groups = self._take_expected(count, timeout)
            if groups is None:
                take = partial(
                    self._fleet.take, self.bound, self.position, count, timeout, self._saved, self._version, more=more
                )
                try:
                    groups = self._retry(take)
                except (DeadlineExceeded, NotReady):
                    self._version = 0  # its sync may have failed: next time take for the version that serves
                    raise
        if is_recording():
            step("rollout.taken", after=after, groups=[_facts(group) for group in groups])
        if tracing.is_on():
            groups = [self._with_trace(group, began) for group in groups]
        self.position = groups[-1].position  # last: a call that fails has taken nothing
        return groups

    def _with_trace(self, group: RolloutGroup, began: int) -> RolloutGroup:
        traceparent = self._traces.pop(group.id, "")
        if traceparent:
            facts = {"position": group.position, "version": group.version, "age": group.age}
            tracing.begin("rollout.take", traceparent, began, **facts).end(group.error)
        return dataclasses.replace(group, traceparent=traceparent)

    def _how_they_are(self) -> str:
        status = self._find_status()
        return f"{queue_in_words(status)}; {engines_in_words(status)}"

    def expect(self, version: int, count: int | None = None) -> None:
        """Request the groups of the next `take` now, for a trainer that has `version` by then.

        `version` is the one that the fleet serves or the one that the next sync will make; called just before that sync, the
        groups do not wait for its end. Their prompts must have been submitted. If the sync fails or the gateway dies, `take`
        returns what it would have returned without this call."""
        self._cancel_expected()
        count = self.bound.batch if count is None else count
        take = self._fleet.take(self.bound, self.position, count, EXPECT_SECONDS, saved=self._saved, version=version)
        self._expected = count, version, event_loop.start(take)

    def _cancel_expected(self) -> None:
        if self._expected is not None:
            self._expected[2].cancel()
            self._expected = None

    def _take_expected(self, count: int, timeout: float) -> list[RolloutGroup] | None:
        """Return the groups requested by `expect`; None if there are none and `take` must ask."""
        if self._expected is None or self._expected[0] != count:
            self._cancel_expected()
            return None
        _, version, future = self._expected
        try:
            groups = future.result(timeout)
            self._version = version
            return groups
        except (SlipstreamError, CancelledError):  # before TimeoutError: DeadlineExceeded is both
            return None
        except TimeoutError:
            raise DeadlineExceeded(f"{count} groups requested by expect did not arrive within {timeout:g} s") from None
        finally:
            self._cancel_expected()

    def saved(self, position: int) -> None:
        """Promise never to continue from before this position. The next `take` deletes prompts and completions up to it."""
        if position > self.position:
            raise RolloutError(f"position {position} is not taken yet; the last taken position is {self.position}")
        self._saved = max(self._saved, position)

    def _retry(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Retry while the gateway is gone, its engines are not back, or its disk is full."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return event_loop.run(call())
            except (GatewayLost, JournalUnavailable, NotReady):
                if time.monotonic() >= deadline:
                    raise
                time.sleep(RETRY_SECONDS)


def _facts(group: RolloutGroup) -> dict[str, Any]:
    """What the history keeps of a group."""
    tokens = repr([(c.token_ids, c.logprobs, c.spans) for c in group.completions])
    return {
        "id": group.id,
        "position": group.position,
        "version": group.version,
        "spans": [[(s.start, s.stop, s.version) for s in c.spans] for c in group.completions],
        "lengths": [len(c.token_ids) for c in group.completions],
        "engines": [c.engine for c in group.completions],
        "tokens": xxhash.xxh3_64_hexdigest(tokens.encode()),
    }


def per_prompt(sampling_params: Sampling, count: int) -> Sequence[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    is_list = isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str)
    rows: Any = sampling_params if is_list else [sampling_params]
    if wrong := [row for row in rows if not isinstance(row, SamplingParams)]:
        hint = "; write SamplingParams(**settings)" if isinstance(wrong[0], Mapping) else ""
        raise InvalidSampling(
            f"sampling_params must be a SamplingParams, or one per prompt, got {reprlib.repr(wrong[0])}{hint}"
        )
    return sampling_params


def make_request(
    id: str,
    prompt: Prompt,
    params: SamplingParams,
    seed: int,
    shown: str,
    priority: int = 0,
    progress: bool = False,
    adapter: str = "",
) -> Request:
    """Return a request, with `seed` if its params have none. `shown` names the prompt in errors."""
    if params.seed is None:
        params = params.with_seed(seed)
    try:
        tokens = prompt if isinstance(prompt, str) else plain_ids(prompt)
        return Request(id, tokens, params, priority, progress, adapter=adapter)
    except SlipstreamError as error:
        raise type(error)(f"prompt {shown}: {error}") from None
