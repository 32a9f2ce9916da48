"""Cost of offloading: training step times with the engine in another process compared with an in-process engine.

    python benchmarks/loop.py [--steps 100] [--json benchmarks/results/loop.json]

Both loops run in alternating blocks of steps, so that a noisy machine slows both equally. They have the same config and
seed, and therefore the same prompts; the benchmark checks that they also sample the same tokens. The first steps, which
compile, do not count. The exit code is 0 even if a target is missed."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.rl.config import TrainConfig
from slipstream.rl.reporting.records import Record, StepRecord
from slipstream.rl.trainer.loop import training_loop

BLOCK = 5
"""Steps of one loop before the other continues."""
WARMUP_BLOCKS = 3

SYNC_TARGET_MS = 10.0
OVERHEAD_TARGET = 0.25


@dataclass(frozen=True, slots=True)
class Loop:
    """Medians over the measured steps, in milliseconds."""

    step: float
    generate: float
    train: float
    sync: float
    other: float
    """Time for prompts, rewards and batching."""
    engine_pause: float
    tokens_per_second: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="measured steps per loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    blocks = max(1, round(arguments.steps / BLOCK))
    offloaded, local = measure(blocks, arguments.seed)
    results = compare(offloaded, local)
    show(results, Console())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(blocks: int, seed: int) -> tuple[list[StepRecord], list[StepRecord]]:
    """Return `blocks` × BLOCK records each of the offloaded and the in-process loop."""
    num_steps = (blocks + WARMUP_BLOCKS) * BLOCK
    engine = EmbeddedConfig(max_num_seqs=256, max_model_len=32)
    config = TrainConfig(steps=num_steps, eval_every=num_steps + 1, save_every=0, seed=seed, engine=engine)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = root / "model"
        write_sample_config(model)
        bridges = (
            stack.enter_context(slipstream.launch(model, engine=engine, run_dir=root / "fleet")),
            stack.enter_context(slipstream.inprocess(model, engine=engine)),
        )
        loops = [steps_of(training_loop(config, bridge, model, root / str(i))) for i, bridge in enumerate(bridges)]
        records: tuple[list[StepRecord], list[StepRecord]] = ([], [])
        for block in track(range(blocks + WARMUP_BLOCKS), "alternating blocks"):
            order = (0, 1) if block % 2 == 0 else (1, 0)  # alternate which loop goes first
            for which in order:
                records[which].extend(next(loops[which]) for _ in range(BLOCK))
    return records[0][WARMUP_BLOCKS * BLOCK :], records[1][WARMUP_BLOCKS * BLOCK :]


def steps_of(records: Iterator[Record]) -> Iterator[StepRecord]:
    return (record for record in records if isinstance(record, StepRecord))


def compare(offloaded: list[StepRecord], local: list[StepRecord]) -> dict:
    ours, theirs = summarize(offloaded), summarize(local)
    overhead = ours.step / theirs.step - 1
    return {
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "device": jax.devices()[0].platform,
            "python": platform.python_version(),
            "jax": jax.__version__,
        },
        "steps": len(offloaded),
        "offloaded": asdict(ours),
        "in_process": asdict(theirs),
        "step_ratio": ours.step / theirs.step,
        "same_rollouts": all(
            (a.reward, a.num_tokens, a.metrics) == (b.reward, b.num_tokens, b.metrics) for a, b in zip(offloaded, local)
        ),
        "targets": {
            "sync_ms": {"target": SYNC_TARGET_MS, "measured": ours.sync, "passed": ours.sync <= SYNC_TARGET_MS},
            "overhead": {"target": OVERHEAD_TARGET, "measured": overhead, "passed": overhead <= OVERHEAD_TARGET},
        },
    }


def summarize(steps: list[StepRecord]) -> Loop:
    def median_ms(seconds: Callable[[StepRecord], float]) -> float:
        return 1e3 * statistics.median(seconds(step) for step in steps)

    return Loop(
        step=median_ms(lambda s: s.seconds.total),
        generate=median_ms(lambda s: s.seconds.generate),
        train=median_ms(lambda s: s.seconds.train),
        sync=median_ms(lambda s: s.seconds.sync),
        other=median_ms(lambda s: s.seconds.prepare + s.seconds.reward),
        engine_pause=median_ms(lambda s: s.sync.pause_seconds),
        tokens_per_second=statistics.median(s.num_tokens / s.seconds.generate for s in steps),
    )


def show(results: dict, console: Console) -> None:
    machine = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    table = Table("median of a step", "offloaded", "in-process", "ratio", title=f"{results['steps']} steps each")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in ("step", "generate", "train", "sync", "other", "engine_pause"):
        ours, theirs = results["offloaded"][name], results["in_process"][name]
        table.add_row(name.replace("_", " "), f"{ours:.2f} ms", f"{theirs:.2f} ms", f"{ours / theirs:.2f}")
    ours, theirs = results["offloaded"]["tokens_per_second"], results["in_process"]["tokens_per_second"]
    table.add_row("tokens/s while generating", f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}")
    console.print(table)
    console.print(machine)
    console.print(f"same rollouts in both loops: {'yes' if results['same_rollouts'] else 'NO'}")
    for label, key, unit, scale in (("sync", "sync_ms", " ms", 1), ("offloading overhead", "overhead", " %", 100)):
        goal = results["targets"][key]
        verdict = "[green]PASS[/]" if goal["passed"] else "[red]FAIL[/]"
        console.print(
            f"{verdict}  {label}: {scale * goal['measured']:.1f}{unit} "
            f"(target at most {scale * goal['target']:g}{unit})"
        )


if __name__ == "__main__":
    main()
