"""Where a run's records go: JSON lines always, TensorBoard and Weights & Biases where the config asks for them.

A logger is a context that gives a function to call with each record. All get the same records, in order, the file first.
One that fails ends the run with a `LogError` that names it: a curve with a hole would look like a curve."""

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
from slipstream.rl.records import Evaluation, Log, Record, StepRecord, WarmupRecord, json_lines


def check(config: LoggingConfig) -> None:
    """`ConfigError` if a logger is asked for whose package is not installed. Loads none of them."""
    for asked, package, setting, extra in (
        (config.tensorboard, "tensorboardX", "logging.tensorboard", "tensorboard"),
        (bool(config.wandb_project), "wandb", "logging.wandb_project", "wandb"),
    ):
        try:
            missing = asked and importlib.util.find_spec(package) is None
        except ValueError:  # barred from being imported
            missing = True
        if missing:
            raise ConfigError(f"{setting} needs {package}; get it with: pip install 'slipstream-rl[{extra}]'")


@contextmanager
def open_logs(config: TrainConfig, run_dir: Path, after: int = 0) -> Iterator[Log]:
    """All loggers that the config asks for, as one. `after` is the step that the run goes on from; 0 for a new one."""
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
    """One logger of several, by name: a failure to open, to write or to close says whose it is."""
    with ExitStack() as stack:
        logs: dict[str, Log] = {}
        for name, logger in loggers.items():
            logs[name] = stack.enter_context(_named(name, logger))

        def write(record: Record) -> None:
            for name, log in logs.items():
                try:
                    log(record)
                except Exception as error:
                    raise _failed(name, f"take {_describe(record)}", error) from error

        yield write


@contextmanager
def tensorboard(directory: Path, after: int = 0) -> Iterator[Log]:
    """Event files for TensorBoard. What an earlier process wrote beyond step `after` is hidden by it.

    Written here and now: tensorboardX's own writer does it in a thread, whose failures nobody hears of."""
    from tensorboardX import summary
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import RecordWriter

    directory.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads a run's files in the order of their names.
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}"
    file = RecordWriter(str(directory / name))

    def event(step: int = 0, **what: Any) -> None:
        file.write(event_pb2.Event(wall_time=time.time(), step=step, **what).SerializeToString())

    def write(record: Record) -> None:
        for tag, value in scalars(record).items():
            event(step_of(record), summary=summary.scalar(tag, value))
        for tag, counts in histograms(record).items():
            values = [value for value, count in counts.items() for _ in range(count)]
            edges = [age - 0.5 for age in range(int(max(values)) + 2)]  # ages are whole: a bar for each
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
    """A run of Weights & Biases. Going on, it is the same run there; steps done again have their points twice."""
    import wandb

    remembered = run_dir / "wandb_id"
    name = remembered.read_text().strip() if remembered.exists() else ""
    run = wandb.init(
        project=config.logging.wandb_project,
        dir=str(run_dir),
        config=dataclasses.asdict(config),
        id=name or None,
        resume="allow" if name else None,
    )
    remembered.write_text(run.id + "\n")
    # Axes of our own: the service's counter only grows, and would drop what a run that goes on does again.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    run.define_metric("warmup/*", step_metric="warmup/step")

    def write(record: Record) -> None:
        found: dict[str, Any] = dict(scalars(record))
        for tag, counts in histograms(record).items():
            found[tag] = wandb.Histogram([value for value, count in counts.items() for _ in range(count)])
        if found:
            run.log(found | {"warmup/step" if isinstance(record, WarmupRecord) else "step": step_of(record)})

    try:
        yield write
    finally:
        run.finish()


# --- what a record says, as numbers -----------------------------------------------------------------------------------


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
    """`{"rollout/staleness": {0: 200, 1: 56}}`: how many tokens were how many versions old."""
    if not isinstance(record, StepRecord) or not record.staleness:
        return {}
    return {"rollout/staleness": {float(age): count for age, count in record.staleness.items()}}


def step_of(record: Record) -> int:
    return int(getattr(record, "step", 0))


# --- whose failure it was ---------------------------------------------------------------------------------------------


@contextmanager
def _named(name: str, logger: AbstractContextManager[Log]) -> Iterator[Log]:
    """The logger, its failures to open and to close under its name; errors of the run itself pass as they are."""
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
    kept = "" if name == "metrics.jsonl" else "; metrics.jsonl has it. Mend it or turn it off, and the run can go on"
    return LogError(f"logger {name!r} could not {what}: {type(error).__name__}: {error}{kept}")


def _describe(record: Record) -> str:
    return f"the {type(record).__name__} of step {step_of(record)}" if step_of(record) else f"a {type(record).__name__}"
