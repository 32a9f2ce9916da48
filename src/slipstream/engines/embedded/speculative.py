"""Guessing tokens. A guess costs little and changes nothing: the policy draws its own token at every position, with the
number that belongs to that position, and guesses only decide how many positions it can do at once.

So a sequence has the same tokens with and without guesses, to the bit, and its distribution is the policy's whatever the
guesses are. The usual rule (accept with probability min(1, p/q), else draw from the rest) accepts more from a draft that
samples on its own; here the draft draws with the same number as the policy, and agrees with it wherever their
distributions do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_NGRAM, MIN_NGRAM = 4, 2
WINDOW = 2048
"""Tokens looked back."""


def lookup(tokens: Sequence[int], count: int) -> tuple[int, ...]:
    """Prompt lookup: what followed the latest earlier occurrence of the last few tokens; at most `count`, perhaps none.

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
            stop = found + len(end) - 1  # between two tokens
    return ()
