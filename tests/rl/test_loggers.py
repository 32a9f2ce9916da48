"""Loggers: TensorBoard round trip, W&B calls, and failures."""

import json
import os
import sys
import types
from contextlib import contextmanager

import pytest

from slipstream.config import load
from slipstream.errors import ConfigError, LogError
from slipstream.rl.config import LoggingConfig, TrainConfig
from slipstream.rl.reporting import loggers
from slipstream.rl.reporting.records import (
    Evaluation,
    PhaseSeconds,
    Saved,
    StepRecord,
    UpdateMetrics,
    WarmupRecord,
    json_lines,
    read_records,
)
from slipstream.types import CommitReport, EngineSync, StageReport, SyncReport

METRICS = UpdateMetrics(loss=-0.1, ratio=1.0, clip_share=0.25, kl=0.5, entropy=0.7, gap=0.01, gradient_norm=2.0)
ENGINE = EngineSync("e", "shm", StageReport(1000, 0.0), CommitReport(0.002, 0.0))
SYNC = SyncReport(7, 1000, 0.0, 0.001, 0.001, 0.001, 0.0035, (ENGINE,))
EVALUATION = Evaluation(2, 7, 0.5, 0.625, None, None)
TENSORBOARD = TrainConfig(logging=LoggingConfig(tensorboard=True))


def step(number, reward=0.25, staleness=None, mfu=None):
    seconds = PhaseSeconds(0.0, 0.5, 0.0, 0.125, 0.25)
    fields = (number, 6, reward, 0.125, 1000, METRICS, seconds, SYNC, staleness or {})
    return StepRecord(*fields, memory={"training": 64}, mfu=mfu)


def read_events(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return events


def points(events, tag):
    return [(e.step, e.value) for e in events.Scalars(tag)]


def test_tensorboard_round_trip(tmp_path):
    records = [WarmupRecord(1, 3.5), step(1), step(2, 0.5, {0: 3, 2: 1}, mfu=0.375), EVALUATION, Saved("x")]
    with loggers.open_logs(TENSORBOARD, tmp_path) as log:
        for record in records:
            log(record)
    events = read_events(tmp_path / "tensorboard")
    assert points(events, "rollout/reward") == [(1, 0.25), (2, 0.5)]
    assert points(events, "warmup/loss") == [(1, 3.5)]
    assert points(events, "train/mfu") == [(2, 0.375)]  # only where it is known
    assert points(events, "eval/greedy_train") == [(2, 0.625)] and "eval/greedy_heldout" not in events.Tags()["scalars"]
    expected = {
        "rollout/accuracy": 0.125,
        "rollout/tokens_per_second": 1000 / 0.875,
        "train/loss": -0.1,
        "train/kl": 0.5,
        "train/entropy": 0.7,
        "train/clip_share": 0.25,
        "train/gap": 0.01,
        "seconds/generate": 0.5,
        "seconds/train": 0.125,
        "seconds/step": 0.875,
        "sync/seconds": 0.0035,
        "sync/pause_seconds": 0.002,
        "memory/training": 64,
    }
    for tag, value in expected.items():
        assert points(events, tag) == [(1, pytest.approx(value)), (2, pytest.approx(value))]
    (ages,) = events.Histograms("rollout/staleness")
    assert ages.step == 2
    found = ages.histogram_value
    assert (found.num, found.sum, found.min, found.max) == (4, 2, 0, 2)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(records)


def test_tensorboard_hides_repeated_steps_of_a_resumed_run(tmp_path):
    for after, rewards in ((0, {1: 0.1, 2: 0.2, 3: 0.9}), (2, {3: 0.3, 4: 0.4})):
        with loggers.open_logs(TENSORBOARD, tmp_path, after) as log:
            for number, reward in rewards.items():
                log(step(number, reward))
    found = points(read_events(tmp_path / "tensorboard"), "rollout/reward")
    assert found == [(n, pytest.approx(n / 10)) for n in (1, 2, 3, 4)]


def test_staleness_is_counted_by_age():
    assert loggers.histograms(step(1, staleness={"0": 3, "2": 1})) == {"rollout/staleness": {0.0: 3, 2.0: 1}}
    assert loggers.histograms(step(1)) == {} == loggers.histograms(WarmupRecord(1, 2.0))


@pytest.mark.parametrize(
    ("override", "package", "extra"),
    [("logging.tensorboard=true", "tensorboardX", "tensorboard"), ("logging.wandb_project=p", "wandb", "wandb")],
)
def test_a_missing_logger_package_is_reported_with_its_extra(tmp_path, monkeypatch, override, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    config = load(TrainConfig, None, [override])
    for refuse in (lambda: loggers.check(config.logging), lambda: loggers.open_logs(config, tmp_path).__enter__()):
        with pytest.raises(
            ConfigError, match=rf"needs {package}; install it with: pip install 'slipstream-rl\[{extra}\]'"
        ):
            refuse()
    loggers.check(LoggingConfig())


class FakeRun:
    def __init__(self, options):
        self.id, self.options, self.logged, self.axes, self.finished = options["id"] or "abc", options, [], {}, False

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch):
    """A fake of the package that records its calls."""
    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace(name="wandb")
    module.runs, module.Histogram = [], list

    def init(**options):
        module.runs.append(FakeRun(options))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_continues_its_run_on_resume(tmp_path, fake_wandb):
    config = TrainConfig(seed=5, logging=LoggingConfig(wandb_project="p"))
    for _ in range(2):
        with loggers.open_logs(config, tmp_path) as log:
            for record in (WarmupRecord(1, 3.5), step(1, staleness={"1": 2}), Saved("x")):
                log(record)
    first, second = fake_wandb.runs
    assert first.options["project"] == "p" and first.options["config"]["seed"] == 5 and first.options["id"] is None
    assert second.options["id"] == "abc" and second.options["resume"] == "allow"
    warmup, rl = first.logged
    assert warmup == {"warmup/loss": 3.5, "warmup/step": 1}
    assert rl["step"] == 1 and rl["rollout/reward"] == 0.25 and rl["rollout/staleness"] == [1.0, 1.0]
    assert first.axes["*"] == "step" and first.finished and second.finished


def test_a_logger_that_fails_is_named_and_the_file_has_the_record(tmp_path):
    @contextmanager
    def broken(when):
        if when == "opened":
            raise OSError("no room")

        def write(record):
            if when == "write":
                raise OSError("no room")

        yield write
        if when == "closed":
            raise OSError("no room")

    for when in ("opened", "write", "closed"):
        path = tmp_path / f"{when}.jsonl"
        names = {"metrics.jsonl": json_lines(path), "other": broken(when)}
        said = rf"logger 'other' could not (be )?{when}.*OSError: no room"
        with pytest.raises(LogError, match=said), loggers.fan_out(names) as log:
            log(step(3))
        assert read_records(path) == ([] if when == "opened" else [step(3)])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_reported_by_its_logger(tmp_path, monkeypatch):
    from tensorboardX import record_writer

    real = record_writer.open_file
    monkeypatch.setattr(record_writer, "open_file", lambda path: real("/dev/full"))
    with (
        pytest.raises(LogError, match=r"logger 'tensorboard'.*No space left"),
        loggers.open_logs(TENSORBOARD, tmp_path) as log,
    ):
        log(step(1))


def test_errors_of_the_run_are_not_attributed_to_loggers(tmp_path):
    with pytest.raises(KeyError, match="of the run"), loggers.open_logs(TENSORBOARD, tmp_path) as log:
        log(step(1))
        raise KeyError("of the run")
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1
