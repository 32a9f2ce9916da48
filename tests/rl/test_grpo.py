"""GRPO against naive references: loops over numbers, written straight from the equations."""

import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.config import GrpoConfig
from slipstream.model import decoder
from slipstream.rl import grpo
from slipstream.types import Completion, VersionSpan
from tests.tiny import tiny_config

MODEL = tiny_config()
CONFIG = GrpoConfig(max_tokens=5, temperature=0.7)


def completion(prompt, tokens, logprobs):
    return Completion(
        "r", 0, tuple(prompt), tuple(tokens), "", tuple(logprobs), (), "stop", (VersionSpan(0, 0, len(tokens)),)
    )


@jax.jit
def policy_logprobs(params, tokens):
    return decoder.logprobs(params, MODEL, tokens, CONFIG.temperature)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, decoder.init(MODEL, jax.random.key(0)))


@pytest.fixture(scope="module")
def batch(params):
    """Six completions of different lengths, with the policy's own logprobs at the sampling temperature."""
    rng = np.random.default_rng(0)
    rows = [(rng.integers(4, 90, 4).tolist(), rng.integers(4, 90, length).tolist()) for length in (1, 2, 3, 5, 5, 4)]
    padded = np.array([(prompt + tokens + [0] * 5)[:9] for prompt, tokens in rows])
    own = policy_logprobs(params, padded)[:, 3:].tolist()
    completions = [completion(*row, logprobs[: len(row[1])]) for row, logprobs in zip(rows, own)]
    return grpo.make_batch(
        completions, grpo.advantages(np.array([[1, 0, 0], [1, 1, 0]], np.float32)), CONFIG.max_tokens
    )


def test_advantages_are_rewards_in_units_of_their_groups_deviation():
    rewards = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    expected = [
        [(r - statistics.mean(group)) / (statistics.pstdev(group) + 1e-6) for r in group] for group in rewards.tolist()
    ]
    np.testing.assert_allclose(grpo.advantages(rewards), expected, rtol=1e-4)


def test_a_group_with_equal_rewards_has_no_advantages():
    assert not grpo.advantages(np.array([[1, 1, 1], [0, 0, 0]], np.float32)).any()


def test_a_batch_says_of_each_next_token_whether_the_policy_sampled_it():
    rows = [completion([7, 8, 9], [5, 2], [-1.0, -2.0]), completion([7], [6, 6, 2], [-3.0, -4.0, -5.0])]
    batch = grpo.make_batch(rows, np.array([0.5, -0.5]), max_tokens=4, pad_id=0)
    assert batch.tokens.tolist() == [[7, 8, 9, 5, 2, 0, 0, 0], [7, 6, 6, 2, 0, 0, 0, 0]]
    assert batch.mask.tolist() == [[0, 0, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]]
    assert batch.logprobs.tolist() == [[0, 0, -1, -2, 0, 0, 0], [-3, -4, -5, 0, 0, 0, 0]]
    assert batch.advantages.tolist() == [0.5, -0.5]


def test_the_shape_of_a_batch_does_not_depend_on_what_was_sampled():
    short = grpo.make_batch([completion([7, 8], [5], [-1.0])], np.zeros(1), max_tokens=9)
    full = grpo.make_batch([completion([7, 8], [5] * 9, [-1.0] * 9)], np.zeros(1), max_tokens=9)
    assert short.tokens.shape == full.tokens.shape == (1, 16)


def naive_objective(logprobs, batch, clip):
    sequences, ratios, clipped, kl, entropy, gap = [], [], [], [], [], []
    for i, advantage in enumerate(batch.advantages.tolist()):
        gains = []
        for t in range(batch.mask.shape[1]):
            if not batch.mask[i, t]:
                continue
            log_ratio = float(logprobs[i, t]) - float(batch.logprobs[i, t])
            ratio = math.exp(log_ratio)
            bounded = min(max(ratio, 1 - clip), 1 + clip)
            gains.append(min(ratio * advantage, bounded * advantage))
            ratios.append(ratio)
            clipped.append(bounded * advantage < ratio * advantage)
            kl.append(ratio - 1 - log_ratio)
            gap.append(abs(log_ratio))
            entropy.append(-float(logprobs[i, t]))
        sequences.append(sum(gains) / len(gains))
    return [-statistics.mean(sequences), *map(statistics.mean, (ratios, clipped, kl, entropy, gap))]


def test_objective_equals_the_naive_one(batch):
    logprobs = batch.logprobs + np.random.default_rng(2).normal(0, 0.4, batch.logprobs.shape).astype(np.float32)
    found = grpo.objective(jnp.asarray(logprobs), batch, 0.2)
    expected = naive_objective(logprobs, batch, 0.2)
    assert 0 < expected[2] < 1  # some tokens are clipped, some are not
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_at_ratio_one_the_gradient_is_reinforce(params, batch):
    def ours(params):
        return grpo.objective(policy_logprobs(params, batch.tokens), batch, 0.2).loss

    def reinforce(params):
        weights = batch.mask * batch.advantages[:, None] / batch.mask.sum(1, keepdims=True)
        return -jnp.sum(weights * policy_logprobs(params, batch.tokens)) / len(batch.tokens)

    np.testing.assert_allclose(grpo.objective(policy_logprobs(params, batch.tokens), batch, 0.2).ratio, 1, atol=1e-5)
    found, expected = (jax.tree.leaves(jax.jit(jax.grad(loss))(params)) for loss in (ours, reinforce))
    for a, b in zip(found, expected):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()) + 1e-7, rtol=1e-3)


def test_tokens_beyond_the_clip_give_no_gradient_and_those_that_went_the_wrong_way_do():
    one = np.ones((2, 1), np.float32)
    batch = grpo.Batch(np.zeros((2, 2), np.int32), one, 0 * one, np.array([1.0, -1.0], np.float32))
    gradient = jax.grad(lambda lp: grpo.objective(lp, batch, 0.2).loss)
    log2 = math.log(2)
    assert gradient(jnp.array([[log2], [-log2]])).tolist() == [[0], [0]]  # far enough in the good direction
    np.testing.assert_allclose(gradient(jnp.array([[-log2], [log2]])), [[-0.25], [1.0]], rtol=1e-6)


def test_padding_and_prompt_do_not_matter_however_unlikely(batch):
    rng = np.random.default_rng(3)
    own = jnp.asarray(batch.logprobs + rng.normal(0, 0.1, batch.logprobs.shape).astype(np.float32))
    wild = jnp.where(batch.mask > 0, own, 1e4)  # its exponential overflows

    def both(logprobs):
        return jax.value_and_grad(lambda lp: grpo.objective(lp, batch, 0.2).loss)(logprobs)

    (loss, gradient), (wild_loss, wild_gradient) = both(own), both(wild)
    assert loss == wild_loss
    np.testing.assert_array_equal(gradient, wild_gradient)
    assert not np.asarray(gradient)[batch.mask == 0].any()


def test_train_step_compiles_once_keeps_params_and_moves_towards_what_was_rewarded(params, batch):
    config = GrpoConfig(max_tokens=5, temperature=0.7, learning_rate=1e-2)
    step, state = grpo.make_train_step(MODEL, config), grpo.optimiser(config).init(params)
    before = jax.tree.map(np.array, params)  # copies: a view would keep JAX from donating the original
    new, state, metrics = step(params, state, batch)
    new, state, _ = step(new, state, batch)
    assert step._cache_size() == 1
    jax.tree.map(np.testing.assert_array_equal, before, params)  # not donated: an engine may be reading them

    def sequence_logprobs(params):
        return np.asarray((policy_logprobs(params, batch.tokens) * batch.mask).sum(1) / batch.mask.sum(1))

    change = sequence_logprobs(new) - sequence_logprobs(params)
    assert (change * batch.advantages).sum() > 0
    assert sorted(metrics) == sorted(f.name for f in grpo.Metrics.__dataclass_fields__.values())
    np.testing.assert_allclose(metrics["ratio"], 1, atol=1e-5)
    np.testing.assert_allclose(metrics["kl"], 0, atol=1e-6)
    assert metrics["clip_share"] == 0 and metrics["gradient_norm"] > 0


def test_the_gradient_is_clipped_by_its_global_norm():
    config = GrpoConfig(gradient_clip=0.5)
    gradients = {"a": jnp.full(9, 4.0), "b": jnp.full(16, 3.0)}  # of norm sqrt(144 + 144)
    tight, _ = grpo.optimiser(config).update(gradients, grpo.optimiser(config).init(gradients))
    scaled = jax.tree.map(lambda g: g * 0.5 / math.sqrt(288), gradients)
    loose = GrpoConfig(gradient_clip=1e9)
    free, _ = grpo.optimiser(loose).update(scaled, grpo.optimiser(loose).init(scaled))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), tight, free)
