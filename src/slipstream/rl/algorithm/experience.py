"""From completions and rewards to a batch ready for an update: reference logprobs, values, advantages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import numpy as np

from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.model.transformer.layers import Params
from slipstream.rl.algorithm import advantages, forward
from slipstream.rl.algorithm.batch import Batch
from slipstream.rl.algorithm.forward import TrainableParams
from slipstream.rl.config import AlgorithmConfig

ApplyScore: TypeAlias = Callable[[Callable[[Batch], jax.Array], Batch], np.ndarray]
"""`apply_score(score, batch)` equals `score(batch)` for a score that treats rows independently."""


def prepare(
    batch: Batch,
    rewards: np.ndarray,
    params: TrainableParams,
    model: ModelConfig,
    config: AlgorithmConfig,
    reference: Params | None = None,
    bonus: np.ndarray | None = None,
    apply_score: ApplyScore = lambda score, batch: np.asarray(score(batch)),
) -> Batch:
    """Fill in what `config` needs, from rewards [prompts, G] in the order of the rows of an unpacked batch.

    A sample with reward NaN gets mask 0, and the advantages of its group are computed without it. `bonus`, of the same
    shape, is added to the rewards, but does not make a group with equal rewards informative. `reference` is the KL reference
    policy, needed if `config.kl` has a weight and the batch has no reference logprobs yet. `apply_score` decides the devices
    and the number of rows per forward pass."""
    if rewards.ndim != 2 or rewards.size != len(batch.tokens):
        raise ConfigError(
            f"rewards must be [prompts, samples], one for each of {len(batch.tokens)} rows; got {rewards.shape}"
        )
    batch = batch._replace(mask=batch.mask * has_reward(rewards).reshape(-1, 1).astype(np.float32))
    if config.kl.weight and batch.reference is None:
        if reference is None:
            raise ConfigError(
                "kl.weight is set, which needs a reference policy: the weights that training started from"
            )
        score = partial(forward.logprob_fn(model, config.temperature, config.compute), reference)
        logprobs = apply_score(score, batch._replace(routes=None))  # another policy, with routes of its own
        batch = batch._replace(reference=logprobs * batch.mask)
    recipe = config.recipe
    total = rewards if bonus is None else rewards + bonus
    if recipe.token_rewards:
        batch = _token_advantages(batch, total, params, model, config, apply_score)
    else:
        batch = batch._replace(advantages=outcome_advantages(total, config).reshape(-1, 1) * batch.mask)
    if recipe.filter_groups:
        informative = by_group(advantages.informative, rewards)
        batch = batch._replace(mask=batch.mask * informative.reshape(-1, 1).astype(np.float32))
    return batch


def has_reward(rewards: np.ndarray) -> np.ndarray:
    """[prompts, G] of booleans: the samples that count. In a group that lost samples, at least two must be left."""
    known = ~np.isnan(rewards)
    enough = known.all(axis=1, keepdims=True) | (known.sum(axis=1, keepdims=True) >= 2)
    return known & enough


def by_group(estimate: Callable[[np.ndarray], np.ndarray], rewards: np.ndarray) -> np.ndarray:
    """`estimate(rewards)` over the samples that count in each group; 0 for the others."""
    known = has_reward(rewards)
    if known.all():
        return estimate(rewards)
    estimates = np.zeros(rewards.shape, np.float32)
    for index in np.flatnonzero(known.any(axis=1)):
        estimates[index, known[index]] = estimate(rewards[index, known[index]][None])[0]
    return estimates


def outcome_advantages(rewards: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """[prompts, G], from rewards of the same shape."""
    match config.recipe.advantage:
        case "group":
            return by_group(advantages.group, rewards)
        case "centered":
            return by_group(advantages.centered, rewards)
        case "leave_one_out":
            return by_group(advantages.leave_one_out, rewards)
        case other:
            raise ConfigError(f"advantages of kind {other!r} are computed per token; see prepare")


def _token_advantages(
    batch: Batch,
    rewards: np.ndarray,
    params: TrainableParams,
    model: ModelConfig,
    config: AlgorithmConfig,
    apply_score: ApplyScore,
) -> Batch:
    penalty = None
    if batch.reference is not None:
        penalty = config.kl.weight * (batch.logprobs - batch.reference)  # k1, of the policy that sampled the tokens
    token_rewards = advantages.token_rewards(rewards.reshape(-1), batch.mask, penalty)
    if params.critic is None:
        return batch._replace(advantages=advantages.batch(token_rewards, batch.mask))
    values = (
        apply_score(partial(forward.value_fn(model, config.compute), params.policy, params.critic), batch) * batch.mask
    )
    estimates, returns = advantages.gae(token_rewards, values, batch.mask, config.value.gamma, config.value.lam)
    return batch._replace(advantages=advantages.normalize(estimates, batch.mask), values=values, returns=returns)
