"""The canary: a few fixed prompts on which an engine shows what it computes with new weights. Pure.

Checksums tell that the right bytes have arrived, not that the engine computes with them: a loader may skip a tensor, leave an
old copy in use, or put rows in the wrong order. So after a commit all engines answer the same prompts, each with the logprob
of the likeliest next token. It depends on every weight, and hardly on rounding: where two tokens are almost equally likely,
engines may choose differently, but the logprob is almost the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slipstream.types import EngineInfo

NUM_PROMPTS, NUM_TOKENS = 4, 12
MAX_GAP = {"float64": 0.1, "float32": 0.1, "float16": 0.1, "bfloat16": 0.5}
"""Nats by which two sound engines may differ, by dtype: ten times the mean difference that rounding explains, on GPUs also that
of TF32 (`observe/mismatch.py`). Tensors in the wrong place show 0.8 or more."""


class CanaryVerdict(NamedTuple):
    wrong: Mapping[str, str]
    """Engines that most others disagree with, and those whose answers are no numbers, with the reason."""
    disputed: Mapping[str, str]
    """Engines that disagree while no majority tells which is right, with the reason."""


def prompts(info: EngineInfo) -> list[tuple[int, ...]]:
    """Return token ids from all over the vocabulary, so that every rank's part of the embedding is used."""
    length = min(NUM_TOKENS, info.max_model_len - 1)
    spread = [(n * 0x9E3779B1 % 2**32) * info.vocab_size >> 32 for n in range(1, NUM_PROMPTS * length + 1)]
    return [tuple(spread[n * length : (n + 1) * length]) for n in range(NUM_PROMPTS)]


def gap(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the largest difference between two answers; infinity if they cannot be compared."""
    if len(a) != len(b) or not math.isfinite(math.fsum((*a, *b))):
        return math.inf
    return max((abs(x - y) for x, y in zip(a, b)), default=0.0)


def judge(answers: Mapping[str, Sequence[float]], dtypes: Mapping[str, str]) -> CanaryVerdict:
    """Compare the answers of engines that serve the same version. Both arguments are by engine."""
    wrong = {
        name: "it answered a canary with logprobs that are not finite"
        for name, answer in answers.items()
        if not math.isfinite(math.fsum(answer))
    }
    sound = {name: answer for name, answer in answers.items() if name not in wrong}

    def far(a: str, b: str) -> float:
        """Return by how much two engines differ; 0 if rounding explains it."""
        nats = gap(sound[a], sound[b])
        return nats if nats > max(MAX_GAP[dtypes[a]], MAX_GAP[dtypes[b]]) else 0.0

    against = {name: [other for other in sound if far(name, other)] for name in sound}
    disputed = {}
    for name, others in against.items():
        if others:
            nats = min(far(name, other) for other in others)
            reason = (
                f"it answered a canary with logprobs that differ by {nats:.2g} nats from those of {', '.join(others)}"
            )
            has_majority = any(len(theirs) < len(sound) / 2 for theirs in against.values())
            if has_majority and len(others) >= len(sound) / 2:
                wrong[name] = reason
            elif not has_majority:
                disputed[name] = reason
    return CanaryVerdict(wrong, disputed)
