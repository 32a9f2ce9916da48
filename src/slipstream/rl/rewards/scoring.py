"""Rewards of completions: by the task, by reward functions and a reward model, or by an environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np

from slipstream.bridge.bridge import Bridge
from slipstream.errors import EnvironmentFailed, RewardFailed
from slipstream.rl.config import TrainConfig
from slipstream.rl.data.data_task import DataTask
from slipstream.rl.data.tasks import EnvironmentTask, Task
from slipstream.rl.data.tokens import Codec
from slipstream.rl.rewards.reward_model import Retry, RewardModel
from slipstream.rl.rewards.rewarder import Rewarder, reward_requests
from slipstream.types import Completion, RolloutGroup


class Scored(NamedTuple):
    rewards: np.ndarray
    """Reward of each completion: finite, or NaN if it is dropped because it could not be scored."""
    parts: Sequence[Mapping[str, float] | None] = ()
    """Rewards of the functions and their parts, for each completion; empty if no function scores."""


Scorer: TypeAlias = Callable[[Sequence[Completion], Sequence[str]], Scored]
"""`score(completions, prompts)`; a completion's `prompt_index` says which prompt it answers."""


@contextmanager
def open_scorer(
    config: TrainConfig,
    task: Task,
    codec: Codec,
    reward_bridge: Bridge | None = None,
    retry: Retry | None = None,
) -> Iterator[Scorer]:
    """The reward functions of the config, in their worker processes, and its reward model, which `reward_bridge` serves;
    `retry` calls it again while its engines restart. Without either, the environment or the task scores."""
    if isinstance(task, EnvironmentTask):
        yield lambda completions, prompts: Scored(episode_rewards(completions, config.environment.on_error))
        return
    if not config.reward.weights and reward_bridge is None:
        yield lambda completions, prompts: Scored(task_rewards(task, codec, prompts, completions))
        return
    answer, facts = (task.known_answer, task.facts) if isinstance(task, DataTask) else (task.answer, None)
    with ExitStack() as opened:
        rewarder = opened.enter_context(Rewarder.from_config(config.reward)) if config.reward.weights else None
        model = RewardModel(reward_bridge, config.reward, codec, retry) if reward_bridge is not None else None

        def score(completions: Sequence[Completion], prompts: Sequence[str]) -> Scored:
            rewards, parts = np.zeros(len(completions), np.float32), dict[int, Mapping[str, float]]()
            if rewarder is not None:
                result = rewarder.score(reward_requests(prompts, completions, codec, answer, facts))
                rewards[:] = np.nan
                rewards[list(result.kept)] = result.values
                parts = dict(zip(result.kept, result.parts))
            if model is not None:
                rewards += config.reward.model_weight * model.score(completions, prompts)
            return Scored(rewards, tuple(map(parts.get, range(len(completions)))) if parts else ())

        yield score


def group_rewards(score: Scorer, groups: Sequence[RolloutGroup], prompts: Sequence[str]) -> Scored:
    """Score rollout groups, given the prompt of each; the rewards are `[groups, samples]`."""
    completions = [replace(c, prompt_index=index) for index, group in enumerate(groups) for c in group.completions]
    scored = score(completions, prompts)
    return scored._replace(rewards=scored.rewards.reshape(len(groups), -1))


def task_rewards(task: Task, codec: Codec, prompts: Sequence[str], completions: Sequence[Completion]) -> np.ndarray:
    """The task's reward of each completion; `prompt_index` says which prompt it answers."""
    # Not `Completion.text`, which is empty if the engine has no tokenizer.
    texts = codec.decode([c.token_ids for c in completions])
    rewards = np.array([task.reward(prompts[c.prompt_index], text) for c, text in zip(completions, texts)], np.float32)
    if not np.isfinite(rewards).all():
        wrong = int(np.flatnonzero(~np.isfinite(rewards))[0])
        prompt, sample = prompts[completions[wrong].prompt_index], completions[wrong].sample_index
        raise RewardFailed(
            f"task {task.name!r} returned {rewards[wrong]} for sample {sample} of prompt {prompt!r:.80}; a reward must be a "
            "finite number"
        )
    return rewards


def episode_rewards(completions: Sequence[Completion], on_error: str) -> np.ndarray:
    """The total reward of each episode; NaN for those whose environment failed."""
    outcomes = [completion.episode for completion in completions if completion.episode is not None]
    failed = [outcome for outcome in outcomes if outcome.end == "failed"]
    if failed and (on_error == "raise" or len(failed) == len(outcomes)):
        count = "" if on_error == "raise" else f"all {len(failed)} episodes failed; the first: "
        raise EnvironmentFailed(f"{count}{failed[0].error}")
    return np.array([outcome.reward for outcome in outcomes], np.float32)
