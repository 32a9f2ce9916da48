"""The `slipstream` command: its subcommands, one module per group. Each imports what it needs when it runs, so that a gateway
never loads JAX."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from slipstream import __version__ as slipstream_version
from slipstream.cli import access, chaos, dashboard, fanout, fleet, hosts, journal, look, machine, models, plan, train
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.runtime.garbage_collection import delay_collections
from slipstream.runtime.unraisable import watch_unraisable


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"slipstream {slipstream_version}")
        raise typer.Exit


app = typer.Typer(
    name="slipstream",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

GROUPS = {
    "Train": (train.demo, train.train, dashboard.dashboard, chaos.chaos),
    "Serve": (
        fleet.launch,
        fleet.drain,
        fanout.fanout,
        fleet.gateway,
        fleet.engine,
        access.token,
        access.revoke,
    ),
    "Look": (look.top, fleet.status, look.logs, look.runs),
    "Models": (models.sample_model, models.fetch, models.convert),
    "Several machines": (plan.plan, hosts.certificates, hosts.slurm, hosts.role),
    "This machine": (machine.doctor, machine.setup, journal.journal),
}

for _group, _commands in GROUPS.items():
    for _command in _commands:
        app.command(rich_help_panel=_group)(_command)


@app.callback()
def slipstream(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Reinforcement learning in JAX, with rollouts by inference engines."""


def main() -> None:
    """Run the command. A `SlipstreamError` is printed as a message, without a traceback."""
    delay_collections()
    watch_unraisable()
    try:
        app()
    except SlipstreamError as error:
        print(f"slipstream: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
