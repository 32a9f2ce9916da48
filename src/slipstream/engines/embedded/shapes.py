"""The few shapes that programs are compiled for. Pure arithmetic; everything an engine ever runs comes from here, so the
number of compilations is known before the first."""

from __future__ import annotations

from dataclasses import dataclass

MIN_ROWS = 8
"""Below eight rows XLA multiplies matrices in another order, and results would differ in their last bits."""
COPIES = (16, 256)
"""Page copies per call."""


@dataclass(frozen=True, slots=True)
class Shapes:
    page_size: int
    num_pages: int
    max_length: int
    rows: tuple[int, ...]
    """Sequences per decode step, ascending."""
    block: int
    """Neighbouring positions of one sequence that are computed together in prefill."""
    blocks: tuple[int, ...]
    """Blocks per prefill chunk, ascending."""
    max_steps: int
    """Decode steps per round trip."""
    guesses: int = 0
    """Tokens guessed at a time; 0 without speculation."""
    has_draft: bool = False

    @property
    def table_width(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_length // self.page_size)

    @property
    def prefill_tokens(self) -> int:
        """Of the largest chunk."""
        return self.block * self.blocks[-1]

    @property
    def max_rows(self) -> int:
        return self.rows[-1]

    def num_pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def num_blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block)

    @property
    def num_programs(self) -> int:
        """Most programs that can be compiled: decode plain and rich, verification of guesses, prefill, two kinds of scoring,
        copies; and what a draft model needs."""
        policy = 2 * len(self.rows) + (len(self.rows) if self.guesses else 0) + 3 * len(self.blocks) + len(COPIES)
        draft = len(self.rows) + len(self.blocks) + len(COPIES) if self.has_draft else 0
        return policy + draft


def bucket(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`."""
    return next(b for b in buckets if b >= size)


def ladder(low: int, high: int, factor: int) -> tuple[int, ...]:
    """`low`, `low * factor` … up to the first that reaches `high`, which is cut down to it (but not below `low`).

    >>> ladder(8, 100, 2)
    (8, 16, 32, 64, 100)
    """
    steps = [low]
    while steps[-1] < high:
        steps.append(min(steps[-1] * factor, high))
    return tuple(steps)
