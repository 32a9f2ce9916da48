"""The critic, and the advantages of each algorithm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.errors import ConfigError
from slipstream.model.transformer import decoder
from slipstream.rl.algorithm import advantages
from slipstream.rl.algorithm.batch import chosen, make_batch
from slipstream.rl.algorithm.experience import by_group, outcome_advantages, prepare
from slipstream.rl.algorithm.forward import TrainableParams, init_critic, logprob_fn, value_fn
from slipstream.rl.algorithm.train_step import init_state, make_train_step
from slipstream.rl.config import AlgorithmConfig, KlConfig, OptimizerConfig, ValueConfig
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
    hidden = decoder.apply_layers(
        PARAMS, MODEL, jnp.asarray(batch.tokens), jnp.arange(8)[None], decoder.causal_attention, None
    )[0]
    wide = np.asarray(hidden, np.float64)
    expected = [[float(wide[b, t] @ np.asarray(HEAD["weight"])) + 0.3 for t in range(7)] for b in range(6)]
    np.testing.assert_allclose(value_fn(MODEL)(PARAMS, HEAD, batch), expected, atol=1e-4)


def test_logits_are_unembedded_hidden_states(batch):
    tokens = jnp.asarray(batch.tokens)
    hidden = decoder.hidden_states(PARAMS, MODEL, tokens)
    np.testing.assert_array_equal(decoder.unembed(PARAMS, MODEL, hidden), decoder.forward(PARAMS, MODEL, tokens))


def test_entropies_match_the_distribution():
    logits = np.random.default_rng(0).normal(0, 2, (3, 7))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(decoder.entropies(jnp.asarray(logits)), -(p * np.log(p)).sum(-1), rtol=1e-5)


def test_a_new_critic_returns_zero(batch):
    assert not np.asarray(value_fn(MODEL)(PARAMS, init_critic(MODEL), batch)).any()


@pytest.mark.parametrize(
    ("config", "estimate"),
    [
        (AlgorithmConfig(kind="grpo"), advantages.group),
        (AlgorithmConfig(kind="dr_grpo"), advantages.centered),
        (AlgorithmConfig(kind="grpo", advantage="leave_one_out"), advantages.leave_one_out),
    ],
)
def test_every_token_of_a_completion_gets_its_advantage(config, estimate, batch):
    found = prepare(batch, REWARDS, TrainableParams(PARAMS, None), MODEL, config)
    np.testing.assert_array_equal(found.advantages, estimate(REWARDS).reshape(-1, 1) * batch.mask)
    np.testing.assert_array_equal(found.mask, batch.mask)
    assert found.reference is None and found.values is None


def test_dapo_masks_groups_with_equal_rewards(batch):
    found = prepare(batch, REWARDS, TrainableParams(PARAMS, None), MODEL, AlgorithmConfig(kind="dapo"))
    np.testing.assert_array_equal(found.mask[:3], batch.mask[:3])
    assert not found.mask[3:].any()


def test_ppo_gets_values_returns_and_normalized_advantages(batch):
    config = AlgorithmConfig(kind="ppo", kl=KlConfig(weight=0.2), value=ValueConfig(gamma=0.9, lam=0.8))
    found = prepare(batch, REWARDS, TrainableParams(PARAMS, HEAD), MODEL, config, REFERENCE)
    reference = np.asarray(logprob_fn(MODEL, 1.0)(REFERENCE, batch)) * batch.mask
    np.testing.assert_allclose(found.reference, reference, atol=1e-5)
    earned = advantages.token_rewards(REWARDS.reshape(-1), batch.mask, 0.2 * (batch.logprobs - reference))
    values = np.asarray(value_fn(MODEL)(PARAMS, HEAD, batch)) * batch.mask
    raw, returns = advantages.gae(earned, values, batch.mask, 0.9, 0.8)
    np.testing.assert_allclose(found.values, values, atol=1e-5)
    np.testing.assert_allclose(found.returns, returns, atol=1e-4)
    np.testing.assert_allclose(found.advantages, advantages.normalize(raw, batch.mask), atol=1e-4)


def test_reinforce_plus_plus_needs_no_critic(batch):
    config = AlgorithmConfig(kind="reinforce++", group=1, kl=KlConfig(weight=0.2))
    found = prepare(batch, REWARDS.reshape(6, 1), TrainableParams(PARAMS, None), MODEL, config, REFERENCE)
    penalty = 0.2 * (batch.logprobs - found.reference)
    earned = advantages.token_rewards(REWARDS.reshape(-1), batch.mask, penalty)
    np.testing.assert_allclose(found.advantages, advantages.batch(earned, batch.mask), atol=1e-5)


def naive_advantages(rewards, kind):
    """Per sample, from the samples of its group that have a reward."""
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
                "centered": float(r) - mean,
                "leave_one_out": float(r) - others,
            }[kind]
    return np.array(found)


NAN = float("nan")
DROPPED = np.array(
    [[1, NAN, 0.5, 0], [NAN, NAN, NAN, NAN], [2, 2, NAN, 2], [NAN, 1, NAN, NAN], [0, 1, 2, 4]], np.float32
)


@pytest.mark.parametrize("kind", ["group", "centered", "leave_one_out"])
def test_samples_without_reward_are_excluded_from_their_group(kind):
    config = AlgorithmConfig(advantage=kind)
    found = outcome_advantages(DROPPED, config)
    np.testing.assert_allclose(found, naive_advantages(DROPPED, kind), atol=1e-5)
    whole = np.nan_to_num(DROPPED)
    np.testing.assert_array_equal(outcome_advantages(whole, config), getattr(advantages, kind)(whole))


def test_a_group_with_one_reward_is_dropped(batch):
    rewards = np.array([[1, 0, 0.5], [NAN, 2, NAN]], np.float32)
    found = prepare(batch, rewards, TrainableParams(PARAMS, None), MODEL, AlgorithmConfig())
    np.testing.assert_array_equal(found.mask[:3], batch.mask[:3])
    assert batch.mask[4].any() and not found.mask[3:].any()


def test_informative_ignores_samples_without_reward():
    expected = [[True, False, True, True], [False] * 4, [False] * 4, [False] * 4, [True] * 4]
    np.testing.assert_array_equal(by_group(advantages.informative, DROPPED), expected)


@pytest.mark.parametrize("kind", ["grpo", "dapo", "reinforce++", "ppo"])
def test_samples_without_reward_do_not_affect_the_others(kind, batch):
    """The columns of the others equal those of a batch without the sample."""
    config = AlgorithmConfig(kind=kind, kl=KlConfig(weight=0.1) if kind == "ppo" else KlConfig())
    weights = TrainableParams(PARAMS, HEAD if kind == "ppo" else None)
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


def test_a_critic_learns_the_returns(batch):
    """With repeated rewards, the value loss falls and the values approach the returns."""
    config = AlgorithmConfig(
        kind="ppo", optimizer=OptimizerConfig(learning_rate=3e-3), value=ValueConfig(lam=1.0, clip=0.0)
    )
    state, step, losses = init_state(PARAMS, MODEL, config), make_train_step(MODEL, config), []
    for _ in range(30):
        ready = prepare(batch, REWARDS, state.params, MODEL, config)
        state, metrics = step(state, ready)
        losses.append(float(metrics["value_loss"]))
    assert losses[-1] < 0.3 * losses[0]
    assert jax.tree.leaves(state.params.critic)[0].any()


@pytest.mark.parametrize(
    ("config", "rewards", "said"),
    [
        (AlgorithmConfig(kl=KlConfig(weight=0.1)), REWARDS, "needs a reference policy"),
        (AlgorithmConfig(), REWARDS[:1], "one for each of 6 rows"),
        (AlgorithmConfig(), REWARDS.reshape(-1), r"must be \[prompts, samples\]"),
    ],
)
def test_missing_inputs_are_reported(config, rewards, said, batch):
    with pytest.raises(ConfigError, match=said):
        prepare(batch, rewards, TrainableParams(PARAMS, None), MODEL, config)
    with pytest.raises(ConfigError, match="computed per token"):
        outcome_advantages(REWARDS, AlgorithmConfig(kind="ppo"))
