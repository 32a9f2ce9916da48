"""Mode `partial` with a real engine, in this process and in another."""

import dataclasses
from contextlib import contextmanager

import pytest

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.errors import ConfigError
from slipstream.gateway.journal import Journal
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.rl.config import AlgorithmConfig, TaskConfig, TrainConfig
from slipstream.rl.data.prompts import PromptSource
from slipstream.rl.reporting.records import StepRecord
from slipstream.rl.trainer.loop import training_loop
from slipstream.rl.trainer.recovery import RecoveringBridge
from slipstream.types import SamplingParams
from tests.gateway.history import check

LONG, SHORT = 150, 2
CONFIG = TrainConfig(
    steps=2,
    warmup_steps=1,
    eval_every=9,
    eval_prompts=2,
    save_every=0,
    diagnose_every=0,
    mode="partial",
    task=TaskConfig(digits=2),
    algorithm=AlgorithmConfig(prompts=4, group=2, max_tokens=LONG),
    engine=EmbeddedConfig(max_num_seqs=16, max_model_len=192, decode_steps=1),
)


@contextmanager
def fleet(engines, model_dir, run_dir, engine):
    """A bridge to an engine in another process, or (0) in this one."""
    if engines:
        with slipstream.launch(model_dir, engine=engine, run_dir=run_dir) as bridge:
            yield bridge
    else:
        with slipstream.inprocess(model_dir, engine=engine, run_dir=run_dir) as bridge:
            yield bridge


@pytest.fixture
def model_dir(tmp_path):
    write_sample_config(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def lengths(monkeypatch):
    """Prompts with long completions, filled by the test; all others get two tokens."""
    long = set()
    draw = PromptSource._draw

    def drawn(self, step):
        asked = draw(self, step)
        counts = [LONG if id in long else SHORT for id in asked.ids]
        sampling = [SamplingParams(n, min_tokens=n, n=how.n, seed=how.seed) for n, how in zip(counts, asked.sampling)]
        return dataclasses.replace(asked, sampling=tuple(sampling))

    monkeypatch.setattr(PromptSource, "_draw", drawn)
    return long


@pytest.fixture
def batches(monkeypatch):
    """The groups that each step takes."""
    found = []
    take = RecoveringBridge.take

    def taken(self, rollouts, timeout, more=False):
        found.append(take(self, rollouts, timeout, more=more))
        return found[-1]

    monkeypatch.setattr(RecoveringBridge, "take", taken)
    return found


@pytest.mark.parametrize(("engines", "in_flight"), [(0, "recompute"), (1, "keep")])
def test_a_slow_completion_continues_under_the_next_version(engines, in_flight, model_dir, tmp_path, lengths, batches):
    """Engines sleep while the trainer trains, so that the slow completion cannot finish in between."""
    lengths.add("1/0")
    config = CONFIG.replace(take_turns=True, in_flight=in_flight)
    with fleet(engines, model_dir, tmp_path / "run", config.engine) as bridge:
        records = list(training_loop(config, bridge, model_dir, tmp_path / "run"))
    first, second = ([group.id for group in groups] for groups in batches)
    assert sorted(first) == ["1/1", "1/2", "1/3", "2/0"]
    assert sorted(second) == ["1/0", "2/1", "2/2", "2/3"]
    for completion in next(group for group in batches[1] if group.id == "1/0").completions:
        assert len(completion.token_ids) == LONG
        assert [span.version for span in completion.spans] == [0, 1]  # it kept its tokens and continued
    ages = [step.staleness for step in records if isinstance(step, StepRecord)]
    assert ages[0].keys() == {"0"} and ages[1].keys() == {"0", "1"}


def test_slow_completions_stay_within_the_staleness_bound_and_are_taken_once(model_dir, tmp_path, lengths, batches):
    lengths.update({"1/0", "2/1", "4/3", "5/0"})
    config = CONFIG.replace(steps=6, quantile=0.5, max_staleness=1)
    assert (config.surplus, config.steps_ahead) == (4, 1)
    with fleet(0, model_dir, tmp_path / "run", config.engine) as bridge:
        records = list(training_loop(config, bridge, model_dir, tmp_path / "run"))
    taken = [group.id for groups in batches for group in groups]
    assert sorted(taken) == sorted(f"{step}/{i}" for step in range(1, 7) for i in range(4))
    assert max(int(age) for step in records if isinstance(step, StepRecord) for age in step.staleness) <= 1
    assert check(Journal(tmp_path / "run" / "journal.sqlite"), config.max_staleness) == []


@pytest.mark.parametrize("engines", [0])
def test_a_resumed_run_gets_the_same_batch_again(engines, model_dir, tmp_path, lengths, batches):
    lengths.update({"1/0", "3/1"})
    config = CONFIG.replace(steps=5, save_every=2)
    with fleet(engines, model_dir, tmp_path / "run", config.engine) as bridge:
        records = training_loop(config, bridge, model_dir, tmp_path / "run")
        next(r for r in records if isinstance(r, StepRecord) and r.step == 3)
        records.close()
    with fleet(engines, model_dir, tmp_path / "run", config.engine) as bridge:
        list(training_loop(config, bridge, model_dir, tmp_path / "run"))
    first, second, third, again, *rest = ([group.id for group in groups] for groups in batches)
    assert again == third  # the checkpoint is of step 2
    taken = [id for ids in (first, second, third, *rest) for id in ids]
    assert sorted(taken) == sorted(f"{step}/{i}" for step in range(1, 6) for i in range(4))
    assert check(Journal(tmp_path / "run" / "journal.sqlite"), config.max_staleness) == []


@pytest.mark.parametrize(
    ("prompts", "quantile", "surplus", "ahead"),
    [(32, 0.8, 8, 1), (4, 0.8, 1, 1), (10, 0.99, 1, 1), (3, 0.25, 9, 3)],
)
def test_surplus_and_steps_ahead_follow_from_the_quantile(prompts, quantile, surplus, ahead):
    algorithm = CONFIG.algorithm.replace(prompts=prompts)
    config = CONFIG.replace(quantile=quantile, algorithm=algorithm)
    assert (config.surplus, config.steps_ahead, config.bound) == (surplus, ahead, 2)
    assert config.replace(mode="async").surplus is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quantile": 1.0}, r"quantile must be less than 1, got 1\.0"),
        ({"quantile": 0.0}, r"quantile must be greater than 0"),
        ({"take_turns": True, "in_flight": "finish"}, "with take_turns engines sleep"),
        ({"take_turns": True, "mode": "one_step_off"}, "needs mode 'sync' or 'partial'"),
    ],
)
def test_conflicting_settings_are_rejected(settings, said):
    with pytest.raises(ConfigError, match=said):
        CONFIG.replace(**settings)
