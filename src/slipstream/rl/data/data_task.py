"""A task made of the rows of a user's dataset (`[data]`), in an order that the seed determines."""

from __future__ import annotations

import logging
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.errors import ConfigError
from slipstream.rl.config import DataConfig
from slipstream.rl.data.answers import EXTRACTORS
from slipstream.rl.data.rows import Row, read_rows
from slipstream.rl.data.tasks import Split

log = logging.getLogger(__name__)

SPLIT_STREAM, ORDER_STREAM = 100, 101
"""Streams of random numbers, besides those of `prompts.py`."""


@dataclass(slots=True)
class DataTask:
    """Implements `Task`. Prompts are texts; a conversation's text is its transcript."""

    name: str
    config: DataConfig
    splits: dict[Split, dict[str, Row]]
    """Rows by prompt, in the order of the file."""
    answer_column: str
    """Empty if rows have no answers."""
    conversations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Messages by prompt, of rows with conversations."""
    num_overlong: int = 0
    """Rows left out because their prompt is too long."""

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> DataTask:
        rows = read_rows(config.path, config.subset, config.split)
        columns = list(dict.fromkeys(key for row in rows for key in row))
        answer_column = _answer_column(config, columns)
        for key, name in [("messages", config.messages), ("pass_rate", config.pass_rate)]:
            _require_column(name, f"data.{key}", config.path, columns)
        if not config.messages and not config.template:
            _require_column(config.prompt, "data.prompt", config.path, columns)
        for name in _fields_of(config.template):
            _require_column(name, "data.template", config.path, columns)
        task = cls(config.path, config, {"train": {}, "heldout": {}}, answer_column)
        heldout = [False] * len(rows)
        if config.eval_path or config.eval_split:
            more = read_rows(config.eval_path or config.path, config.subset, config.eval_split or config.split)
            rows, heldout = [*rows, *more], [*heldout, *[True] * len(more)]
        else:
            num = min(round(config.holdout * len(rows)), len(rows) - 1)
            for index in np.random.default_rng([seed, SPLIT_STREAM]).choice(len(rows), num, replace=False):
                heldout[index] = True
        num_repeated = 0
        for number, (row, is_held) in enumerate(zip(rows, heldout), start=1):
            prompt = task._prompt_of(row, number)
            if any(prompt in split for split in task.splits.values()):
                num_repeated += 1
                continue
            task.splits["heldout" if is_held else "train"][prompt] = row
        if num_repeated:
            log.warning("%d rows of %s repeat the prompt of an earlier row and are left out", num_repeated, config.path)
        if not task.splits["train"]:
            raise ConfigError(f"{config.path} has no rows left to train on; reduce data.holdout")
        return task

    def fit(self, encode: Callable[[Sequence[str]], Sequence[Sequence[int]]], max_tokens: int) -> None:
        """Leave out rows whose prompt has more than `max_tokens` tokens, or raise `ConfigError`, as the config says."""
        for split in self.splits.values():
            prompts = list(split)
            lengths = dict(zip(prompts, map(len, encode(prompts))))
            overlong = [prompt for prompt in prompts if lengths[prompt] > max_tokens]
            if overlong and self.config.overlong == "raise":
                longest = max(overlong, key=lambda prompt: lengths[prompt])
                raise ConfigError(
                    f"{len(overlong)} of {len(prompts)} prompts of {self.name} have more than {max_tokens} tokens, which "
                    f"leaves no room for a completion; the longest has {lengths[longest]}: {longest!r:.80}. Set data.overlong "
                    "= 'skip' to leave them out, or allow longer sequences: engine.max_model_len, algorithm.row_tokens"
                )
            for prompt in overlong:
                del split[prompt]
            self.num_overlong += len(overlong)
        if self.num_overlong:
            log.warning(
                "%d prompts of %s have more than %d tokens and are left out", self.num_overlong, self.name, max_tokens
            )
        if not self.splits["train"]:
            raise ConfigError(f"no prompt of {self.name} has at most {max_tokens} tokens")

    # --- Task ---

    def prompts(self, rng: np.random.Generator, count: int, split: Split = "train") -> list[str]:
        pool = list(self.splits[split])
        if not pool:
            return []
        picks = rng.choice(len(pool), size=min(count, len(pool)), replace=False)
        return [pool[i] for i in np.resize(picks, count)]

    def answer(self, prompt: str) -> str:
        if not self.answer_column:
            raise ConfigError(
                f"{self.name} has no column with answers, which the supervised warm-up and a reward without a function need; "
                "name it in data.answer, or set warmup_steps = 0 and reward.function"
            )
        return str(self.row(prompt)[self.answer_column])

    def reward(self, prompt: str, text: str) -> float:
        """1 if the completion is the answer."""
        extract = EXTRACTORS.get(self.config.extract, str.strip)
        return float(extract(text) == self.answer(prompt).strip())

    # --- rows ---

    def row(self, prompt: str) -> Row:
        """The row of a prompt. Columns that it lacks are None."""
        split = self.splits["train"]
        return split[prompt] if prompt in split else self.splits["heldout"][prompt]

    def known_answer(self, prompt: str) -> str | None:
        """The answer, for reward functions; None without a column of answers."""
        return self.answer(prompt) if self.answer_column else None

    def facts(self, prompt: str) -> Mapping[str, Any]:
        """The columns, for reward functions."""
        return self.row(prompt)

    def epoch(self, number: int, seed: int, rates: Mapping[str, float]) -> list[str]:
        """The training prompts of an epoch in order. `rates` are the pass rates known at its start."""
        prompts = list(self.splits["train"])
        if self.config.order != "file":
            np.random.default_rng([seed, ORDER_STREAM, number]).shuffle(prompts)
        if self.config.order == "easy_first":  # prompts without a rate, in the middle
            prompts.sort(key=lambda prompt: -rates.get(prompt, 0.5))
        return prompts

    def known_rates(self) -> dict[str, float]:
        """Pass rates by prompt, from the column that has them."""
        if not self.config.pass_rate:
            return {}
        return {prompt: float(row[self.config.pass_rate]) for prompt, row in self.splits["train"].items()}

    def _prompt_of(self, row: Row, number: int) -> str:
        config = self.config
        columns = [config.messages] if config.messages else _fields_of(config.template) or [config.prompt]
        needed = [*columns, *([self.answer_column] if self.answer_column else [])]
        if missing := [column for column in needed if row.get(column) is None]:
            raise ConfigError(
                f"row {number} of {self.name} has no {missing[0]!r}, which other rows have; its columns are {', '.join(row)}"
            )
        if config.messages:
            return self._transcript(row[config.messages], number)
        text = config.template.format_map(row) if config.template else row[config.prompt]
        if not isinstance(text, str) or not text:
            raise ConfigError(f"row {number} of {self.name}: {columns[0]!r} must be a text, got {text!r:.80}")
        return text

    def _transcript(self, messages: Any, number: int) -> str:
        is_valid = (
            isinstance(messages, list)
            and messages
            and all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
                for m in messages
            )
        )
        if not is_valid or messages[-1]["role"] == "assistant":
            raise ConfigError(
                f"row {number} of {self.name}: {self.config.messages!r} must be a list of messages with role and content that "
                f"awaits the assistant's answer, got {messages!r:.120}"
            )
        prompt = "\n".join(f"{m['role']}: {m['content']}" for m in messages)
        self.conversations[prompt] = messages
        return prompt


def _fields_of(template: str) -> list[str]:
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"data.template {template!r:.80} is not a valid template: {error}; write {{{{ for a brace"
        ) from None


def _require_column(name: str, setting: str, path: str, columns: Sequence[str]) -> None:
    if name and name not in columns:
        raise ConfigError(
            f"{setting} names column {name!r}, which {path} does not have; its columns are {', '.join(columns)}"
        )


def _answer_column(config: DataConfig, columns: Sequence[str]) -> str:
    if config.answer is None:
        return "answer" if "answer" in columns else ""
    _require_column(config.answer, "data.answer", config.path, columns)
    return config.answer
