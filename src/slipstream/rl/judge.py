"""What a step's groups are worth: by the task, or by functions of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from slipstream.errors import RewardFailed
from slipstream.rl.config import TrainConfig
from slipstream.rl.rewards import Rewarder, reward_requests
from slipstream.rl.tasks import Task
from slipstream.rl.tokens import Codec
from slipstream.types import Completion, RolloutGroup

Judge: TypeAlias = Callable[[Sequence[RolloutGroup], Sequence[str]], np.ndarray]
"""From groups and the texts of their prompts to rewards [groups, samples], finite, or NaN where a sample is left out because
it could not be judged."""


@contextmanager
def judge_of(config: TrainConfig, task: Task, codec: Codec) -> Iterator[Judge]:
    if not config.reward.functions:
        yield lambda groups, prompts: by_task(task, codec, prompts, _rows(groups)).reshape(len(groups), -1)
        return
    with Rewarder.from_config(config.reward) as rewarder:

        def judge(groups: Sequence[RolloutGroup], prompts: Sequence[str]) -> np.ndarray:
            found = rewarder.score(reward_requests(prompts, _rows(groups), codec, answer=task.answer))
            rewards = np.full(found.num_requests, np.nan, np.float32)
            rewards[list(found.kept)] = found.values
            return rewards.reshape(len(groups), -1)

        yield judge


def by_task(task: Task, codec: Codec, prompts: Sequence[str], completions: Sequence[Completion]) -> np.ndarray:
    """What the task itself gives to each completion, whose `prompt_index` says which prompt it answers."""
    # Decoded here and not taken from `Completion.text`, which is empty where an engine has no tokenizer.
    texts = codec.decode([c.token_ids for c in completions])
    found = np.array([task.reward(prompts[c.prompt_index], text) for c, text in zip(completions, texts)], np.float32)
    if not np.isfinite(found).all():
        wrong = int(np.flatnonzero(~np.isfinite(found))[0])
        prompt, sample = prompts[completions[wrong].prompt_index], completions[wrong].sample_index
        raise RewardFailed(
            f"task {task.name!r} gave {found[wrong]} for sample {sample} of prompt {prompt!r:.80}; a reward is a finite number"
        )
    return found


def _rows(groups: Sequence[RolloutGroup]) -> list[Completion]:
    return [replace(c, prompt_index=index) for index, group in enumerate(groups) for c in group.completions]
