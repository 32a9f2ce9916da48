"""One update of the weights, compiled: forward, loss, gradients, optimiser.

A batch may go through the model in parts (`AlgorithmConfig.micro_batches`): the loss of each is its share of the whole
batch's (`loss.Totals`), so that the sum of their gradients is the whole batch's gradient. With a mesh, weights,
optimiser state and batch are cut over its devices (`rl/sharding.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slipstream.errors import ConfigError
from slipstream.model import decoder
from slipstream.model.config import ModelConfig
from slipstream.model.layers import Params
from slipstream.rl import sharding, value
from slipstream.rl.batch import Batch
from slipstream.rl.config import AlgorithmConfig
from slipstream.rl.loss import Forward, Objective, Totals, objective, totals
from slipstream.rl.optimiser import make_optimiser

OptState: TypeAlias = Any
_Update: TypeAlias = Callable[..., tuple["Weights", OptState, dict[str, jax.Array]]]


class Weights(NamedTuple):
    """What the optimiser moves."""

    policy: Params
    critic: Params | None
    """The value head of an algorithm that has one."""


class TrainState(NamedTuple):
    weights: Weights
    opt_state: OptState

    @property
    def policy(self) -> Params:
        """What engines are synced with."""
        return self.weights.policy


@dataclass(frozen=True, slots=True)
class TrainStep:
    """`train_step(state, batch) -> (state, metrics)`, compiled once per process and shape.

    The optimiser's state is donated: do not use the old one again. The parameters are not, since an engine in this
    process may still be generating with them."""

    update: _Update
    micro_batches: int
    mesh: Mesh | None

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        if self.mesh is not None:
            batch = sharding.shard_rows(batch, self.mesh, self.micro_batches)
        elif len(batch.tokens) % self.micro_batches:
            raise ConfigError(
                f"{len(batch.tokens)} rows cannot be cut into {self.micro_batches} equal micro-batches; pack with "
                f"rows_multiple={self.micro_batches}, or choose a number that divides them"
            )
        weights, opt_state, metrics = self.update(state.weights, state.opt_state, batch)
        return TrainState(weights, opt_state), metrics


def init_state(policy: Params, model: ModelConfig, config: AlgorithmConfig, mesh: Mesh | None = None) -> TrainState:
    """Where training starts, sharded over the mesh if there is one."""
    weights = Weights(policy, value.init(model) if config.recipe.critic else None)
    if mesh is None:
        return TrainState(weights, make_optimiser(config.optimiser).init(weights))
    mesh = sharding.automatic(mesh)
    weights = sharding.shard(weights, mesh)
    return TrainState(weights, sharding.shard(make_optimiser(config.optimiser).init(weights), mesh))


@functools.cache
def make_train_step(model: ModelConfig, config: AlgorithmConfig, mesh: Mesh | None = None) -> TrainStep:
    """The step of an algorithm, for states of `init_state` with the same model, config and mesh."""
    if mesh is not None:
        mesh = sharding.automatic(mesh)
    optimiser = make_optimiser(config.optimiser)

    def loss(weights: Weights, batch: Batch, total: Totals) -> tuple[jax.Array, Objective]:
        found = objective(forward(weights, model, batch, config), batch, config, total)
        return found.loss, found

    def gradients(weights: Weights, batch: Batch) -> tuple[Weights, Objective]:
        total = totals(batch)
        if config.micro_batches == 1:
            return jax.grad(loss, has_aux=True)(weights, batch, total)

        def add(so_far: tuple[Weights, Objective], part: Batch) -> tuple[tuple[Weights, Objective], None]:
            return jax.tree.map(jnp.add, so_far, jax.grad(loss, has_aux=True)(weights, part, total)), None

        nothing = jax.tree.map(jnp.zeros_like, weights), Objective(*[jnp.zeros(())] * len(Objective._fields))
        return jax.lax.scan(add, nothing, split(batch, config.micro_batches, mesh))[0]

    def update(weights: Weights, opt_state: OptState, batch: Batch) -> tuple[Weights, OptState, dict[str, jax.Array]]:
        gradient, found = gradients(weights, batch)
        updates, opt_state = optimiser.update(gradient, opt_state, weights)
        weights = optax.apply_updates(weights, updates)
        if mesh is not None:
            weights, opt_state = sharding.shard((weights, opt_state), mesh)
        return weights, opt_state, {**found._asdict(), "gradient_norm": _norm(gradient)}

    return TrainStep(jax.jit(update, donate_argnames="opt_state"), config.micro_batches, mesh)


def forward(weights: Weights, model: ModelConfig, batch: Batch, config: AlgorithmConfig) -> Forward:
    """One pass through the model, and all that the loss needs of it."""
    hidden = value.hidden_states(weights.policy, model, batch)
    logits = decoder.unembed(weights.policy, model, hidden) / config.temperature
    return Forward(
        logprobs=decoder.token_logprobs(logits, jnp.asarray(batch.tokens)[:, 1:]),
        entropies=decoder.entropies(logits) if config.entropy_weight else None,
        values=None if weights.critic is None else value.apply(weights.critic, hidden),
    )


def split(batch: Batch, parts: int, mesh: Mesh | None = None) -> Batch:
    """Every array `[parts, B / parts, …]`. Rows are dealt out in turn: where devices hold neighbouring rows, each device
    has its share of every part."""

    def deal(array: jax.Array) -> jax.Array:
        dealt = jnp.swapaxes(jnp.reshape(array, (-1, parts, *array.shape[1:])), 0, 1)
        if mesh is None:
            return dealt
        return jax.lax.with_sharding_constraint(dealt, NamedSharding(mesh, PartitionSpec(None, sharding.AXIS)))

    return jax.tree.map(deal, batch)


def _norm(tree: Weights) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))
