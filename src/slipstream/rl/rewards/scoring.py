"""Rewards of a step's rollout groups, by the task or by reward functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from slipstream.errors import RewardFailed
from slipstream.rl.config import TrainConfig
from slipstream.rl.data.tasks import Task
from slipstream.rl.data.tokens import Codec
from slipstream.rl.rewards.rewarder import Rewarder, reward_requests
from slipstream.types import Completion, RolloutGroup

Scorer: TypeAlias = Callable[[Sequence[RolloutGroup], Sequence[str]], np.ndarray]
"""`score(groups, prompts)`: rewards [groups, samples], finite, or NaN for a sample dropped because it could not be scored."""


@contextmanager
def open_scorer(config: TrainConfig, task: Task, codec: Codec) -> Iterator[Scorer]:
    """The reward functions of the config, in their worker processes; without any, the task scores."""
    if not config.reward.functions:
        yield lambda groups, prompts: task_rewards(task, codec, prompts, _completions(groups)).reshape(len(groups), -1)
        return
    with Rewarder.from_config(config.reward) as rewarder:

        def score(groups: Sequence[RolloutGroup], prompts: Sequence[str]) -> np.ndarray:
            result = rewarder.score(reward_requests(prompts, _completions(groups), codec, answer=task.answer))
            rewards = np.full(result.num_requests, np.nan, np.float32)
            rewards[list(result.kept)] = result.values
            return rewards.reshape(len(groups), -1)

        yield score


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


def _completions(groups: Sequence[RolloutGroup]) -> list[Completion]:
    return [replace(c, prompt_index=index) for index, group in enumerate(groups) for c in group.completions]
