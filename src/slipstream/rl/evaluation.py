"""How good the policy is that serves now, and that it is the one that it should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from slipstream.bridge import Bridge
from slipstream.errors import VersionError
from slipstream.rl.config import TrainConfig
from slipstream.rl.judge import by_task
from slipstream.rl.prompts import EVAL_PROMPT_STREAM, EVAL_SAMPLE_STREAM
from slipstream.rl.records import Evaluation
from slipstream.rl.tasks import Split, Task
from slipstream.rl.tokens import Codec
from slipstream.types import Completion, SamplingParams

EVAL_SAMPLES = 4


def evaluate(config: TrainConfig, bridge: Bridge, task: Task, codec: Codec, step: int) -> Evaluation:
    """Accuracy of the policy that serves now, always on the same prompts."""
    prompt_rng = np.random.default_rng([config.seed, EVAL_PROMPT_STREAM])
    sample_rng = np.random.default_rng([config.seed, EVAL_SAMPLE_STREAM, step])
    version = bridge.version

    def accuracy(prompts: Sequence[str], temperature: float, n: int) -> float:
        shared = SamplingParams(config.algorithm.max_tokens, temperature, n=n, stop_token_ids=codec.stops)
        how = [replace(shared, seed=_draw(sample_rng)) for _ in prompts]
        completions = bridge.generate(codec.prompts(prompts), how)
        require_versions(completions, [version] * len(completions))
        return float((by_task(task, codec, prompts, completions) >= 1).mean())

    found: dict[Split, tuple[float, float] | tuple[None, None]] = {"heldout": (None, None)}
    for split in get_args(Split):
        # A small split repeats itself.
        prompts = list(dict.fromkeys(task.prompts(prompt_rng, config.eval_prompts, split)))
        if prompts:
            found[split] = accuracy(prompts, config.algorithm.temperature, EVAL_SAMPLES), accuracy(prompts, 0.0, 1)
    return Evaluation(step, version, *found["train"], *found["heldout"])


def require_versions(completions: Sequence[Completion], versions: Sequence[int]) -> None:
    """`VersionError` unless every token of each completion was produced by its policy version."""
    for completion, version in zip(completions, versions, strict=True):
        found = sorted({span.version for span in completion.spans})
        if found != [version]:
            raise VersionError(
                f"strictly on-policy training expects every token from policy version {version}, but sample "
                f"{completion.sample_index} of prompt {completion.prompt_index} came from version(s) {found} on engine "
                f"{completion.engine!r}; is another trainer syncing to the same fleet?"
            )


def _draw(rng: np.random.Generator) -> int:
    return int(rng.integers(2**63))
