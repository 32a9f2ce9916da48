"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JoinRunDir = Annotated[Path | None, typer.Option("--run-dir", help="Run directory of a running gateway.")]
JoinGateway = Annotated[
    str, typer.Option("--gateway", help="Address of a running gateway; its token is read from SLIPSTREAM_TOKEN.")
]
EngineSettings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Engine settings: kind=vllm tensor_parallel_size=2 max_num_seqs=64 …"),
]
Owner = Annotated[int, typer.Option("--owner", help="Pid of the parent process; exit when it exits.", hidden=True)]
Dtype = Annotated[str, typer.Option("--dtype", help="Data type of the weights to write: float32 or bfloat16.")]
