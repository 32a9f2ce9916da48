"""Whether an engine's output can be true at all. Pure, for messages and dataclasses alike.

A sound engine never fails these checks, whatever the policy: they follow from what tokens, probabilities and versions are. Only
`is_repetitive` is a suspicion, since a policy may repeat itself; `engine_watch.py` asks another engine about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MAX_LOGPROB = 0.1
"""Logprobs are at most 0; rounding in bfloat16 may exceed that by less than this."""
MIN_PLAUSIBLE_TOKENS, MARGIN = 16, 4.0
"""Tokens, and nats. Whatever the distribution over V tokens, a sampled token has a logprob below -log V - x with a probability
of at most exp(-x). The mean of 16 tokens is below -log V - 4 with a probability of 2e-13."""
MIN_REPEATED_TOKENS = 8


def fault_in(row: Any, vocab_size: int = 0, temperature: float = 1.0) -> str:
    """Return what is wrong with a completion or with progress; empty if nothing is. `vocab_size` 0 is not known."""
    ids, logprobs = row.token_ids[:], row.logprobs[:]
    if len(logprobs) != len(ids):
        return f"{len(logprobs)} logprobs for {len(ids)} tokens"
    if not ids:
        return ""
    if vocab_size and max(ids) >= vocab_size:
        return f"token {max(ids)}, which is outside the vocabulary of {vocab_size}"
    total = sum(logprobs)  # one value that is not finite makes the sum so
    if not math.isfinite(total):
        number = sum(not math.isfinite(value) for value in logprobs)
        return f"{len(ids)} logprobs, {number} of them not finite"
    if max(logprobs) > MAX_LOGPROB:
        return f"a logprob of {max(logprobs):.3g}: probabilities are at most 1"
    # Above temperature 1, servers that report the logprobs of the model itself may report less.
    if vocab_size and len(ids) >= MIN_PLAUSIBLE_TOKENS and temperature <= 1:
        least = -math.log(vocab_size) - MARGIN
        if total / len(ids) < least:
            return f"tokens with a mean logprob of {total / len(ids):.3g}: chance alone gives more than {least:.3g}"
    return ""


def fault_in_completion(row: Any, vocab_size: int = 0, temperature: float = 1.0) -> str:
    """`fault_in`, and what only finished samples have: raw logprobs and versions."""
    if fault := fault_in(row, vocab_size, temperature):
        return fault
    count, raw = len(row.token_ids), row.raw_logprobs[:]
    if raw and (len(raw) != count or not math.isfinite(sum(raw))):
        return (
            f"{len(raw)} raw logprobs for {count} tokens, {sum(not math.isfinite(v) for v in raw)} of them not finite"
        )
    stop = 0
    for span in row.spans:
        if span.start != stop or span.stop < span.start:
            break
        stop = span.stop
    return "" if stop == count else f"{count} tokens, and versions of {stop} of them"


def is_repetitive(ids: Sequence[int]) -> bool:
    """Whether a completion is one token over and over."""
    return len(ids) >= MIN_REPEATED_TOKENS and ids.count(ids[0]) == len(ids)
