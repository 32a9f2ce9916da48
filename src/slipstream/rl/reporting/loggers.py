"""Loggers of a run's records: JSON lines always, TensorBoard and Weights & Biases if configured.

A logger is a context manager that yields a function to call with each record. All loggers get the same records, in order,
the file first. A logger that fails ends the run with a `LogError` that names it, since a gap in a curve would go unnoticed."""

from __future__ import annotations

import dataclasses
import importlib.util
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, LogError
from slipstream.rl.config import LoggingConfig, TrainConfig
from slipstream.rl.reporting.records import Evaluation, Log, Record, StepRecord, WarmupRecord, json_lines


def check(config: LoggingConfig) -> None:
    """Raise `ConfigError` if the package of a configured logger is not installed. Imports none of them."""
    for is_configured, package, setting, extra in (
        (config.tensorboard, "tensorboardX", "logging.tensorboard", "tensorboard"),
        (bool(config.wandb_project), "wandb", "logging.wandb_project", "wandb"),
    ):
        try:
            missing = is_configured and importlib.util.find_spec(package) is None
        except ValueError:  # blocked in sys.modules
            missing = True
        if missing:
            raise ConfigError(f"{setting} needs {package}; install it with: pip install 'slipstream-rl[{extra}]'")


@contextmanager
def open_logs(config: TrainConfig, run_dir: Path, after: int = 0) -> Iterator[Log]:
    """All configured loggers as one. `after` is the step that the run resumes from; 0 for a new run."""
    check(config.logging)
    loggers: dict[str, AbstractContextManager[Log]] = {"metrics.jsonl": json_lines(run_dir / "metrics.jsonl")}
    if config.logging.tensorboard:
        loggers["tensorboard"] = tensorboard(run_dir / "tensorboard", after)
    if config.logging.wandb_project:
        loggers["wandb"] = wandb(config, run_dir)
    with fan_out(loggers) as log:
        yield log


@contextmanager
def fan_out(loggers: Mapping[str, AbstractContextManager[Log]]) -> Iterator[Log]:
    """Combine several named loggers. Failures to open, write or close name the logger."""
    with ExitStack() as stack:
        logs: dict[str, Log] = {}
        for name, logger in loggers.items():
            logs[name] = stack.enter_context(_named(name, logger))

        def write(record: Record) -> None:
            for name, log in logs.items():
                try:
                    log(record)
                except Exception as error:
                    raise _failed(name, f"write {_describe(record)}", error) from error

        yield write


@contextmanager
def tensorboard(directory: Path, after: int = 0) -> Iterator[Log]:
    """Event files for TensorBoard, which then ignores what an earlier process wrote beyond step `after`.

    Records are written directly: tensorboardX's own writer uses a thread, whose failures go unnoticed."""
    from tensorboardX import summary
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import RecordWriter

    directory.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads a run's files in order of their names.
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}"
    file = RecordWriter(str(directory / name))

    def event(step: int = 0, **fields: Any) -> None:
        file.write(event_pb2.Event(wall_time=time.time(), step=step, **fields).SerializeToString())

    def write(record: Record) -> None:
        for tag, value in scalars(record).items():
            event(step_of(record), summary=summary.scalar(tag, value))
        for tag, counts in histograms(record).items():
            values = [value for value, count in counts.items() for _ in range(count)]
            edges = [age - 0.5 for age in range(int(max(values)) + 2)]  # ages are integers: one bar each
            event(step_of(record), summary=summary.histogram(tag, values, bins=edges))
        file.flush()

    try:
        event(file_version="brain.Event:2")
        if after:
            event(after + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        file.flush()
        yield write
    finally:
        file.close()


@contextmanager
def wandb(config: TrainConfig, run_dir: Path) -> Iterator[Log]:
    """A Weights & Biases run. A resumed run continues it; repeated steps have two points."""
    import wandb

    id_file = run_dir / "wandb_id"
    run_id = id_file.read_text().strip() if id_file.exists() else ""
    run = wandb.init(
        project=config.logging.wandb_project,
        dir=str(run_dir),
        config=config.model_dump(),
        id=run_id or None,
        resume="allow" if run_id else None,
    )
    id_file.write_text(run.id + "\n")
    # Use our own axes: W&B's step counter only increases, and would drop the repeated steps of a resumed run.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    run.define_metric("warmup/*", step_metric="warmup/step")

    def write(record: Record) -> None:
        values: dict[str, Any] = dict(scalars(record))
        for tag, counts in histograms(record).items():
            values[tag] = wandb.Histogram([value for value, count in counts.items() for _ in range(count)])
        if values:
            run.log(values | {"warmup/step" if isinstance(record, WarmupRecord) else "step": step_of(record)})

    try:
        yield write
    finally:
        run.finish()


# --- records as numbers -----------------------------------------------------------------------------------------------


def scalars(record: Record) -> dict[str, float]:
    """`{"rollout/reward": 0.25, "train/loss": -0.1, "seconds/generate": 0.5, "sync/pause_seconds": 0.002, …}`."""
    match record:
        case WarmupRecord():
            return {"warmup/loss": record.loss}
        case StepRecord():
            return {
                "rollout/reward": record.reward,
                "rollout/accuracy": record.accuracy,
                "rollout/tokens": float(record.num_tokens),
                "rollout/tokens_per_second": record.tokens_per_second,
                "rollout/version": float(record.version),
                "rollout/dropped": float(record.num_dropped),
                "rollout/resampled": float(record.num_resampled),
                **{f"train/{name}": float(value) for name, value in dataclasses.asdict(record.metrics).items()},
                **({} if record.mfu is None else {"train/mfu": record.mfu}),
                **({} if (kl := record.kl_without_replay) is None else {"train/kl_without_replay": kl}),
                **{f"seconds/{name}": float(value) for name, value in dataclasses.asdict(record.seconds).items()},
                "seconds/step": record.seconds.total,
                "sync/seconds": record.sync.total_seconds,
                "sync/pause_seconds": record.sync.pause_seconds,
                "sync/bytes": float(record.sync.num_bytes),
                **{f"memory/{name}": float(value) for name, value in record.memory.items()},
            }
        case Evaluation():
            names = ("sampled_train", "greedy_train", "sampled_heldout", "greedy_heldout")
            return {f"eval/{name}": getattr(record, name) for name in names if getattr(record, name) is not None}
        case _:
            return {}


def histograms(record: Record) -> dict[str, dict[float, int]]:
    """`{"rollout/staleness": {0: 200, 1: 56}}`: number of tokens by age in versions."""
    if not isinstance(record, StepRecord) or not record.staleness:
        return {}
    return {"rollout/staleness": {float(age): count for age, count in record.staleness.items()}}


def step_of(record: Record) -> int:
    return int(getattr(record, "step", 0))


# --- failures ---------------------------------------------------------------------------------------------------------


@contextmanager
def _named(name: str, logger: AbstractContextManager[Log]) -> Iterator[Log]:
    """The logger, with its name in failures to open and close. Errors of the run itself pass unchanged."""
    try:
        log = logger.__enter__()
    except ConfigError:
        raise
    except Exception as error:
        raise _failed(name, "be opened", error) from error
    try:
        yield log
    finally:
        try:
            logger.__exit__(None, None, None)
        except Exception as error:
            raise _failed(name, "be closed", error) from error


def _failed(name: str, what: str, error: Exception) -> LogError:
    kept = (
        ""
        if name == "metrics.jsonl"
        else "; the record is in metrics.jsonl. Fix the logger or disable it, then resume the run"
    )
    return LogError(f"logger {name!r} could not {what}: {type(error).__name__}: {error}{kept}")


def _describe(record: Record) -> str:
    return f"the {type(record).__name__} of step {step_of(record)}" if step_of(record) else f"a {type(record).__name__}"
