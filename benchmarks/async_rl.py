"""Speedup of asynchronous over synchronous training when completion lengths have a long tail.

    python benchmarks/async_rl.py [--steps 250] [--seeds 5] [--max-staleness 2] [--json FILE]

The trainer (GRPO on reversing digits) and the engine process are real, and each is pinned to one core, which stands in
for its own device. As with reasoning models, the samples of a prompt run to a length drawn from a long-tailed
distribution: half are short, a few are thirteen times as long. Tokens after the end-of-sequence token are cut off
before training.

Both modes train on the same prompts with the same seeds, in alternating blocks of steps, so that a noisy machine slows
both equally. The idle mode's engine is paused. Blocks during which other virtual machines of the host took CPU time do
not count, because asynchronous training depends on having both cores; the speedup over all blocks is printed as well.
To compare rewards, the benchmark uses several runs with different weights, prompts and samples, because rewards vary
more between runs than with two versions of staleness. The exit code is 0 even if a target is missed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.model.checkpoints.hf_config import read_config, to_hf
from slipstream.model.checkpoints.sample_model import sample_params, write_sample_config
from slipstream.rl.algorithm.batch import Batch, make_batch
from slipstream.rl.algorithm.train_step import init_state, make_train_step
from slipstream.rl.config import AlgorithmConfig, OptimizerConfig, TaskConfig
from slipstream.rl.data.tasks import task_named
from slipstream.rl.data.tokens import Codec
from slipstream.rl.reporting.records import Stopwatch
from slipstream.rl.trainer import supervised
from slipstream.rl.trainer.learner import Learner
from slipstream.types import Completion, SamplingParams

PROMPTS, GROUP, SHORTEST, LONGEST, ROW = 8, 4, 6, 80, 128
SIGMA = 2.0
"""Standard deviation of the log length. Half of the samples have minimum length, the longest of eight about 75
tokens."""
ROWS = range(1, 17)
"""Numbers of packed rows whose programs are compiled before the first step."""
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_layers": 3, "num_kv_heads": 1}
SPEEDUP_TARGET = 1.8
BLOCK, WARMUP_BLOCKS = 10, 5
LAST = 5
"""Number of blocks at the end of a run whose rewards count as final."""
MAX_STOLEN = 0.02
"""Maximum fraction of CPU time stolen by others during a pair of blocks that counts."""
EVAL_PROMPTS, EVAL_SAMPLES = 90, 4
TASK = TaskConfig(digits=3)
LEARNING_RATE = 2.5e-4
"""Initial learning rate, for batches of a tenth of the demo's size. It decays linearly to 0."""
PHASES = ("generate", "reward", "train", "sync")


@dataclass
class Loop:
    """One training mode: its fleet, and the times, rewards and group ages of its runs."""

    name: str
    max_staleness: int
    bridge: Any
    rollouts: Any
    blocks: list[list[dict[str, float]]] = field(default_factory=list)
    """Seconds by phase of each step, by block, over all runs without their warm-up."""
    stolen: list[float] = field(default_factory=list)
    """Fraction of CPU time stolen by others, by block."""
    rewards: list[list[float]] = field(default_factory=list)
    """Reward of each step, by run."""
    ages: Counter[int] = field(default_factory=Counter)
    final: list[float] = field(default_factory=list)
    """Mean reward on held-out prompts at the end, by run."""

    def rate(self, blocks: list[int]) -> float:
        """Return iterations per minute of the median block, which excludes compilation in mid-run."""
        return 60 / statistics.median(
            statistics.mean(sum(phases.values()) for phases in self.blocks[block]) for block in blocks
        )

    def median(self, phase: str, blocks: list[int]) -> float:
        return statistics.median(step[phase] for block in blocks for step in self.blocks[block])

    def last(self) -> np.ndarray:
        """Return the mean reward of the last blocks, by run."""
        return np.array([np.mean(run[-LAST * BLOCK :]) for run in self.rewards])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=250, help="steps per run, without warm-up")
    parser.add_argument("--seeds", type=int, default=5, help="runs per mode")
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=40, help="supervised steps before RL")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error(f"--seeds is {arguments.seeds}, but estimating the variance between runs takes at least 2")
    console = Console()
    modes = {"sync": 0, f"async, K = {arguments.max_staleness}": arguments.max_staleness}
    blocks = WARMUP_BLOCKS + -(-arguments.steps // BLOCK)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        root = Path(temporary)
        model_dir = root / "model"
        write_model(model_dir)
        pin_to(cores[-1])  # inherited by the processes started below
        options = EmbeddedConfig(max_num_seqs=PROMPTS * GROUP, max_model_len=ROW)
        run_dirs = [root / f"run{number}" for number in range(len(modes))]
        bridges = [
            stack.enter_context(slipstream.launch(model_dir, engine=options, run_dir=run_dir, start_timeout=300))
            for run_dir in run_dirs
        ]
        pin_to(cores[0], *(gateway_of(run_dir) for run_dir in run_dirs))
        loops = [
            Loop(name, max_staleness, bridge, bridge.rollouts(max_staleness, PROMPTS))
            for (name, max_staleness), bridge in zip(modes.items(), bridges)
        ]
        for seed in range(arguments.seeds):
            runs = [train(loop, seed, model_dir, arguments.warm_up, blocks * BLOCK) for loop in loops]
            for block in range(blocks):
                for loop, run in zip(loops, runs):
                    run_block(loop, run, counts=block >= WARMUP_BLOCKS)
                rewards = ", ".join(f"{np.mean(loop.rewards[-1][-BLOCK:]):.2f}" for loop in loops)
                console.print(f"run {seed + 1} of {arguments.seeds}, block {block + 1} of {blocks}: rewards {rewards}")
            for loop in loops:
                loop.bridge.resume()
                loop.final.append(evaluate(loop.bridge, model_dir))
    results = report(loops, console)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def run_block(loop: Loop, run: Iterator[tuple[dict[str, float], list[int]]], *, counts: bool) -> None:
    loop.bridge.resume()
    before = cpu_ticks()
    steps = [next(run) for _ in range(BLOCK)]
    stolen, total = (now - then for now, then in zip(cpu_ticks(), before))
    loop.bridge.pause()
    if counts:
        loop.blocks.append([seconds for seconds, _ in steps])
        loop.stolen.append(stolen / max(total, 1))
        loop.ages.update(age for _, ages in steps for age in ages)


def write_model(directory: Path) -> None:
    """Write the demo's model, enlarged and with a single KV head (current models have several), so that the fixed cost
    of a step exceeds the cost of its rows, and compute exceeds communication."""
    model = dataclasses.replace(write_sample_config(directory), **SHAPE)
    (directory / "config.json").write_text(json.dumps(to_hf(model)))


def pin_to(core: int, *others: int) -> None:
    """Pin all threads of this process and of others to a core. Threads and processes that they start inherit it."""
    for process in (os.getpid(), *others):
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def gateway_of(run_dir: Path) -> int:
    return int(json.loads((run_dir / "gateway.json").read_text())["pid"])


def cpu_ticks() -> tuple[int, int]:
    """Return CPU ticks since boot: stolen by other virtual machines, and total. Zeros without `/proc/stat`."""
    try:
        user, nice, system, idle, wait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except OSError:
        return 0, 0
    return steal, user + nice + system + idle + wait + irq + softirq + steal


def train(
    loop: Loop, seed: int, model_dir: Path, warm_up: int, steps: int
) -> Iterator[tuple[dict[str, float], list[int]]]:
    """Train one step per `next`, and yield its seconds by phase and the ages of its groups."""
    bridge, rollouts = loop.bridge, loop.rollouts
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, decay="linear", decay_steps=steps)
    config = AlgorithmConfig(prompts=PROMPTS, group=GROUP, max_tokens=LONGEST, row_tokens=ROW, optimizer=optimizer)
    task, codec, model = task_named(TASK), Codec(model_dir), read_config(model_dir)
    params = sample_params(model, seed)
    for warmed, _ in supervised.warm_up(params, model, task, codec, steps=warm_up, seed=(seed,)):
        params = warmed
    for num_rows in ROWS:
        make_train_step(model, config)(init_state(params, model, config), empty_batch(num_rows))
    learner = Learner(config, model, params, seed=seed)
    texts: dict[str, str] = {}
    loop.rewards.append([])
    bridge.resume()
    bridge.sync(params)
    submitted, syncing = 0, None
    for step in range(1, steps + 1):
        watch = Stopwatch()
        while submitted < min(step + loop.max_staleness, steps):
            submitted += 1
            submit(rollouts, seed, submitted, task, codec, texts)
        groups = rollouts.take()
        watch.lap("generate")

        rows = [truncate_at_eos(c, model.eos_token_ids[0]) for group in groups for c in group.completions]
        prompts = [texts[group.id] for group in groups for _ in group.completions]
        answers = codec.decode([row.token_ids for row in rows])
        rewards = [task.reward(prompt, text) for prompt, text in zip(prompts, answers)]
        batch = make_batch(rows, version=groups[0].version, max_tokens=LONGEST)
        batch = learner.prepare(batch, np.array(rewards, np.float32).reshape(PROMPTS, GROUP))
        watch.lap("reward")

        learner.update(step, batch)
        watch.lap("train")

        if syncing is not None:
            syncing.result()
        if loop.max_staleness and step < steps:
            rollouts.expect(bridge.version + 1)
        syncing = bridge.start_sync(learner.policy)
        if not loop.max_staleness or step % BLOCK == 0:  # the engine is paused at the end of a block
            syncing.result()
        watch.lap("sync")
        loop.rewards[-1].append(float(np.mean(rewards)))
        yield watch.laps, [group.age for group in groups]


def empty_batch(rows: int) -> Batch:
    """Return a packed batch of zeros, for compilation."""
    tokens, columns = np.zeros((rows, ROW), np.int32), np.zeros((rows, ROW - 1), np.float32)
    ages = np.zeros((rows, ROW - 1), np.int32)
    return Batch(tokens, columns, columns, columns, ages, segments=tokens, positions=tokens)


def evaluate(bridge: Any, model_dir: Path) -> float:
    """Return the serving policy's mean reward on held-out prompts, which are the same for both modes."""
    task, codec = task_named(TASK), Codec(model_dir)
    prompts = task.prompts(np.random.default_rng(1), EVAL_PROMPTS, "heldout")
    sampling = [SamplingParams(SHORTEST, n=EVAL_SAMPLES, seed=i) for i in range(len(prompts))]
    completions = bridge.generate(codec.prompts(prompts), sampling)
    texts = codec.decode([c.token_ids for c in completions])
    return statistics.mean(task.reward(prompts[c.prompt_index], text) for c, text in zip(completions, texts))


def submit(rollouts: Any, seed: int, step: int, task: Any, codec: Codec, texts: dict[str, str]) -> None:
    rng = np.random.default_rng([7, seed, step])
    prompts = task.prompts(rng, PROMPTS)
    ids = [f"{seed}/{step}/{i}" for i in range(PROMPTS)]
    texts.update(zip(ids, prompts))
    lengths = long_tailed(rng)
    sampling = [SamplingParams(length, n=GROUP, seed=int(rng.integers(2**31)), ignore_eos=True) for length in lengths]
    rollouts.submit(ids, codec.prompts(prompts), sampling)


def long_tailed(rng: np.random.Generator) -> list[int]:
    """Draw one length per quantile (stratified), so that every batch has long samples, as a batch of hundreds would."""
    quantiles = (rng.permutation(PROMPTS) + rng.random(PROMPTS)) / PROMPTS
    drawn = [SHORTEST * math.exp(SIGMA * NormalDist().inv_cdf(q)) for q in np.clip(quantiles, 1e-6, 1 - 1e-6)]
    return [int(min(max(length, SHORTEST), LONGEST)) for length in drawn]


def truncate_at_eos(completion: Completion, eos: int) -> Completion:
    """Truncate a completion after its first end-of-sequence token, if it has one."""
    if eos not in completion.token_ids:
        return completion
    end = completion.token_ids.index(eos) + 1
    columns = {name: getattr(completion, name)[:end] for name in ("token_ids", "logprobs", "raw_logprobs")}
    spans = [dataclasses.replace(s, stop=min(s.stop, end)) for s in completion.spans if s.start < end]
    return dataclasses.replace(completion, **columns, spans=tuple(spans))


def report(loops: list[Loop], console: Console) -> dict[str, Any]:
    sync, asynchronous = loops
    every = list(range(len(sync.stolen)))
    quiet = [block for block in every if max(loop.stolen[block] for loop in loops) <= MAX_STOLEN]
    counted = quiet if 2 * len(quiet) >= len(every) else every
    table = Table(
        "",
        "iterations/min",
        *PHASES,
        "groups by age",
        title="Same prompts, alternating blocks; median ms per phase of a step",
    )
    rates, rates_of_all = ({loop.name: loop.rate(blocks) for loop in loops} for blocks in (counted, every))
    for loop in loops:
        table.add_row(
            loop.name,
            f"{rates[loop.name]:.0f}",
            *[f"{1e3 * loop.median(name, counted):.0f}" for name in PHASES],
            ", ".join(f"{age}: {count}" for age, count in sorted(loop.ages.items())),
        )
    console.print(table)
    runs = Table(
        "", *(f"run {i + 1}" for i in range(len(sync.final))), title=f"Rewards: last {LAST * BLOCK} steps (held-out)"
    )
    for loop in loops:
        runs.add_row(loop.name, *(f"{last:.2f} ({held_out:.2f})" for last, held_out in zip(loop.last(), loop.final)))
    console.print(runs)
    speedup, speedup_of_all = (rate[asynchronous.name] / rate[sync.name] for rate in (rates, rates_of_all))
    console.print(
        f"more than {MAX_STOLEN:.0%} of the CPU time was stolen during {len(every) - len(quiet)} of {len(every)} "
        + "pairs of blocks"
        + (", which do not count" if counted is quiet else "; all pairs count, because few undisturbed ones are left")
        + f"; speedup over all pairs {speedup_of_all:.2f} ×"
    )
    oldest = max(asynchronous.ages)
    gaps = asynchronous.last() - sync.last()  # paired: runs with the same weights and prompts
    gap = float(gaps.mean())
    noise = 2 * float(gaps.std(ddof=1) / len(gaps) ** 0.5)
    for what, good in (
        (f"async is {speedup:.2f} × as fast as sync (target ≥ {SPEEDUP_TARGET})", speedup >= SPEEDUP_TARGET),
        (
            f"no group is older than {asynchronous.max_staleness} versions: the oldest is {oldest}",
            oldest <= asynchronous.max_staleness,
        ),
        (
            f"reward of the last {LAST * BLOCK} steps {asynchronous.last().mean():.3f}, {gap:+.3f} against sync; "
            f"two standard errors of {len(gaps)} pairs of runs are {noise:.3f}",
            gap >= -noise,
        ),
    ):
        console.print(f"{'PASS' if good else 'FAIL'}  {what}")
    return {
        "cpus": os.cpu_count(),
        "rates_per_minute": rates,
        "speedup": speedup,
        "speedup_of_all_blocks": speedup_of_all,
        "blocks": len(every),
        "blocks_counted": len(counted),
        "final_reward_gap": gap,
        "two_standard_errors": noise,
        "final_rewards": {loop.name: loop.last().tolist() for loop in loops},
        "held_out": {loop.name: loop.final for loop in loops},
        "rewards": {loop.name: loop.rewards for loop in loops},
        "ages": {loop.name: dict(loop.ages) for loop in loops},
    }


if __name__ == "__main__":
    main()
