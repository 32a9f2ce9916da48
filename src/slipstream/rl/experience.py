"""From completions and rewards to a batch that an algorithm can learn from: reference logprobs, values, advantages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.errors import ConfigError
from slipstream.model import decoder
from slipstream.model.config import ModelConfig
from slipstream.model.layers import Params
from slipstream.rl import advantages, value
from slipstream.rl.batch import Batch
from slipstream.rl.config import AlgorithmConfig
from slipstream.rl.train_step import Weights

Over: TypeAlias = Callable[[Callable[[Batch], jax.Array], Batch], np.ndarray]
"""`over(score, batch)` is `score(batch)`, for a score that looks at each row by itself."""


def prepare(
    batch: Batch,
    rewards: np.ndarray,
    weights: Weights,
    model: ModelConfig,
    config: AlgorithmConfig,
    reference: Params | None = None,
    bonus: np.ndarray | None = None,
    over: Over = lambda score, batch: np.asarray(score(batch)),
) -> Batch:
    """Fills in what `config` needs, from rewards [prompts, G] in the order of the batch's rows; not packed yet. A sample whose
    reward is NaN is left out: it has mask 0, and the advantages of its group are those of a group without it, if two are left.
    `bonus`, of the same shape, is learned from, too, but does not make groups differ that were judged alike.

    `reference` is the policy that `config.kl` pulls towards, needed where its weight is not 0 and the batch does not have that
    policy's logprobs. `over` says how a batch goes through the model: on which devices, how many rows at a time."""
    if rewards.ndim != 2 or rewards.size != len(batch.tokens):
        raise ConfigError(
            f"rewards must be [prompts, samples], one for each of {len(batch.tokens)} rows; got {rewards.shape}"
        )
    batch = batch._replace(mask=batch.mask * judged(rewards).reshape(-1, 1).astype(np.float32))
    if config.kl.weight and batch.reference is None:
        if reference is None:
            raise ConfigError(
                "kl.weight is set, which needs a reference policy: the weights that training started from"
            )
        logprobs = over(functools.partial(scorer(model, config.temperature), reference), batch)
        batch = batch._replace(reference=logprobs * batch.mask)
    recipe = config.recipe
    earned = rewards if bonus is None else rewards + bonus
    if recipe.token_rewards:
        batch = _token_advantages(batch, earned, weights, model, config, over)
    else:
        batch = batch._replace(advantages=outcome_advantages(earned, config).reshape(-1, 1) * batch.mask)
    if recipe.filter_groups:
        informative = by_group(advantages.informative, rewards)
        batch = batch._replace(mask=batch.mask * informative.reshape(-1, 1).astype(np.float32))
    return batch


def judged(rewards: np.ndarray) -> np.ndarray:
    """Which samples count, of rewards [prompts, G]: those that have one, unless they are the last of their group."""
    known = ~np.isnan(rewards)
    enough = known.all(axis=1, keepdims=True) | (known.sum(axis=1, keepdims=True) >= 2)
    return known & enough


def by_group(estimate: Callable[[np.ndarray], np.ndarray], rewards: np.ndarray) -> np.ndarray:
    """`estimate(rewards)`, each group without its samples that do not count, for which it is 0."""
    known = judged(rewards)
    if known.all():
        return estimate(rewards)
    found = np.zeros(rewards.shape, np.float32)
    for index in np.flatnonzero(known.any(axis=1)):
        found[index, known[index]] = estimate(rewards[index, known[index]][None])[0]
    return found


def outcome_advantages(rewards: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """[prompts, G], from rewards of the same shape."""
    match config.recipe.advantage:
        case "group":
            return by_group(advantages.group, rewards)
        case "centred":
            return by_group(advantages.centred, rewards)
        case "leave_one_out":
            return by_group(advantages.leave_one_out, rewards)
        case other:
            raise ConfigError(f"advantages of kind {other!r} are made token by token; see prepare")


@functools.cache
def scorer(model: ModelConfig, temperature: float) -> Callable[[Params, Batch], jax.Array]:
    """`score(policy, batch)`: the logprobs [B, T − 1] of a batch's tokens under a policy; for `Batch.old` and `reference`."""

    def score(policy: Params, batch: Batch) -> jax.Array:
        logits = decoder.unembed(policy, model, value.hidden_states(policy, model, batch)) / temperature
        return decoder.token_logprobs(logits, jnp.asarray(batch.tokens)[:, 1:])

    return jax.jit(score)


@functools.cache
def critic(model: ModelConfig) -> Callable[[Params, Params, Batch], jax.Array]:
    """`values(policy, head, batch)`, compiled."""
    return jax.jit(lambda policy, head, batch: value.values(policy, head, model, batch))


def _token_advantages(
    batch: Batch,
    rewards: np.ndarray,
    weights: Weights,
    model: ModelConfig,
    config: AlgorithmConfig,
    over: Over,
) -> Batch:
    penalty = None
    if batch.reference is not None:
        penalty = config.kl.weight * (batch.logprobs - batch.reference)  # k1, of the policy that drew the tokens
    earned = advantages.token_rewards(rewards.reshape(-1), batch.mask, penalty)
    if weights.critic is None:
        return batch._replace(advantages=advantages.batch(earned, batch.mask))
    values = over(functools.partial(critic(model), weights.policy, weights.critic), batch) * batch.mask
    found, returns = advantages.gae(earned, values, batch.mask, config.value.gamma, config.value.lam)
    return batch._replace(advantages=advantages.normalised(found, batch.mask), values=values, returns=returns)
