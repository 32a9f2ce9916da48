"""Interrupted and resumed runs equal uninterrupted ones."""

import dataclasses
import io
import os
import random
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from rich.console import Console

import slipstream
from slipstream.cli import demo
from slipstream.errors import CheckpointError, ConfigError
from slipstream.gateway.journal import Journal
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.rl.config import RewardConfig
from slipstream.rl.reporting.records import Evaluation, Saved, StepRecord, WarmupRecord, read_records
from slipstream.rl.trainer import checkpoint, resume
from slipstream.rl.trainer.batch_log import BatchLog
from slipstream.rl.trainer.loop import training_loop
from tests.rl.runs import SHORT

CONFIG = SHORT.replace(steps=8, warmup_steps=3, eval_every=4, save_every=2)
SETTINGS = """
steps = 8
warmup_steps = 3
eval_every = 4
eval_prompts = 4
save_every = 2
seed = 3
engines = 0
[task]
digits = 2
[algorithm]
prompts = 4
group = 4
max_tokens = 4
[engine]
max_num_seqs = 16
max_model_len = 16
"""


def facts(records):
    """The records without times and versions, which a new fleet counts from 0."""
    found = []
    for record in records:
        fields = {"kind": type(record).__name__, **dataclasses.asdict(record)}
        for name in ("seconds", "sync", "directory", "version"):
            fields.pop(name, None)
        found.append(fields)
    return found


def exported(run_dir):
    return {
        name: np.asarray(a).tobytes() for name, a in hf_weights.flatten(hf_weights.load(run_dir / "checkpoint")).items()
    }


def run(config, model_dir, run_dir, until=None, journal=None):
    """The records of a run, which is left after the record that `until` says. What it takes is forgotten with it, unless there is
    a folder for the journal."""
    found = []
    with slipstream.inprocess(model_dir, engine=config.engine, run_dir=journal) as bridge:
        records = training_loop(config, bridge, model_dir, run_dir)
        for record in records:
            found.append(record)
            if until is not None and until(record):
                records.close()
                break
    return found


def at_step(step):
    return lambda record: isinstance(record, StepRecord) and record.step == step


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_sample_config(path)
    return path


@pytest.fixture(scope="module")
def whole(model_dir, tmp_path_factory):
    """`(records, run directory)` of CONFIG, never interrupted."""
    run_dir = tmp_path_factory.mktemp("whole")
    return run(CONFIG, model_dir, run_dir), run_dir


@pytest.fixture(scope="module")
def interrupted(model_dir, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("interrupted")
    run(CONFIG, model_dir, run_dir, until=at_step(5))
    return run_dir


@pytest.fixture
def left(interrupted, tmp_path):
    """The directory of a run interrupted after step 5, with a checkpoint of step 4."""
    return shutil.copytree(interrupted, tmp_path / "run")


def start_cli(config_file, run_dir):
    return subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", "train", str(config_file), f"run_dir={run_dir}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def num_lines(path):
    return path.read_text().count("\n") if path.exists() else 0


def test_two_devices_train_resume_and_export_the_same(whole, model_dir, tmp_path):
    """In packed rows, too."""
    config = CONFIG.replace(devices=2, algorithm=CONFIG.algorithm.replace(row_tokens=32))
    before = run(config, model_dir, tmp_path / "run", until=at_step(5))
    after = run(config, model_dir, tmp_path / "run")
    assert after[0].step == 5 and isinstance(after[-1], Saved)  # the checkpoint is of step 4
    alone = [r for r in whole[0] if isinstance(r, StepRecord)]
    steps = [r for r in (*before, *after) if isinstance(r, StepRecord)]
    assert [s.step for s in steps] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    for step in steps:
        other = alone[step.step - 1]
        assert step.reward == pytest.approx(other.reward, abs=1e-4)
        assert step.metrics.loss == pytest.approx(other.metrics.loss, abs=1e-4)
        assert step.metrics.gradient_norm == pytest.approx(other.metrics.gradient_norm, rel=0.02)
    ours, theirs = (hf_weights.flatten(hf_weights.load(d / "checkpoint")) for d in (tmp_path / "run", whole[1]))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, atol=1e-3)


@pytest.mark.parametrize("seed", range(int(os.environ.get("SLIPSTREAM_RESUME_SEEDS", "1"))))
def test_repeated_kills_give_the_same_weights(whole, tmp_path, seed):
    """kill -9 of the real command at random points: in the warm-up, between and during steps and saves. The engine is in its
    process; tests/chaos kills a trainer that has launched its fleet."""
    rng = random.Random(seed)
    (tmp_path / "run.toml").write_text(SETTINGS)
    run_dir, log, kills = tmp_path / "run", tmp_path / "run" / "metrics.jsonl", 0
    for saved in (False, True):
        process = start_cli(tmp_path / "run.toml", run_dir)
        try:
            before, wait, deadline = num_lines(log), rng.randrange(1, 5), time.monotonic() + 150
            # Resuming truncates the file, so count new lines from there.
            while process.poll() is None and time.monotonic() < deadline:
                before = min(before, num_lines(log))
                if num_lines(log) >= before + wait and (not saved or checkpoint.latest(run_dir)):
                    break
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.1))
            kills += process.poll() is None
        finally:
            process.kill()
            process.wait()
    last = start_cli(tmp_path / "run.toml", run_dir)
    said, _ = last.communicate(timeout=200)
    if last.returncode:
        assert "which finished after 8 steps" in said, said  # the last kill came too late
    else:
        assert "resuming from the checkpoint of step" in said
    assert kills  # how many of the kills were in time depends on the machine
    assert facts(read_records(log)) == facts(whole[0])
    assert exported(run_dir) == exported(whole[1])
    assert not list((run_dir / "state").glob(".*"))


def test_a_resumed_run_is_identical_to_an_uninterrupted_one(whole, left, model_dir):
    assert checkpoint.latest(left).name == "step-00000004"
    assert read_records(left / "metrics.jsonl")[-1].step == 5
    with slipstream.inprocess(model_dir, engine=CONFIG.engine) as bridge:
        for _ in range(3):  # engines with versions that the run never had
            bridge.sync(hf_weights.load(whole[1] / "checkpoint"))
        more = list(training_loop(CONFIG, bridge, model_dir, left))
    expected = [r for r in whole[0] if isinstance(r, Saved) or (not isinstance(r, WarmupRecord) and r.step > 4)]
    assert facts(more) == facts(expected)
    assert [r.version for r in more if isinstance(r, StepRecord)] == [3, 4, 5, 6]  # the fleet continues its own count
    assert all(r.sync.version == r.version + 1 for r in more if isinstance(r, StepRecord))
    assert facts(read_records(left / "metrics.jsonl")) == facts(whole[0])
    assert exported(left) == exported(whole[1])
    last = [checkpoint.read(checkpoint.latest(d))[0] for d in (left, whole[1])]
    assert dataclasses.replace(last[0], version=8) == last[1] and last[1].evaluated == 8


def test_a_resampling_run_resumes_at_its_cursor(model_dir, tmp_path):
    """The number of prompt batches per step depends on rewards."""
    algorithm = CONFIG.algorithm.replace(kind="dapo", resample=2)
    config = CONFIG.replace(steps=4, warmup_steps=10, algorithm=algorithm)
    expected = run(config, model_dir, tmp_path / "whole")
    assert any(r.num_resampled for r in expected if isinstance(r, StepRecord) and r.step <= 2)
    run(config, model_dir, tmp_path / "run", until=at_step(3))
    more = run(config, model_dir, tmp_path / "run")
    assert facts(more) == facts(expected)[-len(more) :] and isinstance(more[-1], Saved)
    assert facts(read_records(tmp_path / "run" / "metrics.jsonl")) == facts(expected)
    last = checkpoint.read(checkpoint.latest(tmp_path / "run"))[0]
    assert last.cursor == last.journal / 4 > last.step


FLAT = False


def moody(prompt, completion):
    """A reward that is not deterministic, like a judge model's."""
    return 0.5 if FLAT else float(len(completion) + 10 * sum(map(ord, completion)))


@pytest.mark.parametrize("then", [False, True])
def test_resumed_steps_take_the_same_batches_even_if_rewards_changed(then, model_dir, tmp_path, monkeypatch):
    """A step takes one batch if all groups are informative, and three if none is."""
    algorithm = CONFIG.algorithm.replace(kind="dapo", resample=2)
    reward = RewardConfig(functions={"tests.rl.test_resume:moody": 1.0}, workers=0)
    config = CONFIG.replace(steps=6, eval_every=6, keep_checkpoints=9, algorithm=algorithm, reward=reward)
    run_dir = tmp_path / "run"

    def left_after(step, flat):
        """The fifth and sixth step, as far as it came, and the versions for which groups were taken from the fifth on."""
        monkeypatch.setattr(sys.modules[__name__], "FLAT", flat)
        found = run(config, model_dir, run_dir, until=at_step(step), journal=run_dir)
        position = checkpoint.read(checkpoint.latest(run_dir))[0].journal
        versions = [t.version for t in Journal(run_dir / "journal.sqlite").taken(position, 1000)]
        steps = [r for r in found if isinstance(r, StepRecord) and r.step > 4]
        return [(r.step, r.version, r.num_resampled) for r in steps], versions

    assert left_after(5, flat=then) == ([(5, 4, 8 if then else 0)], [4] * (12 if then else 4))
    if then:  # step 5 had taken three batches: it takes them again, though one would suffice now
        assert left_after(6, flat=False) == ([(5, 4, 8), (6, 7, 0)], [4] * 12 + [7] * 4)
        # Interrupted twice: step 5 keeps its batches. Step 6 has one, and needs more now.
        assert left_after(6, flat=True) == ([(5, 4, 8), (6, 7, 8)], [4] * 12 + [7] * 4 + [10] * 8)
    else:  # step 5 had taken one: it takes more, from the restored weights
        assert left_after(6, flat=True) == ([(5, 4, 8), (6, 7, 8)], [4] * 4 + [6] * 8 + [7] * 12)
        assert left_after(6, flat=False) == ([(5, 4, 8), (6, 7, 8)], [4] * 4 + [6] * 8 + [7] * 12)


def test_a_batch_log_survives_a_truncated_line(tmp_path):
    log = BatchLog(tmp_path)
    assert log.num_batches(1) == 0 and not log.is_complete(1)
    for step, batches in ((1, 1), (1, 2), (2, 1), (1, 1)):
        log.record(step, batches)
    with (tmp_path / "batches.jsonl").open("a") as file:
        file.write("[3, ")
    again = BatchLog(tmp_path)
    assert (
        [again.num_batches(step) for step in (1, 2, 3)] == [2, 1, 0]
        and again.is_complete(1)
        and not again.is_complete(2)
    )
    again.record(2, 2)
    assert BatchLog(tmp_path).num_batches(2) == 2
    BatchLog(None).record(1, 1)


def test_a_run_killed_before_its_export_is_exported(whole, model_dir, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole[1], run_dir)
    shutil.rmtree(run_dir / "checkpoint")
    log = run_dir / "metrics.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"Saved"' not in line) + '{"kind": "Sa')
    assert facts(run(CONFIG, model_dir, run_dir)) == facts(whole[0][-1:])
    assert exported(run_dir) == exported(whole[1])


def test_a_finished_run_continues_only_with_more_steps(whole, model_dir, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole[1], run_dir)
    before = (run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"already holds a run, which finished after 8 steps.*increase steps"):
        run(CONFIG, model_dir, run_dir)
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    more = run(CONFIG.replace(steps=10, eval_every=5, save_every=1), model_dir, run_dir)
    assert [(type(r), getattr(r, "step", None)) for r in more] == [
        (StepRecord, 9),
        (StepRecord, 10),
        (Evaluation, 10),
        (Saved, None),
    ]


def test_fewer_steps_than_done_end_with_an_evaluation(left, model_dir, tmp_path):
    shutil.rmtree(left / "state" / "step-00000004")
    more = run(CONFIG.replace(steps=1), model_dir, left)  # the checkpoint is of step 2, not evaluated
    assert [(type(r), getattr(r, "step", None)) for r in more] == [(Evaluation, 2), (Saved, None)]


def test_another_config_is_rejected_with_its_differences(left, model_dir):
    other = CONFIG.replace(
        seed=4,
        steps=100,
        target_accuracy=0.5,
        algorithm=CONFIG.algorithm.replace(group=8, optimizer=CONFIG.algorithm.optimizer.replace(learning_rate=0.5)),
    )
    before = (left / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError) as refused:
        run(other, model_dir, left)
    said = str(refused.value)
    for line in (
        "seed: then 3, now 4",
        "algorithm.group: then 4, now 8",
        "algorithm.optimizer.learning_rate: then 0.001, now 0.5",
    ):
        assert f"\n  {line}\n" in said
    assert "steps: then" not in said and "target_accuracy: then" not in said
    assert (left / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match=r"seed: then 3, now 4"):  # also before any process starts
        demo.run_train(other.replace(run_dir=str(left)), Console(file=io.StringIO()))


def test_differences():
    then = CONFIG.model_dump()
    free = CONFIG.replace(steps=1, run_dir="x", eval_every=1, save_every=0, keep_checkpoints=5)
    assert resume.differences(then, free.model_dump()) == []
    now = {**then, "logging": {"tensorboard": True, "wandb_project": "p"}}
    assert resume.differences(then, now) == []
    old = {name: value for name, value in then.items() if name != "take_turns"}  # from a release without this setting
    assert resume.differences(old, then) == []
    assert resume.differences(old, then | {"take_turns": True}) == ["take_turns: then False, now True"]
    assert resume.differences(then | {"gone": 1}, then) == ["gone: then 1, now 'no such setting'"]


def test_a_run_killed_before_its_first_checkpoint_starts_again(whole, model_dir, tmp_path):
    run(CONFIG, model_dir, tmp_path / "run", until=at_step(1))
    with pytest.raises(ConfigError, match="seed: then 3, now 4"):
        run(CONFIG.replace(seed=4), model_dir, tmp_path / "run")
    assert facts(run(CONFIG, model_dir, tmp_path / "run")) == facts(whole[0])
    assert facts(read_records(tmp_path / "run" / "metrics.jsonl")) == facts(whole[0])


def test_a_run_without_checkpoints_is_not_overwritten(model_dir, tmp_path):
    config = CONFIG.replace(save_every=0)
    run(config, model_dir, tmp_path / "run", until=at_step(3))
    assert checkpoint.latest(tmp_path / "run") is None
    for other in (config, CONFIG):
        with pytest.raises(ConfigError, match=r"already holds a run .* without a checkpoint to resume from"):
            run(other, model_dir, tmp_path / "run")


def test_missing_or_damaged_files_are_reported(left, model_dir):
    log, kept = left / "metrics.jsonl", (left / "metrics.jsonl").read_text()

    def refused(said, error=ConfigError):
        with pytest.raises(error, match=said):
            run(CONFIG, model_dir, left)

    log.unlink()
    refused("has a checkpoint of step 4 but no metrics.jsonl")
    log.write_text("".join(line for line in kept.splitlines(True) if '"step": 3, "version"' not in line))
    refused("lacks step 3 .1 in all., but the checkpoint is of step 4")
    log.write_text("nonsense\n" + kept)
    refused("line 1 of .*metrics.jsonl is not a record of this release")
    log.write_text(kept)
    path = max(
        (p for p in (checkpoint.latest(left) / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    refused("is damaged", CheckpointError)
    for directory in (left / "state").iterdir():
        (directory / "state.json").unlink()
    refused("no complete checkpoint is left")


def test_two_processes_cannot_train_in_one_directory(left, model_dir):
    with resume.open_run(CONFIG, left) as start:
        assert start.step == 4
        with pytest.raises(ConfigError, match="is in use by another training process"):
            run(CONFIG, model_dir, left)
    with resume.open_run(CONFIG, left) as start:
        assert start == resume.ResumePoint(4, left / "state" / "step-00000004")


def test_records_round_trip(whole):
    assert read_records(whole[1] / "metrics.jsonl") == whole[0]


def test_the_target_includes_steps_before_the_checkpoint(model_dir, tmp_path):
    config = CONFIG.replace(steps=30, save_every=6)
    run(config, model_dir, tmp_path / "run", until=at_step(7))
    more = run(config.replace(target_accuracy=1e-9), model_dir, tmp_path / "run")
    steps = [r for r in read_records(tmp_path / "run" / "metrics.jsonl") if isinstance(r, StepRecord)]
    reached = next(i for i in range(10, 31) if np.mean([s.accuracy for s in steps[i - 10 : i]]) > 0)
    assert steps[-1].step == reached == [r for r in more if isinstance(r, Evaluation)][-1].step


def test_transformers_loads_the_export_with_equal_answers(whole, model_dir):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from slipstream.model.transformer import decoder

    directory = whole[1] / "checkpoint"
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    config, params = read_config(directory), hf_weights.load(directory)
    forward = jax.jit(decoder.forward, static_argnums=1)
    for prompt in ("12=", "90=", "57=", "33="):
        ids = tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            answer = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=6)[0].tolist()
        tokens = list(ids)
        while len(tokens) < len(answer):
            padded = np.zeros((1, len(ids) + 6), np.int32)
            padded[0, : len(tokens)] = tokens
            tokens.append(int(np.argmax(forward(params, config, padded)[0, len(tokens) - 1])))
        assert tokens == answer
        assert len(answer) == len(ids) + 6 or answer[-1] in config.eos_token_ids
    with slipstream.inprocess(directory, engine=CONFIG.engine) as bridge:
        (ours,) = bridge.generate(["12="], slipstream.SamplingParams(max_tokens=6, temperature=0.0))
        ids = tokenizer("12=")["input_ids"]
        with torch.no_grad():
            answer = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=6)[0].tolist()
        assert [*ours.prompt_token_ids, *ours.token_ids] == answer
