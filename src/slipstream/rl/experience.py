"""From completions and rewards to a batch that an algorithm can learn from: reference logprobs, values, advantages."""

from __future__ import annotations

import functools
from collections.abc import Callable

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


def prepare(
    batch: Batch,
    rewards: np.ndarray,
    weights: Weights,
    model: ModelConfig,
    config: AlgorithmConfig,
    reference: Params | None = None,
    place: Callable[[Batch], Batch] = lambda batch: batch,
) -> Batch:
    """Fills in what `config` needs, from rewards [prompts, G] in the order of the batch's rows; not packed yet.

    `reference` is the policy that `config.kl` pulls towards, needed where its weight is not 0 and the batch does not have that
    policy's logprobs. `place` puts a batch on the devices that the weights are on."""
    if rewards.ndim != 2 or rewards.size != len(batch.tokens):
        raise ConfigError(
            f"rewards must be [prompts, samples], one for each of {len(batch.tokens)} rows; got {rewards.shape}"
        )
    if config.kl.weight and batch.reference is None:
        if reference is None:
            raise ConfigError(
                "kl.weight is set, which needs a reference policy: the weights that training started from"
            )
        logprobs = np.asarray(scorer(model, config.temperature)(reference, place(batch)))
        batch = batch._replace(reference=logprobs * batch.mask)
    recipe = config.recipe
    if recipe.token_rewards:
        batch = _token_advantages(batch, rewards, weights, model, config, place)
    else:
        batch = batch._replace(advantages=outcome_advantages(rewards, config).reshape(-1, 1) * batch.mask)
    if recipe.filter_groups:
        batch = batch._replace(mask=batch.mask * advantages.informative(rewards).reshape(-1, 1).astype(np.float32))
    return batch


def outcome_advantages(rewards: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """[prompts, G], from rewards of the same shape."""
    match config.recipe.advantage:
        case "group":
            return advantages.group(rewards)
        case "centred":
            return advantages.centred(rewards)
        case "leave_one_out":
            return advantages.leave_one_out(rewards)
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
    place: Callable[[Batch], Batch],
) -> Batch:
    penalty = None
    if batch.reference is not None:
        penalty = config.kl.weight * (batch.logprobs - batch.reference)  # k1, of the policy that drew the tokens
    earned = advantages.token_rewards(rewards.reshape(-1), batch.mask, penalty)
    if weights.critic is None:
        return batch._replace(advantages=advantages.batch(earned, batch.mask))
    values = np.asarray(critic(model)(weights.policy, weights.critic, place(batch))) * batch.mask
    found, returns = advantages.gae(earned, values, batch.mask, config.value.gamma, config.value.lam)
    return batch._replace(advantages=advantages.normalised(found, batch.mask), values=values, returns=returns)
