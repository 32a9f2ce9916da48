"""The policy that KL pulls towards, scored by engines, against the same scored by the trainer."""

import dataclasses
import io
import os
import signal

import numpy as np
import pytest
from rich.console import Console

import slipstream
from slipstream import demo
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.rl.batch import make_batch
from slipstream.rl.config import AlgorithmConfig, KlConfig, TaskConfig, TrainConfig
from slipstream.rl.experience import scorer
from slipstream.rl.loop import train
from slipstream.rl.records import StepRecord, read_records
from slipstream.rl.reference import Reference
from slipstream.rl.tokens import init_small, small_model, write_small_model
from tests.rl.batches import completion

CONFIG = TrainConfig(
    steps=3,
    warmup_steps=20,
    eval_every=9,
    save_every=0,
    seed=3,
    engines=0,
    task=TaskConfig(digits=2),
    algorithm=AlgorithmConfig(prompts=8, group=8, max_tokens=4, kl=KlConfig(0.1)),
    engine=EngineConfig(max_concurrency=64, max_model_len=16),
)
BY_ENGINE = dataclasses.replace(
    CONFIG, algorithm=dataclasses.replace(CONFIG.algorithm, kl=KlConfig(0.1, scored_by="engine"))
)


@pytest.fixture
def model_dir(tmp_path):
    write_small_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def batch():
    """Of the last of its three sequences nothing is learned."""
    rng = np.random.default_rng(0)
    rows = [completion(rng.integers(4, 15, 3), rng.integers(4, 15, n)) for n in (1, 4, 2)]
    made = make_batch(rows, version=0, max_tokens=4)
    return made._replace(mask=made.mask * np.array([[1], [1], [0]], np.float32))


def test_an_engine_gives_the_trainers_logprobs_where_something_is_learned(batch, model_dir):
    params = init_small(small_model(), 5)
    with slipstream.inprocess(model_dir, engine=CONFIG.engine) as bridge:
        found = Reference(bridge, params, patience=0.0).fill(batch)
    expected = np.asarray(scorer(small_model(), 1.0)(params, batch)) * batch.mask
    assert (found.reference[:2] < 0).sum() == 5 and not found.reference[2].any()
    np.testing.assert_allclose(found.reference, expected, atol=1e-4)


def test_an_engine_that_is_started_again_gets_the_same_policy(batch, model_dir, tmp_path):
    run_dir = tmp_path / "fleet"
    with slipstream.launch(model_dir, engine=CONFIG.engine, run_dir=run_dir, keep_alive=True) as bridge:
        reference = Reference(bridge, init_small(small_model(), 5), patience=120.0)
        before = reference.fill(batch).reference
        os.kill(bridge.status().engines[0].info.pid, signal.SIGKILL)
        np.testing.assert_array_equal(reference.fill(batch).reference, before)
        assert bridge.version == 0


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_run_learns_the_same_whoever_scores_the_reference(kind, model_dir, tmp_path):
    def steps(config, name):
        algorithm = dataclasses.replace(config.algorithm, kind=kind)
        config = dataclasses.replace(config, algorithm=algorithm)
        with (
            slipstream.inprocess(model_dir, engine=config.engine) as bridge,
            slipstream.inprocess(model_dir, engine=config.engine) as reference,
        ):
            found = list(train(config, bridge, model_dir, tmp_path / name, reference))
            served = reference.version
        return [r for r in found if isinstance(r, StepRecord)], served

    (by_trainer, untouched), (by_engine, served) = steps(CONFIG, "trainer"), steps(BY_ENGINE, "engine")
    assert (untouched, served) == (-1, 0)  # synced once, and only where it is asked
    assert by_engine[-1].metrics.reference_kl > 0
    for ours, theirs in zip(by_engine, by_trainer, strict=True):
        assert ours.reward == pytest.approx(theirs.reward, abs=1e-4)
        for name in ("loss", "reference_kl", "gradient_norm"):
            expected = pytest.approx(getattr(theirs.metrics, name), rel=0.01, abs=1e-4)
            assert getattr(ours.metrics, name) == expected, name


def test_the_command_starts_the_second_fleet_itself(tmp_path):
    config = dataclasses.replace(BY_ENGINE, steps=1, run_dir=str(tmp_path / "run"))
    assert demo.run_train(config, Console(file=io.StringIO())) == 0
    assert [r.step for r in read_records(tmp_path / "run" / "metrics.jsonl") if isinstance(r, StepRecord)] == [1]
    server = EngineConfig("remote", url="https://example.org:8000")
    with pytest.raises(ConfigError, match="is one server, which serves the policy that learns"):
        demo._open_reference(dataclasses.replace(config, engine=server), tmp_path, tmp_path)


def test_what_cannot_be(model_dir, tmp_path):
    with (
        slipstream.inprocess(model_dir, engine=CONFIG.engine) as bridge,
        pytest.raises(ConfigError, match="needs a second fleet"),
    ):
        list(train(BY_ENGINE, bridge, model_dir, tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"score at temperature 1; with algorithm\.temperature = 0\.7"):
        dataclasses.replace(BY_ENGINE.algorithm, temperature=0.7)
    with pytest.raises(ConfigError, match="a second fleet would keep its own"):
        dataclasses.replace(BY_ENGINE, take_turns=True)
