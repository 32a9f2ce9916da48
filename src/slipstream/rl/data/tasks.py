"""Tasks with verifiable answers: digit strings to reverse, sort or add, and the tasks of reasoning-gym.

Every prompt belongs to exactly one split, training or held-out."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from slipstream.errors import ConfigError
from slipstream.rl.config import TaskConfig
from slipstream.rl.data.answers import EXTRACTORS, tagged

Split: TypeAlias = Literal["train", "heldout"]

_POOL = 2000
"""Questions generated per task of reasoning-gym, and kept, since an item is looked up by its question."""


class Task(Protocol):
    """Prompts and rewards."""

    @property
    def name(self) -> str: ...

    def prompts(self, rng: np.random.Generator, count: int, split: Split = "train") -> list[str]:
        """Draw `count` prompts of a split, without repetition if it has that many; an empty list if the split is empty."""
        ...

    def answer(self, prompt: str) -> str:
        """A right answer, for the supervised warm-up."""
        ...

    def reward(self, prompt: str, text: str) -> float:
        """1 for a right answer, 0 for a wrong one, in between for partial credit."""
        ...


class EnvironmentTask:
    """The starts of an environment's episodes: a prompt is the seed of `reset`. The environment gives the rewards."""

    def __init__(self, name: str) -> None:
        self.name = name

    def prompts(self, rng: np.random.Generator, count: int, split: Split = "train") -> list[str]:
        return [str(seed) for seed in rng.integers(2**31, size=count)] if split == "train" else []

    def answer(self, prompt: str) -> str:
        raise ConfigError(f"environment {self.name!r} has no right answers")

    def reward(self, prompt: str, text: str) -> float:
        raise ConfigError(f"environment {self.name!r} scores episodes, not texts")


def task_named(config: TaskConfig, size: int = _POOL) -> Task:
    """The task that a config names; a `ConfigError` suggests the closest names."""
    kind, colon, rest = config.name.partition(":")
    if colon and kind == "reasoning_gym":
        extract = EXTRACTORS[config.extract]
        return ReasoningGymTask.create(rest, config.holdout, size, options=config.options, extract=extract)
    if config.name not in _DIGIT_TASKS:
        known = [*_DIGIT_TASKS, "reasoning_gym:<name>"]
        near = difflib.get_close_matches(config.name, known, n=2)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known tasks: {', '.join(known)}"
        raise ConfigError(f"task.name {config.name!r} is unknown; {hint}")
    if config.options or config.extract != "tags":
        raise ConfigError(
            f"task.options and task.extract apply to reasoning_gym tasks only; the settings of {config.name!r} are digits and "
            "holdout, and its answer is the whole completion"
        )
    return DigitTask(config.name, config.digits, config.holdout)


# --- digit strings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _DigitRule:
    num_operands: int
    solve: Callable[[str], str]
    """Maps the text between the task's letter and the equals sign to the answer."""


def _add(question: str) -> str:
    left, right = question.split("+")
    return str(int(left) + int(right)).zfill(len(left) + 1)


_DIGIT_TASKS = {
    "reverse": _DigitRule(1, lambda question: question[::-1]),
    "sort": _DigitRule(1, lambda question: "".join(sorted(question))),
    "add": _DigitRule(2, _add),
}

MAX_DIGITS = 9
"""Prompts are numbered by 64-bit integers, and a sum has twice as many digits as an operand."""


@dataclass(frozen=True, slots=True)
class DigitTask:
    """Prompts `r123=`, `s312=`, `a012+034=` with answers `321`, `123`, `0046`: of constant length, with leading zeros.

    Prompt i of N is held out if its rank (i · STRIDE) mod N is below the number to hold out. N is a power of 10 and coprime to
    STRIDE, so that ranks are a permutation: each split has exactly its share, spread evenly, and the inverse permutation
    draws a prompt of either split directly."""

    name: str
    digits: int = 3
    holdout: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= MAX_DIGITS:
            raise ConfigError(f"task.digits must be 1 to {MAX_DIGITS}, got {self.digits}")

    @property
    def num_prompts(self) -> int:
        return 10 ** (self.digits * _DIGIT_TASKS[self.name].num_operands)

    @property
    def num_heldout(self) -> int:
        """At least one prompt if `holdout` is above 0, and never all."""
        if self.holdout == 0:
            return 0
        return min(max(round(self.holdout * self.num_prompts), 1), self.num_prompts - 1)

    def prompts(self, rng: np.random.Generator, count: int, split: Split = "train") -> list[str]:
        start, stop = (0, self.num_heldout) if split == "heldout" else (self.num_heldout, self.num_prompts)
        if start == stop:
            return []
        ranks = rng.choice(stop - start, size=min(count, stop - start), replace=False)
        return [self._prompt(start + int(rank)) for rank in np.resize(ranks, count)]

    def answer(self, prompt: str) -> str:
        return _DIGIT_TASKS[self.name].solve(prompt[1:-1])

    def reward(self, prompt: str, text: str) -> float:
        return float(text == self.answer(prompt))

    def _prompt(self, rank: int) -> str:
        number = rank * pow(_STRIDE, -1, self.num_prompts) % self.num_prompts
        width = self.digits * _DIGIT_TASKS[self.name].num_operands
        text = str(number).zfill(width)
        return f"{self.name[0]}{'+'.join(text[i : i + self.digits] for i in range(0, width, self.digits))}="


_STRIDE = 618_033_989  # digits of the golden ratio; odd and not a multiple of 5


# --- reasoning-gym ----------------------------------------------------------------------------------------------------

_RESERVED = ("size", "seed")
"""Options of every task that are set here, because they determine the splits."""


@dataclass(frozen=True, slots=True)
class ReasoningGymTask:
    """A procedural task of reasoning-gym, with a fixed pool of distinct questions.

    Its scorers give partial credit for text around the answer, so the answer is extracted first (`answers.py`)."""

    name: str
    dataset: Any
    train: dict[str, Any]
    """Items by prompt."""
    heldout: dict[str, Any]
    extract: Callable[[str], str] = tagged

    @classmethod
    def create(
        cls,
        name: str,
        holdout: float,
        size: int,
        options: Mapping[str, Any] = MappingProxyType({}),
        extract: Callable[[str], str] = tagged,
    ) -> ReasoningGymTask:
        dataset = _dataset(name, size, options)
        # Equal questions become one.
        items = {f"{item['question'].strip()}\n": item for item in (dataset[i] for i in range(size))}
        prompts = list(items)
        num_heldout = min(round(holdout * len(prompts)), len(prompts) - 1)
        heldout = {prompt: items.pop(prompt) for prompt in prompts[:num_heldout]}
        return cls(f"reasoning_gym:{name}", dataset, items, heldout, extract)

    def prompts(self, rng: np.random.Generator, count: int, split: Split = "train") -> list[str]:
        pool = list(self.heldout if split == "heldout" else self.train)
        if not pool:
            return []
        picks = rng.choice(len(pool), size=min(count, len(pool)), replace=False)
        return [pool[i] for i in np.resize(picks, count)]

    def answer(self, prompt: str) -> str:
        return str(self._item(prompt)["answer"])

    def reward(self, prompt: str, text: str) -> float:
        return float(self.dataset.score_answer(answer=self.extract(text), entry=self._item(prompt)))

    def _item(self, prompt: str) -> Any:
        return self.train[prompt] if prompt in self.train else self.heldout[prompt]


def _dataset(name: str, size: int, options: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym as gym
    except ImportError:
        raise ConfigError(
            "task.name names a reasoning_gym task, but that package is not installed; "
            "install it with: pip install 'slipstream-rl[reasoning-gym]'"
        ) from None
    try:
        plain = gym.create_dataset(name, size=size, seed=0)
    except ValueError as error:
        raise ConfigError(
            f"reasoning-gym has no task {name!r} ({error}); the gallery lists its tasks: "
            "https://github.com/open-thought/reasoning-gym/blob/main/GALLERY.md"
        ) from None
    if not options:
        return plain
    known = [field.name for field in dataclasses.fields(plain.config) if field.name not in _RESERVED]
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise ConfigError(f"reasoning-gym's task {name!r} has no option {key!r} (task.options.{key}); {hint}")
    try:
        return gym.create_dataset(name, size=size, seed=0, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning-gym's task {name!r} rejects task.options {dict(options)}: {error}") from None
