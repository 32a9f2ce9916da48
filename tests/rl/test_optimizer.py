import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.errors import ConfigError
from slipstream.rl.algorithm.optimizer import learning_rate, make_optimizer
from slipstream.rl.config import OptimizerConfig


def naive_rate(config, step):
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = min((step + 1 - config.warmup_steps) / (config.decay_steps or 1), 1.0)
    fall = {"none": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.decay]
    return config.learning_rate * (config.final_share + (1 - config.final_share) * fall)


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(learning_rate=0.5, warmup_steps=4),
        OptimizerConfig(decay="linear", decay_steps=6),
        OptimizerConfig(warmup_steps=3, decay="cosine", decay_steps=5, final_share=0.1),
    ],
)
def test_learning_rate_schedule(config):
    rate = learning_rate(config)
    found = [float(rate(jnp.asarray(step))) for step in range(12)]
    np.testing.assert_allclose(found, [naive_rate(config, step) for step in range(12)], rtol=1e-5, atol=1e-9)


def naive_adam(config, params, gradients):
    """As in the papers: bias-corrected moments, decoupled weight decay."""
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
        OptimizerConfig(gradient_clip=2.0),
        OptimizerConfig(kind="adamw", learning_rate=0.1, weight_decay=0.3, beta2=0.95),
        OptimizerConfig(
            kind="adamw", learning_rate=0.1, warmup_steps=2, decay="cosine", decay_steps=4, weight_decay=0.1
        ),
    ],
)
def test_updates_match_the_naive_implementation(config):
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=(3, 4)), rng.normal(size=(5, 3, 4))
    optimizer, params = make_optimizer(config), jnp.asarray(start, jnp.float32)
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state, params)
        params = params + updates
    np.testing.assert_allclose(params, naive_adam(config, start, gradients), rtol=1e-4, atol=1e-6)


def test_norms_and_biases_do_not_decay():
    optimizer = make_optimizer(OptimizerConfig(kind="adamw", learning_rate=0.1, weight_decay=0.5))
    params = {"matrix": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert (updates["matrix"] < 0).all() and not updates["norm"].any()


def test_the_gradient_is_clipped_by_its_global_norm_or_not_at_all():
    gradients = {"a": jnp.full(9, 4.0), "b": jnp.full(16, 3.0)}  # of norm sqrt(144 + 144)
    scaled = jax.tree.map(lambda g: g * 0.5 / math.sqrt(288), gradients)
    tight, free = make_optimizer(OptimizerConfig(gradient_clip=0.5)), make_optimizer(OptimizerConfig(gradient_clip=0.0))
    found, _ = tight.update(gradients, tight.init(gradients))
    expected, _ = free.update(scaled, free.init(scaled))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, expected)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (dict(decay="linear"), "a decay needs both"),
        (dict(decay_steps=5), "a decay needs both"),
        (dict(weight_decay=0.1), "adamw"),
        (dict(beta1=1.0), "beta1 must be less than 1"),
        (dict(learning_rate=-1.0), "learning_rate must be greater than or equal to 0"),
    ],
)
def test_invalid_settings_are_rejected(bad, said):
    with pytest.raises(ConfigError, match=said):
        OptimizerConfig(**bad)
