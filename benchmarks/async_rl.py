"""What it is worth that engines do not wait for the trainer: iterations per minute of asynchronous training beside synchronous,
with generations whose lengths have a long tail.

    python benchmarks/async_rl.py [--steps 60] [--max-staleness 2] [--json benchmarks/results/async_rl.json]

A real trainer (GRPO on reversing digits) and a real engine in another process. Every prompt's samples run on to a length drawn
from a long-tailed distribution (most are short, a few are thirty times as long), as answers of reasoning models do; what counts
is what comes before the end-of-sequence token. Both modes take the same prompts with the same seeds, in blocks of steps in
turn, so that a noisy machine slows both alike; the engine whose turn it is not is paused. The exit code is 0 whatever the
verdict: a benchmark reports."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import slipstream
from slipstream.config import EngineConfig
from slipstream.rl import supervised
from slipstream.rl.batch import make_batch
from slipstream.rl.config import AlgorithmConfig, TaskConfig
from slipstream.rl.experience import prepare
from slipstream.rl.tasks import task_named
from slipstream.rl.tokens import Codec, init_small, write_small_model
from slipstream.rl.train_step import init_state, make_train_step
from slipstream.types import Completion, SamplingParams

PROMPTS, GROUP, SHORTEST, LONGEST = 8, 8, 6, 192
SPEEDUP_TARGET = 1.8
BLOCK, WARMUP_BLOCKS = 10, 1


@dataclass
class Loop:
    """One mode's run: its steps' seconds, rewards and tokens' ages."""

    name: str
    bound: int
    seconds: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="steps measured of each mode")
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=40, help="supervised steps before")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console()
    loops = [Loop("sync", 0), Loop(f"async, K = {arguments.max_staleness}", arguments.max_staleness)]
    blocks = WARMUP_BLOCKS + -(-arguments.steps // BLOCK)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        root = Path(temporary)
        write_small_model(root / "model")
        runs = []
        for number, loop in enumerate(loops):
            options = EngineConfig(max_concurrency=4 * PROMPTS * GROUP, max_model_len=LONGEST + 16)
            bridge = stack.enter_context(
                slipstream.launch(root / "model", engine=options, run_dir=root / f"run{number}", start_timeout=300)
            )
            runs.append((bridge, train(loop, bridge, root / "model", arguments.warm_up, blocks * BLOCK)))
        for block in range(blocks):
            for loop, (bridge, run) in zip(loops, runs):
                bridge.resume()
                for _ in range(BLOCK):
                    next(run)
                bridge.pause()
                if block < WARMUP_BLOCKS:
                    loop.seconds.clear()
                    loop.ages.clear()
            console.print(f"block {block + 1} of {blocks}: " + ", ".join(f"{loop.rewards[-1]:.2f}" for loop in loops))
    results = report(loops, console)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def train(loop: Loop, bridge: Any, model_dir: Path, warm_up: int, steps: int) -> Iterator[None]:
    """A step for each `next`."""
    config = AlgorithmConfig(prompts=PROMPTS, group=GROUP, max_tokens=LONGEST)
    task, codec, model = task_named(TaskConfig(digits=2)), Codec(model_dir), write_small_model(model_dir)
    params = init_small(model, 0)
    for warmed, _ in supervised.warm_up(params, model, task, codec, steps=warm_up, seed=(0,)):
        params = warmed
    train_step, state = make_train_step(model, config), init_state(params, model, config)
    rollouts = bridge.rollouts(loop.bound, PROMPTS)
    texts: dict[str, str] = {}
    bridge.sync(params)
    submitted = 0
    for step in range(1, steps + 1):
        start = time.perf_counter()
        while submitted < min(step + loop.bound, steps):
            submitted += 1
            submit(rollouts, submitted, task, codec, texts)
        groups = rollouts.take()
        kept = [[answered(c, model.eos_token_ids[0]) for c in group.completions] for group in groups]
        rewards = np.array(
            [
                [task.reward(texts[g.id], t) for t in codec.decode([c.token_ids for c in row])]
                for g, row in zip(groups, kept)
            ],
            np.float32,
        )
        rows = [completion for group in groups for completion in group.completions]
        batch = make_batch(rows, version=groups[0].version, max_tokens=LONGEST)
        lengths = np.array(
            [len(c.prompt_token_ids) - 1 + len(a.token_ids) for c, a in zip(rows, (a for row in kept for a in row))]
        )
        batch = batch._replace(mask=batch.mask * (np.arange(batch.mask.shape[1]) < lengths[:, None]))
        batch = prepare(batch, rewards, state.weights, model, config)
        state, _ = jax.block_until_ready(train_step(state, batch))
        bridge.sync(state.policy)
        loop.seconds.append(time.perf_counter() - start)
        loop.rewards.append(float(rewards.mean()))
        loop.ages.update(int(age) for group in groups for age in [group.age])
        yield


def submit(rollouts: Any, step: int, task: Any, codec: Codec, texts: dict[str, str]) -> None:
    rng = np.random.default_rng([7, step])
    prompts = task.prompts(rng, PROMPTS)
    ids = [f"{step}/{i}" for i in range(PROMPTS)]
    texts.update(zip(ids, prompts))
    lengths = np.clip(rng.lognormal(np.log(SHORTEST), 1.1, PROMPTS), SHORTEST, LONGEST).astype(int)
    sampling = [
        SamplingParams(int(length), n=GROUP, seed=1000 * step + i, ignore_eos=True) for i, length in enumerate(lengths)
    ]
    rollouts.submit(ids, codec.prompts(prompts), sampling)


def answered(completion: Completion, eos: int) -> Completion:
    """Up to the end of the answer, that token included; all of it if it never ended."""
    count = completion.token_ids.index(eos) + 1 if eos in completion.token_ids else len(completion.token_ids)
    return replace(completion, token_ids=completion.token_ids[:count])


def report(loops: list[Loop], console: Console) -> dict[str, Any]:
    table = Table(
        "", "iterations/min", "step, median ms", "reward, last 20", "groups by age", title="Same prompts, one run"
    )
    rates = {loop.name: 60 * len(loop.seconds) / sum(loop.seconds) for loop in loops}
    for loop in loops:
        ages = ", ".join(f"{age}: {count}" for age, count in sorted(loop.ages.items()))
        table.add_row(
            loop.name,
            f"{rates[loop.name]:.0f}",
            f"{1e3 * statistics.median(loop.seconds):.0f}",
            f"{np.mean(loop.rewards[-20:]):.3f}",
            ages,
        )
    console.print(table)
    speedup = rates[loops[1].name] / rates[loops[0].name]
    oldest = max(loops[1].ages)
    for what, good in (
        (f"async is {speedup:.2f} × as fast as sync (target ≥ {SPEEDUP_TARGET})", speedup >= SPEEDUP_TARGET),
        (f"no group is older than {loops[1].bound} versions: the oldest is {oldest}", oldest <= loops[1].bound),
    ):
        console.print(f"{'PASS' if good else 'FAIL'}  {what}")
    return {
        "cpus": os.cpu_count(),
        "rates_per_minute": rates,
        "speedup": speedup,
        "rewards": {loop.name: loop.rewards for loop in loops},
        "ages": {loop.name: dict(loop.ages) for loop in loops},
    }


if __name__ == "__main__":
    main()
