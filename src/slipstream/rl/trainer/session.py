"""`train(config)`: a whole training run, from the config to the trained checkpoint.

It creates the run directory, starts the engines, runs the training loop (`loop.py`) and stops the engines."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from slipstream.bridge.bridge import Bridge
from slipstream.config import EmbeddedConfig, GatewayConfig, Snapshot
from slipstream.deploy import fleet
from slipstream.errors import ConfigError
from slipstream.model.checkpoints.hub import model_directory
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.rl.config import TrainConfig
from slipstream.rl.data.data_task import DataTask
from slipstream.rl.data.tasks import task_named
from slipstream.rl.reporting import loggers
from slipstream.rl.reporting.records import Evaluation, Record, Saved, StepRecord
from slipstream.rl.rewards.reward_model import check_reward_model
from slipstream.rl.trainer import resume
from slipstream.runtime.private_files import private_directory

VLLM_START_SECONDS = 1200.0
"""vLLM compiles when it starts: one to two minutes on a GPU."""


@dataclass(slots=True)
class TrainResult:
    """The records of a training run by kind, those of an earlier, interrupted part included."""

    run_dir: Path
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    checkpoint: str = ""
    """HF directory of the trained model; empty until training ends."""
    seconds: float = 0.0
    """Wall time, start of the engines included."""

    def add(self, record: Record) -> None:
        match record:
            case StepRecord():
                self.steps.append(record)
            case Evaluation():
                self.evaluations.append(record)
            case Saved(directory=directory):
                self.checkpoint = directory


def train(config: TrainConfig, *, on_record: Callable[[Record], None] | None = None) -> TrainResult:
    """Run a whole training run, as `slipstream train` does, and return its records.

    Starts the engines of `config.engine` and stops them at the end. An interrupted run resumes from its last checkpoint when
    called with the same `run_dir`.

    Args:
        config: All settings of the run.
        on_record: Called with each record (warm-up step, training step, evaluation) as soon as it is made.

    Example:
        result = slipstream.train(slipstream.TrainConfig(model="my-model", steps=100), on_record=print)
        print(result.evaluations[-1], result.checkpoint)
    """
    with TrainSession(config) as session:
        for record in session.records():
            if on_record is not None:
                on_record(record)
    return session.result


class TrainSession:
    """A training run in three steps, for callers that report progress in between:

    session = TrainSession(config)          # checks; `session.result` has the records of an earlier part
    with session:                           # starts the engines
        for record in session.records(): ...
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._start = config, time.perf_counter()
        self.result = TrainResult(Path(config.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}"))
        self._model_dir = model_directory(config.model) if config.model else self.result.run_dir / "model"
        self._bridges = ExitStack()
        loggers.check(config.logging)
        check_subject(config)
        if config.reward.model:
            check_reward_model(config.reward)
        private_directory(self.result.run_dir, "run_dir")
        for record in resume.earlier(config, self.result.run_dir):
            self.result.add(record)
        if not config.model:
            write_sample_config(self._model_dir)

    @property
    def seconds(self) -> float:
        """Time since the session was created."""
        return time.perf_counter() - self._start

    def __enter__(self) -> Self:
        run_dir = self.result.run_dir
        with ExitStack() as opened, ThreadPoolExecutor(1) as beside:
            for module in ("slipstream.rl.trainer.loop", "orbax.checkpoint"):  # JAX too: seconds, while processes start
                beside.submit(importlib.import_module, module)
            self._bridge = opened.enter_context(_open_bridge(self._config, self._model_dir, run_dir))
            reference = open_reference(self._config, self._model_dir, run_dir / "reference")
            self._reference = opened.enter_context(reference)
            self._reward = opened.enter_context(open_reward_model(self._config, run_dir / "reward"))
            self._bridges = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._bridges.close()

    def records(self) -> Iterator[Record]:
        """Train; yield each record as soon as it is made."""
        from slipstream.rl.trainer.loop import training_loop

        run_dir = self.result.run_dir
        for record in training_loop(
            self._config, self._bridge, self._model_dir, run_dir, self._reference, self._reward
        ):
            self.result.add(record)
            self.result.seconds = self.seconds
            yield record


def check_subject(config: TrainConfig) -> None:
    """Raise `ConfigError` unless the task, the data or the environment can be found, before processes start."""
    if config.data.path:
        DataTask.read(config.data, config.seed)
    elif not config.environment.name:
        task_named(config.task, size=1)


def _open_bridge(config: TrainConfig, model_dir: Path, run_dir: Path, snapshot: Snapshot = "reference") -> Bridge:
    if config.engines == 0:
        assert isinstance(config.engine, EmbeddedConfig)  # TrainConfig checks it
        return fleet.inprocess(model_dir, engine=config.engine, run_dir=run_dir)
    return fleet.launch(
        model_dir,
        engines=config.engines,
        engine=config.engine,
        devices=config.engine_devices,
        trainer_devices=config.trainer_devices,
        share_gpus=config.share_gpus,
        gateway=GatewayConfig(record=config.record.enabled),
        run_dir=run_dir,
        snapshot=snapshot,
        keep_alive=config.patience > 0,
        start_timeout=VLLM_START_SECONDS if config.engine.kind == "vllm" else fleet.START_SECONDS,
    )


def open_reward_model(config: TrainConfig, run_dir: Path) -> AbstractContextManager[Bridge | None]:
    """Start the engines of the reward model, if there is one. They load its weights themselves, and get no others."""
    reward = config.reward
    if not reward.model:
        return nullcontext()
    alone = config.replace(
        engines=reward.model_engines,
        engine=reward.model_engine,
        engine_devices=None,
        record=config.record.replace(enabled=False),
        deterministic=config.deterministic and reward.model_engine.kind == "embedded",
    )
    return _open_bridge(alone, model_directory(reward.model), run_dir)


def open_reference(config: TrainConfig, model_dir: Path, run_dir: Path) -> AbstractContextManager[Bridge | None]:
    """Start an engine for the KL reference policy, if engines are to score it."""
    if not config.algorithm.kl.by_engine or config.adapter:  # then the policy's engines have it as their base model
        return nullcontext()
    if config.engine.kind == "remote":
        raise ConfigError(
            f"kl.scored_by = 'engine' needs a second fleet, but {config.engine.url} is one server, which serves the policy; "
            "use 'trainer', or call `training_loop` with a bridge to another server as `reference`"
        )
    unrecorded = config.record.replace(enabled=False)
    alone = config.replace(engines=min(config.engines, 1), engine_devices=None, record=unrecorded)  # beside the trainer
    return _open_bridge(alone, model_dir, run_dir, snapshot="copy")
