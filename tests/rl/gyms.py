"""A fake of the reasoning-gym package with two of its tasks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest


@dataclass
class LegsConfig:
    size: int = 500
    seed: int | None = None
    max_dogs: int = 400


@dataclass
class ChainSumConfig:
    """As in reasoning-gym."""

    min_terms: int = 2
    max_terms: int = 6
    min_digits: int = 1
    max_digits: int = 4
    allow_negation: bool = False
    size: int = 500
    seed: int | None = None

    def validate(self) -> None:
        assert self.max_terms >= self.min_terms, "max_terms must be >= min_terms"


class Dataset:
    """Items by index, partial credit for text around the answer."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __len__(self) -> int:
        return self.config.size

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        if answer == entry["answer"]:
            return 1.0
        return len(entry["answer"]) / len(answer) if answer and entry["answer"] in answer else 0.0

    def _rng(self, index: int) -> np.random.Generator:
        return np.random.default_rng([self.config.seed, index])


class Legs(Dataset):
    def __getitem__(self, index: int) -> dict[str, Any]:
        dogs = int(self._rng(index).integers(1, self.config.max_dogs))
        return {"question": f"How many legs have {dogs} dogs?", "answer": str(4 * dogs), "metadata": {}}


class ChainSum(Dataset):
    def __getitem__(self, index: int) -> dict[str, Any]:
        config, rng = self.config, self._rng(index)
        digits = rng.integers(config.min_digits, config.max_digits + 1)
        terms = rng.integers(0, 10**digits, rng.integers(config.min_terms, config.max_terms + 1))
        return {"question": f"{' + '.join(map(str, terms))} =", "answer": str(terms.sum()), "metadata": {}}


_TASKS: dict[str, tuple[Any, Any]] = {"leg_counting": (Legs, LegsConfig), "chain_sum": (ChainSum, ChainSumConfig)}


def create_dataset(name: str, **settings: Any) -> Dataset:
    if name not in _TASKS:
        raise ValueError(f"Dataset '{name}' not registered")
    kind, config = _TASKS[name]
    made = config(**settings)
    if "validate" in dir(made):
        made.validate()
    return kind(made)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import reasoning_gym` return the fake until the test ends."""
    module = ModuleType("reasoning_gym")
    module.create_dataset = create_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
