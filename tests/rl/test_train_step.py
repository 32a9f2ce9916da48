"""The compiled train step: accumulation, sharding, donation, learning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.errors import ConfigError
from slipstream.model.transformer import decoder
from slipstream.rl.algorithm import advantages, loss
from slipstream.rl.algorithm.batch import Batch, make_batch
from slipstream.rl.algorithm.experience import prepare
from slipstream.rl.algorithm.forward import TrainableParams, forward, logprob_fn
from slipstream.rl.algorithm.packing import pack
from slipstream.rl.algorithm.sharding import leaf_spec
from slipstream.rl.algorithm.train_step import init_state, make_train_step
from slipstream.rl.config import AlgorithmConfig, CorrectionConfig, KlConfig, OptimizerConfig
from slipstream.rl.reporting.records import UpdateMetrics
from tests.rl.batches import completion
from tests.tiny import random_params, tiny_config

MODEL = tiny_config(num_layers=1)
CONFIG = AlgorithmConfig(
    prompts=2, group=4, max_tokens=5, temperature=0.7, optimizer=OptimizerConfig(learning_rate=1e-2)
)
REWARDS = np.array([[1, 0, 0, 1], [1, 1, 0, 1]], np.float32)
LENGTHS = (1, 2, 3, 5, 5, 4, 2, 3)
KINDS = {
    "grpo": CONFIG,
    "dr_grpo": CONFIG.replace(kind="dr_grpo", entropy_weight=0.01),
    "dapo": CONFIG.replace(kind="dapo", correction=CorrectionConfig(kind="tis", level="sequence")),
    "ppo": CONFIG.replace(kind="ppo", kl=KlConfig(weight=0.1)),
    "reinforce++": CONFIG.replace(kind="reinforce++", kl=KlConfig(weight=0.1)),
}


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, decoder.init(MODEL, jax.random.key(0)))


@pytest.fixture(scope="module")
def plain(params):
    """Eight completions of different lengths, with the policy's own logprobs at the sampling temperature."""
    rng = np.random.default_rng(0)
    rows = [completion(rng.integers(4, 90, 4), rng.integers(4, 90, n)) for n in LENGTHS]
    batch = make_batch(rows, version=0, max_tokens=CONFIG.max_tokens)
    own = np.asarray(logprob_fn(MODEL, CONFIG.temperature)(params, batch))
    return batch._replace(logprobs=own * batch.mask)


def prepared(plain, params, config):
    return prepare(plain, REWARDS, init_state(params, MODEL, config).params, MODEL, config, random_params(MODEL))


def close(found, expected, scale=1e-5):
    if isinstance(found, dict):  # metrics: the last bit of a logprob may differ
        found, expected = ({**metrics, "equal_share": 0.0} for metrics in (found, expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=scale * float(np.abs(b).max()) + 1e-6)


def one_step(params, batch, config, mesh=None):
    return make_train_step(MODEL, config, mesh)(init_state(params, MODEL, config, mesh), batch)


def test_the_gradient_at_ratio_one_is_reinforce(params, plain):
    batch = prepared(plain, params, CONFIG)

    def ours(params):
        return loss.objective(forward(TrainableParams(params, None), MODEL, batch, CONFIG), batch, CONFIG).loss

    def reinforce(params):
        logprobs = decoder.logprobs(params, MODEL, jnp.asarray(batch.tokens), CONFIG.temperature)
        weights = batch.advantages / batch.mask.sum(1, keepdims=True)
        return -jnp.sum(weights * logprobs * batch.mask) / len(batch.tokens)

    found, expected = (jax.tree.leaves(jax.jit(jax.grad(of))(params)) for of in (ours, reinforce))
    for a, b in zip(found, expected):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()) + 1e-7, rtol=1e-3)


def test_a_step_compiles_once_keeps_params_and_increases_rewarded_logprobs(params, plain):
    batch, step = prepared(plain, params, CONFIG), make_train_step(MODEL, CONFIG)
    before = jax.tree.map(np.array, params)  # copies: a view would prevent donation
    state = init_state(params, MODEL, CONFIG)
    moments = jax.tree.leaves(state.opt_state)
    state, metrics = step(state, batch)
    assert any(leaf.is_deleted() for leaf in moments)  # donated
    state, _ = step(state, batch)
    assert step.update._cache_size() == 1 and make_train_step(MODEL, CONFIG) is step
    jax.tree.map(np.testing.assert_array_equal, before, params)  # not donated: an engine may be reading them

    def sequence_logprobs(params):
        return np.asarray((logprob_fn(MODEL, 0.7)(params, batch) * batch.mask).sum(1) / batch.mask.sum(1))

    change = sequence_logprobs(state.policy) - sequence_logprobs(params)
    assert (change * advantages.group(REWARDS).reshape(-1)).sum() > 0
    assert UpdateMetrics(**{name: float(value) for name, value in metrics.items()}).gradient_norm > 0
    np.testing.assert_allclose(metrics["ratio"], 1, atol=1e-5)
    np.testing.assert_allclose(metrics["kl"], 0, atol=1e-6)
    assert metrics["clip_share"] == 0


@pytest.mark.parametrize("kind", ["ppo", "dapo"])
def test_micro_batches_give_the_same_step(kind, params, plain):
    config, batch = KINDS[kind], prepared(plain, params, KINDS[kind])
    whole, expected = one_step(params, batch, config)
    state, metrics = one_step(params, batch, config.replace(micro_batches=4))
    close(metrics, expected)
    close(state.opt_state, whole.opt_state)  # moments after one step: the gradient and its square


def test_a_sharded_step_is_the_same(params, plain):
    mesh = jax.make_mesh((2,), ("fsdp",))
    config, batch = KINDS["ppo"].replace(micro_batches=2), prepared(plain, params, KINDS["ppo"])
    whole, expected = one_step(params, batch, KINDS["ppo"])
    state, metrics = one_step(params, batch, config, mesh)
    close(metrics, expected)
    close(state.opt_state, whole.opt_state)
    close(state.params, whole.params, 1e-3)
    embedding = state.policy["model"]["embed_tokens"]["weight"]
    assert {s.data.shape for s in embedding.addressable_shards} == {(48, 32)}  # each device holds half of it
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == embedding.shape]
    assert len(moments) >= 2 and all({s.data.shape for s in m.addressable_shards} == {(48, 32)} for m in moments)
    again, _ = make_train_step(MODEL, config, mesh)(state, batch)  # the output state is a valid input
    assert make_train_step(MODEL, config, mesh).update._cache_size() == 1
    assert again.policy["model"]["embed_tokens"]["weight"].sharding == embedding.sharding


def test_a_packed_batch_gives_the_same_step(params, plain):
    config, batch = CONFIG.replace(micro_batches=2), prepared(plain, params, CONFIG)
    packed = pack(batch, [4 + n for n in LENGTHS], row_tokens=16, rows_multiple=2)
    (whole, expected), (state, metrics) = one_step(params, batch, CONFIG), one_step(params, packed, config)
    close(metrics, expected)
    close(state.opt_state, whole.opt_state)


@pytest.mark.parametrize(
    ("shape", "devices", "spec"),
    [
        ((8, 6), 2, ("fsdp",)),
        ((6, 8), 2, (None, "fsdp")),
        ((8, 8), 4, ("fsdp",)),
        ((9, 4), 4, (None, "fsdp")),
        ((7,), 2, ()),
        ((), 2, ()),
        ((0, 3), 2, ()),
        ((8, 8), 1, ()),
    ],
)
def test_the_largest_divisible_dimension_is_sharded(shape, devices, spec):
    assert tuple(leaf_spec(shape, devices)) == spec


def test_indivisible_batches_are_rejected(params, plain):
    batch = prepared(plain, params, CONFIG)
    odd = Batch(*[None if x is None else x[:7] for x in batch])
    with pytest.raises(ConfigError, match="7 rows cannot be split into 2 equal micro-batches"):
        one_step(params, odd, CONFIG.replace(micro_batches=2))
    with pytest.raises(ConfigError, match="7 rows do not divide by 2 devices × 1"):
        one_step(params, odd, CONFIG, jax.make_mesh((2,), ("fsdp",)))
    with pytest.raises(ConfigError, match=r"axes \['data'\], none of them named 'fsdp'"):
        make_train_step(MODEL, CONFIG, jax.make_mesh((2,), ("data",)))
