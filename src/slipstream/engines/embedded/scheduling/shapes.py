"""The bucketed shapes that programs are compiled for. Every program an engine runs has one of them, so the number of
compilations is known in advance. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

MIN_ROWS = 8
"""With fewer rows XLA multiplies matrices in another order, and results would differ in their last bits."""
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
    """Consecutive positions of one sequence that prefill computes together."""
    blocks: tuple[int, ...]
    """Blocks per prefill call, ascending."""
    max_steps: int
    """Decode steps per tick."""
    num_speculative: int = 0
    """Draft tokens per verification; 0 without speculative decoding."""
    has_draft: bool = False

    @property
    def table_width(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_length // self.page_size)

    def num_pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def num_blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block)

    @property
    def num_programs(self) -> int:
        """The most programs that can be compiled: plain and rich decode, each with groups and without, verification, prefill,
        two kinds of scoring and page copies for the policy; decode with groups and without, prefill and page copies for a
        draft model."""
        decode = 5 if self.num_speculative else 4
        policy = decode * len(self.rows) + 3 * len(self.blocks) + len(COPIES)
        draft = 2 * len(self.rows) + len(self.blocks) + len(COPIES) if self.has_draft else 0
        return policy + draft


def bucket(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`."""
    return next(b for b in buckets if b >= size)


def ladder(low: int, high: int, factor: int) -> tuple[int, ...]:
    """`low`, `low * factor`, … up to `high`; at least `low`.

    >>> ladder(8, 100, 2)
    (8, 16, 32, 64, 100)
    """
    steps = [low]
    while steps[-1] < high:
        steps.append(min(steps[-1] * factor, high))
    return tuple(steps)
