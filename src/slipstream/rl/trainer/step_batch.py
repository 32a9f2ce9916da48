"""The rollout groups of one step with their rewards, and the choice of those that the step trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.rl.algorithm import advantages
from slipstream.rl.algorithm.experience import by_group, has_reward
from slipstream.rl.config import AlgorithmConfig
from slipstream.types import Completion, RolloutGroup


@dataclass(frozen=True, slots=True)
class StepBatch:
    groups: Sequence[RolloutGroup]
    rewards: np.ndarray
    """[groups, samples]; NaN where a sample has no reward."""
    parts: Sequence[Mapping[str, float] | None] = ()
    """For each sample, its rewards by function; empty if the reward has no parts."""

    def __add__(self, other: StepBatch) -> StepBatch:
        groups, rewards = [*self.groups, *other.groups], np.concatenate([self.rewards, other.rewards])
        return StepBatch(groups, rewards, (*self.parts, *other.parts))

    @property
    def known_rewards(self) -> np.ndarray:
        """Flat: the rewards of the samples that count."""
        return self.rewards[has_reward(self.rewards)]

    @property
    def informative(self) -> np.ndarray:
        """[groups]: True where the rewards of a group differ."""
        return np.asarray(by_group(advantages.informative, self.rewards).any(axis=1))

    def choose(self, count: int) -> StepBatch:
        """The `count` groups to train on, informative ones first. `parts` stay behind."""
        if len(self.groups) == count:
            return self
        rows = advantages.chosen(self.informative, count)
        return StepBatch([self.groups[row] for row in rows], self.rewards[rows])

    @property
    def lengths(self) -> np.ndarray:
        """[groups, samples]: tokens per completion."""
        return np.array([[len(c.token_ids) for c in group.completions] for group in self.groups])

    def overlong_penalty(self, config: AlgorithmConfig) -> np.ndarray | None:
        """[groups, samples], 0 or below: the penalty for completions near `max_tokens`; None if there is none."""
        if not config.overlong_tokens:
            return None
        return advantages.overlong(self.lengths, config.max_tokens, config.overlong_tokens)

    @property
    def completions(self) -> list[Completion]:
        return [completion for group in self.groups for completion in group.completions]

    @property
    def versions(self) -> list[int]:
        """For each completion, the trainer's policy version when it took the completion."""
        return [group.version for group in self.groups for _ in group.completions]
