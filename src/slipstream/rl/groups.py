"""The rewards of a batch, and what is left of its groups when some of the samples failed. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from slipstream.errors import RewardError, RewardFailed
from slipstream.rl.reward_functions import Judged, RewardRequest

OnError: TypeAlias = Literal["raise", "drop"]
"""What becomes of a sample that failed. `raise`: the first error is raised. `drop`: the sample is left out and counted."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """What a batch of completions is worth. Of 4 samples, the third of which failed:
    `Rewards(kept=(0, 1, 3), values=(1.0, 0.0, 1.0), …, errors=(RewardFailed(…),))`."""

    kept: tuple[int, ...]
    """Positions, in the batch, of the samples that have a reward."""
    values: tuple[float, ...]
    """Of each sample kept: the weighted sum of its functions' rewards."""
    parts: tuple[Mapping[str, float], ...]
    """Of each sample kept: what each function gave, by its name, without weight; `name.part` for parts of a dict."""
    errors: tuple[RewardError, ...]
    num_requests: int

    @property
    def num_dropped(self) -> int:
        """Samples left out: those that failed, and those whose group was left with too few."""
        return self.num_requests - len(self.kept)


def settled(
    requests: Sequence[RewardRequest], found: Sequence[Sequence[Judged] | RewardError], weights: Mapping[str, float]
) -> Rewards:
    """From what the functions, in the order of `weights`, gave to each request, or why there is nothing."""
    errors = [each for each in found if isinstance(each, RewardError)]
    failed = {i for i, each in enumerate(found) if isinstance(each, RewardError)}
    kept = survivors([r.prompt_index for r in requests], failed)
    if errors and not kept:
        raise type(errors[0])(f"of {len(requests)} samples none is left to train on; the first error: {errors[0]}")
    given = [row for i in kept if not isinstance(row := found[i], RewardError)]
    values = tuple(sum(w * verdict.value for w, verdict in zip(weights.values(), row)) for row in given)
    if not all(map(math.isfinite, values)):
        raise RewardFailed("a weighted sum of rewards is too large for a float; are the weights meant to be so large?")
    parts = tuple(dict(part for pair in zip(weights, row) for part in _parts(*pair)) for row in given)
    return Rewards(kept, values, parts, tuple(errors), len(requests))


def _parts(function: str, verdict: Judged) -> Iterator[tuple[str, float]]:
    yield function, verdict.value
    for name, value in verdict.parts.items():
        yield f"{function}.{name}", value


def survivors(groups: Sequence[Hashable], failed: Collection[int]) -> tuple[int, ...]:
    """Positions to keep. A group that lost samples needs two at least to be each other's baseline, or goes as a whole.

    survivors("aaabb", failed={0, 3})  ->  (1, 2)
    """
    left = Counter(group for i, group in enumerate(groups) if i not in failed)
    too_small = {groups[i] for i in failed if left[groups[i]] < 2}
    return tuple(i for i, group in enumerate(groups) if i not in failed and group not in too_small)
