"""The command `chaos`: a training run under faults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def chaos(
    config: Annotated[Path, typer.Argument(help="TOML file of a training run, as for `slipstream train`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that override the file.")
    ] = None,
    faults: Annotated[int, typer.Option(help="Number of faults.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed that the faults are drawn from.")] = 0,
    every_step: Annotated[
        bool, typer.Option("--every-step", help="Every fault at every step, instead of a random draw.")
    ] = False,
    at: Annotated[str, typer.Option(metavar="TEXT", help="Only faults at steps whose name contains this.")] = "",
    kind: Annotated[str, typer.Option(metavar="TEXT", help="Only faults of this kind.")] = "",
    pause: Annotated[float, typer.Option(help="Seconds between a recovery and the next fault.")] = 0.0,
    minutes: Annotated[float, typer.Option(help="Inject no more faults after this time.")] = float("inf"),
    out: Annotated[Path, typer.Option(help="Directory for runs, histories and the report.")] = Path("chaos"),
) -> None:
    """Inject faults into a training run and check its promises.

    Processes are killed, frozen, slowed, cut off and made to fail at named
    steps of updates, rollouts and launches. An independent checker then reads
    the history: every group is taken once, none is too old, one version is one
    set of weights, nothing is left behind. The exit code is 1 if a promise was
    broken.
    """
    from slipstream.chaos.injection import Injection, drawn, exhaustive
    from slipstream.chaos.rounds import run_rounds
    from slipstream.config import load
    from slipstream.errors import ConfigError
    from slipstream.rl.config import TrainConfig

    settings = load(TrainConfig, config, overrides or [])

    def is_chosen(injection: Injection) -> bool:
        return at in injection.step and kind in ("", injection.kind)

    known = [*exhaustive(), *drawn(2000, seed=0)]
    if not any(map(is_chosen, known)):
        kinds = ", ".join(sorted({injection.kind for injection in known}))
        raise ConfigError(f"no fault of kind {kind!r} at a step with {at!r} in its name; kinds are {kinds}")
    every = list(filter(is_chosen, exhaustive()))
    total = len(every) if every_step else faults

    def plan(round: int, done: int) -> list[Injection]:
        """Return the faults for a run. Drawn ones depend on its seed alone, so that it can be replayed by itself."""
        if every_step:
            return every[done:]
        return list(filter(is_chosen, drawn(total * 100, seed + round)))[: total - done]

    raise typer.Exit(run_rounds(config, overrides or [], settings.bound, plan, total, seed, out, minutes, pause))
