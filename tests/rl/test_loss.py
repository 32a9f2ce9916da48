"""The loss compared with loops over float64 numbers, written from the equations."""

import dataclasses
import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.rl.algorithm import loss
from slipstream.rl.algorithm.batch import Batch
from slipstream.rl.algorithm.loss import Forward
from slipstream.rl.config import AlgorithmConfig, CorrectionConfig, KlConfig, ValueConfig
from slipstream.rl.reporting.records import UpdateMetrics
from tests.rl.batches import random_batch
from tests.rl.test_correction import naive_weights

CONFIGS = {
    "grpo": AlgorithmConfig(kind="grpo"),
    "dr_grpo": AlgorithmConfig(kind="dr_grpo", max_tokens=7),
    "dapo": AlgorithmConfig(kind="dapo"),
    "reinforce++": AlgorithmConfig(kind="reinforce++"),
    "ppo": AlgorithmConfig(kind="ppo", value=ValueConfig(weight=0.3, clip=0.4)),
    "ppo without value clipping": AlgorithmConfig(kind="ppo", value=ValueConfig(clip=0.0)),
    "kl k2": AlgorithmConfig(kind="grpo", kl=KlConfig(weight=0.1, estimator="k2")),
    "kl k3": AlgorithmConfig(kind="dapo", kl=KlConfig(weight=0.1, estimator="k3")),
    "entropy": AlgorithmConfig(kind="grpo", entropy_weight=0.05),
    "asymmetric": AlgorithmConfig(kind="grpo", clip=0.1, clip_high=0.5),
    "tis": AlgorithmConfig(kind="grpo", correction=CorrectionConfig(kind="tis", cap=1.2)),
    "mis": AlgorithmConfig(kind="dapo", correction=CorrectionConfig(kind="mis", level="geometric", low=0.9, high=1.2)),
    "decoupled": AlgorithmConfig(kind="dr_grpo", correction=CorrectionConfig(kind="decoupled", level="sequence")),
}


def naive_loss(logprobs, entropies, values, batch, config):
    """L of the module docstring, token by token."""
    recipe = config.recipe
    corrected = config.correction.kind != "none"
    weights = naive_weights(batch.old, batch, config.correction) if corrected else np.ones(batch.mask.shape)
    sequences, tokens = [], []
    for i in range(len(batch.mask)):
        terms = []
        for t in np.flatnonzero(batch.mask[i]):
            advantage = float(batch.advantages[i, t])
            ratio = math.exp(float(logprobs[i, t]) - float((batch.old if corrected else batch.logprobs)[i, t]))
            bounded = min(max(ratio, 1 - config.clip), 1 + recipe.clip_high)
            term = -float(weights[i, t]) * min(ratio * advantage, bounded * advantage)
            if config.kl.weight and not recipe.token_rewards:
                log_r = float(batch.reference[i, t]) - float(logprobs[i, t])
                kl = {"k1": -log_r, "k2": log_r**2 / 2, "k3": math.exp(log_r) - 1 - log_r}[config.kl.estimator]
                term += config.kl.weight * kl
            term -= config.entropy_weight * float(entropies[i, t])
            if recipe.critic:
                v, v_old, r = (float(x[i, t]) for x in (values, batch.values, batch.returns))
                near = min(max(v, v_old - config.value.clip), v_old + config.value.clip)
                error = max((v - r) ** 2, (near - r) ** 2) if config.value.clip else (v - r) ** 2
                term += config.value.weight * error / 2
            terms.append(term)
        if terms:
            tokens += terms
            sequences.append(sum(terms) / (config.max_tokens if recipe.aggregation == "constant" else len(terms)))
    return statistics.mean(tokens if recipe.aggregation == "token" else sequences)


def forward_of(seed=0):
    batch, logprobs = random_batch(seed)
    rng = np.random.default_rng(seed + 1)
    entropies, values = (rng.uniform(0, 2, batch.mask.shape).astype(np.float32) for _ in range(2))
    return batch, (logprobs, entropies, values)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_matches_the_naive_implementation(name):
    for seed in range(3):
        batch, found = forward_of(seed)
        ours = loss.objective(Forward(*map(jnp.asarray, found)), batch, CONFIGS[name]).loss
        assert float(ours) == pytest.approx(naive_loss(*found, batch, CONFIGS[name]), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_equals_finite_differences_of_the_naive_loss(name):
    batch, found = forward_of()
    ours = jax.grad(lambda f: loss.objective(Forward(*f), batch, CONFIGS[name]).loss)(tuple(map(jnp.asarray, found)))
    step = 1e-5
    for which, gradient in enumerate(ours):
        expected = np.zeros(batch.mask.shape)
        for i, t in np.argwhere(batch.mask):
            ends = []
            for sign in (1, -1):
                moved = [np.array(x, np.float64) for x in found]
                moved[which][i, t] += sign * step
                ends.append(naive_loss(*moved, batch, CONFIGS[name]))
            expected[i, t] = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-5)


def naive_metrics(logprobs, batch, clip):
    ratios, clipped, kl, entropy, gap = [], [], [], [], []
    for i, t in np.argwhere(batch.mask):
        log_ratio, advantage = float(logprobs[i, t]) - float(batch.logprobs[i, t]), float(batch.advantages[i, t])
        ratio = math.exp(log_ratio)
        ratios.append(ratio)
        clipped.append(min(max(ratio, 1 - clip), 1 + clip) * advantage < ratio * advantage)
        kl.append(ratio - 1 - log_ratio)
        entropy.append(-float(logprobs[i, t]))
        gap.append(abs(log_ratio))
    return dict(
        zip(("ratio", "clip_share", "kl", "entropy", "gap"), map(statistics.mean, (ratios, clipped, kl, entropy, gap)))
    )


def test_metrics_match_the_naive_implementation():
    batch, logprobs = random_batch(extras=False)
    found = loss.objective(Forward(jnp.asarray(logprobs)), batch, AlgorithmConfig())
    expected = naive_metrics(logprobs, batch, 0.2)
    assert 0 < expected["clip_share"] < 1  # some tokens are clipped, some are not
    for name, value in expected.items():
        assert float(getattr(found, name)) == pytest.approx(value, rel=1e-4), name
    assert (found.reference_kl, found.value_loss, found.correction, found.dropped) == (0, 0, 1, 0)


def test_metrics_are_the_objective_and_facts_of_the_update():
    assert {f.name for f in dataclasses.fields(UpdateMetrics)} == {
        *loss.Objective._fields,
        "gradient_norm",
        "num_skipped",
    }


@given(st.floats(-3, 3), st.floats(-3, 3))
def test_k2_and_k3_are_never_negative_and_all_vanish_at_the_reference(logprob, reference):
    k1, k2, k3 = (float(loss.kl_estimate(jnp.float32(logprob), jnp.float32(reference), k)) for k in ("k1", "k2", "k3"))
    assert k1 == pytest.approx(logprob - reference, abs=1e-5)
    assert k2 >= 0 and k3 >= -1e-6
    assert all(float(loss.kl_estimate(jnp.float32(logprob), jnp.float32(logprob), k)) == 0 for k in ("k1", "k2", "k3"))


def test_k1_and_k3_estimate_the_divergence_and_k2_its_gradient():
    """Exact expectations over a distribution of five tokens."""
    logits, reference = (
        jnp.array([0.3, -1.0, 0.8, 0.1, -0.4]),
        jax.nn.log_softmax(jnp.array([0.0, 0.5, -0.5, 0.2, 0.9])),
    )

    def divergence(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - reference))

    def expected(logits, estimator):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logp)) * loss.kl_estimate(logp, reference, estimator))

    for estimator in ("k1", "k3"):
        assert float(expected(logits, estimator)) == pytest.approx(float(divergence(logits)), rel=1e-5)
    np.testing.assert_allclose(jax.grad(expected)(logits, "k2"), jax.grad(divergence)(logits), atol=1e-6)
    np.testing.assert_allclose(jax.grad(expected)(logits, "k1"), 0, atol=1e-6)


def test_only_tokens_clipped_in_the_direction_of_the_advantage_have_no_gradient():
    one = np.ones((2, 1), np.float32)
    batch = Batch(np.zeros((2, 2), np.int32), one, 0 * one, np.array([[1.0], [-1.0]], np.float32), 0 * one)
    gradient = jax.grad(lambda lp: loss.objective(Forward(lp), batch, AlgorithmConfig()).loss)
    log2 = math.log(2)
    assert gradient(jnp.array([[log2], [-log2]])).tolist() == [[0], [0]]  # far enough in the good direction
    np.testing.assert_allclose(gradient(jnp.array([[-log2], [log2]])), [[-0.25], [1.0]], rtol=1e-6)


def test_clip_higher_lets_unlikely_tokens_grow():
    ratio, one = jnp.array([0.7, 1.25, 1.4]), jnp.ones(3)
    np.testing.assert_allclose(loss.clipped_surrogate(ratio, one, 0.2, 0.28), [0.7, 1.25, 1.28], rtol=1e-6)
    np.testing.assert_allclose(loss.clipped_surrogate(ratio, -one, 0.2, 0.28), [-0.8, -1.25, -1.4], rtol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_outside_the_mask_have_no_effect(name):
    batch, found = forward_of()
    outside = batch.mask == 0
    wild = [np.where(outside, 1e4, x).astype(np.float32) for x in found]
    wild_batch = batch._replace(
        **{n: np.where(outside, -1e4, getattr(batch, n)).astype(np.float32) for n in ("logprobs", "old", "reference")}
    )

    def both(found, batch):
        return jax.value_and_grad(lambda f: loss.objective(Forward(*f), batch, CONFIGS[name]).loss)(
            tuple(map(jnp.asarray, found))
        )

    (value, gradient), (wild_value, wild_gradient) = both(found, batch), both(wild, wild_batch)
    assert value == wild_value
    for a, b in zip(gradient, wild_gradient):
        np.testing.assert_array_equal(a, b)
        assert not np.asarray(a)[outside].any()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fully_masked_batch_has_zero_loss(name):
    batch, found = forward_of()
    batch = batch._replace(mask=0 * batch.mask)
    value, gradient = jax.value_and_grad(lambda f: loss.objective(Forward(*f), batch, CONFIGS[name]).loss)(
        tuple(map(jnp.asarray, found))
    )
    assert value == 0 and not any(np.asarray(g).any() for g in gradient)


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_of_micro_batches_add_up(name):
    batch, found = forward_of()
    whole = loss.objective(Forward(*map(jnp.asarray, found)), batch, CONFIGS[name])
    total = loss.totals(batch)
    parts = []
    for rows in (slice(0, 2), slice(2, 6)):
        part = Batch(*[None if x is None else x[rows] for x in batch])
        parts.append(loss.objective(Forward(*(jnp.asarray(x[rows]) for x in found)), part, CONFIGS[name], total))
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("correction", ["tis", "mis", "decoupled"])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo"])
def test_a_correction_has_no_effect_if_trainer_and_engine_agree(kind, correction):
    batch, _ = random_batch(extras=False)
    logprobs = jnp.asarray(batch.logprobs)

    def bits(config):
        objective = jax.value_and_grad(lambda lp: loss.objective(Forward(lp), batch, config).loss)(logprobs)
        return [np.asarray(x) for x in objective]

    corrected = AlgorithmConfig(kind=kind, correction=CorrectionConfig(kind=correction, level="sequence"))
    for a, b in zip(bits(AlgorithmConfig(kind=kind)), bits(corrected)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (AlgorithmConfig(kl=KlConfig(weight=0.1)), "no reference logprobs"),
        (AlgorithmConfig(entropy_weight=0.1), "no entropies"),
        (AlgorithmConfig(kind="ppo"), "values and returns"),
    ],
)
def test_missing_loss_inputs_are_reported(config, said):
    batch, logprobs = random_batch(extras=False)
    with pytest.raises(ConfigError, match=said):
        loss.objective(Forward(jnp.asarray(logprobs)), batch, config)
