"""The training loop with a real engine in this process: learning, repeatability, and what it refuses."""

import dataclasses
import json
import time

import numpy as np
import pytest

import slipstream
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, InvalidPrompt, RewardFailed, RewardTimeout, VersionError
from slipstream.gateway.journal import Journal, check
from slipstream.model import checkpoint
from slipstream.rl.config import AlgorithmConfig, CorrectionConfig, KlConfig, RewardConfig, TaskConfig, TrainConfig
from slipstream.rl.evaluation import evaluate, require_versions
from slipstream.rl.learner import Learner
from slipstream.rl.loop import train
from slipstream.rl.prompts import Prompts
from slipstream.rl.records import Evaluation, Saved, StepRecord, WarmupRecord
from slipstream.rl.tasks import task_named
from slipstream.rl.tokens import Codec, init_small, small_model, write_small_model
from slipstream.types import Completion, SamplingParams, VersionSpan

CONFIG = TrainConfig(
    steps=30,
    warmup_steps=20,
    eval_every=15,
    seed=3,
    engines=0,
    task=TaskConfig(digits=2),
    algorithm=AlgorithmConfig(prompts=16, group=8, max_tokens=4),
    engine=EngineConfig(max_concurrency=128, max_model_len=16),
)


def records_of(config, model_dir, run_dir):
    with slipstream.inprocess(model_dir, engine=config.engine) as bridge:
        return list(train(config, bridge, model_dir, run_dir))


def of_kind(kind, records):
    return [r for r in records if isinstance(r, kind)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_small_model(path)
    return path


@pytest.fixture(scope="module")
def run(model_dir, tmp_path_factory):
    """`(records, run directory)` of one run of CONFIG."""
    run_dir = tmp_path_factory.mktemp("run")
    return records_of(CONFIG, model_dir, run_dir), run_dir


def test_accuracy_rises(run):
    before, *_, after = of_kind(Evaluation, run[0])
    assert before.step == 0 and after.step == CONFIG.steps
    assert after.sampled_train > before.sampled_train + 0.2
    assert after.sampled_heldout > before.sampled_heldout
    steps = of_kind(StepRecord, run[0])
    assert np.mean([s.accuracy for s in steps[-5:]]) > np.mean([s.accuracy for s in steps[:5]]) + 0.2


def test_every_step_is_on_policy_and_ends_with_a_new_version(run):
    steps = of_kind(StepRecord, run[0])
    assert [s.step for s in steps] == list(range(1, CONFIG.steps + 1))
    assert [s.version for s in steps] == list(range(CONFIG.steps))
    assert [s.sync.version for s in steps] == list(range(1, CONFIG.steps + 1))
    for s in steps:
        assert s.metrics.ratio == pytest.approx(1, abs=1e-4)  # engine and trainer agree on what the tokens' odds were
        assert s.metrics.kl == pytest.approx(0, abs=1e-6) and s.metrics.clip_share == 0
        assert 128 <= s.num_tokens <= 128 * 4 and s.reward == s.accuracy
        assert min(dataclasses.astuple(s.seconds)) >= 0 and s.tokens_per_second > 0


def test_records_come_in_order_and_are_logged(run):
    records, run_dir = run
    kinds = [type(r) for r in records]
    assert kinds == (
        [WarmupRecord] * 20 + [Evaluation] + ([StepRecord] * 15 + [Evaluation]) * 2 + [Saved]
    )  # the last evaluation is not repeated
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line.pop("kind") for line in lines] == [kind.__name__ for kind in kinds]
    assert lines == [json.loads(json.dumps(dataclasses.asdict(r))) for r in records]


def test_the_checkpoint_is_the_policy_that_was_evaluated_last(run):
    records, run_dir = run
    directory = run_dir / "checkpoint"
    assert records[-1] == Saved(str(directory)) and checkpoint.has_weights(directory)
    with slipstream.inprocess(directory, engine=CONFIG.engine) as bridge:
        again = evaluate(CONFIG, bridge, task_named(CONFIG.task), Codec(directory), CONFIG.steps)
    assert dataclasses.replace(again, version=CONFIG.steps) == of_kind(Evaluation, records)[-1]


def test_the_same_config_makes_the_same_records(run, model_dir, tmp_path):
    short = dataclasses.replace(CONFIG, steps=4, eval_every=2)
    other = dataclasses.replace(short, seed=4)

    def facts(records):
        """All that a record says but for what a clock told."""
        found = []
        for record in records:
            fields = dataclasses.asdict(record)
            for clocked in ("seconds", "sync", "directory"):
                fields.pop(clocked, None)
            found.append(fields)
        return found

    first = facts(records_of(short, model_dir, tmp_path / "a"))
    assert facts(records_of(short, model_dir, tmp_path / "b")) == first
    steps = [r for r in facts(run[0]) if "metrics" in r]
    assert [r for r in first if "metrics" in r] == steps[:4]  # a step's numbers do not depend on evaluations before it
    assert facts(records_of(other, model_dir, tmp_path / "c")) != first


def test_a_target_that_is_not_reached_runs_all_the_steps(model_dir, tmp_path):
    config = dataclasses.replace(CONFIG, warmup_steps=0, steps=2, target_accuracy=0.5)
    records = records_of(config, model_dir, tmp_path)
    assert len(of_kind(StepRecord, records)) == 2 and of_kind(Evaluation, records)[-1].step == 2


def test_weights_in_the_model_directory_are_where_training_starts(run, tmp_path):
    config = dataclasses.replace(CONFIG, warmup_steps=0, steps=12, min_steps=11, target_accuracy=0.01)
    records = records_of(config, run[1] / "checkpoint", tmp_path)
    start, end = of_kind(Evaluation, run[0])[-1], of_kind(Evaluation, records)[0]
    assert abs(end.greedy_train - start.greedy_train) < 1e-9  # the same weights and prompts; sampling seeds differ
    assert len(of_kind(StepRecord, records)) == 11  # far above its target all along, stopped when allowed to
    assert not of_kind(WarmupRecord, records)


@pytest.mark.parametrize("kind", ["dr_grpo", "dapo", "ppo", "reinforce++"])
def test_every_algorithm_runs_on_policy(kind, model_dir, tmp_path):
    algorithm = AlgorithmConfig(kind, prompts=16, group=8, max_tokens=4, micro_batches=2, kl=KlConfig(0.05))
    config = dataclasses.replace(CONFIG, warmup_steps=20, steps=2, algorithm=algorithm)
    records = records_of(config, model_dir, tmp_path)
    first, second = (step.metrics for step in of_kind(StepRecord, records))
    assert first.ratio == pytest.approx(1, abs=1e-4) and first.gradient_norm > 0
    assert first.reference_kl == pytest.approx(0, abs=1e-5)  # the reference is where training starts
    assert second.reference_kl > first.reference_kl
    assert (first.value_loss > 0) == (kind == "ppo")


def test_packed_rows_on_two_devices_make_the_same_run(model_dir, tmp_path):
    """With several updates per step, each of them dealt out, packed, and cut over the devices."""
    algorithm = dataclasses.replace(CONFIG.algorithm, epochs=2, minibatches=2, correction=CorrectionConfig("tis"))
    plain = dataclasses.replace(CONFIG, steps=3, algorithm=algorithm)
    packed = dataclasses.replace(plain, devices=2, algorithm=dataclasses.replace(algorithm, row_tokens=32))
    expected, found = (
        of_kind(StepRecord, records_of(config, model_dir, tmp_path / name))
        for config, name in ((plain, "plain"), (packed, "packed"))
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.reward == pytest.approx(theirs.reward, abs=0.01)
        assert ours.metrics.loss == pytest.approx(theirs.metrics.loss, abs=1e-3)
        assert ours.metrics.gradient_norm == pytest.approx(theirs.metrics.gradient_norm, rel=0.02)
    assert found[0].metrics.ratio != pytest.approx(1, abs=1e-4)  # later updates are off the policy before the step


def test_a_run_without_held_out_prompts_says_so(model_dir):
    config = dataclasses.replace(CONFIG, task=TaskConfig(digits=1, holdout=0.0))
    with slipstream.inprocess(model_dir, engine=CONFIG.engine) as bridge:
        bridge.sync(init_small(small_model(), 0))
        found = evaluate(config, bridge, task_named(config.task), Codec(model_dir), 0)
    assert found.sampled_heldout is None and found.greedy_heldout is None and 0 <= found.sampled_train <= 1


def test_tokens_of_another_version_are_refused():
    def completion(*spans):
        return Completion("r", 5, (1,), (1, 2), "", (), (), "stop", spans, "engine-7", prompt_index=2)

    require_versions([completion(VersionSpan(3, 0, 2))], [3])
    for spans in ((VersionSpan(2, 0, 2),), (VersionSpan(2, 0, 1), VersionSpan(3, 1, 2))):
        with pytest.raises(VersionError, match=r"version 3, but sample 5 of prompt 2 .* engine 'engine-7'"):
            require_versions([completion(VersionSpan(3, 0, 2)), completion(*spans)], [3, 3])


def test_a_rollout_that_fails_ends_the_run_and_is_no_reward_of_zero(model_dir, tmp_path):
    task = TaskConfig(name="add", digits=9)  # too long for max_model_len
    config = dataclasses.replace(CONFIG, task=task, warmup_steps=1)
    with pytest.raises(InvalidPrompt, match="prompt 0 of"):
        records_of(config, model_dir, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"WarmupRecord"}


def test_equal_prompts_in_a_step_get_samples_of_their_own(model_dir):
    prompts = Prompts(CONFIG, task_named(CONFIG.task), Codec(model_dir), 12)
    seeds = [[s.seed for s in prompts.of(step).sampling] for step in (1, 2)]
    assert len({*seeds[0], *seeds[1]}) == 2 * CONFIG.algorithm.prompts
    assert prompts.of(1).sampling[0] == SamplingParams(max_tokens=4, n=8, temperature=1.0, seed=seeds[0][0])
    assert prompts.of(1).ids[:2] == ("1/0", "1/1") and prompts.text("2/3") == prompts.of(2).texts[3]


@pytest.mark.parametrize(("mode", "bound"), [("sync", 0), ("partial", 2), ("async", 2)])
def test_prompts_that_teach_nothing_are_replaced_by_others(mode, bound, model_dir, tmp_path, monkeypatch):
    """DAPO's dynamic sampling. Groups are small, so that many of them are all right or all wrong."""
    learned = []
    learn = Learner.learn
    monkeypatch.setattr(Learner, "learn", lambda self, step, batch: learned.append(batch) or learn(self, step, batch))
    algorithm = AlgorithmConfig("dapo", prompts=8, group=4, max_tokens=4)
    config = dataclasses.replace(
        CONFIG, mode=mode, max_staleness=2, steps=6, eval_every=6, diagnose_every=3, algorithm=algorithm
    )
    with slipstream.inprocess(model_dir, engine=config.engine, run_dir=tmp_path) as bridge:
        steps = of_kind(StepRecord, train(config, bridge, model_dir, tmp_path))
    assert all(s.num_resampled in (0, 8, 16, 24) for s in steps) and any(s.num_resampled for s in steps)
    for step, batch in zip(steps, learned, strict=True):
        informative = np.asarray(batch.mask).any(axis=1).reshape(8, 4).all(axis=1)
        assert informative.all() or step.num_resampled == 24
        assert informative.any() and sum(step.staleness.values()) == np.asarray(batch.mask).sum()
        assert step.num_tokens > sum(step.staleness.values()) or not step.num_resampled
    assert [s.version for s in steps] == list(range(6))
    assert max(int(age) for s in steps for age in s.staleness) <= bound
    journal = Journal(tmp_path / "journal.sqlite")
    taken = [t.id for t in journal.taken(0, 10_000)]
    assert len(taken) == len(set(taken)) == sum(8 + s.num_resampled for s in steps)
    assert check(journal, bound) == []


def test_a_completion_that_is_too_long_is_worth_less_but_judged_as_before(model_dir, tmp_path, monkeypatch):
    earned = []
    prepare = Learner.prepare
    monkeypatch.setattr(
        Learner,
        "prepare",
        lambda self, batch, rewards, bonus: (
            earned.append((batch, rewards + bonus)) or prepare(self, batch, rewards, bonus)
        ),
    )
    config = with_reward("half")
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, overlong_tokens=2))
    (step,) = of_kind(StepRecord, records_of(config, model_dir, tmp_path))
    ((batch, rewards),) = earned
    lengths = np.asarray(batch.mask).sum(axis=1).reshape(rewards.shape)
    assert {0.5, -0.5} <= set(rewards.flat) and (rewards == 0.5 - np.maximum(0, lengths - 2) / 2).all()
    assert step.reward == 0.5 and step.metrics.gradient_norm > 0  # only lengths differ, and they teach


@pytest.mark.parametrize(("mode", "bound"), [("one_step_off", 1), ("async", 3)])
def test_engines_run_ahead_as_far_as_they_may(mode, bound, model_dir, tmp_path):
    config = dataclasses.replace(CONFIG, mode=mode, max_staleness=3, steps=12, eval_every=12, diagnose_every=6)
    steps = of_kind(StepRecord, records_of(config, model_dir, tmp_path))
    assert [s.step for s in steps] == list(range(1, 13)) and [s.version for s in steps] == list(range(12))
    ages = {int(age) for s in steps for age in s.staleness}
    assert max(ages) <= bound and max(ages) >= 1
    assert [bool(s.mismatch) for s in steps] == [s.step % 6 == 0 for s in steps]
    assert all(sum(s.staleness.values()) == s.num_tokens for s in steps)


def test_every_prompt_is_trained_on_once_in_any_mode(model_dir, tmp_path):
    config = dataclasses.replace(CONFIG, mode="async", steps=8, eval_every=8)
    with slipstream.inprocess(model_dir, engine=config.engine, run_dir=tmp_path) as bridge:
        list(train(config, bridge, model_dir, tmp_path))
    journal = Journal(tmp_path / "journal.sqlite")
    taken = [t.id for t in journal.taken(0, 10_000)]
    assert sorted(taken) == sorted(f"{step}/{i}" for step in range(1, 9) for i in range(16))
    assert check(journal, config.max_staleness) == []


# --- bad input ---


def half(prompt, completion):
    return 0.5


def raises(prompt, completion):
    raise ValueError("I do not like this one")


def hangs(prompt, completion):
    time.sleep(60)


def nan(prompt, completion):
    return float("nan")


def with_reward(name, **settings):
    functions = {f"tests.rl.test_loop:{name}": 1.0}
    return dataclasses.replace(CONFIG, warmup_steps=1, steps=1, reward=RewardConfig(functions, **settings))


def test_rewards_of_ones_own(model_dir, tmp_path):
    (step,) = of_kind(StepRecord, records_of(with_reward("half"), model_dir, tmp_path))
    assert step.reward == 0.5 and step.accuracy == 0


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("raises", RewardFailed, "I do not like this one"),
        ("hangs", RewardTimeout, "0.5 s"),
        ("nan", RewardFailed, "nan"),
    ],
)
def test_a_reward_that_fails_ends_the_run_and_is_no_zero(name, error, text, model_dir, tmp_path):
    with pytest.raises(error, match=text):
        records_of(with_reward(name, timeout=0.5 if name == "hangs" else 30.0), model_dir, tmp_path)
    assert "StepRecord" not in (tmp_path / "metrics.jsonl").read_text()


def picky(prompt, completion):
    """Does not like answers that begin with an even digit, and loves the others."""
    if completion[:1] in "02468":
        raise ValueError("even")
    return 1.0


def test_samples_that_cannot_be_judged_are_left_out_and_are_no_zeros(model_dir, tmp_path):
    config = with_reward("picky", on_error="drop")
    config = dataclasses.replace(config, warmup_steps=20)
    (step,) = of_kind(StepRecord, records_of(config, model_dir, tmp_path))
    assert 0 < step.num_dropped < 128
    assert step.reward == step.accuracy == 1  # of all that were judged
    assert sum(step.staleness.values()) < step.num_tokens  # tokens that were learned from
    assert step.metrics.loss == 0  # all that is left has the same reward; a zero in between would teach


def test_a_step_of_which_nothing_can_be_judged_ends_the_run(model_dir, tmp_path):
    with pytest.raises(RewardFailed, match="of 128 samples none is left to train on"):
        records_of(with_reward("raises", on_error="drop"), model_dir, tmp_path)


def test_a_reward_that_is_not_there_is_said_before_anything_runs(model_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean.*half"):
        records_of(with_reward("hlaf"), model_dir, tmp_path)


def test_prompts_that_are_too_long_and_tasks_without_any(model_dir):
    task, codec = task_named(CONFIG.task), Codec(model_dir)
    with pytest.raises(ConfigError, match=r"has \d+ tokens, and there is room for 2 before 4 more"):
        Prompts(CONFIG, task, codec, 2).of(1)

    class Empty:
        name = "empty"

        def prompts(self, rng, count, split="train"):
            return []

    with pytest.raises(ConfigError, match="task 'empty' gave 0 prompts where a step needs 16"):
        Prompts(CONFIG, Empty(), codec, 99).of(1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mode": "async", "take_turns": True}, "take_turns lets engines sleep"),
        ({"max_staleness": 0}, "max_staleness must be at least 1"),
    ],
)
def test_settings_that_do_not_go_together(settings, text):
    with pytest.raises(ConfigError, match=text):
        dataclasses.replace(CONFIG, **settings)
