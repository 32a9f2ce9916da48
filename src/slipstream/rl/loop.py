"""The training loop. One step is: prompts → completions → rewards → advantages → new weights → every engine has them.

How far engines may run ahead of the trainer is `config.mode`: not at all (`sync`), with the slowest of a step (`partial`), one
step (`one_step_off`), or as far as `max_staleness` says (`async`). The loop is the same: it submits prompts early enough and
takes what is finished; that nothing is older than it may be is the gateway's affair (`slipstream/rollouts.py`). Every token's
version reaches the loss.

Everything random derives from `config.seed` and the number of the step or batch, never from what ran before. In `sync` mode two
runs of one config make the same records, and so does one that was interrupted and gone on with."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

from slipstream.bridge import Bridge
from slipstream.errors import ConfigError
from slipstream.model import checkpoint, decoder
from slipstream.model.chat import TEMPLATE_FILE
from slipstream.model.config import ModelConfig
from slipstream.observe.loggers import open_logs
from slipstream.rl import resume, supervised
from slipstream.rl.chat import codec_of
from slipstream.rl.config import TrainConfig
from slipstream.rl.judge import judge_of
from slipstream.rl.prompts import WARMUP_STREAM
from slipstream.rl.records import Record, Saved, WarmupRecord
from slipstream.rl.reference import Reference
from slipstream.rl.run import Run
from slipstream.rl.tasks import Task, task_named
from slipstream.rl.tokens import Codec, init_small


def train(
    config: TrainConfig, bridge: Bridge, model_dir: Path, run_dir: Path, reference: Bridge | None = None
) -> Iterator[Record]:
    """Warms up, trains and evaluates, yielding a record of each step as soon as it is done.

    `model_dir` holds the model's config.json and tokenizer.json, and weights to start from if there are any. `run_dir`
    gets metrics.jsonl, a checkpoint in `state` now and then, and at the end the trained model in `checkpoint`. If it has
    a checkpoint already, training goes on from there (`rl/resume.py` says when it may). `reference` is a second fleet, with
    engines of the same model, for `kl.scored_by = "engine"`; it gets the policy that training starts from. Any failure of an
    engine is raised: a completion that did not come is not a completion with zero reward."""
    if config.algorithm.kl.by_engine and reference is None:
        raise ConfigError(
            "kl.scored_by is 'engine', which needs a second fleet: give `train` a bridge to it as `reference`, or take "
            "'trainer'"
        )
    with resume.open_run(config, run_dir) as start, open_logs(config, run_dir, start.step) as log:
        for record in _run(config, bridge, model_dir, run_dir, start, reference):
            log(record)
            yield record


def _run(
    config: TrainConfig,
    bridge: Bridge,
    model_dir: Path,
    run_dir: Path,
    start: resume.Start,
    fleet: Bridge | None,
) -> Iterator[Record]:
    model, codec, task = ModelConfig.read(model_dir), codec_of(config.task, model_dir), task_named(config.task)
    params = yield from _warm_up(config, model, task, codec, model_dir, start)
    reference = None
    if fleet is not None and config.algorithm.kl.by_engine:
        reference = Reference(fleet, params, config.patience)
    run = Run(config, bridge, model, codec, task, params, start, run_dir, reference)
    del params  # in memory for as long as the learner wants it, and not until the end
    run.begin()
    if run.evaluation_missing:
        yield run.evaluate()
    with judge_of(config, task, codec) as judge:
        while not run.done:
            yield run.take_step(judge)
            if run.done or run.step % config.eval_every == 0:
                yield run.evaluate()
            if config.save_every and (run.done or run.step % config.save_every == 0):
                resume.save(config, run_dir, run.state())
                run.saved()
    yield _save(run_dir / "checkpoint", run.learner.policy, model, model_dir)


def _warm_up(
    config: TrainConfig, model: ModelConfig, task: Task, codec: Codec, model_dir: Path, start: resume.Start
) -> Generator[Record, None, decoder.Params]:
    """The policy that RL starts from, after a record of each supervised step; none where a run goes on."""
    params, steps = _starting_params(config, model, model_dir), _warmup_steps(config, start)
    warm_up = supervised.warm_up(params, model, task, codec, steps=steps, seed=(config.seed, WARMUP_STREAM))
    for number, (warmed, loss) in enumerate(warm_up, start=1):
        params = warmed
        if not start.checkpoint:
            yield WarmupRecord(number, loss)
    return params


def _warmup_steps(config: TrainConfig, start: resume.Start) -> int:
    """A run that goes on has its weights; the policy that KL pulls towards it has to make again."""
    return config.warmup_steps if start.checkpoint is None or config.algorithm.kl.weight else 0


def _starting_params(config: TrainConfig, model: ModelConfig, model_dir: Path) -> decoder.Params:
    if checkpoint.has_weights(model_dir):
        return checkpoint.load(model_dir, model)
    return init_small(model, config.seed)


def _save(directory: Path, params: decoder.Params, model: ModelConfig, model_dir: Path) -> Saved:
    """The trained model, with its tokenizer's files, ready for any engine to load."""
    checkpoint.save(directory, params, model)
    beside = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", TEMPLATE_FILE)
    for name in ("tokenizer.json", *beside):
        if (model_dir / name).exists():
            shutil.copy(model_dir / name, directory / name)
    return Saved(str(directory))
