"""Accuracy of the policy that the fleet serves, and a check that the fleet serves the expected version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, get_args

import numpy as np

from slipstream.bridge.bridge import Bridge
from slipstream.errors import VersionError
from slipstream.rl.config import TrainConfig
from slipstream.rl.data.prompts import EVAL_PROMPT_STREAM, EVAL_SAMPLE_STREAM
from slipstream.rl.data.tasks import Split, Task
from slipstream.rl.data.tokens import Codec
from slipstream.rl.reporting.records import Evaluation
from slipstream.rl.rewards.scoring import Scorer, task_rewards
from slipstream.types import Completion, SamplingParams

EVAL_SAMPLES = 4


Sample: TypeAlias = Callable[[Sequence[str], Sequence[SamplingParams]], Sequence[Completion]]
"""Completions of prompts, outside of the rollout queue."""


def evaluate(
    config: TrainConfig,
    bridge: Bridge,
    task: Task,
    codec: Codec,
    step: int,
    score: Scorer | None = None,
    sample: Sample | None = None,
) -> Evaluation:
    """Measure the accuracy of the served policy on both splits, always on the same prompts. `score` is used instead of the
    task, and `sample` instead of the fleet."""
    prompt_rng = np.random.default_rng([config.seed, EVAL_PROMPT_STREAM])
    sample_rng = np.random.default_rng([config.seed, EVAL_SAMPLE_STREAM, step])
    version = bridge.version

    def accuracy(prompts: Sequence[str], temperature: float, n: int) -> float:
        shared = SamplingParams(config.algorithm.max_tokens, temperature, n=n, stop_token_ids=codec.stops)
        sampling_params = [replace(shared, seed=int(sample_rng.integers(2**63))) for _ in prompts]
        if sample is not None:
            completions = sample(prompts, sampling_params)
        else:
            completions = bridge.generate(codec.prompts(prompts), sampling_params, adapter=config.adapter)
        require_versions(completions, [version] * len(completions))
        rewards = (
            task_rewards(task, codec, prompts, completions) if score is None else score(completions, prompts).rewards
        )
        return float((rewards[~np.isnan(rewards)] >= config.reward.solved).mean())

    accuracies: dict[Split, tuple[float, float] | tuple[None, None]] = {"heldout": (None, None)}
    for split in get_args(Split):
        # A small split repeats its prompts.
        prompts = list(dict.fromkeys(task.prompts(prompt_rng, config.eval_prompts, split)))
        if prompts:
            accuracies[split] = accuracy(prompts, config.algorithm.temperature, EVAL_SAMPLES), accuracy(prompts, 0.0, 1)
    return Evaluation(step, version, *accuracies["train"], *accuracies["heldout"])


def require_versions(completions: Sequence[Completion], versions: Sequence[int]) -> None:
    """Raise `VersionError` unless every token of each completion comes from its policy version."""
    for completion, version in zip(completions, versions, strict=True):
        sampled_by = sorted({span.version for span in completion.spans})
        if sampled_by != [version] and (sampled_by or completion.episode is None):
            raise VersionError(
                f"strictly on-policy training expects every token from policy version {version}, but sample "
                f"{completion.sample_index} of prompt {completion.prompt_index} came from version(s) {sampled_by} on engine "
                f"{completion.engine!r}; is another trainer syncing to the same fleet?"
            )
