"""Rewards from plain Python functions, over a whole batch at once.

    with Rewarder({"my_rewards:exact": 1.0, "my_rewards:brevity": 0.1}, workers=2, timeout=10) as rewarder:
        rewards = rewarder.score(reward_requests(prompts, completions, codec, answer=task.answer))

Every call has a deadline. With `workers`, each function runs in processes of its own (`rl/reward_processes.py`): one that
hangs, crashes or eats memory is killed and replaced, and the trainer goes on. Without, it runs in the trainer's process,
where a synchronous function that hangs can only be left behind.

A completion that could not be judged has no reward, which is not a reward of zero: either the error is raised, or the
sample is left out of its group, and counted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeAlias, get_args

from slipstream import portal
from slipstream.errors import ConfigError, RequestError, RewardError, RewardFailed, RewardTimeout
from slipstream.rl.callbacks import Callbacks, Overdue
from slipstream.rl.config import RewardConfig
from slipstream.rl.groups import OnError, Rewards, settled
from slipstream.rl.reward_functions import (
    Judged,
    Problem,
    RewardFunction,
    RewardRequest,
    Verdict,
    accepted,
    judged,
    name_of,
    reward_from,
)
from slipstream.rl.reward_processes import WorkerPool
from slipstream.rl.tokens import Codec
from slipstream.types import Completion

Functions: TypeAlias = (
    str | RewardFunction | Sequence[str | RewardFunction] | Mapping[str, float] | Mapping[RewardFunction, float]
)
"""One function or several, by name or as they are; as a mapping, with their weights."""


def reward_requests(
    prompts: Sequence[str],
    completions: Sequence[Completion],
    codec: Codec,
    answer: Callable[[str], str] | None = None,
) -> list[RewardRequest]:
    """A request for each completion; `answer` gives a right answer to a prompt, where one is known."""
    texts = codec.decode([c.token_ids for c in completions])
    known = [answer(prompt) if answer else None for prompt in prompts]
    return [
        RewardRequest(
            prompt=prompts[c.prompt_index],
            completion=text,
            prompt_token_ids=c.prompt_token_ids,
            token_ids=c.token_ids,
            finish_reason=c.finish_reason,
            answer=known[c.prompt_index],
            prompt_index=c.prompt_index,
            sample_index=c.sample_index,
        )
        for c, text in zip(completions, texts)
    ]


class Runner(Protocol):
    """Where a function runs: here, or in processes of its own."""

    async def start(self) -> None: ...

    async def judge(self, request: RewardRequest, timeout: float) -> Verdict: ...

    async def close(self) -> None: ...


class Rewarder:
    """Runs reward functions over batches. May be used from several threads. A context manager: leaving it ends its
    processes."""

    def __init__(
        self,
        functions: Functions,
        *,
        timeout: float = 30.0,
        workers: int = 0,
        on_error: OnError = "raise",
        concurrency: int = 64,
        start_timeout: float = 60.0,
        memory_limit: int = 0,
    ) -> None:
        """`timeout` is for one call. `workers` is the number of processes per function; 0 runs them here, `concurrency` calls
        at a time. `start_timeout` is for a worker's imports. `memory_limit` is the most address space of a worker, in bytes.

        Each function is found, and with `workers` a process for it started, before this returns."""
        if on_error not in get_args(OnError):
            raise ConfigError(f"on_error must be one of {', '.join(map(repr, get_args(OnError)))}; got {on_error!r}")
        if timeout <= 0 or start_timeout <= 0 or workers < 0 or concurrency < 1:
            raise ConfigError(
                f"a rewarder needs time-outs above 0, workers of 0 or more and a concurrency of 1 or more; got "
                f"timeout={timeout}, start_timeout={start_timeout}, workers={workers}, concurrency={concurrency}"
            )
        self._on_error, self._timeout, self._callbacks = on_error, timeout, Callbacks()
        self._functions: list[_Weighted] = []
        self._closed = False
        for function, weight in _weighted(functions):
            runner: Runner
            if workers:
                name = function if isinstance(function, str) else name_of(function)
                runner = WorkerPool(name, workers, start_timeout, memory_limit)
            else:
                name = function if isinstance(function, str) else _label(function)
                here = reward_from(function) if isinstance(function, str) else function
                runner = _Here(here, self._callbacks, concurrency)
            self._functions.append(_Weighted(name, weight, runner))
        names = [f.name for f in self._functions]
        if len(set(names)) < len(names) or not names:
            raise ConfigError(f"a rewarder needs functions, each once; got {', '.join(names) or 'none'}")
        try:
            portal.run(self._start())
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(cls, config: RewardConfig) -> Rewarder:
        return cls(
            config.functions,
            timeout=config.timeout,
            workers=config.workers,
            on_error=config.on_error,
            memory_limit=config.memory_limit,
        )

    def score(self, requests: Sequence[RewardRequest]) -> Rewards:
        """In order. Raises the first error with `on_error="raise"`, and in any case if no sample is left."""
        return portal.run(self._score(requests))

    async def ascore(self, requests: Sequence[RewardRequest]) -> Rewards:
        """`score`, awaited on any event loop. Cancelling it ends the calls that are under way."""
        return await portal.arun(self._score(requests))

    async def _score(self, requests: Sequence[RewardRequest]) -> Rewards:
        if self._closed:
            raise RequestError("this rewarder is closed; make another")
        tasks = [asyncio.create_task(self._judge(request)) for request in requests]
        try:
            for done in asyncio.as_completed(tasks):
                await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        weights = {function.name: function.weight for function in self._functions}
        return settled(requests, [task.result() for task in tasks], weights)

    async def _judge(self, request: RewardRequest) -> list[Judged] | RewardError:
        """What each function gave; the error of the first that failed, or that error raised."""
        tasks = [asyncio.create_task(f.runner.judge(request, self._timeout)) for f in self._functions]
        try:
            verdicts = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        given = []
        for function, verdict in zip(self._functions, verdicts):
            if not isinstance(verdict, Judged):
                error = _error(function, request, verdict, self._timeout)
                if self._on_error == "raise":
                    raise error
                return error
            given.append(verdict)
        return given

    def close(self) -> None:
        """Ends the worker processes. May be called twice."""
        self._closed = True
        portal.run(self._close())
        self._callbacks.close()

    async def _start(self) -> None:
        await asyncio.gather(*(f.runner.start() for f in self._functions))

    async def _close(self) -> None:
        await asyncio.gather(*(f.runner.close() for f in self._functions))

    def __enter__(self) -> Rewarder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Weighted:
    name: str
    weight: float
    runner: Runner


class _Here:
    """A function in this process."""

    def __init__(self, function: RewardFunction, callbacks: Callbacks, concurrency: int) -> None:
        self._function, self._callbacks, self._slots = function, callbacks, asyncio.Semaphore(concurrency)

    async def start(self) -> None: ...

    async def judge(self, request: RewardRequest, timeout: float) -> Verdict:
        async with self._slots:
            facts = accepted(self._function, request)
            texts = (request.prompt, request.completion)
            outcome = await self._callbacks.call(self._function, texts, facts, timeout=timeout)
        return outcome if isinstance(outcome, Overdue) else judged(outcome)

    async def close(self) -> None: ...


def _weighted(functions: Functions) -> list[tuple[str | RewardFunction, float]]:
    if isinstance(functions, Mapping):
        for function, weight in functions.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise ConfigError(f"the weight of reward {function!r} must be a finite number, got {weight!r}")
        return [(function, float(weight)) for function, weight in functions.items()]
    if isinstance(functions, str) or callable(functions):
        return [(functions, 1.0)]
    return [(function, 1.0) for function in functions]


def _label(function: RewardFunction) -> str:
    """For errors and parts: a function that runs here needs no name by which it could be imported."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _error(function: _Weighted, request: RewardRequest, verdict: Problem | Overdue, timeout: float) -> RewardError:
    sample = f"on sample {request.sample_index} of prompt {request.prompt_index} ({request.prompt!r:.80})"
    choice = 'on_error="drop" leaves such samples out'
    if isinstance(verdict, Overdue):
        fix = "killed; raise timeout if it needs longer"
        if isinstance(function.runner, _Here):
            fix = "left running, since a thread cannot be ended; with workers=1 it runs in a process that can"
        return RewardTimeout(
            f"reward {function.name!r} gave no answer within {timeout:g} s {sample}. It was {fix}; {choice}"
        )
    detail = f"\n{verdict.detail}" if verdict.detail else ""
    return RewardFailed(
        f"reward {function.name!r} {verdict.what} {sample}. Likely fix: {verdict.fix}; {choice}{detail}"
    )
