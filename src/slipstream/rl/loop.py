"""The training loop. One step is: prompts → completions → rewards → advantages → new weights → every engine has them.

How far engines may run ahead of the trainer is `config.mode`: not at all (`sync`), one step (`one_step_off`), or as far as
`max_staleness` says (`async`). The loop is the same: it submits prompts early enough and takes what is finished; that nothing
is older than it may be is the gateway's affair (`slipstream/rollouts.py`). Every token's version reaches the loss.

Everything random derives from `config.seed` and the step's number, never from what ran before. In `sync` mode two runs of one
config make the same records, and so does one that was interrupted and gone on with."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import jax
import numpy as np

from slipstream.bridge import Bridge
from slipstream.config import TrainConfig
from slipstream.errors import VersionError
from slipstream.model import checkpoint, decoder
from slipstream.model.config import ModelConfig
from slipstream.observe.loggers import open_logs
from slipstream.observe.mismatch import tokens_of
from slipstream.observe.watch import Watch
from slipstream.rl import resume, state, supervised
from slipstream.rl.batch import Batch, make_batch
from slipstream.rl.chat import TEMPLATE_FILE, codec_of
from slipstream.rl.experience import prepare, scorer
from slipstream.rl.judge import by_task, judge_of
from slipstream.rl.loss import Metrics
from slipstream.rl.prompts import EVAL_PROMPT_STREAM, EVAL_SAMPLE_STREAM, WARMUP_STREAM, Prompts
from slipstream.rl.records import (
    Evaluation,
    PhaseSeconds,
    Record,
    Saved,
    StepRecord,
    Stopwatch,
    WarmupRecord,
)
from slipstream.rl.steady import Steady
from slipstream.rl.tasks import Split, Task, task_named
from slipstream.rl.tokens import Codec, init_small
from slipstream.rl.train_step import TrainState, init_state, make_train_step
from slipstream.types import Completion, MemoryReport, SamplingParams

EVAL_SAMPLES = 4


def train(config: TrainConfig, bridge: Bridge, model_dir: Path, run_dir: Path) -> Iterator[Record]:
    """Warms up, trains and evaluates, yielding a record of each step as soon as it is done.

    `model_dir` holds the model's config.json and tokenizer.json, and weights to start from if there are any. `run_dir`
    gets metrics.jsonl, a checkpoint in `state` now and then, and at the end the trained model in `checkpoint`. If it has
    a checkpoint already, training goes on from there (`rl/resume.py` says when it may). Any failure of an engine is
    raised: a completion that did not come is not a completion with zero reward."""
    with resume.open_run(config, run_dir) as start, open_logs(config, run_dir, start.step) as log:
        for record in _run(config, bridge, model_dir, run_dir, start):
            log(record)
            yield record


def _run(config: TrainConfig, bridge: Bridge, model_dir: Path, run_dir: Path, start: resume.Start) -> Iterator[Record]:
    model, codec, task = ModelConfig.read(model_dir), codec_of(config.task, model_dir), task_named(config.task)
    algorithm, room = config.algorithm, _room(config, model)
    params = _starting_params(config, model, model_dir)
    warm_up = supervised.warm_up(
        params, model, task, codec, steps=_warmup_steps(config, start), seed=(config.seed, WARMUP_STREAM)
    )
    for step, (warmed, loss) in enumerate(warm_up, start=1):
        params = warmed
        if not start.checkpoint:
            yield WarmupRecord(step, loss)

    reference, train_step, now = params, make_train_step(model, algorithm), init_state(params, model, algorithm)
    recent: deque[float] = deque(maxlen=resume.RECENT_STEPS)
    last, evaluated, position = config.steps, -1, 0
    if start.checkpoint:
        saved = state.load(start.checkpoint, now.weights, now.opt_state)
        now, evaluated, position = TrainState(saved.params, saved.opt_state), saved.facts.evaluated, saved.facts.journal
        recent.extend(saved.facts.recent)
        if resume.finished(config, start.step, recent):
            last = start.step
    steady, prompts = Steady(bridge, config.patience), Prompts(config, task, codec, room)
    # The patience is `steady`'s, which also mends what it waits for.
    rollouts = bridge.rollouts(config.bound, algorithm.prompts, late=config.late, position=position, patience=0.0)
    steady.sync(now.policy)  # the fleet's next version, whatever number the policy had when it was saved
    if evaluated < 0 or (last == start.step and evaluated != last):
        yield steady.run(partial(evaluate, config, bridge, task, codec, start.step))
        evaluated = start.step

    first = start.step + 1 - config.bound
    with judge_of(config, task, codec) as judge:
        doctor = Watch(lambda: bridge.verify(now.policy), dtype=config.engine.dtype)
        for step in range(start.step + 1, last + 1):
            watch = Stopwatch()
            # What the last run had submitted and not taken is known to the gateway; to submit it again changes nothing.
            steady.run(partial(prompts.submit, rollouts, first, min(step + config.bound, last)))
            watch.lap("prepare")

            groups = steady.take(rollouts, config.generate_timeout)
            completions = [completion for group in groups for completion in group.completions]
            versions = [group.version for group in groups for _ in group.completions]
            if not config.bound:
                require_versions(completions, versions)
            watch.lap("generate")

            rewards = judge(groups, [prompts.text(group.id) for group in groups])
            batch = make_batch(completions, version=versions, max_tokens=algorithm.max_tokens)
            batch = prepare(batch, rewards, now.weights, model, algorithm, reference)
            watch.lap("reward")

            mismatch = ""
            if config.diagnose_every and step % config.diagnose_every == 0:
                mismatch = _diagnose(doctor, model, now.policy, batch, completions, versions)
                watch.lap("diagnose")

            memory: dict[str, int] = {}
            if config.take_turns:
                memory["generating"] = _in_use(bridge.memory())
                memory["training"] = _in_use(bridge.sleep())
                watch.lap("sleep")

            now, metrics = jax.block_until_ready(train_step(now, batch))
            watch.lap("train")

            if config.take_turns:
                memory["syncing"] = _in_use(bridge.wake("weights"))
                watch.lap("wake")
            report = steady.sync(now.policy)
            watch.lap("sync")
            if config.take_turns:
                memory["woken"] = _in_use(bridge.wake())
                watch.lap("wake")

            accuracy = float((rewards >= 1).mean())
            yield StepRecord(
                step=step,
                version=max(versions),
                reward=float(rewards.mean()),
                accuracy=accuracy,
                num_tokens=sum(len(c.token_ids) for c in completions),
                metrics=Metrics(**{name: float(value) for name, value in metrics.items()}),
                seconds=PhaseSeconds(**watch.laps),
                sync=report,
                staleness=_ages(batch),
                mismatch=mismatch,
                memory=memory,
            )
            recent.append(accuracy)
            done = resume.finished(config, step, recent)
            if done or step % config.eval_every == 0:
                yield steady.run(partial(evaluate, config, bridge, task, codec, step))
                evaluated = step
            if config.save_every and (done or step % config.save_every == 0):
                facts = state.Facts(
                    step, step, config.seed, bridge.version, rollouts.position, tuple(recent), evaluated
                )
                resume.save(config, run_dir, state.TrainState(now.weights, now.opt_state, facts))
            if done:
                break
    yield _save(run_dir / "checkpoint", now.policy, model, model_dir)


def _room(config: TrainConfig, model: ModelConfig) -> int:
    """Tokens that a prompt may have."""
    length = config.engine.max_model_len or model.max_position_embeddings
    return min(length, model.max_position_embeddings) - config.algorithm.max_tokens


def _warmup_steps(config: TrainConfig, start: resume.Start) -> int:
    """A run that goes on has its weights; the policy that KL pulls towards it has to make again."""
    return config.warmup_steps if start.checkpoint is None or config.algorithm.kl.weight else 0


def _ages(batch: Batch) -> dict[str, int]:
    ages, counts = np.unique(np.asarray(batch.ages)[np.asarray(batch.mask) > 0], return_counts=True)
    return {str(age): int(count) for age, count in zip(ages, counts)}


def _diagnose(
    doctor: Watch,
    model: ModelConfig,
    policy: decoder.Params,
    batch: Batch,
    completions: Sequence[Completion],
    versions: Sequence[int],
) -> str:
    trainer = np.asarray(scorer(model, 1.0)(policy, batch))
    found = tokens_of(completions, max(versions), trainer.shape[1])
    return doctor.see(trainer, found.processed, found.raw, np.asarray(batch.ages), found.mask).sentence


def evaluate(config: TrainConfig, bridge: Bridge, task: Task, codec: Codec, step: int) -> Evaluation:
    """Accuracy of the policy that serves now, always on the same prompts."""
    prompt_rng = np.random.default_rng([config.seed, EVAL_PROMPT_STREAM])
    sample_rng = np.random.default_rng([config.seed, EVAL_SAMPLE_STREAM, step])
    version = bridge.version

    def accuracy(prompts: Sequence[str], temperature: float, n: int) -> float:
        shared = SamplingParams(config.algorithm.max_tokens, temperature, n=n, stop_token_ids=codec.stops)
        how = [replace(shared, seed=_draw(sample_rng)) for _ in prompts]
        completions = bridge.generate(codec.prompts(prompts), how)
        require_versions(completions, [version] * len(completions))
        return float((by_task(task, codec, prompts, completions) >= 1).mean())

    found: dict[Split, tuple[float, float] | tuple[None, None]] = {"heldout": (None, None)}
    for split in get_args(Split):
        prompts = list(
            dict.fromkeys(task.prompts(prompt_rng, config.eval_prompts, split))
        )  # a small split repeats itself
        if prompts:
            found[split] = accuracy(prompts, config.algorithm.temperature, EVAL_SAMPLES), accuracy(prompts, 0.0, 1)
    return Evaluation(step, version, *found["train"], *found["heldout"])


def require_versions(completions: Sequence[Completion], versions: Sequence[int]) -> None:
    """`VersionError` unless every token of each completion was produced by its policy version."""
    for completion, version in zip(completions, versions, strict=True):
        found = sorted({span.version for span in completion.spans})
        if found != [version]:
            raise VersionError(
                f"strictly on-policy training expects every token from policy version {version}, but sample "
                f"{completion.sample_index} of prompt {completion.prompt_index} came from version(s) {found} on engine "
                f"{completion.engine!r}; is another trainer syncing to the same fleet?"
            )


def _in_use(engines: Mapping[str, MemoryReport]) -> int:
    return sum(report.in_use for report in engines.values())


def _starting_params(config: TrainConfig, model: ModelConfig, model_dir: Path) -> decoder.Params:
    if checkpoint.has_weights(model_dir):
        return checkpoint.load(model_dir, model)
    return init_small(model, config.seed)


def _draw(rng: np.random.Generator) -> int:
    return int(rng.integers(2**63))


def _save(directory: Path, params: decoder.Params, model: ModelConfig, model_dir: Path) -> Saved:
    """The trained model, with its tokenizer's files, ready for any engine to load."""
    checkpoint.save(directory, params, model)
    beside = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", TEMPLATE_FILE)
    for name in ("tokenizer.json", *beside):
        if (model_dir / name).exists():
            shutil.copy(model_dir / name, directory / name)
    return Saved(str(directory))
