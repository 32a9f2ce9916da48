"""Episodes: what a policy and an environment said to each other, token by token, ready to train on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from slipstream.errors import EpisodeError
from slipstream.rl import advantages as how
from slipstream.rl.batch import LENGTH_STEP, Batch
from slipstream.types import FinishReason, VersionSpan

EndReason: TypeAlias = Literal["done", "max_turns", "too_long"]
"""`done`: the environment said so. `max_turns`: the policy had all its turns. `too_long`: what the environment said last
would have left no room for an answer; it is not part of the episode."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy sampled between two observations."""

    start: int
    """Position of its first token in the episode."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """As `Completion.logprobs`: under the distribution that each token was drawn from."""
    raw_logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    """Positions count from the turn's first token."""
    finish_reason: FinishReason
    engine: str
    action: str
    """The tokens as text, without special tokens: what the environment was told."""
    reward: float

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Episode:
    """One environment's episode. With two turns, of two tokens and of one:

    token_ids  1 5 6 | 20 21 | 7 8 | 22        prompt, turn, observation, turn
    sampled    0 0 0 |  1  1 | 0 0 |  1
    """

    environment: int
    """Position in the list given to `run_episodes`."""
    group: int
    """Episodes of one group began alike, and are each other's baseline."""
    seed: int
    token_ids: tuple[int, ...]
    """All of it, exactly as the engine saw and drew it."""
    turns: tuple[Turn, ...]
    end: EndReason

    @property
    def rewards(self) -> tuple[float, ...]:
        """Of each turn."""
        return tuple(turn.reward for turn in self.turns)

    @property
    def reward(self) -> float:
        return math.fsum(self.rewards)

    @property
    def sampled(self) -> tuple[bool, ...]:
        """For each token, whether the policy drew it."""
        mask = [False] * len(self.token_ids)
        for turn in self.turns:
            mask[turn.start : turn.stop] = [True] * len(turn.token_ids)
        return tuple(mask)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """For each token; 0 where the policy did not draw it."""
        return self._spread([turn.logprobs for turn in self.turns])

    @property
    def raw_logprobs(self) -> tuple[float, ...]:
        """For each token; 0 where the policy did not draw it."""
        return self._spread([turn.raw_logprobs for turn in self.turns])

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Of the sampled tokens, by their positions in the episode."""
        return tuple(
            VersionSpan(span.version, turn.start + span.start, turn.start + span.stop)
            for turn in self.turns
            for span in turn.spans
        )

    @property
    def version(self) -> int:
        """The oldest policy version that drew a token of it."""
        return min(span.version for span in self.spans)

    def _spread(self, rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        values = [0.0] * len(self.token_ids)
        for turn, row in zip(self.turns, rows):
            values[turn.start : turn.stop] = row
        return tuple(values)


@dataclass(frozen=True, slots=True)
class Episodes:
    """What `run_episodes` brings back."""

    episodes: tuple[Episode, ...]
    """In the order of their environments, those that failed left out."""
    errors: tuple[EpisodeError, ...]
    num_environments: int

    @property
    def num_dropped(self) -> int:
        """Episodes left out: those that failed, and those whose group was left with too few."""
        return self.num_environments - len(self.episodes)


def episode_advantages(episodes: Sequence[Episode]) -> np.ndarray:
    """A_i of each episode, from the total rewards of its group, whose sizes may differ. [B]"""
    found = np.zeros(len(episodes), np.float32)
    for group in {episode.group for episode in episodes}:
        rows = [i for i, episode in enumerate(episodes) if episode.group == group]
        if len(rows) > 1:  # one that is alone has nothing to be compared with
            found[rows] = how.group(np.array([[episodes[i].reward for i in rows]], np.float32))[0]
    return found


def episode_batch(
    episodes: Sequence[Episode],
    advantages: np.ndarray,
    max_length: int = 0,
    pad_id: int = 0,
    version: int | None = None,
) -> Batch:
    """Every sampled token of every turn is trained on, and nothing that the environment said.

    Rows are as long as the longest episode, or as `max_length`, so that steps share one program. `version` is that of the
    trainer's weights, for the tokens' ages; without it the newest that drew a token."""
    longest = max([max_length, *(len(episode.token_ids) for episode in episodes)])
    length = -(-longest // LENGTH_STEP) * LENGTH_STEP
    now = max(span.version for episode in episodes for span in episode.spans) if version is None else version
    tokens = np.full((len(episodes), length), pad_id, np.int32)
    mask, logprobs = (np.zeros((len(episodes), length - 1), np.float32) for _ in range(2))
    ages = np.zeros((len(episodes), length - 1), np.int32)
    for row, episode in enumerate(episodes):
        count = len(episode.token_ids)
        tokens[row, :count] = episode.token_ids
        mask[row, : count - 1] = episode.sampled[1:]
        logprobs[row, : count - 1] = episode.logprobs[1:]
        for span in episode.spans:
            ages[row, span.start - 1 : span.stop - 1] = now - span.version
    return Batch(tokens, mask, logprobs, advantages.astype(np.float32).reshape(-1, 1) * mask, ages)
