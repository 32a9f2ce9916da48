"""Commands about this machine: `doctor` and `setup`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.errors import ConfigError


def doctor(
    model: Annotated[
        Path | None,
        typer.Option(
            help="HF model directory or org/name on the Hub: also list which parameters a vLLM engine receives directly."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="With --model: data type that vLLM holds it in.")] = "float32",
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Also check the running fleet of this gateway.")
    ] = None,
) -> None:
    """Check this machine and say how to fix what is wrong.

    The exit code is 1 if something is wrong.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from slipstream.deploy.fleet import connect
    from slipstream.observe.doctor import examine, examine_fleet

    diagnoses = list(examine(model, dtype))
    if run_dir is not None:
        with connect(run_dir) as bridge:
            diagnoses += examine_fleet(bridge.status())
    table = Table("", "check")
    for column in ("result", "fix"):
        table.add_column(column, overflow="fold")
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "wrong": "[red]wrong[/]"}
    for diagnosis in diagnoses:
        table.add_row(marks[diagnosis.verdict], diagnosis.subject, escape(diagnosis.result), escape(diagnosis.fix))
    Console().print(table)
    raise typer.Exit(any(diagnosis.verdict == "wrong" for diagnosis in diagnoses))


def setup(
    what: Annotated[str, typer.Argument(help="What to install: vllm.")],
    cpu: Annotated[bool, typer.Option("--cpu", help="Install vLLM for CPU.")] = False,
    into: Annotated[
        Path | None, typer.Option(help="Directory of the environment; in the user's cache by default.")
    ] = None,
) -> None:
    """Install vLLM for CPU in its own Python environment.

    Engines with kind=vllm find the environment there.
    """
    from slipstream.deploy.processes.vllm_environment import default_directory, make_vllm

    if what != "vllm" or not cpu:
        raise ConfigError(
            f"cannot set up {what!r}{'' if cpu else ' without --cpu'}: only `slipstream setup vllm --cpu` is supported. For "
            "GPUs, install vllm as its documentation says, install slipstream in the same environment, and name its "
            "interpreter with python=… in the engine's settings or SLIPSTREAM_VLLM_PYTHON"
        )
    make_vllm(into or default_directory(), lambda text: print(text, flush=True))
