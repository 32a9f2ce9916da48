"""Advantages compared with loops over Python numbers, written from the equations."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from slipstream.errors import ConfigError
from slipstream.rl.algorithm import advantages

REWARDS = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
GROUPS = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 5), st.integers(2, 6)), elements=st.integers(-8, 8).map(float)
)


def test_group_advantages_are_normalized_within_the_group():
    expected = [
        [(r - statistics.mean(group)) / (statistics.pstdev(group) + 1e-6) for r in group] for group in REWARDS.tolist()
    ]
    np.testing.assert_allclose(advantages.group(REWARDS), expected, rtol=1e-4)


def test_centered_advantages_are_not_divided():
    expected = [[r - statistics.mean(group) for r in group] for group in REWARDS.tolist()]
    np.testing.assert_allclose(advantages.centered(REWARDS), expected, atol=1e-6)


def test_leave_one_out_compares_with_the_others():
    expected = [
        [r - statistics.mean(group[:i] + group[i + 1 :]) for i, r in enumerate(group)] for group in REWARDS.tolist()
    ]
    np.testing.assert_allclose(advantages.leave_one_out(REWARDS), expected, atol=1e-6)


@given(GROUPS)
def test_invariants_of_group_estimators(rewards):
    size = rewards.shape[1]
    for estimate in (advantages.group, advantages.centered, advantages.leave_one_out):
        found = estimate(rewards)
        assert found.dtype == np.float32 and np.isfinite(found).all()
        np.testing.assert_allclose(found.sum(axis=1), 0, atol=1e-3)  # a baseline: zero on average
    np.testing.assert_allclose(
        advantages.leave_one_out(rewards), advantages.centered(rewards) * size / (size - 1), atol=1e-4
    )
    keep = advantages.informative(rewards)
    assert keep.tolist() == [[len(set(group)) > 1] * size for group in rewards.tolist()]
    assert not advantages.centered(rewards)[~keep].any()


def test_a_group_with_equal_rewards_has_no_advantages():
    assert not advantages.group(np.array([[1, 1, 1], [0, 0, 0]], np.float32)).any()


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 8))
def test_informative_groups_are_chosen_first(informative, count):
    found = advantages.chosen(np.array(informative, bool), count).tolist()
    teaching = [i for i, teaches in enumerate(informative) if teaches]
    others = [i for i, teaches in enumerate(informative) if not teaches]
    assert found == sorted((teaching + others)[:count])


def test_overlong_penalty_grows_linearly():
    found = advantages.overlong(np.array([[1, 12, 13], [14, 15, 16]]), max_length=16, interval=4)
    assert found.dtype == np.float32 and found.tolist() == [[0, 0, -0.25], [-0.5, -0.75, -1]]
    assert advantages.overlong(np.array([[1, 2]]), max_length=2, interval=2).tolist() == [[-0.5, -1]]


@pytest.mark.parametrize("rewards", [np.ones(4), np.ones((4, 1)), np.ones((2, 2, 2))])
def test_groups_of_one_are_rejected(rewards):
    for estimate in (advantages.group, advantages.centered, advantages.leave_one_out, advantages.informative):
        with pytest.raises(ConfigError, match=r"\[prompts, samples\] with at least 2"):
            estimate(rewards)


MASK = np.array([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 0], [1, 0, 1, 0]], np.float32)


def test_token_rewards_have_the_reward_last_and_a_penalty_everywhere():
    penalty = np.full(MASK.shape, 0.5, np.float32)
    found = advantages.token_rewards(np.array([1, 2, 3, 4]), MASK, penalty)
    assert found.tolist() == [[0, -0.5, 0.5, 0], [-0.5, -0.5, -0.5, 1.5], [0, 0, 2.5, 0], [-0.5, 0, 3.5, 0]]
    assert not advantages.token_rewards(np.ones(1), np.zeros((1, 3))).any()  # a row without tokens gets no reward
    with pytest.raises(ConfigError, match="one reward for each of 4 rows"):
        advantages.token_rewards(np.ones(3), MASK)


def test_reinforce_plus_plus_normalizes_the_reward_to_go_over_the_batch():
    rng = np.random.default_rng(2)
    rewards = (rng.normal(size=MASK.shape) * MASK).astype(np.float32)
    to_come = {
        (i, t): sum(float(rewards[i, s]) for s in range(t, MASK.shape[1]) if MASK[i, s]) for i, t in np.argwhere(MASK)
    }
    mean, deviation = statistics.mean(to_come.values()), statistics.pstdev(to_come.values())
    found = advantages.batch(rewards, MASK)
    for (i, t), total in to_come.items():
        assert found[i, t] == pytest.approx((total - mean) / (deviation + 1e-6), abs=1e-5)
    assert not found[MASK == 0].any()


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.9, 0.0), (1.0, 1.0)])
def test_gae_is_the_weighted_sum_of_later_td_errors(gamma, lam):
    """A_t = Σ_l (γλ)^l δ_{t+l}: the sum itself, not the recursion. Columns that were not sampled are skipped."""
    rng = np.random.default_rng(3)
    rewards, values = (rng.normal(size=MASK.shape).astype(np.float32) for _ in range(2))
    found, returns = advantages.gae(rewards, values, MASK, gamma, lam)
    for i in range(len(MASK)):
        steps = np.flatnonzero(MASK[i])
        v = [float(values[i, t]) for t in steps] + [0.0]
        delta = [float(rewards[i, t]) + gamma * v[n + 1] - v[n] for n, t in enumerate(steps)]
        for n, t in enumerate(steps):
            expected = sum((gamma * lam) ** k * d for k, d in enumerate(delta[n:]))
            assert found[i, t] == pytest.approx(expected, abs=1e-5)
            assert returns[i, t] == pytest.approx(expected + v[n], abs=1e-5)
    assert not found[MASK == 0].any() and not returns[MASK == 0].any()


def test_with_lambda_and_gamma_one_returns_do_not_depend_on_values():
    rewards = advantages.token_rewards(np.array([1, 2, 3, 4]), MASK)
    _, returns = advantages.gae(rewards, np.random.default_rng(0).normal(size=MASK.shape), MASK, 1.0, 1.0)
    np.testing.assert_allclose(returns, MASK * np.array([[1], [2], [3], [4]]), atol=1e-6)


def test_normalizing_an_empty_mask_gives_zeros():
    assert not advantages.normalize(np.ones((2, 3)), np.zeros((2, 3))).any()
    assert not advantages.normalize(np.ones((2, 3)), np.ones((2, 3))).any()
