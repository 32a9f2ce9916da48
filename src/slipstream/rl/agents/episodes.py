"""Episodes: the tokens that a policy and an environment exchanged, ready to train on."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.errors import EpisodeError
from slipstream.rl.algorithm import advantages as estimators
from slipstream.rl.algorithm.batch import Batch, padded_length
from slipstream.types import EndReason, ExpertRoutes, FinishReason, VersionSpan


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens that the policy sampled between two observations."""

    start: int
    """Position of the first token in the episode."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """As `Completion.logprobs`: under the sampling distribution."""
    raw_logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    """Positions relative to the turn's first token."""
    finish_reason: FinishReason
    engine: str
    action: str
    """The text passed to the environment: the tokens without special tokens."""
    reward: float
    routes: ExpertRoutes | None = None
    """As `Completion.routes`: of everything before the turn's last token."""

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode of an environment. With two turns of two tokens and one token:

    token_ids  1 5 6 | 20 21 | 7 8 | 22        prompt, turn, observation, turn
    sampled    0 0 0 |  1  1 | 0 0 |  1
    """

    environment: int
    """Position in the list given to `run_episodes`."""
    group: int
    """Episodes of a group start alike and are each other's baseline."""
    seed: int
    token_ids: tuple[int, ...]
    """The whole episode, exactly as the engine saw and sampled it."""
    turns: tuple[Turn, ...]
    end: EndReason

    @property
    def rewards(self) -> tuple[float, ...]:
        """The reward of each turn."""
        return tuple(turn.reward for turn in self.turns)

    @property
    def reward(self) -> float:
        return math.fsum(self.rewards)

    @property
    def sampled(self) -> tuple[bool, ...]:
        """For each token, whether the policy sampled it."""
        mask = [False] * len(self.token_ids)
        for turn in self.turns:
            mask[turn.start : turn.stop] = [True] * len(turn.token_ids)
        return tuple(mask)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """For each token; 0 if the policy did not sample it."""
        return self._spread([turn.logprobs for turn in self.turns])

    @property
    def raw_logprobs(self) -> tuple[float, ...]:
        """For each token; 0 if the policy did not sample it."""
        return self._spread([turn.raw_logprobs for turn in self.turns])

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """The policy versions of the sampled tokens, by position in the episode."""
        return tuple(
            VersionSpan(span.version, turn.start + span.start, turn.start + span.stop)
            for turn in self.turns
            for span in turn.spans
        )

    @property
    def version(self) -> int:
        """The oldest policy version that sampled a token."""
        return min(span.version for span in self.spans)

    @property
    def routes(self) -> ExpertRoutes | None:
        """As `Completion.routes`, each token's from the turn that read it first; None unless all turns have them."""
        routes = [turn.routes for turn in self.turns if turn.routes is not None]
        return functools.reduce(ExpertRoutes.followed_by, routes) if len(routes) == len(self.turns) else None

    def _spread(self, rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        values = [0.0] * len(self.token_ids)
        for turn, row in zip(self.turns, rows):
            values[turn.start : turn.stop] = row
        return tuple(values)


@dataclass(frozen=True, slots=True)
class Episodes:
    """The result of `run_episodes`."""

    episodes: tuple[Episode, ...]
    """In the order of their environments, without the failed ones. An agent's session has one for each of its branches."""
    errors: tuple[EpisodeError, ...]
    num_environments: int

    @property
    def num_dropped(self) -> int:
        """Episodes that failed, and episodes of groups that were left with too few."""
        return self.num_environments - len({episode.environment for episode in self.episodes})


def episode_advantages(episodes: Sequence[Episode]) -> np.ndarray:
    """[B]: A_i of each episode, from the total rewards of its group. Group sizes may differ."""
    advantages = np.zeros(len(episodes), np.float32)
    for group in {episode.group for episode in episodes}:
        rows = [i for i, episode in enumerate(episodes) if episode.group == group]
        if len(rows) > 1:  # a single episode has no baseline
            advantages[rows] = estimators.group(np.array([[episodes[i].reward for i in rows]], np.float32))[0]
    return advantages


def episode_batch(
    episodes: Sequence[Episode],
    advantages: np.ndarray,
    max_length: int = 0,
    pad_id: int = 0,
    version: int | None = None,
) -> Batch:
    """Build a batch that trains on the sampled tokens of every turn, and not on the environment's text.

    Rows are as long as the longest episode, or `max_length` if that is longer, so that steps share a compiled program.
    `version` is the trainer's policy version, for the ages of the tokens; the default is the newest that sampled a token."""
    length = padded_length(max([max_length, *(len(episode.token_ids) for episode in episodes)]))
    current = max(span.version for episode in episodes for span in episode.spans) if version is None else version
    tokens = np.full((len(episodes), length), pad_id, np.int32)
    mask, logprobs = (np.zeros((len(episodes), length - 1), np.float32) for _ in range(2))
    ages = np.zeros((len(episodes), length - 1), np.int32)
    for row, episode in enumerate(episodes):
        count = len(episode.token_ids)
        tokens[row, :count] = episode.token_ids
        mask[row, : count - 1] = episode.sampled[1:]
        logprobs[row, : count - 1] = episode.logprobs[1:]
        for span in episode.spans:
            ages[row, span.start - 1 : span.stop - 1] = current - span.version
    return Batch(tokens, mask, logprobs, advantages.astype(np.float32).reshape(-1, 1) * mask, ages)
