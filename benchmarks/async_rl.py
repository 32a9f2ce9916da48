"""What it is worth that engines do not wait for the trainer: iterations per minute of asynchronous training beside synchronous,
with generations whose lengths have a long tail.

    python benchmarks/async_rl.py [--steps 250] [--seeds 5] [--max-staleness 2] [--json benchmarks/results/async_rl.json]

A real trainer (GRPO on reversing digits) and a real engine in another process, each on a core of its own, as they would have a
device of their own. Every prompt's samples run on to a length drawn from a long-tailed distribution (half are short, a few are
thirteen times as long), as answers of reasoning models do. What comes after the end-of-sequence token is cut off before
training. Both modes take the same prompts with the same seeds, in blocks of steps in turn, so that a noisy machine slows both
alike; the engine whose turn it is not is paused. On a machine that others share, blocks during which they took processor time
do not count: asynchronous training wants both cores, and would be measured by what is left of them; what all blocks give is
printed beside. Whether both learn the same is asked of several runs, each with weights, prompts and samples of its own: one
run's luck moves its reward by more than two versions of age do. The exit code is 0 whatever the verdict: a benchmark
reports."""

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
from slipstream.config import EngineConfig
from slipstream.model.config import ModelConfig
from slipstream.rl import supervised
from slipstream.rl.batch import Batch, make_batch
from slipstream.rl.config import AlgorithmConfig, OptimiserConfig, TaskConfig
from slipstream.rl.learner import Learner
from slipstream.rl.records import Stopwatch
from slipstream.rl.tasks import task_named
from slipstream.rl.tokens import Codec, init_small, write_small_model
from slipstream.rl.train_step import init_state, make_train_step
from slipstream.types import Completion, SamplingParams

PROMPTS, GROUP, SHORTEST, LONGEST, ROW = 8, 4, 6, 80, 128
SIGMA = 2.0
"""Of the lengths' logarithm: half of them are the shortest, and the longest of eight is about 75 tokens."""
ROWS = range(1, 17)
"""Of packed batches: the programs for these are compiled before the first step."""
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_layers": 3, "num_kv_heads": 1}
SPEEDUP_TARGET = 1.8
BLOCK, WARMUP_BLOCKS = 10, 5
LAST = 5
"""Blocks of a run whose rewards count as the final ones."""
QUIET = 0.02
"""Of the processors' time: what others may take during a pair of blocks that counts."""
EVAL_PROMPTS, EVAL_SAMPLES = 90, 4
TASK = TaskConfig(digits=3)
LEARNING_RATE = 2.5e-4
"""At the beginning: batches are a tenth of the demo's. It falls to 0 by the end, as it does in runs that are to arrive."""
PHASES = ("generate", "reward", "train", "sync")


@dataclass
class Loop:
    """One mode: its fleet, and of each of its runs the steps' seconds, rewards and groups' ages."""

    name: str
    bound: int
    bridge: Any
    rollouts: Any
    blocks: list[list[dict[str, float]]] = field(default_factory=list)
    """Of all runs, those after the warm-up: a step's seconds by phase."""
    stolen: list[float] = field(default_factory=list)
    """By block: what others took of the processors' time."""
    rewards: list[list[float]] = field(default_factory=list)
    """By run: every step's."""
    ages: Counter[int] = field(default_factory=Counter)
    final: list[float] = field(default_factory=list)
    """By run: mean reward on held-out prompts at the end."""

    def rate(self, blocks: list[int]) -> float:
        """Iterations per minute: of the median block, so that a program compiled in mid-run does not count."""
        return 60 / statistics.median(
            statistics.mean(sum(phases.values()) for phases in self.blocks[block]) for block in blocks
        )

    def median(self, phase: str, blocks: list[int]) -> float:
        return statistics.median(step[phase] for block in blocks for step in self.blocks[block])

    def last(self) -> np.ndarray:
        """By run: the mean reward of its last blocks."""
        return np.array([np.mean(run[-LAST * BLOCK :]) for run in self.rewards])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=250, help="steps of a run, those of the warm-up not counted")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each mode")
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=40, help="supervised steps before")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds: at least 2, to know how much luck moves a run's reward")
    console = Console()
    modes = {"sync": 0, f"async, K = {arguments.max_staleness}": arguments.max_staleness}
    blocks = WARMUP_BLOCKS + -(-arguments.steps // BLOCK)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        root = Path(temporary)
        model_dir = root / "model"
        write_model(model_dir)
        move_to(cores[-1])  # the processes that are started stay there
        options = EngineConfig(max_concurrency=PROMPTS * GROUP, max_model_len=ROW)
        run_dirs = [root / f"run{number}" for number in range(len(modes))]
        bridges = [
            stack.enter_context(slipstream.launch(model_dir, engine=options, run_dir=run_dir, start_timeout=300))
            for run_dir in run_dirs
        ]
        move_to(cores[0], *(gateway_of(run_dir) for run_dir in run_dirs))
        loops = [
            Loop(name, bound, bridge, bridge.rollouts(bound, PROMPTS))
            for (name, bound), bridge in zip(modes.items(), bridges)
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
    before = processor_time()
    steps = [next(run) for _ in range(BLOCK)]
    stolen, all_ = (now - then for now, then in zip(processor_time(), before))
    loop.bridge.pause()
    if counts:
        loop.blocks.append([seconds for seconds, _ in steps])
        loop.stolen.append(stolen / max(all_, 1))
        loop.ages.update(age for _, ages in steps for age in ages)


def write_model(directory: Path) -> None:
    """As the demo's, but larger and with one head of keys and values for all heads of queries (models of today have several of
    each), so that a step costs more than its rows do, and computing more than what is said about it."""
    model = dataclasses.replace(write_small_model(directory), **SHAPE)
    (directory / "config.json").write_text(json.dumps(model.to_hf()))


def move_to(core: int, *others: int) -> None:
    """All threads of this process and of others, and with them what they will start."""
    for process in (os.getpid(), *others):
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def gateway_of(run_dir: Path) -> int:
    return int(json.loads((run_dir / "gateway.json").read_text())["pid"])


def processor_time() -> tuple[int, int]:
    """Since the machine started: what others on its host took of its processors, and all of it. Zeros where nobody counts."""
    try:
        user, nice, system, idle, wait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except OSError:
        return 0, 0
    return steal, user + nice + system + idle + wait + irq + softirq + steal


def train(
    loop: Loop, seed: int, model_dir: Path, warm_up: int, steps: int
) -> Iterator[tuple[dict[str, float], list[int]]]:
    """A step for each `next`: its seconds by phase, and its groups' ages."""
    bridge, rollouts = loop.bridge, loop.rollouts
    optimiser = OptimiserConfig(learning_rate=LEARNING_RATE, decay="linear", decay_steps=steps)
    config = AlgorithmConfig(prompts=PROMPTS, group=GROUP, max_tokens=LONGEST, row_tokens=ROW, optimiser=optimiser)
    task, codec, model = task_named(TASK), Codec(model_dir), ModelConfig.read(model_dir)
    params = init_small(model, seed)
    for warmed, _ in supervised.warm_up(params, model, task, codec, steps=warm_up, seed=(seed,)):
        params = warmed
    for num_rows in ROWS:
        make_train_step(model, config)(init_state(params, model, config), nothing(num_rows))
    learner = Learner(config, model, params, seed=seed)
    texts: dict[str, str] = {}
    loop.rewards.append([])
    bridge.resume()
    bridge.sync(params)
    submitted, syncing = 0, None
    for step in range(1, steps + 1):
        watch = Stopwatch()
        while submitted < min(step + loop.bound, steps):
            submitted += 1
            submit(rollouts, seed, submitted, task, codec, texts)
        groups = rollouts.take()
        watch.lap("generate")

        rows = [answered(completion, model.eos_token_ids[0]) for group in groups for completion in group.completions]
        prompts = [texts[group.id] for group in groups for _ in group.completions]
        answers = codec.decode([row.token_ids for row in rows])
        rewards = [task.reward(prompt, text) for prompt, text in zip(prompts, answers)]
        batch = make_batch(rows, version=groups[0].version, max_tokens=LONGEST)
        batch = learner.prepare(batch, np.array(rewards, np.float32).reshape(PROMPTS, GROUP))
        watch.lap("reward")

        learner.learn(step, batch)
        watch.lap("train")

        if syncing is not None:
            syncing.result()
        if loop.bound and step < steps:
            rollouts.expect(bridge.version + 1)
        syncing = bridge.start_sync(learner.policy)
        if not loop.bound or step % BLOCK == 0:  # where a block ends, the engine is paused
            syncing.result()
        watch.lap("sync")
        loop.rewards[-1].append(float(np.mean(rewards)))
        yield watch.laps, [group.age for group in groups]


def nothing(rows: int) -> Batch:
    """A packed batch that nothing is learned from."""
    tokens, columns = np.zeros((rows, ROW), np.int32), np.zeros((rows, ROW - 1), np.float32)
    ages = np.zeros((rows, ROW - 1), np.int32)
    return Batch(tokens, columns, columns, columns, ages, segments=tokens, positions=tokens)


def evaluate(bridge: Any, model_dir: Path) -> float:
    """Mean reward of the policy that serves on held-out prompts, the same for both."""
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
    """One from each of equal parts of the distribution: every batch has its long ones, as batches of hundreds do."""
    parts = (rng.permutation(PROMPTS) + rng.random(PROMPTS)) / PROMPTS
    drawn = [SHORTEST * math.exp(SIGMA * NormalDist().inv_cdf(part)) for part in np.clip(parts, 1e-6, 1 - 1e-6)]
    return [int(min(max(length, SHORTEST), LONGEST)) for length in drawn]


def answered(completion: Completion, eos: int) -> Completion:
    """Up to the end of the answer, that token included; all of it if it never ended."""
    if eos not in completion.token_ids:
        return completion
    end = completion.token_ids.index(eos) + 1
    columns = {name: getattr(completion, name)[:end] for name in ("token_ids", "logprobs", "raw_logprobs")}
    spans = [dataclasses.replace(s, stop=min(s.stop, end)) for s in completion.spans if s.start < end]
    return dataclasses.replace(completion, **columns, spans=tuple(spans))


def report(loops: list[Loop], console: Console) -> dict[str, Any]:
    sync, ahead = loops
    every = list(range(len(sync.stolen)))
    quiet = [block for block in every if max(loop.stolen[block] for loop in loops) <= QUIET]
    counted = quiet if 2 * len(quiet) >= len(every) else every
    table = Table(
        "",
        "iterations/min",
        *PHASES,
        "groups by age",
        title="Same prompts, block by block in turn; median ms of a step's phases",
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
    speedup, speedup_of_all = (found[ahead.name] / found[sync.name] for found in (rates, rates_of_all))
    console.print(
        f"others took more than {QUIET:.0%} of the processors during {len(every) - len(quiet)} of {len(every)} pairs of blocks"
        + (", which do not count" if counted is quiet else ", so many that these count, too")
        + f"; all pairs give {speedup_of_all:.2f} ×"
    )
    oldest = max(ahead.ages)
    gaps = ahead.last() - sync.last()  # of runs with the same weights and prompts
    gap = float(gaps.mean())
    noise = 2 * float(gaps.std(ddof=1) / len(gaps) ** 0.5)
    for what, good in (
        (f"async is {speedup:.2f} × as fast as sync (target ≥ {SPEEDUP_TARGET})", speedup >= SPEEDUP_TARGET),
        (f"no group is older than {ahead.bound} versions: the oldest is {oldest}", oldest <= ahead.bound),
        (
            f"reward of the last {LAST * BLOCK} steps {ahead.last().mean():.3f}, {gap:+.3f} against sync; "
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
