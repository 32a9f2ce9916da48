"""The KL reference scored by engines, compared with the trainer's own scores."""

import io

import numpy as np
import pytest
from rich.console import Console

import slipstream
from slipstream.cli import demo
from slipstream.config import RemoteConfig
from slipstream.errors import ConfigError, EngineLost
from slipstream.model.checkpoints.sample_model import sample_config, sample_params, write_sample_config
from slipstream.rl.algorithm.batch import make_batch
from slipstream.rl.algorithm.forward import logprob_fn
from slipstream.rl.config import KlConfig
from slipstream.rl.reporting.records import StepRecord, read_records
from slipstream.rl.trainer.loop import training_loop
from slipstream.rl.trainer.reference import Reference
from slipstream.rl.trainer.session import open_reference
from tests.rl.batches import completion
from tests.rl.runs import SHORT

PPO = SHORT.algorithm.replace(kind="ppo", micro_batches=2, kl=KlConfig(weight=0.1))
CONFIG = SHORT.replace(steps=3, warmup_steps=20, algorithm=PPO)
BY_ENGINE = CONFIG.replace(algorithm=CONFIG.algorithm.replace(kl=KlConfig(weight=0.1, scored_by="engine")))


@pytest.fixture
def model_dir(tmp_path):
    write_sample_config(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def batch():
    """Three sequences, the last of which has no trained token."""
    rng = np.random.default_rng(0)
    rows = [completion(rng.integers(4, 15, 3), rng.integers(4, 15, n)) for n in (1, 4, 2)]
    made = make_batch(rows, version=0, max_tokens=4)
    return made._replace(mask=made.mask * np.array([[1], [1], [0]], np.float32))


def test_engine_scores_match_the_trainers_logprobs(batch, model_dir):
    params = sample_params(sample_config(), 5)
    with slipstream.inprocess(model_dir, engine=CONFIG.engine) as bridge:
        found = Reference(bridge, params, patience=0.0).add_logprobs(batch)
    expected = np.asarray(logprob_fn(sample_config(), 1.0)(params, batch)) * batch.mask
    assert (found.reference[:2] < 0).sum() == 5 and not found.reference[2].any()
    np.testing.assert_allclose(found.reference, expected, atol=1e-4)


def test_an_engine_that_is_lost_is_waited_for(batch, model_dir, monkeypatch):
    """The bridge sends a restarted engine its weights (tests/deploy/test_rollouts.py)."""
    with slipstream.inprocess(model_dir, engine=CONFIG.engine) as bridge:
        reference = Reference(bridge, sample_params(sample_config(), 5), patience=120.0)
        before = reference.add_logprobs(batch).reference
        score, losses = bridge.score, [EngineLost("it died"), EngineLost("it is not back yet")]

        def lost_at_first(sequences):
            if losses:
                raise losses.pop()
            return score(sequences)

        monkeypatch.setattr(bridge, "score", lost_at_first)
        np.testing.assert_array_equal(reference.add_logprobs(batch).reference, before)
        assert not losses and bridge.version == 0


def test_a_run_is_the_same_with_either_reference(model_dir, tmp_path):
    def steps(config, name):
        with (
            slipstream.inprocess(model_dir, engine=config.engine) as bridge,
            slipstream.inprocess(model_dir, engine=config.engine) as reference,
        ):
            found = list(training_loop(config, bridge, model_dir, tmp_path / name, reference))
            served = reference.version
        return [r for r in found if isinstance(r, StepRecord)], served

    (by_trainer, untouched), (by_engine, served) = steps(CONFIG, "trainer"), steps(BY_ENGINE, "engine")
    assert (untouched, served) == (-1, 0)  # synced once, and only if used
    first, second, last = (step.metrics for step in by_engine)
    assert first.ratio == pytest.approx(1, abs=1e-4) and first.gradient_norm > 0 and first.value_loss > 0
    assert first.reference_kl == pytest.approx(0, abs=1e-5)  # the reference is where training starts
    assert second.reference_kl > first.reference_kl and last.reference_kl > 0
    for ours, theirs in zip(by_engine, by_trainer, strict=True):
        assert ours.reward == pytest.approx(theirs.reward, abs=1e-4)
        for name in ("loss", "reference_kl", "gradient_norm"):
            expected = pytest.approx(getattr(theirs.metrics, name), rel=0.01, abs=1e-4)
            assert getattr(ours.metrics, name) == expected, name


def test_the_command_starts_the_second_fleet(tmp_path):
    config = BY_ENGINE.replace(steps=1, run_dir=str(tmp_path / "run"))
    assert demo.run_train(config, Console(file=io.StringIO())) == 0
    assert [r.step for r in read_records(tmp_path / "run" / "metrics.jsonl") if isinstance(r, StepRecord)] == [1]
    server = RemoteConfig(url="https://example.org:8000")
    with pytest.raises(ConfigError, match="is one server, which serves the policy"):
        open_reference(config.replace(engine=server, engines=1), tmp_path, tmp_path)


def test_unsupported_references_are_rejected(model_dir, tmp_path):
    with (
        slipstream.inprocess(model_dir, engine=CONFIG.engine) as bridge,
        pytest.raises(ConfigError, match="needs a second fleet"),
    ):
        list(training_loop(BY_ENGINE, bridge, model_dir, tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"engines score at temperature 1, got 0\.7"):
        BY_ENGINE.algorithm.replace(temperature=0.7)
    with pytest.raises(ConfigError, match="a second fleet that keeps its own"):
        BY_ENGINE.replace(take_turns=True)
