"""A reward model, served by a fleet of its own: a model for sequence classification with a score for prompt and completion.

The engines, embedded ones or vLLM's pooling runner, see one sequence per completion, in the tokens of the reward model, whose
tokenizer may be another than the policy's. The output of the label at the last token is the reward (`Bridge.score`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from slipstream.bridge.bridge import Bridge
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.checkpoints.hub import model_directory
from slipstream.model.checkpoints.served_model import ServedModel, served_model
from slipstream.model.config import ModelConfig
from slipstream.rl.config import RewardConfig
from slipstream.rl.data.chat import user_message
from slipstream.rl.data.tokens import Codec, chat_of
from slipstream.types import Completion, Score

Retry: TypeAlias = Callable[[Callable[[], list[Score]]], list[Score]]


class RewardModel:
    """`bridge` is to a fleet that serves the model (`rl/trainer/session.py`). `retry` calls again while engines restart."""

    def __init__(self, bridge: Bridge, config: RewardConfig, policy_codec: Codec, retry: Retry | None = None) -> None:
        directory = model_directory(config.model)
        self._bridge, self._config, self._policy_codec = bridge, config, policy_codec
        self._retry = retry or (lambda call: call())
        model = check_reward_model(config)
        chat = chat_of(directory) if policy_codec.chat is not None else None
        self._codec, self._end = Codec(directory, chat), model.eos_token_ids[:1]
        self._max_length = min(engine.info.max_model_len for engine in bridge.status().present)

    def score(self, completions: Sequence[Completion], prompts: Sequence[str]) -> np.ndarray:
        """The score of each completion. Sequences that are too long for the model lose tokens at their start."""
        texts = self._policy_codec.decode([c.token_ids for c in completions])
        pairs = [(prompts[c.prompt_index], text) for c, text in zip(completions, texts)]
        rows = self._tokens(pairs)
        sequences = [(*ids[-(self._max_length - 1) :], self._config.model_label) for ids in rows]
        try:
            scores = self._retry(partial(self._bridge.score, sequences))
        except SlipstreamError as error:  # the policy has an engine of the same name
            raise type(error)(f"the reward model {self._config.model}: {error}") from None
        return np.array([score.logprobs[-1] for score in scores], np.float32)

    def _tokens(self, pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[int, ...]]:
        chat, policy = self._codec.chat, self._policy_codec.chat
        if chat is None or policy is None:
            return [(*ids, *self._end) for ids in self._codec.prompts([prompt + text for prompt, text in pairs])]
        chats = [
            [*(policy.conversations.get(prompt) or [user_message(prompt)]), {"role": "assistant", "content": text}]
            for prompt, text in pairs
        ]
        return self._codec.answers([chat.template.render(messages, add_generation_prompt=False) for messages in chats])


def check_reward_model(config: RewardConfig) -> ModelConfig | ServedModel:
    """Read the config of the model. Raises `ConfigError` unless it classifies sequences and has the label and weights."""
    directory = model_directory(config.model)
    model = read_config(directory) if config.model_engine.kind == "embedded" else served_model(directory)
    if not model.num_labels:
        raise ConfigError(
            f"reward.model {config.model} is a language model; a reward model is one for sequence classification "
            "(architectures in its config.json), with a score.weight"
        )
    if config.model_label >= model.num_labels:
        raise ConfigError(
            f"reward.model_label is {config.model_label}, but {config.model} has labels 0 to {model.num_labels - 1}"
        )
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"reward.model {config.model} has no weights (safetensors)")
    return model
