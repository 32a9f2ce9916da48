"""Run Python reward functions over batches of completions.

    with Rewarder({"my_rewards:exact": 1.0, "my_rewards:brevity": 0.1}, workers=2, timeout=10) as rewarder:
        rewards = rewarder.score(reward_requests(prompts, completions, codec, answer=task.answer))

Every call has a deadline. With `workers`, each function runs in its own processes (`worker_pool.py`): a worker that hangs,
crashes or exhausts memory is killed and replaced, and training continues. Without, it runs in the trainer's process, where
a synchronous function that hangs cannot be stopped.

A completion that could not be scored has no reward, which is not a reward of 0: either the error is raised, or the sample is
dropped from its group and counted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from slipstream.errors import ConfigError, RequestError, RewardError, RewardFailed, RewardTimeout
from slipstream.rl.config import RewardConfig
from slipstream.rl.data.tokens import Codec
from slipstream.rl.rewards.callbacks import Callbacks, TimedOut, gather_or_cancel
from slipstream.rl.rewards.functions import (
    FACTS,
    Reward,
    RewardFunction,
    RewardOutcome,
    RewardProblem,
    RewardRequest,
    accepted_facts,
    import_function,
    import_name,
    to_reward,
)
from slipstream.rl.rewards.groups import OnError, Rewards, combine
from slipstream.rl.rewards.worker_pool import WorkerPool
from slipstream.runtime import event_loop
from slipstream.types import Completion

Functions: TypeAlias = (
    str | RewardFunction | Sequence[str | RewardFunction] | Mapping[str, float] | Mapping[RewardFunction, float]
)
"""One function or several, as names or callables; with weights as a mapping."""


def reward_requests(
    prompts: Sequence[str],
    completions: Sequence[Completion],
    codec: Codec,
    answer: Callable[[str], str | None] | None = None,
    facts: Callable[[str], Mapping[str, Any]] | None = None,
) -> list[RewardRequest]:
    """A request for each completion. `answer` returns a right answer to a prompt, `facts` returns additional facts; those that
    a request has already are left out."""
    texts = codec.decode([c.token_ids for c in completions])
    answers = [answer(prompt) if answer else None for prompt in prompts]
    extras = [{k: v for k, v in facts(prompt).items() if k not in FACTS} if facts else {} for prompt in prompts]
    return [
        RewardRequest(
            prompt=prompts[c.prompt_index],
            completion=text,
            prompt_token_ids=c.prompt_token_ids,
            token_ids=c.token_ids,
            finish_reason=c.finish_reason,
            answer=answers[c.prompt_index],
            prompt_index=c.prompt_index,
            sample_index=c.sample_index,
            extra=extras[c.prompt_index],
        )
        for c, text in zip(completions, texts)
    ]


class Rewarder:
    """Runs reward functions over batches. Thread-safe. A context manager, whose exit ends the worker processes."""

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
        """`timeout` limits one call. `workers` is the number of processes per function; 0 runs functions in this process,
        `concurrency` calls at a time. `start_timeout` limits the imports of a worker. `memory_limit` is the maximum address
        space of a worker in bytes.

        Functions are imported, and their first workers started, before this returns."""
        if on_error not in get_args(OnError):
            raise ConfigError(f"on_error must be one of {', '.join(map(repr, get_args(OnError)))}; got {on_error!r}")
        if timeout <= 0 or start_timeout <= 0 or workers < 0 or concurrency < 1:
            raise ConfigError(
                "a rewarder needs timeout > 0, start_timeout > 0, workers >= 0 and concurrency >= 1; got "
                f"timeout={timeout}, start_timeout={start_timeout}, workers={workers}, concurrency={concurrency}"
            )
        self._on_error, self._timeout, self._callbacks = on_error, timeout, Callbacks()
        self._functions: list[_WeightedFunction] = []
        self._closed = False
        for function, weight in _weighted(functions):
            runner: WorkerPool | _InProcessRunner
            if workers:
                name = function if isinstance(function, str) else import_name(function)
                runner = WorkerPool(name, workers, start_timeout, memory_limit)
            else:
                imported = import_function(function) if isinstance(function, str) else function
                # A function that runs in this process need not be importable.
                label = getattr(imported, "__qualname__", None) or type(imported).__qualname__
                name = function if isinstance(function, str) else label
                runner = _InProcessRunner(imported, self._callbacks, concurrency)
            self._functions.append(_WeightedFunction(name, weight, runner))
        names = [f.name for f in self._functions]
        if len(set(names)) < len(names) or not names:
            raise ConfigError(
                f"a rewarder needs at least one function, and each only once; got {', '.join(names) or 'none'}"
            )
        try:
            event_loop.run(gather_or_cancel(f.runner.start() for f in self._functions))
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(cls, config: RewardConfig) -> Rewarder:
        return cls(
            config.weights,
            timeout=config.timeout,
            workers=config.workers,
            on_error=config.on_error,
            memory_limit=config.memory_limit,
        )

    def score(self, requests: Sequence[RewardRequest]) -> Rewards:
        """Score a batch, in order. Raises the first error with `on_error="raise"`, or if no sample is left."""
        return event_loop.run(self._score(requests))

    async def ascore(self, requests: Sequence[RewardRequest]) -> Rewards:
        """`score` as a coroutine for any event loop. Cancelling it ends the running calls."""
        return await event_loop.arun(self._score(requests))

    async def _score(self, requests: Sequence[RewardRequest]) -> Rewards:
        if self._closed:
            raise RequestError("this rewarder is closed; create another")
        results = await gather_or_cancel(self._evaluate(request) for request in requests)
        weights = {function.name: function.weight for function in self._functions}
        return combine(requests, results, weights)

    async def _evaluate(self, request: RewardRequest) -> list[Reward] | RewardError:
        """The reward of each function, or the error of the first that failed, which is raised with `on_error="raise"`."""
        outcomes = await gather_or_cancel(f.runner.evaluate(request, self._timeout) for f in self._functions)
        rewards = []
        for function, outcome in zip(self._functions, outcomes):
            if not isinstance(outcome, Reward):
                error = _error(function, request, outcome, self._timeout)
                if self._on_error == "raise":
                    raise error
                return error
            rewards.append(outcome)
        return rewards

    def close(self) -> None:
        """End the worker processes. May be called twice."""
        self._closed = True
        event_loop.run(gather_or_cancel(f.runner.close() for f in self._functions))
        self._callbacks.close()

    def __enter__(self) -> Rewarder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _WeightedFunction:
    name: str
    weight: float
    runner: WorkerPool | _InProcessRunner


class _InProcessRunner:
    def __init__(self, function: RewardFunction, callbacks: Callbacks, concurrency: int) -> None:
        self._function, self._callbacks, self._slots = function, callbacks, asyncio.Semaphore(concurrency)

    async def start(self) -> None: ...

    async def evaluate(self, request: RewardRequest, timeout: float) -> RewardOutcome:
        async with self._slots:
            facts = accepted_facts(self._function, request)
            texts = (request.prompt, request.completion)
            outcome = await self._callbacks.call(self._function, texts, facts, timeout=timeout)
        return outcome if isinstance(outcome, TimedOut) else to_reward(outcome)

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


def _error(
    function: _WeightedFunction, request: RewardRequest, outcome: RewardProblem | TimedOut, timeout: float
) -> RewardError:
    sample = f"on sample {request.sample_index} of prompt {request.prompt_index} ({request.prompt!r:.80})"
    choice = 'on_error="drop" drops such samples'
    if isinstance(outcome, TimedOut):
        fix = "killed; increase timeout if it needs longer"
        if isinstance(function.runner, _InProcessRunner):
            fix = (
                "left running, since a thread cannot be stopped; with workers=1 it runs in a process that can be killed"
            )
        return RewardTimeout(
            f"reward {function.name!r} did not return within {timeout:g} s {sample}. It was {fix}; {choice}"
        )
    detail = f"\n{outcome.detail}" if outcome.detail else ""
    return RewardFailed(
        f"reward {function.name!r} {outcome.what} {sample}. Likely fix: {outcome.fix}; {choice}{detail}"
    )
