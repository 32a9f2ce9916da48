"""The demo's task, learned undisturbed and under faults: is the curve the same, and how much longer does it take?

    python benchmarks/learning_under_faults.py [--steps 150] [--seeds 3] [--engines 1] [--json FILE]

Each seed trains twice. The second time, a tenth as many faults as there are steps are spread over them: a process (engine,
gateway or trainer, drawn from the seed) is killed, or frozen for a few seconds. A disturbed curve lies within seed noise if its
final reward (mean of the last tenth of the steps) and its mean reward over all steps differ from those of the undisturbed run
with the same seed by no more than the undisturbed seeds differ among themselves. The exit code is 1 if a curve does not, or if
a promise that `slipstream chaos` checks was broken."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream.chaos.injection import ChaosRun, Injection, drawn
from slipstream.rl.config import TrainConfig
from slipstream.rl.reporting.records import StepRecord, read_records
from slipstream.rl.trainer import resume

FAULT_SHARE = 0.1
RATIO_TARGET = 1.5
FINISH_SECONDS = 1800.0
CONFIG = """
eval_every = {steps}
save_every = {save_every}
engines = {engines}
[engine]
max_num_seqs = 256
max_model_len = 32
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--engines", type=int, default=1, help="the demo has one; with two, the other generates on")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    pairs: list[list[dict]] = []
    with tempfile.TemporaryDirectory() as root:
        config = Path(root) / "demo.toml"
        config.write_text(CONFIG.format(steps=options.steps, save_every=options.save_every, engines=options.engines))
        for seed in range(options.seeds):
            counts = (0, round(FAULT_SHARE * options.steps))
            pairs.append([run(config, Path(root) / f"{seed}-{n}", options.steps, seed, n) for n in counts])
            results = compare(pairs)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    show(results, Console())
    sys.exit(not results["within_noise"] or any(side["problems"] for pair in pairs for side in pair))


def run(config: Path, directory: Path, steps: int, seed: int, faults: int) -> dict:
    """Train with as many faults, evenly spread over the steps."""
    kinds = [
        fault
        for fault in drawn(200 * faults, seed)
        if fault.step.startswith("any.") and fault.kind in ("kill", "freeze")
    ]
    started, done = time.monotonic(), list[Injection]()
    training = ChaosRun(config, directory, seed, [f"steps={steps}", f"seed={seed}"])
    try:
        for fault in kinds[:faults]:
            for _ in range(round(1 / FAULT_SHARE) - 3):  # a fault itself takes two steps or three
                training.run([], print)  # waits for the next step
            done += training.run(
                [fault],
                lambda fault: print(f"  {fault.step} {fault.kind}: {fault.outcome} {fault.seconds:.1f} s", flush=True),
            )
        has_finished = training.finish(time.monotonic() + FINISH_SECONDS)
    finally:
        training.close()
    records = read_records(directory / "run" / resume.LOG)
    rewards = [record.reward for record in records if isinstance(record, StepRecord)]
    problems = training.problems(TrainConfig().bound)
    if not has_finished or len(rewards) != steps:
        problems.append(f"the run ended after {len(rewards)} of {steps} steps")
    return {
        "seconds": time.monotonic() - started,
        "rewards": rewards,
        "final": statistics.fmean(rewards[-len(rewards) // 10 :]),
        "mean": statistics.fmean(rewards),
        "restarts": training.restarts,
        "faults": [[fault.step, fault.kind, fault.outcome, round(fault.seconds, 2)] for fault in done],
        "problems": problems,
    }


def compare(pairs: list[list[dict]]) -> dict:
    differences = {}
    for name in ("final", "mean"):
        quiet = [undisturbed[name] for undisturbed, _ in pairs]
        largest = max(abs(disturbed[name] - undisturbed[name]) for undisturbed, disturbed in pairs)
        differences[name] = {"difference": largest, "spread_of_seeds": max(quiet) - min(quiet)}
    quiet_seconds, seconds = (sum(pair[side]["seconds"] for pair in pairs) for side in (0, 1))
    lost = (seconds - quiet_seconds) / sum(len(disturbed["faults"]) for _, disturbed in pairs)
    return {
        "runs": pairs,
        "differences": differences,
        "within_noise": all(found["difference"] <= found["spread_of_seeds"] for found in differences.values()),
        "same_curves": all(undisturbed["rewards"] == disturbed["rewards"] for undisturbed, disturbed in pairs),
        "time_ratio": seconds / quiet_seconds,
        "time_ratio_target": RATIO_TARGET,
        "seconds_per_fault": lost,
        "step_seconds": quiet_seconds / sum(len(undisturbed["rewards"]) for undisturbed, _ in pairs),
        "step_seconds_for_target": lost * FAULT_SHARE / (RATIO_TARGET - 1),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg()},
    }


def show(results: dict, console: Console) -> None:
    names = [f"seed {seed}{suffix}" for seed in range(len(results["runs"])) for suffix in ("", ", faults")]
    sides = [side for pair in results["runs"] for side in pair]
    table = Table("mean reward of steps", *names)
    for start in range(0, len(sides[0]["rewards"]), 10):
        table.add_row(
            f"{start + 1} to {start + 10}",
            *(f"{statistics.fmean(side['rewards'][start : start + 10]):.3f}" for side in sides),
        )
    table.add_section()
    for label, cell in (("seconds", "seconds"), ("trainer restarts", "restarts")):
        table.add_row(label, *(f"{side[cell]:.0f}" for side in sides))
    table.add_row("faults", *(str(len(side["faults"])) for side in sides))
    console.print(table)
    for name, found in results["differences"].items():
        console.print(
            f"{name} reward: largest difference {found['difference']:.4f}, between seeds {found['spread_of_seeds']:.4f}"
        )
    console.print(
        f"within seed noise: {results['within_noise']}; curves are the same, number by number: {results['same_curves']}"
    )
    console.print(
        f"time under faults: {results['time_ratio']:.2f} × (target at most {RATIO_TARGET}). A fault costs "
        f"{results['seconds_per_fault']:.1f} s, a step {results['step_seconds']:.2f} s; the target is met for steps of "
        f"{results['step_seconds_for_target']:.2f} s and longer"
    )
    for problem in (problem for side in sides for problem in side["problems"]):
        console.print(f"[red]BROKEN:[/] {problem}")


if __name__ == "__main__":
    main()
