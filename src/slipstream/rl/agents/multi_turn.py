"""Multi-turn rollouts: a policy and environments that take turns.

    result = run_episodes(bridge, codec, [Guess() for _ in range(64)], sampling_params, group=8, max_turns=4, seed=step)

The context of a turn is the context of the turn before, the sampled token ids, and the ids of the environment's new text,
encoded alone. No text is tokenized twice: the trainer trains on exactly what the engine saw, and the engine's prefix cache
holds everything before the new text.

Every environment continues as soon as its own turn is finished; engines batch the turns that are in flight. An episode stays
on the engine that started it, unless that engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from slipstream.bridge.bridge import Bridge
from slipstream.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineLost,
    EnvironmentFailed,
    EnvironmentTimeout,
    EpisodeError,
    InvalidPrompt,
    InvalidSampling,
    NotReady,
    SlipstreamError,
    UnknownEngine,
)
from slipstream.rl.agents.api_agent import ApiAgent, play_episodes
from slipstream.rl.agents.dialogue import Dialogue, MarkedText
from slipstream.rl.agents.environments import NO_MARKERS, Environment, Markers, checked_observation, checked_step
from slipstream.rl.agents.episodes import Episode, Episodes, Turn
from slipstream.rl.agents.hosts import Host, InProcessHost
from slipstream.rl.data.tokens import Codec
from slipstream.rl.rewards.callbacks import Raised, TimedOut, gather_or_cancel
from slipstream.rl.rewards.groups import OnError, survivors
from slipstream.runtime import event_loop
from slipstream.types import Completion, EndReason, SamplingParams


def run_episodes(
    bridge: Bridge,
    codec: Codec,
    environments: Sequence[Environment | ApiAgent],
    sampling_params: SamplingParams | None = None,
    *,
    max_turns: int = 8,
    seed: int = 0,
    group: int = 1,
    markers: Markers = NO_MARKERS,
    max_length: int = 0,
    step_timeout: float = 60.0,
    turn_timeout: float = 600.0,
    on_error: OnError = "raise",
    concurrency: int = 256,
) -> Episodes:
    """Run one episode of each environment, `concurrency` of them at a time.

    `sampling_params` apply to each turn; from their seed, each environment derives its own. `group` consecutive environments
    are reset with the same seed, derived from `seed` and the number of the group. `max_length` is the maximum number of
    tokens of an episode; 0 uses the engines' limit. `step_timeout` limits each reset and step, `turn_timeout` each turn of
    the policy.

    A failing environment raises an `EpisodeError` with the environment and the turn. With `on_error="drop"` its episode is
    dropped instead, and so is a group left with fewer than two. Engine failures are always raised."""
    options = dict(max_turns=max_turns, seed=seed, group=group, markers=markers, max_length=max_length)
    limits = dict(step_timeout=step_timeout, turn_timeout=turn_timeout, on_error=on_error, concurrency=concurrency)
    return event_loop.run(_runner(bridge, codec, environments, sampling_params, **options, **limits).run(environments))


async def arun_episodes(
    bridge: Bridge,
    codec: Codec,
    environments: Sequence[Environment | ApiAgent],
    sampling_params: SamplingParams | None = None,
    **options: Any,
) -> Episodes:
    """`run_episodes` as a coroutine for any event loop, with the same options. Cancelling it ends the episodes."""
    runner = await asyncio.to_thread(_runner, bridge, codec, environments, sampling_params, **options)
    return await event_loop.arun(runner.run(environments))


def _runner(
    bridge: Bridge,
    codec: Codec,
    environments: Sequence[Environment | ApiAgent],
    sampling_params: SamplingParams | None,
    **options: Any,
) -> _EpisodeRunner:
    runner = _EpisodeRunner(bridge, codec, sampling_params or SamplingParams(), **options)
    runner.check(environments)
    fleet = bridge.status()
    limits = [engine.info.max_model_len for engine in fleet.present]
    if not limits:
        raise fleet.no_engines("to generate")
    return dataclasses.replace(runner, max_length=min([*limits, *([runner.max_length] if runner.max_length else [])]))


@dataclass(frozen=True, slots=True)
class _EpisodeRunner:
    """One call of `run_episodes`."""

    bridge: Bridge
    codec: Codec
    sampling: SamplingParams
    max_turns: int = 8
    seed: int = 0
    group: int = 1
    markers: Markers = NO_MARKERS
    max_length: int = 0
    step_timeout: float = 60.0
    turn_timeout: float = 600.0
    on_error: OnError = "raise"
    concurrency: int = 256

    def check(self, environments: Sequence[Environment | ApiAgent]) -> None:
        for name, low in (("max_turns", 1), ("seed", 0), ("group", 1), ("max_length", 0), ("concurrency", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
        for name in ("step_timeout", "turn_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.on_error not in get_args(OnError):
            raise ConfigError(f"on_error must be one of {', '.join(get_args(OnError))}; got {self.on_error!r}")
        if self.sampling.n != 1:
            raise InvalidSampling(
                f"an episode continues from one sample, got n={self.sampling.n}; use group={self.sampling.n} instead"
            )
        if len(environments) % self.group:
            raise ConfigError(f"{len(environments)} environments cannot be divided into groups of {self.group}")
        first: dict[int, int] = {}
        for index, environment in enumerate(environments):
            if (other := first.setdefault(id(environment), index)) != index:
                raise ConfigError(f"environments {other} and {index} are the same object; each episode needs its own")

    async def run(self, environments: Sequence[Environment | ApiAgent]) -> Episodes:
        slots = asyncio.Semaphore(self.concurrency)
        results = await gather_or_cancel(
            self._run_one(index, environment, slots) for index, environment in enumerate(environments)
        )
        errors = tuple(result for result in results if isinstance(result, EpisodeError))
        failed = {index for index, result in enumerate(results) if isinstance(result, EpisodeError)}
        kept = survivors([index // self.group for index in range(len(results))], failed)
        if errors and not kept:
            raise type(errors[0])(f"none of {len(results)} episodes is left; the first error: {errors[0]}")
        episodes = tuple(e for index in kept if not isinstance(result := results[index], EpisodeError) for e in result)
        return Episodes(episodes, errors, len(environments))

    async def _run_one(
        self, index: int, environment: Environment | ApiAgent, slots: asyncio.Semaphore
    ) -> list[Episode] | EpisodeError:
        group = index // self.group
        seed, sampling = derive_seed(self.seed, group), self.sampling
        if sampling.seed is not None:  # equal prompts with equal seeds would give equal samples
            sampling = dataclasses.replace(sampling, seed=derive_seed(sampling.seed, index))
        name = f"environment {index} ({type(environment).__name__}, seed {seed})"
        async with slots:
            try:
                if isinstance(environment, ApiAgent):
                    place = index, group, seed, f"{name}: play"
                    return await play_episodes(self.bridge, environment, sampling, *place)
                loop = EpisodeLoop(
                    *(
                        self.bridge,
                        self.codec,
                        InProcessHost(environment),
                        MarkedText(self.codec, self.markers),
                        sampling,
                    ),
                    *(name, seed),
                    max_turns=self.max_turns,
                    max_length=self.max_length,
                    step_timeout=self.step_timeout,
                    turn_timeout=self.turn_timeout,
                )
                return [Episode(index, group, seed, *await loop.run())]
            except EpisodeError as error:
                if self.on_error == "raise":
                    raise
                return error


class EpisodeLoop:
    """One episode: the environment's observations and the policy's turns."""

    def __init__(
        self,
        bridge: Bridge,
        codec: Codec,
        host: Host,
        dialogue: Dialogue,
        sampling: SamplingParams,
        name: str,
        seed: int,
        *,
        max_turns: int,
        max_length: int,
        step_timeout: float,
        turn_timeout: float,
        adapter: str = "",
    ) -> None:
        """`sampling` applies to each turn. `name` is the environment's, for errors."""
        self._adapter = adapter
        self._bridge, self._codec, self._host, self._dialogue = bridge, codec, host, dialogue
        self._sampling, self._name, self._seed = sampling, name, seed
        self._max_turns, self._max_length = max_turns, max_length
        self._step_timeout, self._turn_timeout = step_timeout, turn_timeout

    async def run(self) -> tuple[tuple[int, ...], tuple[Turn, ...], EndReason]:
        """Return the tokens, the policy's turns, and why the episode ended."""
        turns = list[Turn]()
        observation = checked_observation(await self._call("reset", self._seed, 0), f"{self._where(0)}: reset")
        tokens = self._encoded(0, self._dialogue.first, observation)
        if len(tokens) >= self._max_length:
            raise EnvironmentFailed(
                f"{self._where(0)}: the first observation has {len(tokens)} tokens, which leaves no room for an answer in "
                f"{self._max_length} (max_length, or the engines' max_model_len); make it shorter"
            )
        while True:
            completion = await self._generate(tokens, turns)
            (action,) = self._codec.decode([completion.token_ids])
            stepped = await self._call("step", action, len(turns))
            observation, reward, done = checked_step(stepped, f"{self._where(len(turns))}: step")
            turns.append(_turn(completion, action, reward))
            tokens += completion.token_ids
            if done:
                return tokens, tuple(turns), "done"
            if len(turns) == self._max_turns:
                return tokens, tuple(turns), "max_turns"
            more = self._encoded(len(turns), self._dialogue.next, observation, completion)
            if len(tokens) + len(more) >= self._max_length:
                return tokens, tuple(turns), "too_long"
            tokens += more

    async def _generate(self, tokens: tuple[int, ...], turns: Sequence[Turn]) -> Completion:
        """Generate on the engine of the turn before, whose prefix cache has the context; on any other if it is gone."""
        where, room, sampling = self._where(len(turns)), self._max_length - len(tokens), self._sampling
        if room < sampling.max_tokens:
            sampling = dataclasses.replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        generate = functools.partial(self._bridge.agenerate, [tokens], sampling, adapter=self._adapter)
        try:
            async with asyncio.timeout(self._turn_timeout):
                if turns:
                    with contextlib.suppress(EngineLost, NotReady, UnknownEngine):
                        return (await generate(engine=turns[-1].engine))[0]
                return (await generate())[0]
        except SlipstreamError as error:  # before TimeoutError: DeadlineExceeded is both
            raise type(error)(f"{where}: {error}") from None
        except TimeoutError:
            raise DeadlineExceeded(
                f"{where}: the policy's turn took longer than {self._turn_timeout:g} s; increase turn_timeout, or "
                "reduce sampling_params.max_tokens"
            ) from None

    async def _call(self, method: str, argument: Any, turn: int) -> Any:
        where, seconds = f"{self._where(turn)}: {method}", self._step_timeout
        try:
            outcome = await self._host.call(method, argument, seconds)
        except EnvironmentFailed as error:
            raise EnvironmentFailed(f"{where}: {error}") from None
        if isinstance(outcome, TimedOut):
            raise EnvironmentTimeout(
                f"{where} did not return within {seconds:g} s; increase step_timeout if it needs longer"
            )
        if isinstance(outcome, Raised):
            raise EnvironmentFailed(f"{where} raised {outcome.what}\n{outcome.trace}")
        return outcome.value

    def _encoded(self, turn: int, encode: Callable[..., tuple[int, ...]], *observed: Any) -> tuple[int, ...]:
        try:
            return encode(*observed)
        except (EnvironmentFailed, InvalidPrompt) as error:  # the template rejects the messages
            raise EnvironmentFailed(f"{self._where(turn)}: {error}") from None

    def _where(self, turn: int) -> str:
        return f"{self._name}, turn {turn}"


def _turn(completion: Completion, action: str, reward: float) -> Turn:
    return Turn(
        start=len(completion.prompt_token_ids),
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        raw_logprobs=completion.raw_logprobs,
        spans=completion.spans,
        finish_reason=completion.finish_reason,
        engine=completion.engine,
        action=action,
        reward=reward,
        routes=completion.routes,
    )


def derive_seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
