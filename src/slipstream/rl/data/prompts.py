"""Prompt batches with their ids and sampling seeds.

A batch depends only on the config's seed and the number of the batch, so that a resumed run submits the same prompts. A step
takes one batch, or more with `resample`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.bridge.rollouts import Rollouts
from slipstream.errors import ConfigError
from slipstream.rl.config import TrainConfig
from slipstream.rl.data.curriculum import Curriculum
from slipstream.rl.data.tasks import Task
from slipstream.rl.data.tokens import Codec
from slipstream.types import Prompt, SamplingParams

KEPT_BATCHES = 64
"""Batches kept in memory; older ones are drawn again when needed."""

WARMUP_STREAM, PROMPT_STREAM, SAMPLE_STREAM, EVAL_PROMPT_STREAM, EVAL_SAMPLE_STREAM, SHUFFLE_STREAM = range(6)
"""Independent streams of random numbers, one per use."""


@dataclass(frozen=True, slots=True)
class PromptBatch:
    ids: tuple[str, ...]
    texts: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    """What is generated from: token ids, or the seed of an environment."""
    sampling: tuple[SamplingParams, ...]


class PromptSource:
    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        codec: Codec,
        max_prompt_tokens: int,
        curriculum: Curriculum | None = None,
    ) -> None:
        """`max_prompt_tokens` is the longest prompt that leaves room for a completion. `curriculum` has the prompts of each
        batch; otherwise the task draws them."""
        self._curriculum = curriculum
        self._config, self._task, self._codec, self._max_prompt_tokens = config, task, codec, max_prompt_tokens
        self._batches: OrderedDict[int, PromptBatch] = OrderedDict()
        self._submitted = 0

    def batch(self, number: int) -> PromptBatch:
        if number not in self._batches:
            self._batches[number] = self._draw(number)
            while len(self._batches) > KEPT_BATCHES:
                self._batches.popitem(last=False)
        return self._batches[number]

    def text(self, id: str) -> str:
        """The text of the prompt with this id."""
        number, _, index = id.partition("/")
        return self.batch(int(number)).texts[int(index)]

    def submit(self, rollouts: Rollouts, first: int, last: int) -> None:
        """Submit the batches `first` to `last` that have not been submitted yet."""
        for number in range(max(first, self._submitted + 1), last + 1):
            batch = self.batch(number)
            rollouts.submit(batch.ids, batch.prompts, batch.sampling)
            self._submitted = number

    def _draw(self, number: int) -> PromptBatch:
        seed, config = self._config.seed, self._config.algorithm
        if self._curriculum is not None:
            texts = self._curriculum.batch(number)
        else:
            texts = self._task.prompts(np.random.default_rng([seed, PROMPT_STREAM, number]), config.prompts)
        if len(texts) != config.prompts:
            raise ConfigError(
                f"task {self._task.name!r} returned {len(texts)} prompts, but a step needs {config.prompts}; is its "
                "training split empty? Reduce task.holdout"
            )
        rng = np.random.default_rng([seed, SAMPLE_STREAM, number])
        shared = SamplingParams(config.max_tokens, config.temperature, n=config.group, stop_token_ids=self._codec.stops)
        sampling = tuple(replace(shared, seed=int(rng.integers(2**63))) for _ in texts)
        ids = tuple(f"{number}/{i}" for i in range(len(texts)))
        return PromptBatch(ids, tuple(texts), self._encoded(texts, number), sampling)

    def _encoded(self, texts: Sequence[str], number: int) -> tuple[Prompt, ...]:
        if self._config.environment.name:
            return tuple(texts)
        token_ids = tuple(map(tuple, self._codec.prompts(texts)))
        for text, ids in zip(texts, token_ids):
            if len(ids) > self._max_prompt_tokens:
                raise ConfigError(
                    f"a prompt of batch {number} has {len(ids)} tokens, but at most {self._max_prompt_tokens} leave room for "
                    f"{self._config.algorithm.max_tokens} tokens of completion: {text!r:.80}; use shorter prompts, a model "
                    "with a longer context, or a larger engine.max_model_len or algorithm.row_tokens if they are set"
                )
        return token_ids
