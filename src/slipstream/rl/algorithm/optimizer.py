"""The optimizer of a config and its learning rate schedule."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from slipstream.rl.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clip the gradient by its global norm, then apply Adam (Kingma and Ba 2014, arXiv:1412.6980) or AdamW (Loshchilov and
    Hutter 2017, arXiv:1711.05101)."""
    constant = config.warmup_steps == 0 and config.decay == "none"
    rate = config.learning_rate if constant else learning_rate(config)
    if config.kind == "adam":
        step = optax.adam(rate, config.beta1, config.beta2)
    else:
        step = optax.adamw(
            rate,
            config.beta1,
            config.beta2,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),  # matrices only
        )
    return optax.chain(optax.clip_by_global_norm(config.gradient_clip), step) if config.gradient_clip else step


def learning_rate(config: OptimizerConfig) -> Callable[[jax.Array], jax.Array]:
    """The schedule: the rate at a step, counted from 0. With n warm-up steps, step k < n has (k + 1) / n of the rate."""

    def at(step: jax.Array) -> jax.Array:
        rise = jnp.minimum((step + 1) / max(config.warmup_steps, 1), 1.0)
        progress = jnp.clip((step + 1 - config.warmup_steps) / max(config.decay_steps, 1), 0.0, 1.0)
        match config.decay:
            case "none":
                fall = jnp.ones(())
            case "linear":
                fall = 1 - progress
            case "cosine":
                fall = (1 + jnp.cos(jnp.pi * progress)) / 2
        return config.learning_rate * rise * (config.final_share + (1 - config.final_share) * fall)

    return at
