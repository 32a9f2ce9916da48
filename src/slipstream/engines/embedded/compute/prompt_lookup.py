"""Prompt lookup: draft tokens for speculative decoding, taken from the sequence itself.

Speculation never changes a result. The policy draws its own token at every position, with the random number of that position
(a counter-based PRNG keyed by seed, sample and position); draft tokens only decide how many positions one forward pass covers.
A sequence therefore has the same tokens, to the bit, with and without speculation. The usual rejection rule (accept with
probability min(1, p/q), else draw from the residual) accepts more from a draft with randomness of its own. Here the draft
model draws with the policy's random numbers and agrees with it wherever their distributions do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_NGRAM, MIN_NGRAM = 4, 2
WINDOW = 2048
"""Tokens searched."""


def lookup(tokens: Sequence[int], count: int) -> tuple[int, ...]:
    """Return up to `count` tokens that followed the latest earlier occurrence of the last few tokens; maybe none.

    >>> lookup((5, 6, 7, 8, 5, 6), 2)
    (7, 8)
    """
    recent = np.array(tokens[-WINDOW:], np.int32)
    text, item = recent.tobytes(), recent.itemsize
    for size in range(min(MAX_NGRAM, len(recent) - 1), MIN_NGRAM - 1, -1):
        end, stop = text[-size * item :], len(text) - item
        while (found := text.rfind(end, 0, stop)) >= 0:
            if found % item == 0:
                start = found // item + size
                return tuple(recent[start : start + count].tolist())
            stop = found + len(end) - 1  # a match across a token boundary
    return ()
