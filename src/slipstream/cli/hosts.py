"""Commands for several machines: `certificates`, `slurm` and `role` (docs/hosts.md)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import EngineDevices, ShareGpus, TrainerDevices, parse_devices, parse_trainer_devices
from slipstream.cli.stderr import LogFormat, LogFormatOption, log_to_stderr

Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- COMMAND...", help="Command that starts the trainer: -- python train.py"),
]
Engine = Annotated[
    list[str] | None, typer.Option("--engine", help="An engine setting, such as tensor_parallel_size=2; repeatable.")
]
Model = Annotated[
    Path, typer.Option(help="HF model directory on a file system shared by all nodes, or name on the Hub.")
]
Inference = Annotated[
    int,
    typer.Option(
        envvar="NUM_INFERENCE_NODES", help="Number of nodes for engines, the last of the job; 0 runs all on one."
    ),
]
EnginesPerNode = Annotated[int, typer.Option(min=1, help="Engines per inference node.")]


def certificates(
    out: Annotated[Path, typer.Option(help="Directory to create, or to add hosts to.")],
    hosts: Annotated[str, typer.Option(help="Host names or addresses, comma-separated: node01,node02/10.0.0.2")],
    days: Annotated[int, typer.Option(min=1, help="Validity in days.")] = 365,
) -> None:
    """Make TLS certificates for a fleet on several machines.

    Creates a private CA, and a certificate and key for each host. Gateways and
    engines need them to listen beyond loopback. With --mutual-tls a gateway
    also requires them of those who connect.
    """
    from slipstream.deploy.processes.certificates import make

    groups = [host.strip() for host in hosts.split(",") if host.strip()]
    files = make(out, groups, days)
    print(f"CA, for every machine:  {files.ca}")
    for group in groups:
        print(f"certificate and key of {group}:  {'  '.join(files.of(group.split('/')[0]))}")


def slurm(
    model: Model,
    command: Command = None,
    inference_nodes: Inference = 1,
    trainer_nodes: Annotated[int, typer.Option(help="Number of nodes for the trainer, the first of the job.")] = 1,
    engines_per_node: EnginesPerNode = 1,
    engine: Engine = None,
    devices: EngineDevices = "",
    trainer_devices: TrainerDevices = "",
    share_gpus: ShareGpus = False,
    run_dir: Annotated[
        Path, typer.Option(help="Parent of run directories, on a file system shared by all nodes.")
    ] = Path("runs"),
    name: Annotated[str, typer.Option(help="Name of the job.")] = "slipstream",
    sbatch: Annotated[
        list[str] | None, typer.Option(help="A further option of sbatch: --sbatch=--gpus-per-node=8; repeatable.")
    ] = None,
) -> None:
    """Print a batch script for SLURM.

    The gateway and the trainer run on the first nodes, engines on the last:
    [b]slipstream slurm … | sbatch[/b]
    """
    from slipstream.deploy.slurm.job import SlurmJob, script
    from slipstream.model.checkpoints.hub import absolute_model

    parse_devices(devices)  # raises
    parse_trainer_devices(trainer_devices)
    given = {"--devices": devices, "--trainer-devices": trainer_devices}
    placement = [f"{option}={value}" for option, value in given.items() if value] + ["--share-gpus"] * share_gpus
    job = SlurmJob(
        command=command or (),
        model=absolute_model(model),
        run_dir=str(run_dir.absolute()),
        num_trainers=trainer_nodes,
        num_inference=inference_nodes,
        engines_per_node=engines_per_node,
        engine=engine or (),
        placement=placement,
        name=name,
        sbatch=sbatch or (),
    )
    print(script(job), end="")


def role(
    model: Model,
    run_dir: Annotated[
        Path,
        typer.Option(
            envvar=["SLIPSTREAM_RUN_DIR", "LOGDIR"], help="Run directory of this attempt, on a shared file system."
        ),
    ],
    command: Command = None,
    inference_nodes: Inference = 0,
    engines_per_node: EnginesPerNode = 1,
    engine: Engine = None,
    devices: EngineDevices = "",
    trainer_devices: TrainerDevices = "",
    share_gpus: ShareGpus = False,
    port: Annotated[
        int, typer.Option(help="Port of the gateway; 0 takes a free one, or 26758 if NUM_INFERENCE_NODES is set.")
    ] = 0,
    start_seconds: Annotated[float, typer.Option(help="Time limit for gateway and engines to start.")] = 900.0,
    log_format: LogFormatOption = LogFormat.text,
) -> None:
    """Run one node of a SLURM job.

    The script of [b]slipstream slurm[/b] runs this on every node.
    """
    from slipstream.config import EngineConfig, load
    from slipstream.deploy.slurm.job import INFERENCE_PORT, NUM_INFERENCE_NODES, this_node
    from slipstream.deploy.slurm.node import NodeRole
    from slipstream.errors import ConfigError

    log_to_stderr(log_format, "node", run_dir=run_dir)
    if not command:
        raise ConfigError("no trainer command given: slipstream role … -- python train.py")
    config = load(EngineConfig, overrides=engine or ())
    node = this_node(os.environ, inference_nodes)
    port = port or (INFERENCE_PORT if os.environ.get(NUM_INFERENCE_NODES) else 0)
    node_role = NodeRole(
        node,
        run_dir.resolve(),
        model,
        command,
        config,
        engines_per_node,
        port,
        start_seconds,
        devices=parse_devices(devices),
        trainer_devices=parse_trainer_devices(trainer_devices),
        share_gpus=share_gpus,
    )
    raise typer.Exit(node_role.run())
