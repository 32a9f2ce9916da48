"""Agents that speak OpenAI's API as environments: they play whole episodes by themselves, against a session of the gateway.

    def play(endpoint):
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        ...                                                     any number of calls
        return reward

    run_episodes(bridge, codec, [ApiAgent(play) for _ in range(64)], sampling_params, group=8)

The session keeps the exact tokens, so the agent needs no change (docs/agents.md)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slipstream.bridge.agent_sessions import AgentEndpoint, AgentSessions, Trajectory
from slipstream.bridge.bridge import Bridge
from slipstream.errors import EnvironmentFailed, EnvironmentTimeout, SlipstreamError
from slipstream.rl.agents.episodes import Episode, Turn
from slipstream.rl.rewards import callbacks
from slipstream.rl.rewards.callbacks import Raised, TimedOut
from slipstream.rl.rewards.functions import RewardProblem, finite_number
from slipstream.types import SamplingParams

Play = Callable[[AgentEndpoint], float | Awaitable[float]]
"""Plays one episode and returns its reward. May be `async`; otherwise it runs in a thread of its own."""


@dataclass(eq=False)
class ApiAgent:
    """Takes an environment's place in `run_episodes`. `max_turns` and `markers` do not apply to it."""

    play: Play
    timeout: float = 600.0
    """Seconds for a whole episode."""
    api_key: str = ""
    """What the agent gets; by default the token of the run. For code that is not trusted, a token of the role `client`."""


async def play_episodes(
    bridge: Bridge, agent: ApiAgent, sampling: SamplingParams, index: int, group: int, seed: int, where: str
) -> list[Episode]:
    """Have an agent play one episode; return what it sampled, one `Episode` per branch of its session. `where` prefixes
    errors."""
    sessions = AgentSessions.of(bridge, agent.api_key)
    endpoint = await asyncio.to_thread(sessions.open, sampling)
    endpoint = dataclasses.replace(endpoint, seed=seed)
    try:
        outcome = await callbacks.shared().call(agent.play, (endpoint,), timeout=agent.timeout)
        reward = _reward(outcome, agent, where)
        await asyncio.to_thread(sessions.close, endpoint.session, reward)
    except BaseException:
        with contextlib.suppress(SlipstreamError):  # what it holds is released with its expiry at the latest
            await asyncio.shield(asyncio.to_thread(sessions.close, endpoint.session))
        raise
    trajectories = await asyncio.to_thread(sessions.take, endpoint.session)
    episodes = [episode_of(trajectory, index, group, seed) for trajectory in trajectories if trajectory.turns]
    if not episodes:
        raise EnvironmentFailed(f"{where}: the agent finished without a call of {endpoint.base_url}/chat/completions")
    return episodes


def _reward(outcome: Any, agent: ApiAgent, where: str) -> float:
    if isinstance(outcome, TimedOut):
        raise EnvironmentTimeout(f"{where} did not return within {agent.timeout:g} s; increase ApiAgent.timeout")
    if isinstance(outcome, Raised):
        raise EnvironmentFailed(f"{where} raised {outcome.what}\n{outcome.trace}")
    number = finite_number(outcome.value)
    if isinstance(number, RewardProblem):
        raise EnvironmentFailed(f"{where}: as a reward it {number.what}; {number.fix}")
    return number


def episode_of(trajectory: Trajectory, environment: int, group: int, seed: int) -> Episode:
    """Return a trajectory as an episode. The session's reward, 0 if it has none, belongs to the last turn."""
    last, reward = len(trajectory.turns) - 1, trajectory.reward or 0.0
    turns = tuple(
        Turn(
            start,
            completion.token_ids,
            completion.logprobs,
            completion.raw_logprobs,
            completion.spans,
            completion.finish_reason,
            completion.engine,
            completion.text,
            reward if number == last else 0.0,
        )
        for number, (start, completion) in enumerate(trajectory.turns)
    )
    return Episode(environment, group, seed, trajectory.token_ids, turns, "done")
