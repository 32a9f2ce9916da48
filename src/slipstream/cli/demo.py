"""`slipstream demo` and `slipstream train`: run training with a live display, and print a summary."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.errors import Unsupported
from slipstream.rl.config import TrainConfig
from slipstream.rl.reporting.plot import write_curve
from slipstream.rl.reporting.progress import logged_display, training_display
from slipstream.rl.reporting.records import Log
from slipstream.rl.trainer.session import TrainResult, TrainSession
from slipstream.runtime.compilation_cache import enable_compilation_cache

DEMO_ACCURACY = 0.9
"""Sampled accuracy on training prompts that the demo must reach to succeed."""


def run(
    *,
    steps: int = 400,
    seed: int = 0,
    engines: int = 1,
    engine: str = "embedded",
    mode: str = "sync",
    out: str = "",
    console: Console | None = None,
) -> int:
    """Run the demo: a tiny decoder learns to reverse three digits. Return the exit code, 0 on success.

    It stops when the accuracy of the last ten steps is 95 %, but not before step 150."""
    console = console or Console()
    settings: dict[str, Any] = {
        "run_dir": out,
        "steps": steps,
        "min_steps": 150,
        "target_accuracy": 0.95,
        "seed": seed,
        "engines": engines,
        "mode": mode,
        "engine": {"kind": engine, "max_num_seqs": 256, "max_model_len": 32},
    }
    config = TrainConfig(**settings)
    result = _execute(config, console)
    if result is None:
        return 130
    first, last = result.evaluations[0].sampled_train, result.evaluations[-1].sampled_train
    if last < DEMO_ACCURACY:
        hint = "Try another --seed." if len(result.steps) > 200 else "It usually takes 100 to 200 steps; allow more."
        console.print(
            f"[bold red]The demo did not learn its task:[/] after {len(result.steps)} steps its sampled accuracy is "
            f"{last:.3f}; the target is {DEMO_ACCURACY}. {hint}",
            soft_wrap=True,
        )
        return 1
    console.print(f"[bold green]Learned:[/] sampled accuracy {first:.3f} → {last:.3f}.")
    console.print("Next: slipstream demo --seed 1 --engines 2", "      slipstream train examples/train.toml", sep="\n")
    return 0


def run_train(config: TrainConfig, console: Console | None = None, is_logged: bool = False) -> int:
    """Run training with a config. Return the exit code: 1 if a target accuracy was set and not reached. `is_logged`: progress
    goes to the log, and nothing to the console."""
    console = console or Console(quiet=is_logged)
    result = _execute(config, console, logged_display if is_logged else training_display)
    if result is None:
        return 130
    reached, target = result.evaluations[-1].sampled_train, config.target_accuracy
    if target and len(result.steps) == config.steps and reached < target:
        console.print(f"[bold red]target_accuracy {target} was not reached[/] in {config.steps} steps: {reached:.3f}")
        return 1
    return 0


def _execute(
    config: TrainConfig, console: Console, display: Callable[..., AbstractContextManager[Log]] = training_display
) -> TrainResult | None:
    """Train and print a summary; return None if the user interrupted the run."""
    session = TrainSession(config)
    result = session.result
    engines = f"{config.engines} {config.engine.kind} engine process(es)" if config.engines else "an in-process engine"
    console.print(
        f"{config.subject}, rollouts by {engines}; logs are in {result.run_dir}", markup=False, soft_wrap=True
    )
    if result.steps:
        console.print(f"resuming from the checkpoint of step {result.steps[-1].step}")
    try:
        with session:
            enable_compilation_cache()  # a trainer that is restarted after a crash continues sooner
            console.print(f"engines started in {session.seconds:.1f} s; compiling and warming up")
            with display(console, config.warmup_steps, config.steps) as show:
                for record in session.records():
                    show(record)
    except KeyboardInterrupt:
        log = f"{result.run_dir}/metrics.jsonl"
        more = f"; the same command with run_dir={result.run_dir} resumes it" if config.save_every else ""
        console.print(
            f"interrupted after {len(result.steps)} steps; records are in {log}{more}", markup=False, soft_wrap=True
        )
        return None
    console.print(_summary(result))
    _print_files(result, config, console)
    return result


def _summary(result: TrainResult) -> Table:
    first, last = result.evaluations[0], result.evaluations[-1]
    table = Table(title="Measured in this run", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, label in (
        ("sampled_train", "accuracy, training prompts, sampled"),
        ("greedy_train", "accuracy, training prompts, greedy"),
        ("sampled_heldout", "accuracy, held-out prompts, sampled"),
        ("greedy_heldout", "accuracy, held-out prompts, greedy"),
    ):
        if getattr(first, name) is not None:
            table.add_row(label, f"{getattr(first, name):.3f} → {getattr(last, name):.3f}")
    table.add_section()
    syncs = [step.sync for step in result.steps]
    table.add_row("RL steps", str(len(result.steps)))
    table.add_row("weight syncs", str(len(syncs) + 1))
    table.add_row("sync, median", f"{1e3 * statistics.median(s.total_seconds for s in syncs):.1f} ms")
    table.add_row("engine pause per sync, median", f"{1e3 * statistics.median(s.pause_seconds for s in syncs):.2f} ms")
    table.add_row("step, median", f"{1e3 * statistics.median(s.seconds.total for s in result.steps):.0f} ms")
    table.add_row("tokens/s, median", f"{statistics.median(s.tokens_per_second for s in result.steps):,.0f}")
    table.add_row("total wall time", f"{result.seconds:.1f} s")
    return table


def _print_files(result: TrainResult, config: TrainConfig, console: Console) -> None:
    title = f"{config.algorithm.kind} on {config.subject!r}, seed {config.seed}"
    try:
        curve = str(write_curve(result.run_dir / "curve.png", result.steps, result.evaluations, title))
    except Unsupported as missing:
        curve = str(missing)
    # Without markup: paths and hints may contain square brackets.
    for label, text in (
        ("curve", curve),
        ("records", f"{result.run_dir}/metrics.jsonl"),
        ("checkpoint", result.checkpoint),
    ):
        console.print(f"{label:10}  {text}", markup=False, soft_wrap=True)
