"""One compiled update of the weights: forward, loss, gradients, optimizer.

With `AlgorithmConfig.micro_batches`, a batch goes through the model in parts. The loss of a part is its share of the whole
batch's loss (`loss.Totals`), so that the gradients of the parts add up to the whole batch's gradient. With a mesh,
parameters, optimizer state and batch are sharded over its devices (`sharding.py`). `compute.py` decides on precision, and on
what trades time for memory.

With LoRA, the policy of the state is an adapter, and `base`, the model that it changes, is frozen."""

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
from slipstream.model.transformer.adapters import with_adapter
from slipstream.model.transformer.layers import Params
from slipstream.rl.algorithm import compute, sharding
from slipstream.rl.algorithm.batch import Batch
from slipstream.rl.algorithm.forward import TrainableParams, forward, init_critic
from slipstream.rl.algorithm.loss import Objective, Totals, objective, totals
from slipstream.rl.algorithm.optimizer import make_optimizer
from slipstream.rl.config import AlgorithmConfig
from slipstream.types import Lora

OptState: TypeAlias = Any
_Update: TypeAlias = Callable[..., tuple[TrainableParams, OptState, dict[str, jax.Array], jax.Array]]


class TrainState(NamedTuple):
    params: TrainableParams
    opt_state: OptState

    @property
    def policy(self) -> Params:
        """The weights that engines are synced to: those of the model, or of its adapter."""
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

    def __call__(
        self, state: TrainState, batch: Batch, base: Params | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        return self.with_logprobs(state, batch, base)[:2]

    def with_logprobs(
        self, state: TrainState, batch: Batch, base: Params | None = None
    ) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
        """Also return [B, T − 1]: the logprobs of the batch's tokens before the update, which the loss has computed."""
        if self.mesh is not None:
            batch = sharding.shard_rows(batch, self.mesh, self.micro_batches)
        elif len(batch.tokens) % self.micro_batches:
            raise ConfigError(
                f"{len(batch.tokens)} rows cannot be split into {self.micro_batches} equal micro-batches; choose a number that "
                f"divides them, or pack with rows_multiple={self.micro_batches}"
            )
        params, opt_state, metrics, logprobs = self.update(state.params, state.opt_state, batch, base)
        return TrainState(params, opt_state), metrics, logprobs


def init_state(policy: Params, model: ModelConfig, config: AlgorithmConfig, mesh: Mesh | None = None) -> TrainState:
    """The initial state in `compute.param_dtype`, sharded over the mesh if there is one."""
    policy = compute.cast(policy, compute.param_dtype(config.compute, compute.platform()))
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
def make_train_step(
    model: ModelConfig, config: AlgorithmConfig, mesh: Mesh | None = None, lora: Lora | None = None
) -> TrainStep:
    """The train step of an algorithm, for a state made by `init_state` with the same model, config and mesh. With `lora`, the
    state's policy is this adapter."""
    if mesh is not None:
        mesh = sharding.automatic(mesh)
    optimizer = make_optimizer(config.optimizer)

    def prepared(policy: Params) -> Params:
        return compute.prepare(policy, model, config.compute, mesh)

    def loss(
        params: TrainableParams, base: Params | None, batch: Batch, total: Totals
    ) -> tuple[jax.Array, tuple[Objective, jax.Array]]:
        if base is not None and lora is not None:
            params = params._replace(policy=prepared(with_adapter(base, params.policy, lora)))
        outputs = forward(params, model, batch, config)
        result = objective(outputs, batch, config, total)
        return result.loss, (result, outputs.logprobs)

    def gradients(
        params: TrainableParams, base: Params | None, batch: Batch
    ) -> tuple[TrainableParams, Objective, jax.Array]:
        total = totals(batch)
        ready = params if base is not None else params._replace(policy=prepared(params.policy))
        if config.micro_batches == 1:
            gradient, (result, logprobs) = jax.grad(loss, has_aux=True)(ready, base, batch, total)
        else:
            gradient, result, logprobs = accumulated(ready, base, batch, total)
        gradient = gradient._replace(policy=compute.restore(gradient.policy))
        return jax.tree.map(lambda new, leaf: new.astype(leaf.dtype), gradient, params), result, logprobs

    def accumulated(
        params: TrainableParams, base: Params | None, batch: Batch, total: Totals
    ) -> tuple[TrainableParams, Objective, jax.Array]:
        def add(
            sums: tuple[TrainableParams, Objective], part: Batch
        ) -> tuple[tuple[TrainableParams, Objective], jax.Array]:
            gradient, (result, logprobs) = jax.grad(loss, has_aux=True)(params, base, part, total)
            found = gradient, result
            return jax.tree.map(lambda sum_, new: sum_ + new.astype(sum_.dtype), sums, found), logprobs

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, config.compute.accumulate_dtype), params)
        metrics = Objective(*[jnp.zeros(())] * len(Objective._fields))
        (gradient, result), logprobs = jax.lax.scan(add, (zeros, metrics), split(batch, config.micro_batches, mesh))
        return gradient, result, joined(logprobs)

    def update(
        params: TrainableParams, opt_state: OptState, batch: Batch, base: Params | None = None
    ) -> tuple[TrainableParams, OptState, dict[str, jax.Array], jax.Array]:
        gradient, result, logprobs = gradients(params, base, batch)
        norm = optax.global_norm(gradient)
        updates, next_opt_state = optimizer.update(gradient, opt_state, params)
        after = optax.apply_updates(params, updates), next_opt_state
        is_finite = jnp.isfinite(result.loss) & jnp.isfinite(norm)
        params, opt_state = jax.tree.map(partial(jnp.where, is_finite), after, (params, opt_state))
        if mesh is not None:
            params, opt_state = sharding.shard((params, opt_state), mesh)
        return params, opt_state, {**result._asdict(), "gradient_norm": norm}, logprobs

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


def joined(parts: jax.Array) -> jax.Array:
    """`[parts, B / parts, …]` as `split` makes it, back to `[B, …]`."""
    return jnp.reshape(jnp.swapaxes(parts, 0, 1), (-1, *parts.shape[2:]))
