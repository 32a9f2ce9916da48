"""The training loop: warm up, then train, evaluate and save until the run is done. `run.py` has a single step.

`config.mode` says how far engines may run ahead of the trainer: not at all (`sync`), only with the slowest completions of a
step (`partial`), one step (`one_step_off`), or up to `max_staleness` versions (`async`). The loop is the same in every mode:
it submits prompts early enough and takes finished groups, and the gateway enforces the staleness bound
(`bridge/rollouts.py`). The loss sees the policy version of every token.

All randomness derives from `config.seed` and the number of the step or prompt batch, never from earlier state. In `sync` mode,
two runs of one config produce the same records, and so does a run that was interrupted and resumed."""

from __future__ import annotations

import math
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from slipstream.bridge.bridge import Bridge
from slipstream.errors import ConfigError, UpdateNotFinite
from slipstream.model.chat_template import TEMPLATE_FILE
from slipstream.model.checkpoints import hf_weights, peft
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.checkpoints.sample_model import sample_params
from slipstream.model.config import ModelConfig
from slipstream.model.transformer import decoder
from slipstream.rl.agents.player import open_player
from slipstream.rl.config import TrainConfig
from slipstream.rl.data.data_task import DataTask
from slipstream.rl.data.prompts import WARMUP_STREAM
from slipstream.rl.data.tasks import EnvironmentTask, Task, task_named
from slipstream.rl.data.tokens import Codec, codec_of
from slipstream.rl.reporting.loggers import open_logs
from slipstream.rl.reporting.records import Record, Saved, WarmupRecord
from slipstream.rl.rewards.scoring import open_scorer
from slipstream.rl.trainer import resume, supervised
from slipstream.rl.trainer.learner import Learner
from slipstream.rl.trainer.recording import Recording, open_recording
from slipstream.rl.trainer.recovery import RecoveringBridge
from slipstream.rl.trainer.reference import Reference
from slipstream.rl.trainer.run import TrainingRun
from slipstream.runtime.failpoints import step


def training_loop(
    config: TrainConfig,
    bridge: Bridge,
    model_dir: Path,
    run_dir: Path,
    reference: Bridge | None = None,
    reward_bridge: Bridge | None = None,
) -> Iterator[Record]:
    """Warm up, train and evaluate; yield a record of each step as soon as it is done.

    `model_dir` holds config.json and tokenizer.json, and optionally initial weights. `run_dir` receives metrics.jsonl,
    checkpoints in `state`, and the trained model in `checkpoint`. If it already has a checkpoint, training resumes from it
    (`resume.py`). `reference` is a second fleet of the same model, for `kl.scored_by = "engine"`; it is synced to the
    initial policy. `reward_bridge` is a fleet that serves the reward model of the config. Engine failures are raised: a
    missing completion is not a completion with reward 0."""
    if config.algorithm.kl.by_engine and reference is None and not config.adapter:
        raise ConfigError(
            "kl.scored_by = 'engine' needs a second fleet: pass a bridge to it as `reference`, or set kl.scored_by = "
            "'trainer'"
        )
    if config.reward.model and reward_bridge is None:
        raise ConfigError("reward.model needs a fleet that serves it: pass a bridge to it as `reward_bridge`")
    with (
        resume.open_run(config, run_dir) as start,
        open_logs(config, run_dir, start.step) as log,
        open_recording(config, run_dir, model_dir, start.step) as recording,
    ):
        for record in _records(config, bridge, model_dir, run_dir, start, reference, reward_bridge, recording):
            log(record)
            yield record


def _records(
    config: TrainConfig,
    bridge: Bridge,
    model_dir: Path,
    run_dir: Path,
    start: resume.ResumePoint,
    reference_bridge: Bridge | None,
    reward_bridge: Bridge | None,
    recording: Recording,
) -> Iterator[Record]:
    model = read_config(model_dir)
    task, codec = open_task(config, model_dir)
    retry = RecoveringBridge(reward_bridge, config.patience).retry if reward_bridge is not None else None
    with (
        open_scorer(config, task, codec, reward_bridge, retry) as score,
        open_player(config.environment, bridge, codec, config.adapter) as player,
    ):
        with recording.phase("warm-up", start.step):
            params = yield from _warm_up(config, model, task, codec, model_dir, start)
        reference = None
        if config.algorithm.kl.by_engine and config.adapter:
            reference = Reference(bridge, None, config.patience)
        elif reference_bridge is not None and config.algorithm.kl.by_engine:
            reference = Reference(reference_bridge, params, config.patience)
        run = TrainingRun(
            config, bridge, model, codec, task, score, params, start, run_dir, reference, player, recording
        )
        del params  # the learner decides how long it stays in memory
        run.begin()
        if run.evaluation_missing:
            yield run.evaluate()
        while not run.done:
            yield run.take_step()
            if run.done or run.step % config.eval_every == 0:
                yield run.evaluate()
            if config.save_every and (run.done or run.step % config.save_every == 0):
                step("train.save", train_step=run.step)
                with recording.phase("save", run.step):
                    resume.save(config, run_dir, run.state())
                step("train.saved", train_step=run.step, position=run.position)
                run.saved()
    yield _export(config, run_dir, run.learner, model, model_dir)


def open_task(config: TrainConfig, model_dir: Path) -> tuple[Task, Codec]:
    """What the run trains on, and how the model reads it."""
    if config.environment.name:
        settings = config.environment
        if settings.name.startswith("verifiers:"):  # their observations are messages
            settings = settings.replace(chat=True)
        return EnvironmentTask(settings.name), codec_of(settings, model_dir)
    if config.data.path:
        task = DataTask.read(config.data, config.seed)
        return task, codec_of(config.data, model_dir, task.conversations)
    return task_named(config.task), codec_of(config.task, model_dir)


def _warm_up(
    config: TrainConfig, model: ModelConfig, task: Task, codec: Codec, model_dir: Path, start: resume.ResumePoint
) -> Generator[Record, None, decoder.Params]:
    """Yield a record of each supervised step; return the policy that RL starts from."""
    params = (
        hf_weights.load(model_dir, model) if hf_weights.has_weights(model_dir) else sample_params(model, config.seed)
    )
    # A resumed run has its own weights, and warms up again only to get the KL reference, or the model of its adapter.
    is_needed = start.checkpoint is None or config.algorithm.kl.weight or config.adapter
    steps = config.warmup_steps if is_needed else 0
    warm_up = supervised.warm_up(params, model, task, codec, steps=steps, seed=(config.seed, WARMUP_STREAM))
    for number, (warmed, loss) in enumerate(warm_up, start=1):
        if not math.isfinite(loss):
            raise UpdateNotFinite(f"the loss of warm-up step {number} is {loss}; are the initial weights finite?")
        params = warmed
        if not start.checkpoint:
            yield WarmupRecord(number, loss)
    return params


def _export(config: TrainConfig, run_dir: Path, learner: Learner, model: ModelConfig, model_dir: Path) -> Saved:
    """Write the trained model with its tokenizer files, ready for any engine to load. Of an adapter, write a PEFT directory,
    and the model that it belongs to if it is not `model_dir`'s."""
    directory = run_dir / "checkpoint"
    for path, leaf in jax.tree_util.tree_flatten_with_path(learner.policy)[0]:
        if not jnp.isfinite(leaf).all():
            raise UpdateNotFinite(
                f"the trained weights are not finite: {jax.tree_util.keystr(path)}; nothing is exported"
            )
    if (lora := config.lora.adapter) is None or learner.base is None:
        _save_model(directory, learner.policy, model, model_dir)
        return Saved(str(directory))
    base: Path | str = config.model or model_dir
    if config.warmup_steps or not hf_weights.has_weights(model_dir):
        base = (run_dir / "base").resolve()
        _save_model(base, learner.base, model, model_dir)
    peft.save_adapter(directory, learner.policy, lora, base)
    _copy_tokenizer(model_dir, directory)
    return Saved(str(directory))


def _save_model(directory: Path, params: decoder.Params, model: ModelConfig, model_dir: Path) -> None:
    hf_weights.save(directory, params, model)
    _copy_tokenizer(model_dir, directory)


def _copy_tokenizer(model_dir: Path, directory: Path) -> None:
    optional = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", TEMPLATE_FILE)
    for name in ("tokenizer.json", *optional):
        if (model_dir / name).exists():
            shutil.copy(model_dir / name, directory / name)
