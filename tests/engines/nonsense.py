"""Malformed server responses, for tests of code that parses or rejects them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from slipstream.errors import ProtocolMismatch


def anything(*names: str) -> st.SearchStrategy[Any]:
    """JSON with these names in it, in places where they may or may not belong."""
    return st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(names), inner, max_size=4),
        max_leaves=12,
    )


def refusal(call: str, expected: str, found: Any) -> ProtocolMismatch:
    return ProtocolMismatch(f"{call}: expected {expected}")
