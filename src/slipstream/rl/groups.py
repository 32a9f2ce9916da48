"""Groups of samples that are each other's baseline, when some of the samples failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import Literal, TypeAlias

OnError: TypeAlias = Literal["raise", "drop"]
"""What becomes of a sample that failed. `raise`: the first error is raised. `drop`: the sample is left out and counted."""


def survivors(groups: Sequence[Hashable], failed: Collection[int]) -> tuple[int, ...]:
    """Positions to keep. A group that lost samples needs two at least to be each other's baseline, or goes as a whole.

    survivors("aaabb", failed={0, 3})  ->  (1, 2)
    """
    left = Counter(group for i, group in enumerate(groups) if i not in failed)
    too_small = {groups[i] for i in failed if left[groups[i]] < 2}
    return tuple(i for i, group in enumerate(groups) if i not in failed and group not in too_small)
