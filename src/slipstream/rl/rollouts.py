"""Multi-turn rollouts: environments that answer, and a policy that goes on from exactly the tokens it saw and drew.

    found = run_episodes(bridge, codec, [Guess() for _ in range(64)], sampling, group=8, max_turns=4, seed=step)

The context of a turn is the token ids of the turn before, the ids that were sampled, and the ids of the environment's
new text, encoded alone. What exists is never tokenised again: the trainer trains on what the engine saw, and the engine's
prefix cache has the KV cache of everything before, so that a turn costs its own tokens only.

Every environment goes on as soon as its own turn is finished; engines batch whatever is under way. Of several engines, an
episode stays with the one that began it, unless that dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from slipstream import portal
from slipstream.bridge import Bridge
from slipstream.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineLost,
    EnvironmentFailed,
    EnvironmentTimeout,
    EpisodeError,
    InvalidSampling,
    NotReady,
    SlipstreamError,
    UnknownEngine,
)
from slipstream.rl import callbacks
from slipstream.rl.callbacks import Overdue, Raised
from slipstream.rl.environments import NO_MARKERS, Environment, Markers, checked_step, observed
from slipstream.rl.episodes import EndReason, Episode, Episodes, Turn
from slipstream.rl.groups import OnError, survivors
from slipstream.rl.tokens import Codec
from slipstream.types import Completion, SamplingParams


def run_episodes(
    bridge: Bridge,
    codec: Codec,
    environments: Sequence[Environment],
    sampling: SamplingParams | None = None,
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
    """An episode of each environment, `concurrency` of them at a time.

    `sampling` is for each turn; with a seed, each environment draws from a seed of its own made of it. `group`
    environments in a row are reset with the same seed, made of `seed` and their group's number. `max_length` is the most
    tokens of an episode; 0 takes what the engines allow. `step_timeout` is for each reset and step, `turn_timeout` for
    each turn of the policy.

    An environment that fails is an `EpisodeError` that names it and the turn: raised, or, with `on_error="drop"`, its
    episode is left out (a group left with fewer than two goes as a whole). A failure of an engine is raised always."""
    options = dict(max_turns=max_turns, seed=seed, group=group, markers=markers, max_length=max_length)
    limits = dict(step_timeout=step_timeout, turn_timeout=turn_timeout, on_error=on_error, concurrency=concurrency)
    return portal.run(_run(bridge, codec, environments, sampling, **options, **limits).all(environments))


async def arun_episodes(
    bridge: Bridge,
    codec: Codec,
    environments: Sequence[Environment],
    sampling: SamplingParams | None = None,
    **options: Any,
) -> Episodes:
    """`run_episodes`, awaited on any event loop, with the same options. Cancelling it ends the episodes."""
    run = await asyncio.to_thread(_run, bridge, codec, environments, sampling, **options)
    return await portal.arun(run.all(environments))


def _run(
    bridge: Bridge,
    codec: Codec,
    environments: Sequence[Environment],
    sampling: SamplingParams | None,
    **options: Any,
) -> _Run:
    run = _Run(bridge, codec, sampling or SamplingParams(), **options)
    run.check(environments)
    fleet = bridge.status()
    limits = [engine.info.max_model_len for engine in fleet.present]
    if not limits:
        raise fleet.nobody("to generate")
    return dataclasses.replace(run, max_length=min([*limits, *([run.max_length] if run.max_length else [])]))


@dataclass(frozen=True, slots=True)
class _Run:
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

    def check(self, environments: Sequence[Environment]) -> None:
        for name, low in (("max_turns", 1), ("seed", 0), ("group", 1), ("max_length", 0), ("concurrency", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
        for name in ("step_timeout", "turn_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be more than 0, got {getattr(self, name)}")
        if self.on_error not in get_args(OnError):
            raise ConfigError(f"on_error must be one of {', '.join(get_args(OnError))}; got {self.on_error!r}")
        if self.sampling.n != 1:
            raise InvalidSampling(
                f"an episode goes on from one sample, got n={self.sampling.n}; group={self.sampling.n} does it"
            )
        if len(environments) % self.group:
            raise ConfigError(f"{len(environments)} environments do not make groups of {self.group}")
        first: dict[int, int] = {}
        for index, environment in enumerate(environments):
            if (other := first.setdefault(id(environment), index)) != index:
                raise ConfigError(f"environments {other} and {index} are one object; each episode needs its own")

    async def all(self, environments: Sequence[Environment]) -> Episodes:
        slots = asyncio.Semaphore(self.concurrency)
        tasks = [
            asyncio.create_task(self._one(_Seat(self, index, environment), slots))
            for index, environment in enumerate(environments)
        ]
        try:
            for done in asyncio.as_completed(tasks):
                await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        found = [task.result() for task in tasks]
        errors = tuple(each for each in found if isinstance(each, EpisodeError))
        failed = {index for index, each in enumerate(found) if isinstance(each, EpisodeError)}
        kept = survivors([index // self.group for index in range(len(found))], failed)
        if errors and not kept:
            raise type(errors[0])(f"of {len(found)} episodes none is left; the first error: {errors[0]}")
        episodes = tuple(each for index in kept if isinstance(each := found[index], Episode))
        return Episodes(episodes, errors, len(environments))

    async def _one(self, seat: _Seat, slots: asyncio.Semaphore) -> Episode | EpisodeError:
        async with slots:
            try:
                return await seat.episode()
            except EpisodeError as error:
                if self.on_error == "raise":
                    raise
                return error


class _Seat:
    """One environment in a run."""

    def __init__(self, run: _Run, index: int, environment: Environment) -> None:
        self._run, self._index, self._environment = run, index, environment
        self._group = index // run.group
        self._seed = _mixed(run.seed, self._group)
        sampling = run.sampling
        if sampling.seed is not None:  # equal prompts with equal seeds would be equal samples
            sampling = dataclasses.replace(sampling, seed=_mixed(sampling.seed, index))
        self._sampling = sampling

    async def episode(self) -> Episode:
        run, markers, turns = self._run, self._run.markers, list[Turn]()
        text = observed(await self._call("reset", self._seed), f"{self._where(0)}: reset")
        first = markers.before if markers.first is None else markers.first
        (tokens,) = run.codec.prompts([first + text + markers.after])
        if len(tokens) >= run.max_length:
            raise EnvironmentFailed(
                f"{self._where(0)}: the first observation has {len(tokens)} tokens, which leaves no room in "
                f"{run.max_length} (max_length, or the engines' max_model_len); make it shorter"
            )
        end: EndReason | None = None
        while end is None:
            completion = await self._generate(tokens, turns)
            (action,) = run.codec.decode([completion.token_ids])
            stepped = await self._call("step", action, turn=len(turns))
            text, reward, done = checked_step(stepped, f"{self._where(len(turns))}: step")
            turns.append(_turn(completion, action, reward))
            tokens += completion.token_ids
            cut = completion.finish_reason == "length"
            more = self._encoded(text, cut)
            if done:
                end = "done"
            elif len(turns) == run.max_turns:
                end = "max_turns"
            elif len(tokens) + len(more) >= run.max_length:
                end = "too_long"
            else:
                tokens += more
        return Episode(self._index, self._group, self._seed, tokens, tuple(turns), end)

    async def _generate(self, tokens: tuple[int, ...], turns: Sequence[Turn]) -> Completion:
        """On the engine of the turn before, whose cache has all of it; on any other if that one is gone."""
        where, room, how = self._where(len(turns)), self._run.max_length - len(tokens), self._sampling
        if room < how.max_tokens:
            how = dataclasses.replace(how, max_tokens=room, min_tokens=min(how.min_tokens, room))
        try:
            async with asyncio.timeout(self._run.turn_timeout):
                if turns:
                    with contextlib.suppress(EngineLost, NotReady, UnknownEngine):
                        return (await self._run.bridge.agenerate([tokens], how, engine=turns[-1].engine))[0]
                return (await self._run.bridge.agenerate([tokens], how))[0]
        except TimeoutError:
            raise DeadlineExceeded(
                f"{where}: waited {self._run.turn_timeout:g} s for the policy's turn; raise turn_timeout, or lower "
                "sampling.max_tokens"
            ) from None
        except SlipstreamError as error:
            raise type(error)(f"{where}: {error}") from None

    async def _call(self, method: str, argument: Any, turn: int = 0) -> Any:
        where, seconds = f"{self._where(turn)}: {method}", self._run.step_timeout
        function: Callable[..., Any] | None = getattr(self._environment, method, None)
        if not callable(function):
            raise EnvironmentFailed(f"{where} is not there; an environment has reset(seed) and step(action)")
        outcome = await callbacks.shared().call(function, (argument,), timeout=seconds)
        if isinstance(outcome, Overdue):
            raise EnvironmentTimeout(
                f"{where} gave no answer within {seconds:g} s; raise step_timeout if it needs longer"
            )
        if isinstance(outcome, Raised):
            raise EnvironmentFailed(f"{where} raised {outcome.what}\n{outcome.trace}")
        return outcome.value

    def _encoded(self, text: str, cut: bool) -> tuple[int, ...]:
        """The environment's new text alone, without what a tokenizer puts at the beginning of a sequence."""
        markers = self._run.markers
        whole = (markers.unfinished if cut else "") + markers.before + text + markers.after
        return self._run.codec.answers([whole])[0]

    def _where(self, turn: int) -> str:
        return f"environment {self._index} ({type(self._environment).__name__}, seed {self._seed}), turn {turn}"


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
    )


def _mixed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
