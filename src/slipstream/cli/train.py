"""Training commands: `demo` and `train`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.stderr import LogFormat, LogFormatOption, log_to_stderr


def demo(
    steps: Annotated[
        int, typer.Option(help="Maximum number of RL steps; it stops early when the task is solved.")
    ] = 400,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    engines: Annotated[int, typer.Option(help="Number of engine processes; 0 generates in the trainer process.")] = 1,
    engine: Annotated[
        str, typer.Option(help="Engine backend: embedded, or vllm (see `slipstream setup`).")
    ] = "embedded",
    mode: Annotated[str, typer.Option(help="Schedule: sync, partial, one_step_off or async.")] = "sync",
    out: Annotated[str, typer.Option(help="Run directory; runs/TIME by default.")] = "",
) -> None:
    """Train a tiny model with GRPO on this machine.

    No download and no config are needed. A decoder and its tokenizer are
    created, warmed up for a few seconds, and learn to reverse digits. Rollouts
    run in another process, which receives the new weights after every step.
    """
    from slipstream.cli.demo import run

    raise typer.Exit(run(steps=steps, seed=seed, engines=engines, engine=engine, mode=mode, out=out))


def train(
    config: Annotated[Path, typer.Argument(help="TOML file; see examples/train.toml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that override the file: algorithm.group=16 seed=3 …"),
    ] = None,
    log_format: LogFormatOption = LogFormat.text,
) -> None:
    """Train a model with the settings of a TOML file.

    Any setting can be overridden: [b]slipstream train run.toml steps=50[/b]
    """
    from slipstream.cli.demo import run_train
    from slipstream.config import load
    from slipstream.rl.config import TrainConfig

    beside = str(config.parent.absolute())
    if beside not in sys.path:
        sys.path.append(beside)  # reward functions and environments beside the file
    settings = load(TrainConfig, config, overrides or []).beside(config.parent)
    if log_format is LogFormat.json:
        log_to_stderr(log_format, "trainer", run_dir=Path(settings.run_dir) if settings.run_dir else None)
    raise typer.Exit(run_train(settings, is_logged=log_format is LogFormat.json))
