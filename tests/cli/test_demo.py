"""The demo end to end with real processes, and its output."""

import dataclasses
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from rich.console import Console

from slipstream.cli import demo
from slipstream.config import load
from slipstream.errors import ConfigError, Unsupported
from slipstream.model.checkpoints import hf_weights
from slipstream.rl.config import TrainConfig
from slipstream.rl.reporting import plot
from slipstream.rl.reporting.progress import training_display
from slipstream.rl.reporting.records import Evaluation, PhaseSeconds, StepRecord, UpdateMetrics, WarmupRecord
from slipstream.types import SyncReport
from tests.rl.runs import SHORT

METRICS = UpdateMetrics(loss=-0.1, ratio=1.0, clip_share=0.0, kl=0.0, entropy=0.7, gap=0.0, gradient_norm=2.0)
SYNC = SyncReport(7, 1000, 0.0, 0.001, 0.001, 0.001, 0.0035, ())
STEP = StepRecord(20, 6, 0.25, 0.125, 1000, METRICS, PhaseSeconds(0.0, 0.5, 0.0, 0.1, 0.004), SYNC)
EVALUATION = Evaluation(20, 7, 0.5, 0.625, 0.375, 0.75)


def console(**options):
    return Console(file=io.StringIO(), width=160, **options)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_demo_with_processes_and_too_few_steps_says_that_it_did_not_learn(tmp_path, monkeypatch):
    small = {name: getattr(SHORT, name) for name in ("warmup_steps", "eval_prompts", "task", "algorithm", "engine")}
    monkeypatch.setattr(demo, "TrainConfig", lambda **settings: TrainConfig(**settings | small))
    out = console()
    assert demo.run(steps=3, engines=1, out=str(tmp_path / "run"), console=out) == 1
    said = out.file.getvalue()
    assert "did not learn" in said and "Learned" not in said
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "StepRecord"]
    assert [s["step"] for s in steps] == [1, 2, 3] and [s["version"] for s in steps] == [0, 1, 2]
    assert {e["transport"] for s in steps for e in s["sync"]["engines"]} == {"shm"}  # another process
    assert hf_weights.has_weights(tmp_path / "run" / "checkpoint")
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")

    first, last = (line for line in lines if line["kind"] == "Evaluation")
    for name, row in (("sampled_train", "training prompts, sampled"), ("greedy_heldout", "held-out prompts, greedy")):
        shown = next(line for line in said.splitlines() if row in line and "→" in line)
        assert f"{first[name]:.3f} → {last[name]:.3f}" in shown
    with pytest.raises(ConfigError, match="already holds a run"):
        demo.run(steps=3, out=str(tmp_path / "run"), console=out)


# A shell ignores SIGINT in background jobs, and the demo would inherit that.
_INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from slipstream.cli.main import main
main()
"""


def test_an_interrupted_demo_ends_its_processes(tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", _INTERRUPTIBLE, "demo", "--out", str(run_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 150
        while not (run_dir / "metrics.jsonl").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        gateway = json.loads((run_dir / "gateway.json").read_text())["pid"]
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "interrupted after" in said and "Traceback" not in said
    assert not alive(gateway)


def test_exit_codes_of_train(tmp_path):
    def train(name, **changes):
        config = SHORT.replace(run_dir=str(tmp_path / name), **changes)
        return demo.run_train(config, console())

    assert train("reached", steps=12, warmup_steps=20, target_accuracy=0.001) == 0
    assert train("missed", target_accuracy=1.0) == 1


def test_without_a_directory_a_run_makes_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert demo.run_train(SHORT, console()) == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert {"metrics.jsonl", "curve.png", "checkpoint", "model"} <= {p.name for p in made.iterdir()}


def test_a_restarted_trainer_finds_the_programs_that_the_last_one_compiled(tmp_path, monkeypatch):
    def interrupt(_session):
        raise KeyboardInterrupt

    settings = {}
    monkeypatch.setattr(demo.TrainSession, "__enter__", lambda session: session)
    monkeypatch.setattr(demo.TrainSession, "records", interrupt)
    monkeypatch.setattr(jax.config, "update", settings.__setitem__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.run_train(SHORT.replace(run_dir=str(tmp_path / "run")), console()) == 130
    assert settings == {}  # the user has configured another cache (tests/conftest.py)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    assert demo.run_train(SHORT.replace(run_dir=str(tmp_path / "run")), console()) == 130
    assert settings["jax_compilation_cache_dir"] == str(tmp_path / "slipstream" / "programs")


def test_the_example_config_is_one():
    path = Path(__file__).parents[2] / "examples" / "train.toml"
    config = load(TrainConfig, path, ["seed=3", "task.name=sort"])
    assert (config.seed, config.task.name) == (3, "sort")
    assert config.algorithm.prompts * config.algorithm.group <= config.engine.max_num_seqs


def test_plain_lines_where_there_is_no_terminal():
    out = console()
    with training_display(out, warmup_steps=2, steps=50) as show:
        for record in (
            WarmupRecord(1, 3.5),
            WarmupRecord(2, 1.25),
            STEP,
            dataclasses.replace(STEP, step=21),
            EVALUATION,
        ):
            show(record)
    warm_first, warm_last, step, evaluation = out.file.getvalue().splitlines()
    assert "3.500" in warm_first and "1.250" in warm_last
    for part in ("step   20", "reward 0.250", "accuracy 0.125", "1,656 tokens/s", "sync 3.5 ms", "version 7"):
        assert part in step
    assert "0.500 sampled, 0.625 greedy" in evaluation and "0.375 sampled, 0.750 greedy" in evaluation


def test_a_live_bar_where_there_is_one():
    out = console(force_terminal=True, color_system=None)
    with training_display(out, warmup_steps=2, steps=50) as show:
        for record in (WarmupRecord(2, 1.25), dataclasses.replace(EVALUATION, step=0), STEP):
            show(record)
    said = out.file.getvalue()
    assert "20/50" in said and "accuracy 0.125" in said and "evaluation after 0 steps" in said


def test_a_run_without_held_out_prompts_can_be_shown_and_plotted(tmp_path):
    bare = dataclasses.replace(EVALUATION, sampled_heldout=None, greedy_heldout=None)
    out = console()
    with training_display(out, warmup_steps=0, steps=50) as show:
        show(bare)
    assert "held-out" not in out.file.getvalue()
    assert plot.write_curve(tmp_path / "c.png", [STEP], [bare]).stat().st_size > 1000


def test_without_matplotlib_there_is_a_hint_and_no_plot(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unsupported, match=r"pip install 'slipstream-rl\[plot\]'"):
        plot.write_curve(tmp_path / "c.png", [STEP], [EVALUATION])
    out = console()
    assert demo.run_train(SHORT.replace(run_dir=str(tmp_path / "run")), out) == 0
    assert "pip install 'slipstream-rl[plot]'" in out.file.getvalue()


def test_smooth_is_a_trailing_mean():
    values = [0.0, 1.0, 5.0, 3.0]
    expected = [sum(values[max(0, i - 1) : i + 1]) / len(values[max(0, i - 1) : i + 1]) for i in range(4)]
    assert plot.smooth(values, width=2).tolist() == expected


def test_medians_leave_out_an_outlier():
    assert plot.medians([1.0, 1.0, 90.0, 2.0, 2.0], width=3).tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]
