"""Prompt lookup: draft tokens from the sequence itself."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.engines.embedded.compute.prompt_lookup import MAX_NGRAM, MIN_NGRAM, WINDOW, lookup


def naive(tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The longest suffix first, and the latest of its earlier occurrences."""
    recent = tokens[-WINDOW:]
    for size in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        for start in range(len(recent) - size - 1, -1, -1):
            if recent[start : start + size] == recent[-size:]:
                return recent[start + size : start + size + count]
    return ()


@pytest.mark.parametrize(
    ("tokens", "count", "draft_tokens"),
    [
        ((5, 6, 7, 8, 5, 6), 2, (7, 8)),
        ((5, 6, 7, 8, 5, 6), 9, (7, 8, 5, 6)),  # no more than there is
        ((5, 6, 7, 8, 5, 6), 0, ()),
        ((), 3, ()),
        ((5,), 3, ()),
        ((5, 6), 3, ()),
        ((5, 5), 3, ()),
        ((5, 5, 5), 3, (5,)),  # an occurrence may overlap the end
        ((6, 1, 2, 3, 6), 3, ()),  # one token is not enough
        ((5, 6, 1, 5, 6, 2, 5, 6), 1, (2,)),  # the latest
        ((9, 5, 6, 1, 8, 5, 6, 2, 9, 5, 6), 1, (1,)),  # the longest before the latest
    ],
)
def test_lookup(tokens: tuple[int, ...], count: int, draft_tokens: tuple[int, ...]) -> None:
    assert lookup(tokens, count) == draft_tokens


def test_only_recent_tokens_are_searched() -> None:
    far = (7, 8, 9, *range(100, 100 + WINDOW), 7, 8)
    assert lookup(far, 1) == ()
    assert lookup(far[-WINDOW:], 1) == ()
    assert lookup((7, 8, 9, *range(100, 100 + WINDOW - 5), 7, 8), 1) == (9,)


def test_a_match_across_token_boundaries_does_not_count() -> None:
    """Tokens are searched as four bytes each: 0x01000000, 0x02000000 contains the bytes of 1, 2 at an odd offset."""
    assert lookup((9, 0x01000000, 0x02000000, 7, 1, 2), 1) == ()
    assert lookup((1, 2, 8, 0x01000000, 0x02000000, 7, 1, 2), 1) == (8,)


# Tokens whose bytes look like those of other tokens, shifted.
tricky = st.sampled_from([0, 1, 2, 0x100, 0x10000, 0x01000000, 0x01000001, 0x00010001, 0x02000000])


@given(st.lists(tricky, max_size=40).map(tuple), st.integers(0, 5))
@example((0, 0, 0, 0, 0), 3)
def test_lookup_is_the_naive_search(tokens: tuple[int, ...], count: int) -> None:
    assert lookup(tokens, count) == naive(tokens, count)


def test_draft_tokens_are_python_integers() -> None:
    assert [type(token) for token in lookup([1, 2, 3, 1, 2], 1)] == [int]
