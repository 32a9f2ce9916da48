"""The training loop with a real engine in this process: learning, reproducibility, errors."""

import dataclasses
import json
import sqlite3
import time

import jax
import numpy as np
import pytest

import slipstream
from slipstream.config import EmbeddedConfig, RecordConfig
from slipstream.errors import ConfigError, InvalidPrompt, RewardFailed, RewardTimeout, UpdateNotFinite, VersionError
from slipstream.gateway.journal import Journal
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.sample_model import sample_config, sample_params, write_sample_config
from slipstream.rl.config import AlgorithmConfig, RewardConfig, TaskConfig, TrainConfig
from slipstream.rl.data.prompts import PromptSource
from slipstream.rl.data.tasks import task_named
from slipstream.rl.data.tokens import Codec
from slipstream.rl.reporting.records import Evaluation, Saved, StepRecord, WarmupRecord
from slipstream.rl.trainer import run as trainer_run
from slipstream.rl.trainer.evaluation import evaluate, require_versions
from slipstream.rl.trainer.learner import Learner
from slipstream.rl.trainer.loop import training_loop
from slipstream.types import Completion, SamplingParams, VersionSpan
from tests.gateway.history import check
from tests.rl.runs import SHORT

CONFIG = TrainConfig(
    steps=20,
    warmup_steps=20,
    eval_every=10,
    eval_prompts=48,
    seed=3,
    engines=0,
    task=TaskConfig(digits=2),
    algorithm=AlgorithmConfig(prompts=16, group=8, max_tokens=4),
    engine=EmbeddedConfig(max_num_seqs=128, max_model_len=16),
)


def records_of(config, model_dir, run_dir):
    with slipstream.inprocess(model_dir, engine=config.engine) as bridge:
        return list(training_loop(config, bridge, model_dir, run_dir))


def of_kind(kind, records):
    return [r for r in records if isinstance(r, kind)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_sample_config(path)
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
        assert s.metrics.ratio == pytest.approx(1, abs=1e-4)  # engine and trainer logprobs agree
        assert s.metrics.kl == pytest.approx(0, abs=1e-6) and s.metrics.clip_share == 0
        assert 128 <= s.num_tokens <= 128 * 4 and s.reward == s.accuracy
        assert min(dataclasses.astuple(s.seconds)) >= 0 and s.tokens_per_second > 0


def test_records_come_in_order_and_are_logged(run):
    records, run_dir = run
    kinds = [type(r) for r in records]
    assert kinds == (
        [WarmupRecord] * 20 + [Evaluation] + ([StepRecord] * 10 + [Evaluation]) * 2 + [Saved]
    )  # the last evaluation is not repeated
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line.pop("kind") for line in lines] == [kind.__name__ for kind in kinds]
    assert lines == [json.loads(json.dumps(dataclasses.asdict(r))) for r in records]


def test_the_run_is_recorded(run):
    """The record agrees with metrics that are computed elsewhere: in the loss, and from the rewards."""
    records, run_dir = run
    steps = of_kind(StepRecord, records)
    with sqlite3.connect(run_dir / "record/run.sqlite") as db:
        db.row_factory = sqlite3.Row
        recorded = db.execute("SELECT * FROM steps ORDER BY step").fetchall()
        evaluations = db.execute("SELECT step, sampled_train FROM evaluations ORDER BY step").fetchall()
        phases = {row[0] for row in db.execute("SELECT DISTINCT name FROM spans WHERE lane = 'trainer'")}
        assert [row[0] for row in db.execute("SELECT version FROM syncs ORDER BY version")] == list(
            range(len(steps) + 1)
        )
    for step, row in zip(steps, recorded, strict=True):
        assert (row["step"], row["rollout_reward"], row["train_loss"]) == (step.step, step.reward, step.metrics.loss)
        np.testing.assert_allclose(row["mismatch_mean"], step.metrics.gap, rtol=1e-2, atol=1e-9)
    assert {"generate", "train", "sync", "send", "evaluate", "warm-up", "save"} <= phases
    assert [tuple(row) for row in evaluations] == [(e.step, e.sampled_train) for e in of_kind(Evaluation, records)]
    with sqlite3.connect(run_dir / "record/rollouts-00000001.sqlite") as db:
        rewards = db.execute(
            "SELECT step, avg(reward), count(*), sum(length), sum(used) FROM samples GROUP BY step"
        ).fetchall()
    count = CONFIG.algorithm.prompts * CONFIG.algorithm.group
    for step, row in zip(steps, rewards, strict=True):
        assert row == (step.step, pytest.approx(step.reward), count, step.num_tokens, count)


def test_a_run_goes_on_without_its_recorder(model_dir, tmp_path):
    (tmp_path / "failing").mkdir()
    (tmp_path / "failing/record").write_text("no directory")
    config = SHORT.replace(steps=1)
    failing = records_of(config, model_dir, tmp_path / "failing")
    off = records_of(config.replace(record=RecordConfig(enabled=False)), model_dir, tmp_path / "off")
    assert not (tmp_path / "off/record").exists()
    assert [s.metrics for s in of_kind(StepRecord, failing)] == [s.metrics for s in of_kind(StepRecord, off)]


def test_the_checkpoint_is_the_policy_that_was_evaluated_last(run):
    records, run_dir = run
    directory = run_dir / "checkpoint"
    assert records[-1] == Saved(str(directory)) and hf_weights.has_weights(directory)
    with slipstream.inprocess(directory, engine=CONFIG.engine) as bridge:
        again = evaluate(CONFIG, bridge, task_named(CONFIG.task), Codec(directory), CONFIG.steps)
    assert dataclasses.replace(again, version=CONFIG.steps) == of_kind(Evaluation, records)[-1]


def test_runs_of_the_same_config_have_the_same_records(model_dir, tmp_path):
    config = SHORT.replace(steps=2, eval_every=1, warmup_steps=5)

    def facts(name, config=config):
        """All that the records of a run say but for what a clock told."""
        found = []
        for record in records_of(config, model_dir, tmp_path / name):
            fields = dataclasses.asdict(record)
            for clocked in ("seconds", "sync", "directory"):
                fields.pop(clocked, None)
            found.append(fields)
        return found

    first = facts("first")
    assert len(first) == 5 + 2 + 3 + 1 and facts("again") == first
    other = [r for r in facts("other", config.replace(seed=4)) if "loss" in r or "metrics" in r]
    assert len(other) == 7 and all(r not in first for r in other)


def test_a_target_that_is_not_reached_runs_all_the_steps(model_dir, tmp_path):
    config = SHORT.replace(steps=2, target_accuracy=0.5)
    records = records_of(config, model_dir, tmp_path)
    assert len(of_kind(StepRecord, records)) == 2 and of_kind(Evaluation, records)[-1].step == 2


def test_training_starts_from_the_weights_in_the_model_directory(run, tmp_path):
    config = SHORT.replace(warmup_steps=0, steps=12, min_steps=11, target_accuracy=0.01)
    config = config.replace(eval_prompts=CONFIG.eval_prompts, engine=CONFIG.engine)
    records = records_of(config, run[1] / "checkpoint", tmp_path)
    start, end = of_kind(Evaluation, run[0])[-1], of_kind(Evaluation, records)[0]
    assert abs(end.greedy_train - start.greedy_train) < 1e-9  # the same weights and prompts; sampling seeds differ
    assert len(of_kind(StepRecord, records)) == 11  # above its target from the start, stopped at min_steps
    assert not of_kind(WarmupRecord, records)


def test_evaluation_without_held_out_prompts_has_none(model_dir):
    config = CONFIG.replace(task=TaskConfig(digits=1, holdout=0.0))
    with slipstream.inprocess(model_dir, engine=CONFIG.engine) as bridge:
        bridge.sync(sample_params(sample_config(), 0))
        found = evaluate(config, bridge, task_named(config.task), Codec(model_dir), 0)
    assert found.sampled_heldout is None and found.greedy_heldout is None and 0 <= found.sampled_train <= 1


def test_tokens_of_another_version_are_rejected():
    def completion(*spans):
        return Completion("r", 5, (1,), (1, 2), "", (), (), "stop", spans, "engine-7", prompt_index=2)

    require_versions([completion(VersionSpan(3, 0, 2))], [3])
    for spans in ((VersionSpan(2, 0, 2),), (VersionSpan(2, 0, 1), VersionSpan(3, 1, 2))):
        with pytest.raises(VersionError, match=r"version 3, but sample 5 of prompt 2 .* engine 'engine-7'"):
            require_versions([completion(VersionSpan(3, 0, 2)), completion(*spans)], [3, 3])


def test_a_failed_rollout_ends_the_run(model_dir, tmp_path):
    task = TaskConfig(name="add", digits=9)  # too long for max_model_len
    config = SHORT.replace(task=task)
    with pytest.raises(InvalidPrompt, match="prompt 0 of"):
        records_of(config, model_dir, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"WarmupRecord"}


def test_every_prompt_of_a_step_has_its_own_seed(model_dir):
    prompts = PromptSource(CONFIG, task_named(CONFIG.task), Codec(model_dir), 12)
    seeds = [[s.seed for s in prompts.batch(step).sampling] for step in (1, 2)]
    assert len({*seeds[0], *seeds[1]}) == 2 * CONFIG.algorithm.prompts
    assert prompts.batch(1).sampling[0] == SamplingParams(max_tokens=4, n=8, temperature=1.0, seed=seeds[0][0])
    assert prompts.batch(1).ids[:2] == ("1/0", "1/1") and prompts.text("2/3") == prompts.batch(2).texts[3]


@pytest.mark.parametrize(("mode", "bound"), [("sync", 0), ("async", 2)])
def test_dapo_replaces_uninformative_groups(mode, bound, model_dir, tmp_path, monkeypatch):
    """Groups are small, so that many are all right or all wrong."""
    learned = []
    update = Learner.update
    monkeypatch.setattr(Learner, "update", lambda self, step, batch: learned.append(batch) or update(self, step, batch))
    algorithm = AlgorithmConfig(kind="dapo", prompts=8, group=4, max_tokens=4)
    config = SHORT.replace(mode=mode, max_staleness=2, warmup_steps=20, steps=4, diagnose_every=3, algorithm=algorithm)
    with slipstream.inprocess(model_dir, engine=config.engine, run_dir=tmp_path) as bridge:
        steps = of_kind(StepRecord, training_loop(config, bridge, model_dir, tmp_path))
    assert all(s.num_resampled in (0, 8, 16, 24) for s in steps) and any(s.num_resampled for s in steps)
    for step, batch in zip(steps, learned, strict=True):
        informative = np.asarray(batch.mask).any(axis=1).reshape(8, 4).all(axis=1)
        assert informative.all() or step.num_resampled == 24
        assert informative.any() and sum(step.staleness.values()) == np.asarray(batch.mask).sum()
        assert step.num_tokens > sum(step.staleness.values()) or not step.num_resampled
    assert [s.version for s in steps] == list(range(4))
    assert max(int(age) for s in steps for age in s.staleness) <= bound
    journal = Journal(tmp_path / "journal.sqlite")
    taken = [t.id for t in journal.taken(0, 10_000)]
    assert len(taken) == len(set(taken)) == sum(8 + s.num_resampled for s in steps)
    assert check(journal, bound) == []


def test_a_custom_reward_is_recorded_without_the_overlong_penalty(model_dir, tmp_path, monkeypatch):
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
    config = config.replace(algorithm=CONFIG.algorithm.replace(overlong_tokens=2), engine=CONFIG.engine)
    (step,) = of_kind(StepRecord, records_of(config, model_dir, tmp_path))
    ((batch, rewards),) = earned
    lengths = np.asarray(batch.mask).sum(axis=1).reshape(rewards.shape)
    assert {0.5, -0.5} <= set(rewards.flat) and (rewards == 0.5 - np.maximum(0, lengths - 2) / 2).all()
    assert step.reward == 0.5 and step.accuracy == 0
    assert step.metrics.gradient_norm > 0  # only lengths differ


@pytest.mark.parametrize(("mode", "bound"), [("async", 3)])
def test_engines_run_ahead_up_to_the_bound_and_every_prompt_counts_once(mode, bound, model_dir, tmp_path):
    config = SHORT.replace(mode=mode, max_staleness=3, steps=12, diagnose_every=6)
    with slipstream.inprocess(model_dir, engine=config.engine, run_dir=tmp_path) as bridge:
        steps = of_kind(StepRecord, training_loop(config, bridge, model_dir, tmp_path))
    assert [s.step for s in steps] == list(range(1, 13)) and [s.version for s in steps] == list(range(12))
    ages = {int(age) for s in steps for age in s.staleness}
    assert max(ages) <= bound and max(ages) >= 1
    assert [bool(s.mismatch) for s in steps] == [s.step % 6 == 0 for s in steps]
    assert all(sum(s.staleness.values()) == s.num_tokens for s in steps)
    with sqlite3.connect(tmp_path / "record/run.sqlite") as db:
        syncs = db.execute("SELECT version, step FROM syncs ORDER BY version").fetchall()
    assert syncs == [(step, step) for step in range(13)], "also the one that the last step overtook"
    journal = Journal(tmp_path / "journal.sqlite")  # every prompt is trained on once
    taken = [t.id for t in journal.taken(0, 10_000)]
    assert sorted(taken) == sorted(f"{step}/{i}" for step in range(1, 13) for i in range(4))
    assert check(journal, bound) == []


# --- bad input ---


def half(prompt, completion):
    return 0.5


def raises(prompt, completion):
    raise ValueError("I do not like this one")


def hangs(prompt, completion):
    time.sleep(60)


def with_reward(name, **settings):
    functions = {f"tests.rl.test_loop:{name}": 1.0}
    return SHORT.replace(steps=1, reward=RewardConfig(functions=functions, **settings))


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("raises", RewardFailed, "I do not like this one"),
        ("hangs", RewardTimeout, "0.5 s"),
    ],
)
def test_a_failed_reward_ends_the_run(name, error, text, model_dir, tmp_path):
    with pytest.raises(error, match=text):
        records_of(with_reward(name, timeout=0.5 if name == "hangs" else 30.0), model_dir, tmp_path)
    assert "StepRecord" not in (tmp_path / "metrics.jsonl").read_text()


def picky(prompt, completion):
    """Raises for answers that start with an even digit, and returns 1 for the others."""
    if completion[:1] in "02468":
        raise ValueError("even")
    return 1.0


def test_samples_without_reward_are_dropped_not_zero(model_dir, tmp_path):
    config = with_reward("picky", on_error="drop")
    config = config.replace(warmup_steps=20)
    (step,) = of_kind(StepRecord, records_of(config, model_dir, tmp_path))
    assert 0 < step.num_dropped < 16
    assert step.reward == step.accuracy == 1  # of all scored samples
    assert sum(step.staleness.values()) < step.num_tokens  # tokens that were trained on
    assert step.metrics.loss == 0  # all remaining rewards are equal; a zero would cause a gradient


def test_a_step_without_any_reward_ends_the_run(model_dir, tmp_path):
    with pytest.raises(RewardFailed, match="none of 16 samples is left to train on"):
        records_of(with_reward("raises", on_error="drop"), model_dir, tmp_path)


def test_a_missing_reward_function_is_reported_before_the_warm_up(model_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean.*half"):
        records_of(with_reward("hlaf"), model_dir, tmp_path)


def test_long_prompts_and_empty_tasks_are_rejected(model_dir):
    task, codec = task_named(CONFIG.task), Codec(model_dir)
    with pytest.raises(ConfigError, match=r"has \d+ tokens, but at most 2 leave room for 4 tokens"):
        PromptSource(CONFIG, task, codec, 2).batch(1)

    class Empty:
        name = "empty"

        def prompts(self, rng, count, split="train"):
            return []

    with pytest.raises(ConfigError, match="task 'empty' returned 0 prompts, but a step needs 16"):
        PromptSource(CONFIG, Empty(), codec, 99).batch(1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mode": "async", "take_turns": True}, "take_turns needs mode 'sync' or 'partial', got 'async'"),
        ({"max_staleness": 0}, "max_staleness must be greater than 0"),
    ],
)
def test_conflicting_settings_are_rejected(settings, text):
    with pytest.raises(ConfigError, match=text):
        CONFIG.replace(**settings)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_an_update_that_is_not_finite_never_reaches_the_weights(model_dir, tmp_path, monkeypatch, on_nonfinite):
    config = SHORT.replace(steps=3, on_nonfinite=on_nonfinite)
    prepare, step = Learner.prepare, 0

    def poisoned(self, batch, *arguments):
        nonlocal step
        step += 1
        batch = prepare(self, batch, *arguments)
        return batch._replace(advantages=batch.advantages * (np.nan if step == 2 else 1))

    monkeypatch.setattr(Learner, "prepare", poisoned)
    if on_nonfinite == "stop":
        with pytest.raises(
            UpdateNotFinite, match=r"step 2: loss or gradient is not finite.*prompt .*engine 'inprocess'"
        ):
            records_of(config, model_dir, tmp_path)
        assert not (tmp_path / "checkpoint").exists()
    else:
        records = records_of(config, model_dir, tmp_path)
        assert [s.metrics.num_skipped for s in of_kind(StepRecord, records)] == [0, 1, 0]
        weights = hf_weights.load(of_kind(Saved, records)[0].directory)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(weights))


def test_an_engine_that_disagrees_with_the_trainer_is_reported_and_not_learned_from(model_dir, tmp_path, monkeypatch):
    config = SHORT.replace(steps=1, diagnose_every=1)
    reported = []
    monkeypatch.setattr(trainer_run, "disagreeing_engines", lambda *_, **__: {"inprocess": "Wrong weights."})
    monkeypatch.setattr(slipstream.Bridge, "quarantine", lambda _, *report: reported.append(report))
    (step,) = of_kind(StepRecord, records_of(config, model_dir, tmp_path))
    assert reported == [("inprocess", "its logprobs differ from the trainer's. Wrong weights.", 0)]
    assert step.metrics.gradient_norm == 0 and not step.staleness
