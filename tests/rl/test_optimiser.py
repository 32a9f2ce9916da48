import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.errors import ConfigError
from slipstream.rl.config import OptimiserConfig
from slipstream.rl.optimiser import learning_rate, make_optimiser


def naive_rate(config, step):
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = min((step + 1 - config.warmup_steps) / (config.decay_steps or 1), 1.0)
    fall = {"none": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.decay]
    return config.learning_rate * (config.final_share + (1 - config.final_share) * fall)


@pytest.mark.parametrize(
    "config",
    [
        OptimiserConfig(learning_rate=0.5, warmup_steps=4),
        OptimiserConfig(decay="linear", decay_steps=6),
        OptimiserConfig(warmup_steps=3, decay="cosine", decay_steps=5, final_share=0.1),
    ],
)
def test_the_rate_rises_and_falls_as_told(config):
    rate = learning_rate(config)
    found = [float(rate(jnp.asarray(step))) for step in range(12)]
    np.testing.assert_allclose(found, [naive_rate(config, step) for step in range(12)], rtol=1e-5, atol=1e-9)


def naive_adam(config, params, gradients):
    """As the papers write it: bias-corrected moments, decay apart from the gradient."""
    m = v = np.zeros_like(params)
    for step, g in enumerate(gradients):
        g = g * min(1.0, config.gradient_clip / np.linalg.norm(g))
        m, v = config.beta1 * m + (1 - config.beta1) * g, config.beta2 * v + (1 - config.beta2) * g * g
        m_hat, v_hat = m / (1 - config.beta1 ** (step + 1)), v / (1 - config.beta2 ** (step + 1))
        rate = naive_rate(config, step)
        params = params - rate * (m_hat / (np.sqrt(v_hat) + 1e-8) + config.weight_decay * params)
    return params


@pytest.mark.parametrize(
    "config",
    [
        OptimiserConfig(gradient_clip=2.0),
        OptimiserConfig("adamw", 0.1, weight_decay=0.3, beta2=0.95),
        OptimiserConfig("adamw", 0.1, warmup_steps=2, decay="cosine", decay_steps=4, weight_decay=0.1),
    ],
)
def test_updates_equal_the_naive_ones(config):
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=(3, 4)), rng.normal(size=(5, 3, 4))
    optimiser, params = make_optimiser(config), jnp.asarray(start, jnp.float32)
    state = optimiser.init(params)
    for gradient in gradients:
        updates, state = optimiser.update(jnp.asarray(gradient, jnp.float32), state, params)
        params = params + updates
    np.testing.assert_allclose(params, naive_adam(config, start, gradients), rtol=1e-4, atol=1e-6)


def test_norms_and_biases_do_not_decay():
    optimiser = make_optimiser(OptimiserConfig("adamw", 0.1, weight_decay=0.5))
    params = {"matrix": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    updates, _ = optimiser.update(jax.tree.map(jnp.zeros_like, params), optimiser.init(params), params)
    assert (updates["matrix"] < 0).all() and not updates["norm"].any()


def test_the_gradient_is_clipped_by_its_global_norm_or_not_at_all():
    gradients = {"a": jnp.full(9, 4.0), "b": jnp.full(16, 3.0)}  # of norm sqrt(144 + 144)
    scaled = jax.tree.map(lambda g: g * 0.5 / math.sqrt(288), gradients)
    tight, free = make_optimiser(OptimiserConfig(gradient_clip=0.5)), make_optimiser(OptimiserConfig(gradient_clip=0.0))
    found, _ = tight.update(gradients, tight.init(gradients))
    expected, _ = free.update(scaled, free.init(scaled))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, expected)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (dict(decay="linear"), "a decay needs both"),
        (dict(decay_steps=5), "a decay needs both"),
        (dict(weight_decay=0.1), "adamw"),
        (dict(beta1=1.0), "beta1 must be below 1"),
        (dict(learning_rate=-1.0), "learning_rate must be at least 0"),
    ],
)
def test_mistakes_are_named(bad, said):
    with pytest.raises(ConfigError, match=said):
        OptimiserConfig(**bad)
