"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.config import parse_value
from slipstream.errors import ConfigError

JoinRunDir = Annotated[Path | None, typer.Option("--run-dir", help="Run directory of a running gateway.")]
JoinGateway = Annotated[
    str, typer.Option("--gateway", help="Address of a running gateway; its token is read from SLIPSTREAM_TOKEN.")
]
EngineSettings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Engine settings: kind=vllm tensor_parallel_size=2 max_num_seqs=64 …"),
]
EngineDevices = Annotated[
    str,
    typer.Option(
        "--devices",
        help="GPUs of the engines. auto: those that the trainer does not use. 0,1,2,3: divided among the engines. "
        "[[0,1],[2,3]]: one list per engine.",
    ),
]
TrainerDevices = Annotated[str, typer.Option("--trainer-devices", help="GPUs that the trainer takes: 0,1.")]
ShareGpus = Annotated[
    bool, typer.Option("--share-gpus", help="Let several ranks, or a rank and the trainer, be on one GPU.")
]
Owner = Annotated[int, typer.Option("--owner", help="Pid of the parent process; exit when it exits.", hidden=True)]
BesideGateway = Annotated[
    bool, typer.Option("--beside-gateway", help="The owner starts the gateway too; wait for it.", hidden=True)
]
Dtype = Annotated[str, typer.Option("--dtype", help="Data type of the weights to write: float32 or bfloat16.")]


def parse_devices(text: str) -> Any:
    """Return the value of `--devices`; None if it was not given."""
    if not text or text == "auto":
        return text or None
    value = parse_value(text if text.startswith("[") else f"[{text}]")
    if not isinstance(value, list):
        raise ConfigError(f'--devices is {text!r}; expected auto, 0,1 or [[0,1],[2,3]], and UUIDs as ["GPU-…"]')
    return value


def parse_trainer_devices(text: str) -> tuple[Any, ...]:
    """Return the value of `--trainer-devices`."""
    value = () if not text else parse_value(text if text.startswith("[") else f"[{text}]")
    if not isinstance(value, (list, tuple)) or any(isinstance(device, list) for device in value) or "auto" in value:
        raise ConfigError(f'--trainer-devices is {text!r}; expected GPUs: 0,1, or UUIDs as ["GPU-…"]')
    return tuple(value)
