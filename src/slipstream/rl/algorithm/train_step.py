"""One compiled update of the weights: forward, loss, gradients, optimizer.

With `AlgorithmConfig.micro_batches`, a batch goes through the model in parts. The loss of a part is its share of the whole
batch's loss (`loss.Totals`), so that the gradients of the parts add up to the whole batch's gradient. With a mesh,
parameters, optimizer state and batch are sharded over its devices (`sharding.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.model.transformer.layers import Params
from slipstream.rl.algorithm import sharding
from slipstream.rl.algorithm.batch import Batch
from slipstream.rl.algorithm.forward import TrainableParams, forward, init_critic
from slipstream.rl.algorithm.loss import Objective, Totals, objective, totals
from slipstream.rl.algorithm.optimizer import make_optimizer
from slipstream.rl.config import AlgorithmConfig

OptState: TypeAlias = Any
_Update: TypeAlias = Callable[..., tuple[TrainableParams, OptState, dict[str, jax.Array]]]


class TrainState(NamedTuple):
    params: TrainableParams
    opt_state: OptState

    @property
    def policy(self) -> Params:
        """The weights that engines are synced to."""
        return self.params.policy


@dataclass(frozen=True, slots=True)
class TrainStep:
    """`train_step(state, batch) -> (state, metrics)`, compiled once per process and shape. If loss or gradient is not finite,
    the new state is equal to the old one.

    The optimizer state is donated: do not use the old one again. The parameters are not, because an engine in this process
    may still be generating with them."""

    update: _Update
    micro_batches: int
    mesh: Mesh | None

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        if self.mesh is not None:
            batch = sharding.shard_rows(batch, self.mesh, self.micro_batches)
        elif len(batch.tokens) % self.micro_batches:
            raise ConfigError(
                f"{len(batch.tokens)} rows cannot be split into {self.micro_batches} equal micro-batches; choose a number that "
                f"divides them, or pack with rows_multiple={self.micro_batches}"
            )
        params, opt_state, metrics = self.update(state.params, state.opt_state, batch)
        return TrainState(params, opt_state), metrics


def init_state(policy: Params, model: ModelConfig, config: AlgorithmConfig, mesh: Mesh | None = None) -> TrainState:
    """The initial state, sharded over the mesh if there is one."""
    params = TrainableParams(policy, init_critic(model) if config.recipe.critic else None)
    optimizer = make_optimizer(config.optimizer)
    if mesh is None:
        # Committed to their device, as those of a checkpoint are: otherwise a resumed run compiles another program.
        return jax.tree.map(_committed, TrainState(params, optimizer.init(params)))
    mesh = sharding.automatic(mesh)
    params = sharding.shard(params, mesh)
    return TrainState(params, sharding.shard(optimizer.init(params), mesh))


def _committed(leaf: Any) -> jax.Array:
    array = jnp.asarray(leaf)
    return jax.device_put(array, array.sharding)


@functools.cache
def make_train_step(model: ModelConfig, config: AlgorithmConfig, mesh: Mesh | None = None) -> TrainStep:
    """The train step of an algorithm, for a state made by `init_state` with the same model, config and mesh."""
    if mesh is not None:
        mesh = sharding.automatic(mesh)
    optimizer = make_optimizer(config.optimizer)

    def loss(params: TrainableParams, batch: Batch, total: Totals) -> tuple[jax.Array, Objective]:
        result = objective(forward(params, model, batch, config), batch, config, total)
        return result.loss, result

    def gradients(params: TrainableParams, batch: Batch) -> tuple[TrainableParams, Objective]:
        total = totals(batch)
        if config.micro_batches == 1:
            return jax.grad(loss, has_aux=True)(params, batch, total)

        def add(sums: tuple[TrainableParams, Objective], part: Batch) -> tuple[tuple[TrainableParams, Objective], None]:
            return jax.tree.map(jnp.add, sums, jax.grad(loss, has_aux=True)(params, part, total)), None

        zeros = jax.tree.map(jnp.zeros_like, params), Objective(*[jnp.zeros(())] * len(Objective._fields))
        return jax.lax.scan(add, zeros, split(batch, config.micro_batches, mesh))[0]

    def update(
        params: TrainableParams, opt_state: OptState, batch: Batch
    ) -> tuple[TrainableParams, OptState, dict[str, jax.Array]]:
        gradient, result = gradients(params, batch)
        norm = optax.global_norm(gradient)
        updates, next_opt_state = optimizer.update(gradient, opt_state, params)
        after = optax.apply_updates(params, updates), next_opt_state
        is_finite = jnp.isfinite(result.loss) & jnp.isfinite(norm)
        params, opt_state = jax.tree.map(partial(jnp.where, is_finite), after, (params, opt_state))
        if mesh is not None:
            params, opt_state = sharding.shard((params, opt_state), mesh)
        return params, opt_state, {**result._asdict(), "gradient_norm": norm}

    return TrainStep(jax.jit(update, donate_argnames="opt_state"), config.micro_batches, mesh)


def split(batch: Batch, parts: int, mesh: Mesh | None = None) -> Batch:
    """Reshape every array to `[parts, B / parts, …]`. Rows are dealt in turn: each device holds adjacent rows, and so has
    its share of every part."""

    def deal(array: jax.Array) -> jax.Array:
        dealt = jnp.swapaxes(jnp.reshape(array, (-1, parts, *array.shape[1:])), 0, 1)
        if mesh is None:
            return dealt
        return jax.lax.with_sharding_constraint(dealt, NamedSharding(mesh, PartitionSpec(None, sharding.AXIS)))

    return jax.tree.map(deal, batch)
