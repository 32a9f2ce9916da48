"""Several updates per step, packed and sharded, compared with plain train steps."""

from dataclasses import astuple

import jax
import numpy as np
import pytest

from slipstream.errors import ConfigError
from slipstream.rl.algorithm import forward
from slipstream.rl.algorithm.batch import Batch, make_batch
from slipstream.rl.algorithm.experience import prepare
from slipstream.rl.algorithm.forward import logprob_fn
from slipstream.rl.algorithm.sharding import mesh_over
from slipstream.rl.algorithm.train_step import TrainStep, init_state, make_train_step
from slipstream.rl.config import AlgorithmConfig, CorrectionConfig, KlConfig, OptimizerConfig, TrainConfig
from slipstream.rl.data.prompts import SHUFFLE_STREAM
from slipstream.rl.reporting.records import UpdateMetrics
from slipstream.rl.trainer import checkpoint
from slipstream.rl.trainer.learner import Learner
from tests.rl.batches import completion
from tests.tiny import random_params, tiny_config

MODEL = tiny_config(num_layers=1)
PARAMS = random_params(MODEL)
# Used by no other test: compiled steps are cached by config, and test_train_step counts compilations.
CONFIG = AlgorithmConfig(
    prompts=2, group=4, max_tokens=5, temperature=0.7, optimizer=OptimizerConfig(learning_rate=2e-2)
)
TIS = CONFIG.replace(correction=CorrectionConfig(kind="tis"))
PPO = CONFIG.replace(kind="ppo", kl=KlConfig(weight=0.1))
REWARDS = np.array([[1, 0, 0, 1], [1, 1, 0, 1]], np.float32)
SEED, STEP = 11, 7


@pytest.fixture(scope="module")
def batch():
    """Eight completions of different lengths, sampled by a policy close to ours."""
    rng = np.random.default_rng(0)
    rows = [completion(rng.integers(4, 90, 4), rng.integers(4, 90, n)) for n in (1, 2, 3, 5, 5, 4, 2, 3)]
    plain = make_batch(rows, version=0, max_tokens=CONFIG.max_tokens)
    own = np.asarray(logprob_fn(MODEL, CONFIG.temperature)(PARAMS, plain))
    return plain._replace(logprobs=((own + rng.normal(0, 0.1, own.shape)) * plain.mask).astype(np.float32))


def learned(config, batch, rewards=REWARDS, **how):
    """`(metrics, state)` after one step of a learner."""
    learner = Learner(config, MODEL, PARAMS, SEED, **how)
    return learner.update(STEP, learner.prepare(batch, rewards)), learner.state


def by_hand(config, batch, rows_of_updates):
    """The same from consecutive train steps on the given rows, with π_old from before the first."""
    state = init_state(PARAMS, MODEL, config)
    ready = prepare(batch, REWARDS, state.params, MODEL, config, PARAMS)
    if len(rows_of_updates) > 1 and config.correction.kind != "none":
        old = np.asarray(logprob_fn(MODEL, config.temperature)(PARAMS, ready)) * ready.mask
        ready = ready._replace(old=old)
    found = []
    for rows in rows_of_updates:
        part = Batch(*[None if column is None else np.stack([column[row] for row in rows]) for column in ready])
        state, metrics = make_train_step(MODEL, config)(state, part)
        found.append(metrics)
    means = {name: sum(float(each[name]) for each in found) / len(found) for name in found[0]}
    return UpdateMetrics(**means), state


def assert_same(found, expected):
    (metrics, state), (metrics_by_hand, state_by_hand) = found, expected
    assert metrics == metrics_by_hand
    jax.tree.map(np.testing.assert_array_equal, state, state_by_hand)


def assert_close(found, expected):
    (metrics, state), (plain_metrics, plain) = found, expected
    np.testing.assert_allclose(astuple(metrics), astuple(plain_metrics), rtol=1e-4, atol=1e-6)
    for a, b in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(plain.opt_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(np.abs(b).max()) + 1e-6)


def order(epoch):
    rows = np.arange(8)
    np.random.default_rng([SEED, SHUFFLE_STREAM, STEP, epoch]).shuffle(rows)
    return rows.tolist()


def test_one_update_is_bit_identical_to_the_train_step(batch):
    assert_same(learned(TIS, batch), by_hand(TIS, batch, [range(8)]))


def test_two_minibatches_are_two_train_steps(batch):
    rows = order(epoch=0)
    found = learned(PPO.replace(minibatches=2), batch)
    assert_same(found, by_hand(PPO, batch, [rows[:4], rows[4:]]))
    with pytest.raises(AssertionError):
        assert_same(found, by_hand(PPO, batch, [rows[4:], rows[:4]]))


def test_epochs_reshuffle_and_share_the_old_policy(batch):
    first, second = order(epoch=0), order(epoch=1)
    assert first != second
    found = learned(TIS.replace(epochs=2, minibatches=2), batch)
    assert_same(found, by_hand(TIS, batch, [first[:4], first[4:], second[:4], second[4:]]))
    assert abs(found[0].ratio - 1) > 1e-4  # later updates have moved away from π_old


PACKED = {
    "ppo": PPO.replace(micro_batches=2),
    "dapo, of which a group teaches nothing": CONFIG.replace(kind="dapo"),
    "in minibatches": TIS.replace(minibatches=2, epochs=2),
}


@pytest.mark.parametrize("kind", PACKED)
def test_packed_rows_give_the_same_update(kind, batch, monkeypatch):
    shapes = []
    step = TrainStep.with_logprobs
    monkeypatch.setattr(TrainStep, "with_logprobs", lambda *args: shapes.append(args[2].tokens.shape) or step(*args))
    rewards = np.array([[1, 0, 0, 1], [1, 1, 1, 1]], np.float32)
    config = PACKED[kind]
    plain = learned(config, batch, rewards)
    packed = learned(config.replace(row_tokens=16), batch, rewards)
    assert_close(packed, plain)
    whole, rows = shapes[: len(shapes) // 2], shapes[len(shapes) // 2 :]
    assert all(shape[1] == 16 and shape[0] % config.micro_batches == 0 for shape in rows)
    assert sum(n for n, _ in rows) < sum(n for n, _ in whole)


@pytest.mark.parametrize("row_tokens", [0, 16])
@pytest.mark.parametrize("kind", ["ppo", "in minibatches"])
def test_the_update_returns_the_logprobs_that_its_loss_computed(kind, row_tokens, batch):
    config = PACKED[kind].replace(row_tokens=row_tokens)
    learner = Learner(config, MODEL, PARAMS, SEED)
    ready = learner.prepare(batch, REWARDS)
    expected = learner.logprobs(ready, config.temperature)
    learner.update(STEP, ready)
    found = learner.logprobs_in_update.rows()
    assert found.shape == expected.shape
    rows = np.array(order(epoch=0)[: 8 // config.minibatches]) if config.minibatches > 1 else np.arange(8)
    learned = ready.mask[rows] > 0
    np.testing.assert_allclose(found[rows][learned], expected[rows][learned], rtol=1e-4, atol=1e-5)
    assert np.isfinite(found[ready.mask > 0]).all()


@pytest.mark.parametrize(
    "shares, most", [({"micro_batches": 4}, 2), ({"minibatches": 2, "micro_batches": 2}, 2), ({"minibatches": 4}, 8)]
)
def test_no_forward_pass_has_more_rows_than_a_micro_batch(shares, most, batch, monkeypatch):
    """Including the passes for reference, values and old logprobs."""
    config = PPO.replace(correction=CorrectionConfig(kind="tis"))
    seen = []

    def counting(make):
        def made(*args):
            score = make(*args)
            return lambda *params_and_batch: seen.append(len(params_and_batch[-1].tokens)) or score(*params_and_batch)

        return made

    learner = Learner(config.replace(**shares), MODEL, PARAMS, SEED)
    whole = Learner(config, MODEL, PARAMS, SEED)
    expected = whole.prepare(batch, REWARDS)
    monkeypatch.setattr(forward, "logprob_fn", counting(forward.logprob_fn))
    monkeypatch.setattr(forward, "value_fn", counting(forward.value_fn))
    found = learner.prepare(batch, REWARDS)
    for name in ("reference", "values", "returns", "advantages"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-5)
    logprobs = learner.logprobs(batch, 0.7)
    assert len(seen) == 3 * len(batch.tokens) / most and set(seen) == {most}
    np.testing.assert_allclose(logprobs, whole.logprobs(batch, 0.7), rtol=1e-4, atol=1e-5)


def test_an_uninformative_batch_packs_into_one_empty_row(batch):
    config = CONFIG.replace(kind="dapo", row_tokens=16)
    metrics, _ = learned(config, batch, np.ones((2, 4), np.float32))
    assert metrics.loss == 0 and metrics.gradient_norm == 0


def test_two_devices_give_the_same_update(batch):
    """In packed minibatches."""
    config = PACKED["in minibatches"].replace(row_tokens=16)
    plain, found = learned(config, batch), learned(config, batch, num_devices=2)
    assert_close(found, plain)
    embedding = found[1].policy["model"]["embed_tokens"]["weight"]
    assert {shard.data.shape for shard in embedding.addressable_shards} == {(48, 32)}  # each device holds half of it


def test_too_many_devices_are_rejected():
    assert mesh_over(0).size == 2 and mesh_over(1) is None
    with pytest.raises(ConfigError, match=r"devices is 3, but JAX has 2 \(cpu\)"):
        Learner(CONFIG, MODEL, PARAMS, SEED, num_devices=3)
    odd = CONFIG.replace(prompts=3, group=3)
    with pytest.raises(ConfigError, match="= 9 completions per step are not divisible by devices 2"):
        Learner(odd, MODEL, PARAMS, SEED, num_devices=0)
    with pytest.raises(ConfigError, match="= 9 completions per step are not divisible by devices 2"):
        TrainConfig(devices=2, algorithm=odd)
    TrainConfig(devices=2, algorithm=odd.replace(row_tokens=16))  # packed rows are padded


def test_indivisible_batches_are_rejected():
    with pytest.raises(ConfigError, match="= 8 completions per step are not divisible by minibatches 3"):
        CONFIG.replace(minibatches=3)
    with pytest.raises(ConfigError, match="not divisible by minibatches 4 × micro_batches 4"):
        CONFIG.replace(minibatches=4, micro_batches=4)
    CONFIG.replace(minibatches=4, micro_batches=4, row_tokens=16)  # rows are padded
    with pytest.raises(ConfigError, match="epochs must be greater than 0"):
        CONFIG.replace(epochs=0)
    with pytest.raises(ConfigError, match="must hold a prompt and 5 tokens"):
        CONFIG.replace(row_tokens=5)


def test_an_update_that_is_not_finite_changes_nothing_and_is_counted(batch):
    poisoned = batch._replace(logprobs=batch.logprobs.copy())
    poisoned.logprobs[0, 3] = np.nan  # a token that counts
    metrics, state = learned(TIS, poisoned)
    assert metrics.num_skipped == 1 and np.isnan(metrics.loss)
    jax.tree.map(np.testing.assert_array_equal, state.policy, PARAMS)
    metrics, state = learned(TIS.replace(minibatches=2), poisoned)
    assert metrics.num_skipped == 1 and np.isfinite(astuple(metrics)).all()
    changed = [not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(state.policy), jax.tree.leaves(PARAMS))]
    assert any(changed) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_a_resumed_learner_runs_the_same_program(batch, tmp_path):
    """It finds the program in the compilation cache, instead of compiling another one."""
    learner = Learner(CONFIG, MODEL, PARAMS, SEED)

    def program():
        return learner._train_step.update.lower(*learner.state, learner.prepare(batch, REWARDS)).as_text()

    before = program()
    progress = checkpoint.RunProgress(step=1, cursor=1, seed=SEED, version=1, journal=8, recent=(), evaluated=0)
    learner.load(checkpoint.save(tmp_path, checkpoint.RunState(*learner.state, progress), {}))
    assert program() == before
