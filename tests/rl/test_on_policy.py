"""With `deterministic`, the trainer's logprobs are the engines' to the bit over a whole GRPO run, and updates are right."""

from __future__ import annotations

import logging
from dataclasses import astuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slipstream
from slipstream.config import EmbeddedConfig, VllmConfig
from slipstream.engines.embedded.sequence_logprobs import SequenceLogprobs
from slipstream.errors import ConfigError
from slipstream.rl.algorithm.forward import Forward, TrainableParams, forward
from slipstream.rl.algorithm.loss import objective
from slipstream.rl.config import AlgorithmConfig, CorrectionConfig, KlConfig, OptimizerConfig, TaskConfig, TrainConfig
from slipstream.rl.trainer import run as trainer_run
from slipstream.rl.trainer.learner import Learner
from tests.rl.batches import random_batch
from tests.tiny import random_params, tiny_config

MODEL = tiny_config(num_layers=1)
RUN = TrainConfig(
    steps=3,
    warmup_steps=20,
    eval_prompts=4,
    save_every=0,
    diagnose_every=1,
    deterministic=True,
    task=TaskConfig(digits=2),
    algorithm=AlgorithmConfig(prompts=16, group=8, max_tokens=4),
    engine=EmbeddedConfig(max_num_seqs=128, max_model_len=16),
)


def test_a_whole_run_is_on_policy_to_the_bit(tmp_path, caplog):
    """With the engine in another process."""
    with caplog.at_level(logging.WARNING, logger=trainer_run.__name__):
        steps = slipstream.train(RUN.replace(run_dir=tmp_path)).steps
    assert len(steps) == 3 and "deterministic is set" not in caplog.text
    for step in steps:
        m = step.metrics
        assert (m.gap, m.equal_share, m.ratio, m.clip_share, m.kl, step.staleness.keys()) == (0, 1, 1, 0, 0, {"0"})
        assert m.gradient_norm > 0 and step.mismatch == "Trainer and engine agree to the bit."


def test_a_difference_is_reported(tmp_path, caplog, monkeypatch):
    """The trainer computes with other pages than the engine."""
    other = RUN.engine.replace(block_size=2)
    monkeypatch.setattr(trainer_run, "SequenceLogprobs", lambda model, options: SequenceLogprobs(model, other))
    with caplog.at_level(logging.WARNING, logger=trainer_run.__name__):
        (step,) = slipstream.train(RUN.replace(run_dir=tmp_path, engines=0, steps=1)).steps
    assert 0 < step.metrics.gap < 1e-5 and step.metrics.equal_share < 0.9
    assert "deterministic is set, but the trainer's logprobs" in caplog.text


def test_values_are_the_exact_ones_and_the_gradient_is_that_of_the_forward_pass():
    """Against a naive chain: the loss's derivative at the exact values, times the derivative of the forward pass."""
    config = AlgorithmConfig(clip=0.5)
    batch, _ = random_batch(extras=False)
    exact = jnp.asarray(batch.logprobs + 0.1 * np.sin(np.arange(batch.logprobs.size)).reshape(batch.logprobs.shape))

    def plain(params):
        return forward(params, MODEL, batch, config).logprobs

    def loss(params):
        outputs = forward(params, MODEL, batch._replace(exact=exact), config)
        return objective(outputs, batch, config).loss, outputs.logprobs

    def naive(params):
        outer = jax.grad(lambda logprobs: objective(Forward(logprobs), batch, config).loss)(exact)
        return jax.vjp(plain, params)[1](outer)[0]

    both = jax.jit(lambda params: (jax.grad(loss, has_aux=True)(params), naive(params), plain(params)))
    (found, values), expected, other = both(TrainableParams(random_params(MODEL), None))
    np.testing.assert_array_equal(values, exact)
    assert (np.abs(other - exact) * batch.mask).max() > 0.5
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


UPDATES = AlgorithmConfig(
    prompts=2,
    group=3,
    max_tokens=6,
    temperature=0.7,
    epochs=2,
    row_tokens=24,
    minibatches=2,
    kl=KlConfig(weight=0.1),
    correction=CorrectionConfig(kind="decoupled"),
    optimizer=OptimizerConfig(learning_rate=2e-2),
)


def test_several_packed_updates_are_those_of_the_plain_learner():
    """Each update has the values of its own weights: those of the weights before it would have a ratio of 1."""
    batch, _ = random_batch(extras=False)
    rewards = np.array([[1, 0, 0], [1, 1, 0]], np.float32)
    params, exact = random_params(MODEL), SequenceLogprobs(MODEL, EmbeddedConfig(max_model_len=32))
    found = []
    for how in (None, exact):
        learner = Learner(UPDATES, MODEL, params, 3, exact=how)
        found.append(learner.update(1, learner.prepare(batch, rewards)))
    plain, ours = found
    np.testing.assert_allclose(astuple(ours), astuple(plain), rtol=1e-3, atol=1e-5)
    assert abs(ours.ratio - 1) > 1e-3

    # Reference and π_old are computed the same way: KL and correction of the engine's tokens are exactly 0 and 1.
    own = batch._replace(logprobs=exact(params, batch.tokens, batch.mask > 0, 0.7))
    learner = Learner(UPDATES, MODEL, params, 3, exact=exact)
    np.testing.assert_array_equal(learner.prepare(own, rewards).reference, own.logprobs)
    np.testing.assert_array_equal(learner.logprobs(own, 0.7), own.logprobs)


def test_the_setting_holds_for_both_sides_and_needs_the_embedded_engine():
    config = TrainConfig(deterministic=True)
    assert config.engine == EmbeddedConfig(max_num_seqs=256, deterministic=True)
    assert config.replace(engine=EmbeddedConfig()).engine.deterministic and not TrainConfig().engine.deterministic
    with pytest.raises(ConfigError, match=r"needs engine.kind = 'embedded', got 'vllm'"):
        TrainConfig(deterministic=True, engine=VllmConfig())
