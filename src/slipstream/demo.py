"""`slipstream demo` and `slipstream train`: a whole run from nothing to a trained checkpoint, shown as it happens."""

from __future__ import annotations

import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream import topology
from slipstream.bridge import Bridge
from slipstream.config import build
from slipstream.errors import ConfigError, Unsupported
from slipstream.observe import loggers
from slipstream.observe.plot import write_curve
from slipstream.observe.progress import training_display
from slipstream.rl import resume
from slipstream.rl.config import TrainConfig
from slipstream.rl.loop import train
from slipstream.rl.records import Evaluation, Record, Saved, StepRecord
from slipstream.rl.tokens import write_small_model

DEMO_ACCURACY = 0.9
"""Sampled accuracy on training prompts that the demo must reach to call itself a success."""
VLLM_START_SECONDS = 300.0
"""vLLM compiles before it is up: one to two minutes on a GPU."""


@dataclass(slots=True)
class Outcome:
    """The records of a run, sorted by kind."""

    run_dir: Path
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    checkpoint: str = ""
    seconds: float = 0.0

    def add(self, record: Record) -> None:
        match record:
            case StepRecord():
                self.steps.append(record)
            case Evaluation():
                self.evaluations.append(record)
            case Saved(directory=directory):
                self.checkpoint = directory


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
    """The demo: a small decoder made on the spot learns to reverse three digits. Returns the exit code, 0 if it did.

    Stops once the last ten steps were right 95 % of the time, but not before 150 steps."""
    console = console or Console()
    settings = {
        "run_dir": out,
        "steps": steps,
        "min_steps": 150,
        "target_accuracy": 0.95,
        "seed": seed,
        "engines": engines,
        "mode": mode,
        "engine": {"kind": engine, "max_concurrency": 256, "max_model_len": 32},
    }
    config = build(TrainConfig, settings)
    outcome = _execute(config, console)
    if outcome is None:
        return 130
    first, last = outcome.evaluations[0].sampled_train, outcome.evaluations[-1].sampled_train
    if last < DEMO_ACCURACY:
        hint = "Try another --seed." if len(outcome.steps) > 200 else "It usually takes 100 to 200 steps; give it more."
        console.print(
            f"[bold red]The demo did not learn its task:[/] after {len(outcome.steps)} steps its sampled accuracy is "
            f"{last:.3f}, and {DEMO_ACCURACY} was the aim. {hint}",
            soft_wrap=True,
        )
        return 1
    console.print(f"[bold green]Learned:[/] sampled accuracy {first:.3f} → {last:.3f}.")
    console.print("Next: slipstream demo --seed 1 --engines 2", "      slipstream train examples/train.toml", sep="\n")
    return 0


def run_train(config: TrainConfig, console: Console | None = None) -> int:
    """A run as the config says. Returns the exit code: 1 if there was a target accuracy and it was not reached."""
    console = console or Console()
    outcome = _execute(config, console)
    if outcome is None:
        return 130
    reached, aim = outcome.evaluations[-1].sampled_train, config.target_accuracy
    if aim and len(outcome.steps) == config.steps and reached < aim:
        console.print(f"[bold red]target_accuracy {aim} was not reached[/] in {config.steps} steps: {reached:.3f}")
        return 1
    return 0


def _execute(config: TrainConfig, console: Console) -> Outcome | None:
    """Runs to the end and prints the summary; None when the user interrupted it."""
    started = time.perf_counter()
    outcome = Outcome(Path(config.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}"))
    loggers.check(config.logging)
    for record in resume.earlier(config, outcome.run_dir):
        outcome.add(record)
    model_dir = Path(config.model) if config.model else outcome.run_dir / "model"
    if not config.model:
        write_small_model(model_dir)
    where = (
        f"{config.engines} {config.engine.kind} engine process(es)"
        if config.engines
        else "an engine inside this process"
    )
    console.print(
        f"task {config.task.name}, rollouts by {where}; logs in {outcome.run_dir}", markup=False, soft_wrap=True
    )
    if outcome.steps:
        console.print(f"going on from the checkpoint after step {outcome.steps[-1].step}")
    try:
        with (
            _open_bridge(config, model_dir, outcome.run_dir) as bridge,
            _open_reference(config, model_dir, outcome.run_dir / "reference") as reference,
        ):
            console.print(f"engines up after {time.perf_counter() - started:.1f} s; compiling and warming up")
            with training_display(console, config.warmup_steps, config.steps) as display:
                for record in train(config, bridge, model_dir, outcome.run_dir, reference):
                    outcome.add(record)
                    display.show(record)
    except KeyboardInterrupt:
        where = f"{outcome.run_dir}/metrics.jsonl"
        more = f"; the same command with run_dir={outcome.run_dir} goes on" if config.save_every else ""
        console.print(
            f"interrupted after {len(outcome.steps)} steps; records are in {where}{more}", markup=False, soft_wrap=True
        )
        return None
    outcome.seconds = time.perf_counter() - started
    console.print(_summary(outcome))
    _print_files(outcome, config, console)
    return outcome


def _open_bridge(config: TrainConfig, model_dir: Path, run_dir: Path) -> Bridge:
    if config.engines == 0:
        return topology.inprocess(model_dir, engine=config.engine, run_dir=run_dir)
    return topology.launch(
        model_dir,
        engines=config.engines,
        engine=config.engine,
        run_dir=run_dir,
        keep_alive=config.patience > 0,
        start_timeout=VLLM_START_SECONDS if config.engine.kind == "vllm" else topology.START_SECONDS,
    )


def _open_reference(config: TrainConfig, model_dir: Path, run_dir: Path) -> AbstractContextManager[Bridge | None]:
    """An engine of the same kind for the policy that KL pulls towards, where engines are to score it."""
    if not config.algorithm.kl.by_engine:
        return nullcontext()
    if config.engine.kind == "remote":
        raise ConfigError(
            f"kl.scored_by is 'engine', and {config.engine.url} is one server, which serves the policy that learns; take "
            "'trainer', or call `train` with a bridge to another server as `reference`"
        )
    return _open_bridge(replace(config, engines=min(config.engines, 1)), model_dir, run_dir)


def _summary(outcome: Outcome) -> Table:
    """Everything in it was measured in this run."""
    first, last = outcome.evaluations[0], outcome.evaluations[-1]
    table = Table(title="What this run measured", title_justify="left", show_header=False)
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
    syncs = [step.sync for step in outcome.steps]
    table.add_row("RL steps", str(len(outcome.steps)))
    table.add_row("weight syncs", str(len(syncs) + 1))
    table.add_row("sync, median", f"{1e3 * statistics.median(s.total_seconds for s in syncs):.1f} ms")
    table.add_row(
        "engine's pause in a sync, median", f"{1e3 * statistics.median(s.pause_seconds for s in syncs):.2f} ms"
    )
    table.add_row("step, median", f"{1e3 * statistics.median(s.seconds.total for s in outcome.steps):.0f} ms")
    table.add_row("tokens/s, median", f"{statistics.median(s.tokens_per_second for s in outcome.steps):,.0f}")
    table.add_row("wall time, all included", f"{outcome.seconds:.1f} s")
    return table


def _print_files(outcome: Outcome, config: TrainConfig, console: Console) -> None:
    title = f"{config.algorithm.kind} on {config.task.name!r}, seed {config.seed}"
    try:
        curve = str(write_curve(outcome.run_dir / "curve.png", outcome.steps, outcome.evaluations, title))
    except Unsupported as missing:
        curve = str(missing)
    # Not as markup: paths and the hint for a missing package may have square brackets.
    for label, text in (
        ("curve", curve),
        ("records", f"{outcome.run_dir}/metrics.jsonl"),
        ("checkpoint", outcome.checkpoint),
    ):
        console.print(f"{label:10}  {text}", markup=False, soft_wrap=True)
