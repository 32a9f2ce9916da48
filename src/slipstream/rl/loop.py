"""The training loop. One step is: prompts → completions → rewards → advantages → new weights → every engine has them.

Strictly on-policy: each step's completions come from the weights that the step before it made, and that is checked on
every token's version. Everything random derives from `config.seed` and the step's number, never from what ran before,
so that two runs of one config make the same records, and so does one that was interrupted and gone on with."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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
from slipstream.rl import resume, state, supervised
from slipstream.rl.batch import make_batch
from slipstream.rl.experience import prepare
from slipstream.rl.loss import Metrics
from slipstream.rl.records import (
    Evaluation,
    PhaseSeconds,
    Record,
    Saved,
    StepRecord,
    Stopwatch,
    WarmupRecord,
)
from slipstream.rl.tasks import Split, Task, task_named
from slipstream.rl.tokens import Codec, init_small
from slipstream.rl.train_step import TrainState, init_state, make_train_step
from slipstream.types import Completion, MemoryReport, SamplingParams

EVAL_PROMPTS = 128
EVAL_SAMPLES = 4

# Streams of randomness, so that no two uses share numbers.
_WARMUP, _PROMPTS, _SAMPLES, _EVAL_PROMPTS, _EVAL_SAMPLES = range(5)


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
    model, codec, task = ModelConfig.read(model_dir), Codec(model_dir), task_named(config.task)
    params = _starting_params(config, model, model_dir)
    warmup_steps = 0 if start.checkpoint else config.warmup_steps
    warm_up = supervised.warm_up(params, model, task, codec, steps=warmup_steps, seed=(config.seed, _WARMUP))
    for step, (warmed, loss) in enumerate(warm_up, start=1):
        params = warmed
        yield WarmupRecord(step, loss)

    algorithm, reference = config.algorithm, params
    train_step, now = make_train_step(model, algorithm), init_state(params, model, algorithm)
    recent: deque[float] = deque(maxlen=resume.RECENT_STEPS)
    last, evaluated = config.steps, -1
    if start.checkpoint:
        saved = state.load(start.checkpoint, now.weights, now.opt_state)
        now, evaluated = TrainState(saved.params, saved.opt_state), saved.facts.evaluated
        recent.extend(saved.facts.recent)
        if resume.finished(config, start.step, recent):
            last = start.step
    bridge.sync(now.policy)  # the fleet's next version, whatever number the policy had when it was saved
    if evaluated < 0 or (last == start.step and evaluated != last):
        yield evaluate(config, bridge, task, codec, start.step)
        evaluated = start.step

    for step in range(start.step + 1, last + 1):
        watch = Stopwatch()
        prompts = task.prompts(np.random.default_rng([config.seed, _PROMPTS, step]), algorithm.prompts)
        token_ids, sampling, version = codec.prompts(prompts), _sampling(config, step), bridge.version
        watch.lap("prepare")

        completions = bridge.generate(token_ids, sampling)
        require_version(completions, version)
        watch.lap("generate")

        rewards = _rewards(task, codec, prompts, completions).reshape(len(prompts), algorithm.group)
        batch = make_batch(completions, version=version, max_tokens=algorithm.max_tokens)
        batch = prepare(batch, rewards, now.weights, model, algorithm, reference)
        watch.lap("reward")

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
        report = bridge.sync(now.policy)
        watch.lap("sync")
        if config.take_turns:
            memory["woken"] = _in_use(bridge.wake())
            watch.lap("wake")

        accuracy = float((rewards >= 1).mean())
        yield StepRecord(
            step=step,
            version=version,
            reward=float(rewards.mean()),
            accuracy=accuracy,
            num_tokens=sum(len(c.token_ids) for c in completions),
            metrics=Metrics(**{name: float(value) for name, value in metrics.items()}),
            seconds=PhaseSeconds(**watch.laps),
            sync=report,
            memory=memory,
        )
        recent.append(accuracy)
        done = resume.finished(config, step, recent)
        if done or step % config.eval_every == 0:
            yield evaluate(config, bridge, task, codec, step)
            evaluated = step
        if config.save_every and (done or step % config.save_every == 0):
            facts = state.Facts(step, step, config.seed, bridge.version, recent=tuple(recent), evaluated=evaluated)
            resume.save(config, run_dir, state.TrainState(now.weights, now.opt_state, facts))
        if done:
            break
    yield _save(run_dir / "checkpoint", now.policy, model, model_dir)


def evaluate(config: TrainConfig, bridge: Bridge, task: Task, codec: Codec, step: int) -> Evaluation:
    """Accuracy of the policy that serves now, always on the same prompts."""
    prompt_rng = np.random.default_rng([config.seed, _EVAL_PROMPTS])
    sample_rng = np.random.default_rng([config.seed, _EVAL_SAMPLES, step])
    version = bridge.version

    def accuracy(prompts: Sequence[str], temperature: float, n: int) -> float:
        how = [SamplingParams(config.algorithm.max_tokens, temperature, n=n, seed=_draw(sample_rng)) for _ in prompts]
        completions = bridge.generate(codec.prompts(prompts), how)
        require_version(completions, version)
        return float((_rewards(task, codec, prompts, completions) >= 1).mean())

    found: dict[Split, tuple[float, float] | tuple[None, None]] = {"heldout": (None, None)}
    for split in get_args(Split):
        prompts = list(dict.fromkeys(task.prompts(prompt_rng, EVAL_PROMPTS, split)))  # a small split repeats itself
        if prompts:
            found[split] = accuracy(prompts, config.algorithm.temperature, EVAL_SAMPLES), accuracy(prompts, 0.0, 1)
    return Evaluation(step, version, *found["train"], *found["heldout"])


def require_version(completions: Sequence[Completion], version: int) -> None:
    """`VersionError` unless every token of every completion was produced by policy `version`."""
    for completion in completions:
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


def _sampling(config: TrainConfig, step: int) -> list[SamplingParams]:
    """One seed per prompt of the step: equal prompts in a step get samples of their own."""
    rng, how = np.random.default_rng([config.seed, _SAMPLES, step]), config.algorithm
    return [SamplingParams(how.max_tokens, how.temperature, n=how.group, seed=_draw(rng)) for _ in range(how.prompts)]


def _draw(rng: np.random.Generator) -> int:
    return int(rng.integers(2**63))


def _rewards(task: Task, codec: Codec, prompts: Sequence[str], completions: Sequence[Completion]) -> np.ndarray:
    # Decoded here and not taken from `Completion.text`, which is empty where an engine has no tokenizer.
    texts = codec.decode([c.token_ids for c in completions])
    return np.array([task.reward(prompts[c.prompt_index], text) for c, text in zip(completions, texts)], np.float32)


def _save(directory: Path, params: decoder.Params, model: ModelConfig, model_dir: Path) -> Saved:
    """The trained model, with its tokenizer's files, ready for any engine to load."""
    checkpoint.save(directory, params, model)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        if (model_dir / name).exists():
            shutil.copy(model_dir / name, directory / name)
    return Saved(str(directory))
