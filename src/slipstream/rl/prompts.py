"""Which prompts are asked, batch by batch, under which ids and seeds: all of it follows from the config's seed and the batch's
number, never from what ran before. So whoever starts again asks the same. A step takes one batch, or more (`resample`)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np

from slipstream.errors import ConfigError
from slipstream.rl.config import TrainConfig
from slipstream.rl.tasks import Task
from slipstream.rl.tokens import Codec
from slipstream.rollouts import Rollouts
from slipstream.types import SamplingParams

KEPT_BATCHES = 64
"""That are remembered; older ones are drawn again if need be."""

WARMUP_STREAM, PROMPT_STREAM, SAMPLE_STREAM, EVAL_PROMPT_STREAM, EVAL_SAMPLE_STREAM, SHUFFLE_STREAM = range(6)
"""Of randomness: no two uses share numbers."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompts of one batch."""

    ids: tuple[str, ...]
    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]


class Prompts:
    def __init__(self, config: TrainConfig, task: Task, codec: Codec, max_prompt_tokens: int) -> None:
        """`max_prompt_tokens` is what there is room for, before the model answers."""
        self._config, self._task, self._codec, self._room = config, task, codec, max_prompt_tokens
        self._known: OrderedDict[int, Asked] = OrderedDict()
        self._submitted = 0

    def of(self, number: int) -> Asked:
        if number not in self._known:
            self._known[number] = self._draw(number)
            while len(self._known) > KEPT_BATCHES:
                self._known.popitem(last=False)
        return self._known[number]

    def text(self, id: str) -> str:
        """Of a prompt that was asked."""
        number, _, index = id.partition("/")
        return self.of(int(number)).texts[int(index)]

    def submit(self, rollouts: Rollouts, first: int, last: int) -> None:
        """Hands over these batches, as far as that has not been done."""
        for number in range(max(first, self._submitted + 1), last + 1):
            asked = self.of(number)
            rollouts.submit(asked.ids, asked.token_ids, asked.sampling)
            self._submitted = number

    def _draw(self, number: int) -> Asked:
        seed, how = self._config.seed, self._config.algorithm
        texts = self._task.prompts(np.random.default_rng([seed, PROMPT_STREAM, number]), how.prompts)
        if len(texts) != how.prompts:
            raise ConfigError(
                f"task {self._task.name!r} gave {len(texts)} prompts where a step needs {how.prompts}; is its training split "
                "empty? A smaller task.holdout leaves more"
            )
        token_ids = tuple(tuple(ids) for ids in self._codec.prompts(texts))
        for text, ids in zip(texts, token_ids):
            if len(ids) > self._room:
                raise ConfigError(
                    f"a prompt of batch {number} has {len(ids)} tokens, and there is room for {self._room} before "
                    f"{how.max_tokens} more: {text!r:.80}; take a model with a longer context, a larger engine.max_model_len "
                    "or algorithm.row_tokens if they are set, or shorter prompts"
                )
        rng = np.random.default_rng([seed, SAMPLE_STREAM, number])
        shared = SamplingParams(how.max_tokens, how.temperature, n=how.group, stop_token_ids=self._codec.stops)
        sampling = tuple(replace(shared, seed=int(rng.integers(2**63))) for _ in texts)
        return Asked(tuple(f"{number}/{i}" for i in range(len(texts))), tuple(texts), token_ids, sampling)
