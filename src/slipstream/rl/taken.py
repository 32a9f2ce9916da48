"""What a step has taken: groups of completions and their rewards, and which of them it learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.rl import advantages
from slipstream.rl.config import AlgorithmConfig
from slipstream.rl.experience import by_group
from slipstream.types import Completion, RolloutGroup


@dataclass(frozen=True, slots=True)
class Taken:
    """A step's groups with their rewards, and completion by completion, in their order, what they hold."""

    groups: Sequence[RolloutGroup]
    rewards: np.ndarray
    """[groups, samples], as they were judged."""

    def __add__(self, other: Taken) -> Taken:
        return Taken([*self.groups, *other.groups], np.concatenate([self.rewards, other.rewards]))

    @property
    def lengths(self) -> np.ndarray:
        """[groups, samples]: tokens."""
        return np.array([[len(c.token_ids) for c in group.completions] for group in self.groups])

    def overlong(self, how: AlgorithmConfig) -> np.ndarray | None:
        """[groups, samples]: what completions lose that are too long, below 0."""
        if not how.overlong_tokens:
            return None
        return advantages.overlong(self.lengths, how.max_tokens, how.overlong_tokens)

    @property
    def informative(self) -> np.ndarray:
        """[groups]: those whose samples were not all judged alike."""
        return np.asarray(by_group(advantages.informative, self.rewards).any(axis=1))

    def chosen(self, count: int) -> Taken:
        """The groups of these that are learned from."""
        if len(self.groups) == count:
            return self
        rows = advantages.chosen(self.informative, count)
        return Taken([self.groups[row] for row in rows], self.rewards[rows])

    @property
    def completions(self) -> list[Completion]:
        return [completion for group in self.groups for completion in group.completions]

    @property
    def versions(self) -> list[int]:
        """The trainer's, when it took the completion."""
        return [group.version for group in self.groups for _ in group.completions]
