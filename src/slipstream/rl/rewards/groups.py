"""The rewards of a batch, and which samples of its groups remain if some failed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from slipstream.errors import RewardError, RewardFailed
from slipstream.rl.rewards.functions import Reward, RewardRequest

OnError: TypeAlias = Literal["raise", "drop"]
"""What to do with a failed sample. `raise`: raise the first error. `drop`: leave the sample out and count it."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards of a batch of completions. For 4 samples of which the third failed:
    `Rewards(kept=(0, 1, 3), values=(1.0, 0.0, 1.0), …, errors=(RewardFailed(…),))`."""

    kept: tuple[int, ...]
    """Positions in the batch of the samples that have a reward."""
    values: tuple[float, ...]
    """The reward of each kept sample: the weighted sum over the functions."""
    parts: tuple[Mapping[str, float], ...]
    """For each kept sample, the unweighted reward by function name, and `name.part` for the parts of a dict."""
    errors: tuple[RewardError, ...]
    num_requests: int

    @property
    def num_dropped(self) -> int:
        """Samples that failed, and samples of groups that were left with too few."""
        return self.num_requests - len(self.kept)


def combine(
    requests: Sequence[RewardRequest], results: Sequence[Sequence[Reward] | RewardError], weights: Mapping[str, float]
) -> Rewards:
    """Combine the results of each request: one reward per function in the order of `weights`, or an error."""
    errors = [result for result in results if isinstance(result, RewardError)]
    failed = {i for i, result in enumerate(results) if isinstance(result, RewardError)}
    kept = survivors([r.prompt_index for r in requests], failed)
    if errors and not kept:
        raise type(errors[0])(f"none of {len(requests)} samples is left to train on; the first error: {errors[0]}")
    rows = [row for i in kept if not isinstance(row := results[i], RewardError)]
    values = tuple(sum(w * reward.value for w, reward in zip(weights.values(), row)) for row in rows)
    if not all(map(math.isfinite, values)):
        raise RewardFailed("a weighted sum of rewards overflows a float; are the weights too large?")
    parts = tuple(dict(part for pair in zip(weights, row) for part in _parts(*pair)) for row in rows)
    return Rewards(kept, values, parts, tuple(errors), len(requests))


def _parts(function: str, reward: Reward) -> Iterator[tuple[str, float]]:
    yield function, reward.value
    for name, value in reward.parts.items():
        yield f"{function}.{name}", value


def survivors(groups: Sequence[Hashable], failed: Collection[int]) -> tuple[int, ...]:
    """Positions to keep. A group that lost samples needs at least two for a baseline; otherwise it is dropped as a whole.

    survivors("aaabb", failed={0, 3})  ->  (1, 2)
    """
    left = Counter(group for i, group in enumerate(groups) if i not in failed)
    too_small = {groups[i] for i in failed if left[groups[i]] < 2}
    return tuple(i for i, group in enumerate(groups) if i not in failed and group not in too_small)
