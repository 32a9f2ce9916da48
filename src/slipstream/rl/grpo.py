"""Group-relative policy optimisation (Shao et al., 2024, arXiv:2402.03300), outcome rewards, no KL term.

For each prompt the policy draws a group of G completions o_1 … o_G with rewards r_1 … r_G. Then

    A_i  = (r_i − mean(r)) / (std(r) + ε)                                        the group is its own baseline
    ρ_it = π_θ(o_it | q, o_i<t) / π_engine(o_it | q, o_i<t)                      importance ratio, token by token
    J(θ) = E[ 1/G Σ_i 1/|o_i| Σ_t min(ρ_it A_i, clip(ρ_it, 1 − clip, 1 + clip) A_i) ]

The denominator is the engine's own logprob of the token that it drew (`Completion.logprobs`), so that a gap between
trainer and engine, in numerics or in policy version, is corrected instead of ignored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slipstream.config import GrpoConfig
from slipstream.model import decoder
from slipstream.model.config import ModelConfig
from slipstream.types import Completion

OptState: TypeAlias = Any
StepResult: TypeAlias = tuple[decoder.Params, OptState, dict[str, jax.Array]]
TrainStep: TypeAlias = Callable[[decoder.Params, OptState, "Batch"], StepResult]

_EPSILON = 1e-6
_LENGTH_STEP = 8
"""Sequences are padded to a multiple of this, so that batches of almost the same length share a program."""


class Batch(NamedTuple):
    """Completions as arrays of one shape. Row i of `logprobs` and `mask` speaks of `tokens[i, 1:]`."""

    tokens: np.ndarray
    """[B, T] prompt and completion, padded on the right."""
    mask: np.ndarray
    """[B, T − 1] 1 where the next token was sampled by the policy, 0 for prompt and padding."""
    logprobs: np.ndarray
    """[B, T − 1] the engine's, of the tokens that it sampled; 0 elsewhere."""
    advantages: np.ndarray
    """[B]"""


class Objective(NamedTuple):
    """The loss, and what tells how far θ has moved from the policy that sampled."""

    loss: jax.Array
    """−J(θ)."""
    ratio: jax.Array
    """Mean ρ: 1 when trainer and engine hold the same policy."""
    clip_share: jax.Array
    """Share of tokens whose ratio was clipped and which therefore gave no gradient."""
    kl: jax.Array
    """KL(engine ‖ θ), estimated as the mean of ρ − 1 − log ρ, which is never negative."""
    entropy: jax.Array
    """In nats per token, estimated as the mean of −log π_θ over the sampled tokens."""
    gap: jax.Array
    """Mean |log ρ|: how far the trainer's logprobs are from the engine's. 0 when both compute the same policy alike."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """`Objective` and the gradient's norm before clipping, as numbers for the log."""

    loss: float
    ratio: float
    clip_share: float
    kl: float
    entropy: float
    gap: float
    gradient_norm: float


def advantages(rewards: np.ndarray) -> np.ndarray:
    """A_i of each completion, from rewards [prompts, G]. A group with equal rewards teaches nothing: all zero.

    Divided by the group's own deviation: a rare success among failures then weighs as much as it is rare. A constant
    in its place makes learning stall while successes are few."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return (centred / (rewards.std(axis=1, keepdims=True) + _EPSILON)).astype(np.float32)


def make_batch(completions: Sequence[Completion], advantages: np.ndarray, max_tokens: int, pad_id: int = 0) -> Batch:
    """Arrays from a step's completions (prompt-major) and their advantages [prompts, G] or [B].

    T depends on the longest prompt and on `max_tokens`, not on what was sampled, so that steps share one program."""
    longest = max(len(c.prompt_token_ids) for c in completions) + max_tokens
    length = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    tokens = np.full((len(completions), length), pad_id, np.int32)
    mask = np.zeros((len(completions), length - 1), np.float32)
    logprobs = np.zeros((len(completions), length - 1), np.float32)
    for row, completion in enumerate(completions):
        start, count = len(completion.prompt_token_ids), len(completion.token_ids)
        tokens[row, :start] = completion.prompt_token_ids
        tokens[row, start : start + count] = completion.token_ids
        mask[row, start - 1 : start - 1 + count] = 1
        logprobs[row, start - 1 : start - 1 + count] = completion.logprobs
    return Batch(tokens, mask, logprobs, advantages.reshape(-1).astype(np.float32))


def objective(logprobs: jax.Array, batch: Batch, clip: float) -> Objective:
    """−J and its companions, from log π_θ [B, T − 1] of the batch's tokens."""
    # Masked before the exponential: padding would overflow it, and 0 · inf poisons the gradient.
    log_ratio = jnp.where(batch.mask > 0, logprobs - batch.logprobs, 0.0)
    ratio = jnp.exp(log_ratio)
    advantage = batch.advantages[:, None]
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
    clipped = jnp.where(advantage > 0, ratio > 1 + clip, ratio < 1 - clip) & (advantage != 0)

    def token_mean(values: jax.Array) -> jax.Array:
        return jnp.sum(values * batch.mask) / jnp.sum(batch.mask)

    per_sequence = jnp.sum(gain * batch.mask, axis=1) / jnp.maximum(jnp.sum(batch.mask, axis=1), 1)
    return Objective(
        loss=-jnp.mean(per_sequence),
        ratio=token_mean(ratio),
        clip_share=token_mean(clipped),
        kl=token_mean(ratio - 1 - log_ratio),
        entropy=token_mean(-logprobs),
        gap=token_mean(jnp.abs(log_ratio)),
    )


def optimiser(config: GrpoConfig) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(config.gradient_clip), optax.adam(config.learning_rate))


@functools.cache
def make_train_step(model: ModelConfig, config: GrpoConfig) -> TrainStep:
    """`train_step(params, opt_state, batch) -> (params, opt_state, metrics)`, compiled once per process and shape.

    The optimiser's state is donated: do not use the old one again. The parameters are not, since an engine in this
    process may still be generating with them."""
    adam = optimiser(config)

    def loss(params: decoder.Params, batch: Batch) -> tuple[jax.Array, Objective]:
        found = objective(
            decoder.logprobs(params, model, jnp.asarray(batch.tokens), config.temperature), batch, config.clip
        )
        return found.loss, found

    def train_step(params: decoder.Params, opt_state: OptState, batch: Batch) -> StepResult:
        gradients, found = jax.grad(loss, has_aux=True)(params, batch)
        updates, opt_state = adam.update(gradients, opt_state, params)
        metrics = {**found._asdict(), "gradient_norm": _norm(gradients)}
        return optax.apply_updates(params, updates), opt_state, metrics

    return jax.jit(train_step, donate_argnames="opt_state")


def _norm(tree: decoder.Params) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))
