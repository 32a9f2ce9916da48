"""Reference logit processing, one token at a time and in double precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from slipstream.types import SamplingParams


def edited(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], drawn: Sequence[int], banned: Iterable[int]
) -> np.ndarray:
    """Apply biases, penalties and bans to the `logits` of the token after `prompt` and `drawn`. Temperature and truncation come
    later."""
    values = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in {*prompt, *drawn}:
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in drawn:
        values[token] -= params.frequency_penalty
    for token in set(drawn):
        values[token] -= params.presence_penalty
    values[list(banned)] = -np.inf
    return values
