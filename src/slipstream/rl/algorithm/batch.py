"""A step's completions as padded arrays, and sums over the sequences in them.

Column t of every `[B, T − 1]` array describes the next token, `tokens[:, t + 1]`. A row is one prompt with its completion,
or several if packed (`packing.py`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.errors import ConfigError, EngineFailure, VersionError
from slipstream.gateway.output_check import fault_in
from slipstream.types import Completion

LENGTH_STEP = 8
"""Sequences are padded to a multiple of this, so that batches of similar length share a compiled program."""


class Batch(NamedTuple):
    """Input of an update. NumPy arrays when created, JAX arrays inside compiled programs."""

    tokens: np.ndarray
    """[B, T] prompt and completion, padded on the right."""
    mask: np.ndarray
    """[B, T − 1] 1 where the policy sampled the next token and the update learns from it; 0 for prompt and padding."""
    logprobs: np.ndarray
    """[B, T − 1] the engine's logprobs of its sampled tokens, under the sampling distribution; 0 elsewhere."""
    advantages: np.ndarray
    """[B, T − 1] 0 where the mask is 0."""
    ages: np.ndarray
    """[B, T − 1] how many versions the weights that sampled the token are behind the trainer's; 0 outside the mask."""
    old: np.ndarray | None = None
    """[B, T − 1] the trainer's logprobs before the first of several updates; None for a single update, which computes them
    in its own forward pass."""
    exact: np.ndarray | None = None
    """[B, T − 1] the trainer's logprobs before this update, computed as engines do (`TrainConfig.deterministic`). They replace
    the values of the forward pass, whose gradient is kept."""
    reference: np.ndarray | None = None
    """[B, T − 1] logprobs under the KL reference policy."""
    values: np.ndarray | None = None
    """[B, T − 1] the critic's value before each token."""
    returns: np.ndarray | None = None
    """[B, T − 1] the returns that the critic is fitted to."""
    routes: np.ndarray | None = None
    """[B, T − 1, layers with experts, experts per token]: the experts to which the engine sent `tokens[:, t]`, for the forward
    pass to use; `unknown_expert(dtype)` where they are not known."""
    segments: np.ndarray | None = None
    """[B, T] for packed rows: number of the sequence in its row, from 1; 0 is padding."""
    positions: np.ndarray | None = None
    """[B, T] for packed rows: position in the sequence, from 0."""


def chosen(batch: Batch, rows: np.ndarray) -> Batch:
    """The given rows of a batch, in the given order."""
    return Batch(*(None if column is None else column[rows] for column in batch))  # type: ignore[arg-type]


def unknown_expert(dtype: np.dtype) -> int:
    """The number in `Batch.routes` that stands for an expert that is not known."""
    return int(np.iinfo(dtype).max)


def make_batch(
    completions: Sequence[Completion],
    *,
    version: int | Sequence[int],
    max_tokens: int,
    advantages: np.ndarray | None = None,
    pad_id: int = 0,
    vocab_size: int = 0,
    replay_routes: bool = False,
) -> Batch:
    """Build a batch from completions. `version` is the trainer's policy version, or one per completion if they were taken at
    different versions.

    `advantages` has one number per completion, in any shape; the default is zeros. T depends on the longest prompt and on
    `max_tokens`, not on the samples, so that steps share one compiled program. With a `vocab_size`, tokens outside of it are
    refused, which a compiled program would read as others. With `replay_routes`, the update uses the engine's experts."""
    if not completions:
        raise ConfigError("a batch needs at least one completion, got 0")
    num_rows = len(completions)
    given = np.zeros(num_rows, np.float32) if advantages is None else np.asarray(advantages, np.float32).reshape(-1)
    if len(given) != num_rows:
        raise ConfigError(f"expected one advantage for each of {num_rows} completions, got {len(given)}")
    longest = max(len(c.prompt_token_ids) for c in completions) + max_tokens
    length = padded_length(longest)
    versions = [version] * num_rows if isinstance(version, int) else list(version)
    if len(versions) != num_rows:
        raise ConfigError(f"expected one version, or one for each of {num_rows} completions; got {len(versions)}")
    tokens = np.full((num_rows, length), pad_id, np.int32)
    mask, logprobs, per_token = (np.zeros((num_rows, length - 1), np.float32) for _ in range(3))
    ages = np.zeros((num_rows, length - 1), np.int32)
    for row, completion in enumerate(completions):
        _check(completion, row, max_tokens, vocab_size)
        start, count = len(completion.prompt_token_ids), len(completion.token_ids)
        sampled = slice(start - 1, start - 1 + count)
        tokens[row, :start] = completion.prompt_token_ids
        tokens[row, start : start + count] = completion.token_ids
        mask[row, sampled] = policy_tokens(completion)
        logprobs[row, sampled] = completion.logprobs
        per_token[row, sampled] = given[row] * mask[row, sampled]
        ages[row, sampled] = token_ages(completion, versions[row])
    routes = _routes(completions, length - 1) if replay_routes else None
    return Batch(tokens, mask, logprobs, per_token, ages, routes=routes)


def padded_length(longest: int) -> int:
    return -(-longest // LENGTH_STEP) * LENGTH_STEP


def policy_tokens(completion: Completion) -> np.ndarray:
    """For each token of a completion, 1 if the policy sampled it, 0 if it is an environment's text."""
    sampled = np.ones(len(completion.token_ids), np.float32)
    if completion.episode is not None:
        sampled[:] = 0
        for span in completion.spans:
            sampled[span.start : span.stop] = 1
    return sampled


def token_ages(completion: Completion, version: int) -> np.ndarray:
    """For each token of a completion, how many versions its weights are behind `version`: 0 is on-policy, and an environment's
    text."""
    ages = np.full(len(completion.token_ids), -1 if completion.episode is None else 0, np.int32)
    for span in completion.spans:
        if span.version > version:
            raise VersionError(
                f"a completion has tokens of policy version {span.version}, newer than the trainer's version {version}; pass "
                "the current version of the trainer's weights"
            )
        ages[span.start : span.stop] = version - span.version
    if (ages < 0).any():
        missing = int(np.flatnonzero(ages < 0)[0])
        raise VersionError(f"no span of the completion gives the policy version of token {missing}")
    return ages


def sequence_sums(values: jax.Array, batch: Batch) -> jax.Array:
    """[B, S]: the sum of `values` [B, T − 1] over each sequence. S is 1, or T + 1 if packed."""
    if batch.segments is None:
        return jnp.sum(values, axis=1, keepdims=True)
    add = functools.partial(jax.ops.segment_sum, num_segments=batch.tokens.shape[1] + 1)
    return jax.vmap(add)(values, jnp.asarray(batch.segments)[:, :-1])


def at_tokens(sums: jax.Array, batch: Batch) -> jax.Array:
    """[B, T − 1]: for each token, the value of its sequence in `sums` (from `sequence_sums`)."""
    if batch.segments is None:
        return jnp.broadcast_to(sums, batch.mask.shape)
    return jnp.take_along_axis(sums, jnp.asarray(batch.segments)[:, :-1], axis=1)


def _routes(completions: Sequence[Completion], length: int) -> np.ndarray:
    first = next((c.routes for c in completions if c.routes is not None), None)
    if first is None:
        raise ConfigError(
            "replay_routes needs engines that record routes: set record_routes=True in their EmbeddedConfig"
        )
    dtype = np.dtype(f"<u{first.item_size}")
    routes = np.full((len(completions), length, first.num_layers, first.num_chosen), unknown_expert(dtype), dtype)
    for row, completion in enumerate(completions):
        given, count = completion.routes, len(completion.prompt_token_ids) + len(completion.token_ids) - 1
        if given is None and not completion.token_ids:  # an episode that failed
            continue
        if given is None or given.num_tokens != count or replace(given, experts=b"") != replace(first, experts=b""):
            found = "no routes"
            if given is not None:
                found = (
                    f"routes of {given.num_tokens} tokens in {given.num_layers} layers of {given.num_chosen} experts"
                )
            raise EngineFailure(
                f"completion {row} of the batch came from engine {completion.engine!r} with {found}; expected those of {count} "
                f"tokens in {first.num_layers} layers of {first.num_chosen} experts"
            )
        routes[row, :count] = np.frombuffer(given.experts, dtype).reshape(count, *routes.shape[2:])
    return routes


def _check(completion: Completion, row: int, max_tokens: int, vocab_size: int) -> None:
    count = len(completion.token_ids)
    if count > max_tokens:
        raise ConfigError(f"completion {row} has {count} tokens, more than max_tokens ({max_tokens})")
    if len(completion.logprobs) != count:
        raise ConfigError(
            f"completion {row} has {count} tokens but {len(completion.logprobs)} logprobs; the loss needs one per token"
        )
    if fault := fault_in(completion, vocab_size):
        raise EngineFailure(f"completion {row} of the batch came from engine {completion.engine!r} with {fault}")
    if not completion.prompt_token_ids:
        raise ConfigError(f"completion {row} has no prompt tokens; at least one is needed")
