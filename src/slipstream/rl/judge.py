"""What a step's groups are worth: by the task, or by functions of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from slipstream.config import TrainConfig
from slipstream.errors import RewardFailed
from slipstream.rl.rewards import Rewarder, reward_requests
from slipstream.rl.tasks import Task
from slipstream.rl.tokens import Codec
from slipstream.types import Completion, RolloutGroup

Judge: TypeAlias = Callable[[Sequence[RolloutGroup], Sequence[str]], np.ndarray]
"""From groups and the texts of their prompts to rewards [groups, samples], all of them finite."""


@contextmanager
def judge_of(config: TrainConfig, task: Task, codec: Codec) -> Iterator[Judge]:
    if not config.reward.functions:
        yield lambda groups, prompts: _by_task(task, codec, groups, prompts)
        return
    with Rewarder.from_config(config.reward) as rewarder:

        def judge(groups: Sequence[RolloutGroup], prompts: Sequence[str]) -> np.ndarray:
            rows = [replace(c, prompt_index=i) for i, group in enumerate(groups) for c in group.completions]
            found = rewarder.score(reward_requests(prompts, rows, codec, answer=task.answer))
            return np.array(found.values, np.float32).reshape(len(groups), -1)

        yield judge


def _by_task(task: Task, codec: Codec, groups: Sequence[RolloutGroup], prompts: Sequence[str]) -> np.ndarray:
    rewards = [
        [task.reward(prompt, text) for text in _texts(codec, group.completions)]
        for group, prompt in zip(groups, prompts, strict=True)
    ]
    found = np.array(rewards, np.float32)
    if not np.isfinite(found).all():
        group, sample = np.argwhere(~np.isfinite(found))[0]
        raise RewardFailed(
            f"task {task.name!r} gave {found[group, sample]} for sample {sample} of prompt {prompts[group]!r:.80}; a reward is "
            "a finite number"
        )
    return found


def _texts(codec: Codec, completions: Sequence[Completion]) -> list[str]:
    # Decoded here and not taken from `Completion.text`, which is empty where an engine has no tokenizer.
    return codec.decode([c.token_ids for c in completions])
