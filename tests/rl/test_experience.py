"""The critic, and what each algorithm makes of rewards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.errors import ConfigError
from slipstream.model import decoder
from slipstream.rl import advantages, value
from slipstream.rl.batch import chosen, make_batch
from slipstream.rl.config import AlgorithmConfig, KlConfig, OptimiserConfig, ValueConfig
from slipstream.rl.experience import by_group, outcome_advantages, prepare, scorer
from slipstream.rl.train_step import Weights, init_state, make_train_step
from tests.rl.batches import completion
from tests.tiny import random_params, tiny_config

MODEL = tiny_config()
PARAMS = random_params(MODEL)
REFERENCE = random_params(MODEL, seed=1)
HEAD = {"weight": jnp.linspace(-1, 1, MODEL.hidden_size), "bias": jnp.asarray(0.3)}
REWARDS = np.array([[1, 0, 0.5], [2, 2, 2]], np.float32)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    rows = [
        completion(rng.integers(4, 90, 3), rng.integers(4, 90, n), rng.normal(-4, 1, n)) for n in (1, 4, 2, 3, 4, 2)
    ]
    return make_batch(rows, version=0, max_tokens=4)


def test_values_are_a_linear_map_of_the_hidden_states_before_each_token(batch):
    hidden, _ = decoder.apply_layers(
        PARAMS, MODEL, jnp.asarray(batch.tokens), jnp.arange(8)[None], decoder.causal_attention, None
    )
    wide = np.asarray(hidden, np.float64)
    expected = [[float(wide[b, t] @ np.asarray(HEAD["weight"])) + 0.3 for t in range(7)] for b in range(6)]
    np.testing.assert_allclose(value.values(PARAMS, HEAD, MODEL, batch), expected, atol=1e-4)


def test_logits_are_unembedded_hidden_states(batch):
    tokens = jnp.asarray(batch.tokens)
    hidden = decoder.hidden_states(PARAMS, MODEL, tokens)
    np.testing.assert_array_equal(decoder.unembed(PARAMS, MODEL, hidden), decoder.forward(PARAMS, MODEL, tokens))


def test_entropies_are_those_of_the_distribution():
    logits = np.random.default_rng(0).normal(0, 2, (3, 7))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(decoder.entropies(jnp.asarray(logits)), -(p * np.log(p)).sum(-1), rtol=1e-5)


def test_a_new_critic_expects_nothing(batch):
    assert not np.asarray(value.values(PARAMS, value.init(MODEL), MODEL, batch)).any()


@pytest.mark.parametrize(
    ("config", "estimate"),
    [
        (AlgorithmConfig("grpo"), advantages.group),
        (AlgorithmConfig("dr_grpo"), advantages.centred),
        (AlgorithmConfig("grpo", advantage="leave_one_out"), advantages.leave_one_out),
    ],
)
def test_every_token_of_a_completion_gets_its_advantage(config, estimate, batch):
    found = prepare(batch, REWARDS, Weights(PARAMS, None), MODEL, config)
    np.testing.assert_array_equal(found.advantages, estimate(REWARDS).reshape(-1, 1) * batch.mask)
    np.testing.assert_array_equal(found.mask, batch.mask)
    assert found.reference is None and found.values is None


def test_dapo_leaves_out_groups_with_equal_rewards(batch):
    found = prepare(batch, REWARDS, Weights(PARAMS, None), MODEL, AlgorithmConfig("dapo"))
    np.testing.assert_array_equal(found.mask[:3], batch.mask[:3])
    assert not found.mask[3:].any()


def test_ppo_gets_values_returns_and_normalised_advantages(batch):
    config = AlgorithmConfig("ppo", kl=KlConfig(0.2), value=ValueConfig(gamma=0.9, lam=0.8))
    found = prepare(batch, REWARDS, Weights(PARAMS, HEAD), MODEL, config, REFERENCE)
    reference = np.asarray(scorer(MODEL, 1.0)(REFERENCE, batch)) * batch.mask
    np.testing.assert_allclose(found.reference, reference, atol=1e-5)
    earned = advantages.token_rewards(REWARDS.reshape(-1), batch.mask, 0.2 * (batch.logprobs - reference))
    values = np.asarray(value.values(PARAMS, HEAD, MODEL, batch)) * batch.mask
    raw, returns = advantages.gae(earned, values, batch.mask, 0.9, 0.8)
    np.testing.assert_allclose(found.values, values, atol=1e-5)
    np.testing.assert_allclose(found.returns, returns, atol=1e-4)
    np.testing.assert_allclose(found.advantages, advantages.normalised(raw, batch.mask), atol=1e-4)


def test_reinforce_plus_plus_needs_no_critic(batch):
    config = AlgorithmConfig("reinforce++", group=1, kl=KlConfig(0.2))
    found = prepare(batch, REWARDS.reshape(6, 1), Weights(PARAMS, None), MODEL, config, REFERENCE)
    penalty = 0.2 * (batch.logprobs - found.reference)
    earned = advantages.token_rewards(REWARDS.reshape(-1), batch.mask, penalty)
    np.testing.assert_allclose(found.advantages, advantages.batch(earned, batch.mask), atol=1e-5)


def naive_advantages(rewards, kind):
    """Sample by sample, from those of its group that have a reward."""
    found = [[0.0] * len(group) for group in rewards]
    for i, group in enumerate(rewards):
        known = [float(r) for r in group if r == r]
        for j, r in enumerate(group):
            if r != r or len(known) < 2:
                continue
            mean = sum(known) / len(known)
            deviation = (sum((k - mean) ** 2 for k in known) / len(known)) ** 0.5
            others = (sum(known) - float(r)) / (len(known) - 1)
            found[i][j] = {
                "group": (float(r) - mean) / (deviation + advantages.EPSILON),
                "centred": float(r) - mean,
                "leave_one_out": float(r) - others,
            }[kind]
    return np.array(found)


NAN = float("nan")
DROPPED = np.array(
    [[1, NAN, 0.5, 0], [NAN, NAN, NAN, NAN], [2, 2, NAN, 2], [NAN, 1, NAN, NAN], [0, 1, 2, 4]], np.float32
)


@pytest.mark.parametrize("kind", ["group", "centred", "leave_one_out"])
def test_a_group_is_compared_without_the_samples_that_were_not_judged(kind):
    config = AlgorithmConfig(advantage=kind)
    found = outcome_advantages(DROPPED, config)
    np.testing.assert_allclose(found, naive_advantages(DROPPED, kind), atol=1e-5)
    whole = np.nan_to_num(DROPPED)
    np.testing.assert_array_equal(outcome_advantages(whole, config), getattr(advantages, kind)(whole))


def test_the_last_of_a_group_is_left_out_with_it(batch):
    rewards = np.array([[1, 0, 0.5], [NAN, 2, NAN]], np.float32)
    found = prepare(batch, rewards, Weights(PARAMS, None), MODEL, AlgorithmConfig())
    np.testing.assert_array_equal(found.mask[:3], batch.mask[:3])
    assert batch.mask[4].any() and not found.mask[3:].any()


def test_informative_groups_are_told_by_the_samples_that_were_judged():
    expected = [[True, False, True, True], [False] * 4, [False] * 4, [False] * 4, [True] * 4]
    np.testing.assert_array_equal(by_group(advantages.informative, DROPPED), expected)


@pytest.mark.parametrize("kind", ["grpo", "dapo", "reinforce++", "ppo"])
def test_what_was_not_judged_has_no_part_in_the_step(kind, batch):
    """As if it had never been: the others' columns are those of a batch of them alone."""
    config = AlgorithmConfig(kind, kl=KlConfig(0.1) if kind == "ppo" else KlConfig())
    weights = Weights(PARAMS, HEAD if kind == "ppo" else None)
    rewards = np.array([[1, NAN, 0.5], [NAN, 2, 0]], np.float32)
    found = prepare(batch, rewards, weights, MODEL, config, REFERENCE)
    left = [0, 2, 4, 5]
    alone = prepare(
        chosen(batch, np.array(left)), rewards.reshape(-1)[left].reshape(2, 2), weights, MODEL, config, REFERENCE
    )
    assert not found.mask[[1, 3]].any() and not found.advantages[[1, 3]].any()
    for name in ("mask", "advantages", "reference", "values", "returns"):
        column, expected = getattr(found, name), getattr(alone, name)
        assert (column is None) == (expected is None)
        if column is not None:
            assert np.isfinite(column).all()
            np.testing.assert_allclose(column[left], expected, atol=1e-4)


def test_a_critic_learns_what_to_expect(batch):
    """The same rewards again and again: the value loss falls, and the values come near the returns."""
    config = AlgorithmConfig("ppo", optimiser=OptimiserConfig(learning_rate=3e-3), value=ValueConfig(lam=1.0, clip=0.0))
    state, step, losses = init_state(PARAMS, MODEL, config), make_train_step(MODEL, config), []
    for _ in range(30):
        ready = prepare(batch, REWARDS, state.weights, MODEL, config)
        state, metrics = step(state, ready)
        losses.append(float(metrics["value_loss"]))
    assert losses[-1] < 0.3 * losses[0]
    assert jax.tree.leaves(state.weights.critic)[0].any()


@pytest.mark.parametrize(
    ("config", "rewards", "said"),
    [
        (AlgorithmConfig(kl=KlConfig(0.1)), REWARDS, "needs a reference policy"),
        (AlgorithmConfig(), REWARDS[:1], "one for each of 6 rows"),
        (AlgorithmConfig(), REWARDS.reshape(-1), r"must be \[prompts, samples\]"),
    ],
)
def test_what_is_missing_is_named(config, rewards, said, batch):
    with pytest.raises(ConfigError, match=said):
        prepare(batch, rewards, Weights(PARAMS, None), MODEL, config)
    with pytest.raises(ConfigError, match="token by token"):
        outcome_advantages(REWARDS, AlgorithmConfig("ppo"))
