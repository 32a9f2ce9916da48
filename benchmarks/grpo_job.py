"""Shared by the sides of `grpo_step.py`: the job, the reward, and the median step.

A side is a script, `grpo_<side>.py JOB`, which reads the job from a file, trains, and writes the result to another. This module
needs neither JAX nor torch."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PHASES = ("generate", "reward", "old logprobs", "train", "optimizer", "sync", "rest")
"""Parts of a step. `reward`: encoding prompts, decoding and scoring completions, advantages, padding. `old logprobs`: a forward
pass before the update. `train`: forward and backward pass and gradient clipping. `rest`: what the side does in between."""


@dataclass(frozen=True, slots=True)
class Job:
    model: str
    """HF directory of the model."""
    data: str
    """JSONL file with the prompts of all steps, in order."""
    result: str
    gpu: bool
    dtype: str
    """Data type of the checkpoint, and of the engine."""
    prompts: int
    group: int
    prompt_tokens: int
    completion_tokens: int
    rows: int
    """Completions in a micro-batch."""
    steps: int
    """Steps, those of the warm-up included."""
    learning_rate: float
    options: dict[str, Any] = field(default_factory=dict)
    """Options of this side."""

    @property
    def completions(self) -> int:
        return self.prompts * self.group

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def serve(run: Callable[[Job], dict[str, Any]]) -> None:
    """The main function of a side."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    Path(job.result).write_text(json.dumps(run(job)))


def even_share(prompt: str, completion: str, token_ids: Sequence[int]) -> float:
    """The reward of all sides: the share of a completion's tokens that have an even number."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


def median_step(steps: list[dict[str, float]], warm_up: int) -> dict[str, float]:
    """Median seconds of each phase after the warm-up, and of the whole step, which is not the sum of those medians."""
    measured = steps[warm_up:]
    phases = {name: statistics.median(step.get(name, 0.0) for step in measured) for name in PHASES}
    return phases | {"step": statistics.median(sum(step.values()) for step in measured)}
