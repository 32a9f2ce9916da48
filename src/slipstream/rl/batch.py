"""A step's completions as arrays of one shape, and sums over the sequences in them.

Column t of every `[B, T − 1]` array speaks of the token that comes next, `tokens[:, t + 1]`: who drew it, with which
probability, what it was worth. A row is one prompt with its completion, or, packed (`rl/packing.py`), several."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.errors import ConfigError, VersionError
from slipstream.types import Completion

LENGTH_STEP = 8
"""Sequences are padded to a multiple of this, so that batches of almost the same length share a program."""


class Batch(NamedTuple):
    """What one update learns from. NumPy arrays when made, JAX arrays inside compiled programs."""

    tokens: np.ndarray
    """[B, T] prompt and completion, padded on the right."""
    mask: np.ndarray
    """[B, T − 1] 1 where the next token was sampled by the policy and is to be learned from; 0 for prompt and padding."""
    logprobs: np.ndarray
    """[B, T − 1] the engine's, of the tokens that it sampled, under the distribution it drew from; 0 elsewhere."""
    advantages: np.ndarray
    """[B, T − 1] 0 where the mask is."""
    ages: np.ndarray
    """[B, T − 1] how many versions older the weights that drew the token are than the trainer's; 0 outside the mask."""
    old: np.ndarray | None = None
    """[B, T − 1] the trainer's own logprobs before the first of several updates on this batch; None for a single update,
    which finds them on its way."""
    reference: np.ndarray | None = None
    """[B, T − 1] logprobs under the policy that KL pulls towards."""
    values: np.ndarray | None = None
    """[B, T − 1] what the critic expected before each token."""
    returns: np.ndarray | None = None
    """[B, T − 1] what it should have expected."""
    segments: np.ndarray | None = None
    """[B, T] for packed rows: the number of the sequence in its row, from 1; 0 is padding."""
    positions: np.ndarray | None = None
    """[B, T] for packed rows: the position in the sequence, from 0."""


def chosen(batch: Batch, rows: np.ndarray) -> Batch:
    """These rows of a batch, in this order."""
    return Batch(*(None if column is None else column[rows] for column in batch))  # type: ignore[arg-type]


def make_batch(
    completions: Sequence[Completion],
    *,
    version: int | Sequence[int],
    max_tokens: int,
    advantages: np.ndarray | None = None,
    pad_id: int = 0,
) -> Batch:
    """Arrays from a step's completions (prompt-major), for a trainer whose weights are `version`; one for each completion,
    where they were taken at different times.

    `advantages` has one number per completion, in their order, whatever its shape; none are zeros. T depends on the
    longest prompt and on `max_tokens`, not on what was sampled, so that steps share one program."""
    if not completions:
        raise ConfigError("a batch needs at least one completion, got none")
    num_rows = len(completions)
    worth = np.zeros(num_rows, np.float32) if advantages is None else np.asarray(advantages, np.float32).reshape(-1)
    if len(worth) != num_rows:
        raise ConfigError(f"{num_rows} completions need as many advantages, got {len(worth)}")
    longest = max(len(c.prompt_token_ids) for c in completions) + max_tokens
    length = -(-longest // LENGTH_STEP) * LENGTH_STEP
    versions = [version] * num_rows if isinstance(version, int) else list(version)
    if len(versions) != num_rows:
        raise ConfigError(f"{num_rows} completions need as many versions, or one for all; got {len(versions)}")
    tokens = np.full((num_rows, length), pad_id, np.int32)
    mask, logprobs, spread = (np.zeros((num_rows, length - 1), np.float32) for _ in range(3))
    ages = np.zeros((num_rows, length - 1), np.int32)
    for row, completion in enumerate(completions):
        _check(completion, row, max_tokens)
        start, count = len(completion.prompt_token_ids), len(completion.token_ids)
        sampled = slice(start - 1, start - 1 + count)
        tokens[row, :start] = completion.prompt_token_ids
        tokens[row, start : start + count] = completion.token_ids
        mask[row, sampled] = 1
        logprobs[row, sampled] = completion.logprobs
        spread[row, sampled] = worth[row]
        ages[row, sampled] = token_ages(completion, versions[row])
    return Batch(tokens, mask, logprobs, spread, ages)


def token_ages(completion: Completion, version: int) -> np.ndarray:
    """For each token of a completion, how many versions before `version` its weights were: 0 is on-policy."""
    ages = np.full(len(completion.token_ids), -1, np.int32)
    for span in completion.spans:
        if span.version > version:
            raise VersionError(
                f"a completion has tokens of policy version {span.version}, but the trainer is at {version}; give "
                "the version that the trainer's weights have now"
            )
        ages[span.start : span.stop] = version - span.version
    if (ages < 0).any():
        missing = int(np.flatnonzero(ages < 0)[0])
        raise VersionError(f"no span of the completion says which policy version made its token {missing}")
    return ages


def sequence_sums(values: jax.Array, batch: Batch) -> jax.Array:
    """[B, S]: the sum of `values` [B, T − 1] over each sequence. S is 1, or, packed, what segments can be numbered."""
    if batch.segments is None:
        return jnp.sum(values, axis=1, keepdims=True)
    add = functools.partial(jax.ops.segment_sum, num_segments=batch.tokens.shape[1] + 1)
    return jax.vmap(add)(values, jnp.asarray(batch.segments)[:, :-1])


def at_tokens(sums: jax.Array, batch: Batch) -> jax.Array:
    """[B, T − 1]: for each token what `sequence_sums` found for its sequence."""
    if batch.segments is None:
        return jnp.broadcast_to(sums, batch.mask.shape)
    return jnp.take_along_axis(sums, jnp.asarray(batch.segments)[:, :-1], axis=1)


def _check(completion: Completion, row: int, max_tokens: int) -> None:
    count = len(completion.token_ids)
    if count > max_tokens:
        raise ConfigError(f"completion {row} has {count} tokens, more than max_tokens ({max_tokens})")
    if len(completion.logprobs) != count:
        raise ConfigError(
            f"completion {row} has {count} tokens but {len(completion.logprobs)} logprobs; an importance ratio needs one each"
        )
    if not completion.prompt_token_ids:
        raise ConfigError(f"completion {row} has no prompt tokens; its first token depends on nothing")
