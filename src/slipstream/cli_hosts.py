"""Commands for several machines: `certificates`, `slurm` and `role` (docs/hosts.md)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

Command = Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The trainer: -- python train.py")]
Engine = Annotated[list[str] | None, typer.Option("--engine", help="A setting of EngineConfig: tp=2; may be repeated.")]
Model = Annotated[Path, typer.Option(help="HF model directory, seen by all nodes.")]
Inference = Annotated[int, typer.Option(help="Nodes for engines, the last of the job; 0: all on one machine.")]
EnginesPerNode = Annotated[int, typer.Option(min=1, help="Engines on each of them; they share its GPUs evenly.")]


def certificates(
    out: Annotated[Path, typer.Option(help="Directory to make, or to add hosts to.")],
    hosts: Annotated[str, typer.Option(help="Machines by comma, by name or address: node01,node02/10.0.0.2")],
    days: Annotated[int, typer.Option(min=1, help="How long they are valid.")] = 365,
) -> None:
    """Make a private CA and a certificate for each machine, for a gateway and engines beyond loopback."""
    from slipstream.topology.certificates import make

    named = [host.strip() for host in hosts.split(",") if host.strip()]
    made = make(out, named, days)
    print(f"trusted by everybody:  {made.ca}")
    for host in named:
        print(f"shown by {host}:  {'  '.join(made.of(host.split('/')[0]))}")


def slurm(
    model: Model,
    command: Command = None,
    inference_nodes: Inference = 1,
    trainer_nodes: Annotated[int, typer.Option(help="Nodes for the trainer, the first of the job.")] = 1,
    engines_per_node: EnginesPerNode = 1,
    engine: Engine = None,
    run_dir: Annotated[Path, typer.Option(help="Directory for run directories, seen by all nodes.")] = Path("runs"),
    name: Annotated[str, typer.Option(help="Of the job.")] = "slipstream",
    sbatch: Annotated[
        list[str] | None, typer.Option(help="More for sbatch: --sbatch=--gpus-per-node=8; may be repeated.")
    ] = None,
) -> None:
    """Print a script for sbatch: a gateway and the trainer on the first nodes, engines on the last."""
    from slipstream.topology.slurm import Job, script

    where = (str(model.absolute()), str(run_dir.absolute()))
    sizes = (trainer_nodes, inference_nodes, engines_per_node)
    print(script(Job(command or (), *where, *sizes, engine or (), name, sbatch or ())), end="")


def role(
    model: Model,
    run_dir: Annotated[
        Path,
        typer.Option(envvar="SLIPSTREAM_RUN_DIR", help="Run directory of this attempt, seen by all nodes."),
    ],
    command: Command = None,
    inference_nodes: Inference = 0,
    engines_per_node: EnginesPerNode = 1,
    engine: Engine = None,
    port: Annotated[int, typer.Option(help="Of the gateway; 0 takes a free one.")] = 0,
    start_seconds: Annotated[float, typer.Option(help="How long engines and gateway may take to come up.")] = 900.0,
) -> None:
    """Do this node's part of a SLURM job; see [b]slipstream slurm[/b], whose script runs it on every node."""
    from slipstream.config import EngineConfig, load
    from slipstream.errors import ConfigError
    from slipstream.observe.stderr import log_to_stderr
    from slipstream.topology.role import Part
    from slipstream.topology.slurm import role_of

    log_to_stderr()
    if not command:
        raise ConfigError("say what the trainer is: slipstream role … -- python train.py")
    config = load(EngineConfig, overrides=engine or ())
    mine = role_of(os.environ, inference_nodes)
    part = Part(mine, run_dir.resolve(), model, command, config, engines_per_node, port, start_seconds)
    raise typer.Exit(part.run())
