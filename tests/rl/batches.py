"""Batches and completions for tests."""

import numpy as np

from slipstream.rl.algorithm.batch import Batch
from slipstream.types import Completion, VersionSpan


def completion(prompt, tokens, logprobs=None, spans=None):
    logprobs = [-1.0] * len(tokens) if logprobs is None else logprobs
    spans = (VersionSpan(0, 0, len(tokens)),) if spans is None else spans
    return Completion("r", 0, tuple(prompt), tuple(tokens), "", tuple(logprobs), (), "stop", spans)


def random_batch(seed=0, rows=6, length=9, extras=True):
    """A batch with all optional columns (`extras`), and log π_θ that differ enough for some tokens to be clipped."""
    rng = np.random.default_rng(seed)
    shape = (rows, length - 1)
    mask = np.zeros(shape, np.float32)
    for row in range(rows):
        start = rng.integers(0, 3)
        mask[row, start : start + rng.integers(1, length - 3)] = 1

    def column(mean, scale):
        return (rng.normal(mean, scale, shape) * mask).astype(np.float32)

    logprobs = column(-2, 0.5)
    batch = Batch(
        tokens=rng.integers(0, 90, (rows, length)).astype(np.int32),
        mask=mask,
        logprobs=logprobs,
        advantages=column(0, 1),
        ages=np.zeros(shape, np.int32),
    )
    policy = logprobs + column(0, 0.4)
    if extras:
        batch = batch._replace(
            old=logprobs + column(0, 0.3),
            reference=logprobs + column(0, 0.3),
            values=column(0, 1),
            returns=column(0, 1),
        )
    return batch, policy
