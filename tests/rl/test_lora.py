"""Training a LoRA adapter: its updates against hand-made ones, and whole runs in the same loop as full weights."""

import dataclasses
import sqlite3

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slipstream
from slipstream.errors import ConfigError
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.peft import load_adapter
from slipstream.model.checkpoints.sample_model import sample_config, write_sample_config
from slipstream.model.transformer import decoder
from slipstream.model.transformer.adapters import merged
from slipstream.model.tree import flatten
from slipstream.rl.algorithm.batch import make_batch
from slipstream.rl.algorithm.forward import TrainableParams, forward
from slipstream.rl.algorithm.loss import objective
from slipstream.rl.config import AlgorithmConfig, KlConfig, LoraConfig, OptimizerConfig, TrainConfig
from slipstream.rl.reporting.records import Saved, StepRecord, read_records
from slipstream.rl.trainer.learner import Learner
from slipstream.rl.trainer.loop import training_loop
from slipstream.rl.trainer.run import initial_adapter
from slipstream.types import Lora
from tests.adapters import random_adapter
from tests.rl.batches import completion
from tests.rl.test_loop import CONFIG as LOOP
from tests.tiny import random_params, tiny_config

MODEL = tiny_config(num_layers=1)
PARAMS = random_params(MODEL)
LORA = Lora("policy", 2, 3.0, ("q_proj", "down_proj"))
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_an_update_is_that_of_the_merged_weights_and_leaves_the_model_alone():
    config = AlgorithmConfig(
        prompts=2, group=4, max_tokens=5, kl=KlConfig(weight=0.1), optimizer=OptimizerConfig(learning_rate=1e-2)
    )
    rng = np.random.default_rng(0)
    rows = [completion(rng.integers(4, 90, 4), rng.integers(4, 90, n)) for n in (1, 2, 3, 5, 5, 4, 2, 3)]
    adapter = jax.tree.map(jnp.asarray, random_adapter(MODEL, LORA, seed=1, size=0.1))
    learner = Learner(config, MODEL, PARAMS, 0, adapter=(LORA, adapter))
    batch = learner.prepare(
        make_batch(rows, version=0, max_tokens=5), np.array([[1, 0, 0, 1], [1, 1, 0, 1]], np.float32)
    )
    reference = decoder.logprobs(PARAMS, MODEL, jnp.asarray(batch.tokens)) * batch.mask
    np.testing.assert_allclose(batch.reference, reference, atol=1e-5, err_msg="the model without the adapter")

    def loss(adapter):
        outputs = forward(TrainableParams(merged(PARAMS, adapter, LORA), None), MODEL, batch, config)
        return objective(outputs, batch, config).loss

    gradient = jax.jit(jax.grad(loss))(adapter)
    metrics = learner.update(1, batch)
    assert metrics.gradient_norm == pytest.approx(float(optax.global_norm(gradient)), rel=1e-4)
    scale = min(1.0, config.optimizer.gradient_clip / metrics.gradient_norm)
    for name, leaf in flatten(gradient).items():
        moved = flatten(learner.policy)[name] - flatten(adapter)[name]
        expected = -1e-2 * scale * leaf / (jnp.abs(scale * leaf) + 1e-8)  # Adam's first step
        np.testing.assert_allclose(moved, expected, atol=1e-4)
    assert learner.base is PARAMS or all(a is b for a, b in zip(*map(jax.tree.leaves, (learner.base, PARAMS))))
    assert learner._reference is learner.base, "no second copy for the KL penalty"
    num_trained = sum(leaf.size for leaf in jax.tree.leaves(adapter))
    assert sum(leaf.size for leaf in jax.tree.leaves(learner.state.opt_state)) <= 2 * num_trained + 2


CONFIG = LOOP.replace(
    steps=10,
    save_every=2,
    eval_every=10,
    eval_prompts=4,
    algorithm=LOOP.algorithm.replace(kl=KlConfig(weight=0.01), optimizer=OptimizerConfig(learning_rate=1e-2)),
    lora=LoraConfig(rank=4, alpha=8.0, targets=ALL),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`(records, run directory)` of a run that was interrupted after step 2 and resumed."""
    model_dir, run_dir = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("run")
    write_sample_config(model_dir)
    with slipstream.inprocess(model_dir, engine=CONFIG.engine) as bridge:
        interrupted = training_loop(CONFIG, bridge, model_dir, run_dir)
        next(record for record in interrupted if isinstance(record, StepRecord) and record.step == 3)
        interrupted.close()
        list(training_loop(CONFIG, bridge, model_dir, run_dir))
    return read_records(run_dir / "metrics.jsonl"), run_dir


def test_rewards_rise_and_only_the_adapter_is_sent(run):
    steps = [r for r in run[0] if isinstance(r, StepRecord)]
    assert [s.step for s in steps] == list(range(1, 11))
    assert np.mean([s.accuracy for s in steps[-3:]]) > np.mean([s.accuracy for s in steps[:3]]) + 0.05
    lora = CONFIG.lora.adapter
    assert steps[0].metrics.reference_kl == pytest.approx(0, abs=1e-5), "the reference is where training starts"
    assert steps[1].metrics.reference_kl > steps[0].metrics.reference_kl
    size = sum(4 * leaf.size for leaf in jax.tree.leaves(random_adapter(sample_config(), lora, 0)))
    for s in steps:
        assert s.sync.num_bytes == size and s.sync.adapter == "policy"
        assert s.metrics.ratio == pytest.approx(1, abs=1e-4), "engine and trainer compute the same"
        assert set(s.staleness) == {"0"}


def test_the_base_is_recorded_too(run):
    with sqlite3.connect(run[1] / "record/run.sqlite") as db:
        sizes = [num_bytes for (num_bytes,) in db.execute("SELECT bytes FROM syncs ORDER BY version")]
    assert len(sizes) == 15 and sum(size > 10 * min(sizes) for size in sizes) == 2, "one base for each process"


def test_what_is_exported_is_what_engines_served(run):
    records, run_dir = run
    (saved,) = (r for r in records if isinstance(r, Saved))
    model = sample_config()
    adapter, lora = load_adapter(saved.directory, model, "policy")
    assert lora == CONFIG.lora.adapter
    base = hf_weights.load(run_dir / "base")  # the model was warmed up
    tokens = jnp.asarray([[5, 6, 7, 8]])
    before, after = (decoder.forward(p, model, tokens) for p in (base, merged(base, adapter, lora)))
    assert jnp.abs(after - before).max() > 0.1
    continued = CONFIG.replace(lora=CONFIG.lora.replace(path=saved.directory))
    jax.tree.map(np.testing.assert_array_equal, initial_adapter(continued, model, lora), adapter)
    with pytest.raises(
        ConfigError, match=r"lora.path has an adapter of rank 4, alpha 8 .*the config says rank 4, alpha 2"
    ):
        initial_adapter(continued, model, dataclasses.replace(lora, alpha=2.0))


def test_settings_that_do_not_fit():
    with pytest.raises(ConfigError, match=r"lora.rank is missing"):
        TrainConfig(lora=LoraConfig(alpha=8.0))
    with pytest.raises(ConfigError, match=r"deterministic does not work with lora"):
        CONFIG.replace(deterministic=True)
    with pytest.raises(ConfigError, match=r"lora needs engine\.kind = 'embedded' or 'vllm'.*got 'remote'"):
        CONFIG.replace(engines=1, engine={"kind": "remote", "url": "http://127.0.0.1:8000"})
    with pytest.raises(ConfigError, match="in_flight is 'recompute', which vLLM cannot do"):
        CONFIG.replace(engines=1, engine="vllm", in_flight="recompute")
