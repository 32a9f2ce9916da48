"""Commands about who may use a fleet: `token` and `revoke` (docs/security.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

RunDir = Annotated[Path, typer.Option("--run-dir", help="Run directory of the gateway.")]


def token(
    role: Annotated[
        str,
        typer.Argument(
            help="trainer, engine, client or viewer; run replaces the run's own token, which has all rights."
        ),
    ],
    run_dir: RunDir,
    name: Annotated[str, typer.Option(help="Name to revoke it by; made up by default.")] = "",
) -> None:
    """Make a token with the rights of a role, and print it.

    The gateway accepts it at once. Only its hash is stored, so it cannot be
    shown again.
    """
    from slipstream.gateway.tokens import Role, make_token

    print(make_token(run_dir, cast(Role, role), name))


def revoke(
    name: Annotated[str, typer.Argument(help="Name of the token.")],
    run_dir: RunDir,
) -> None:
    """Revoke a token; the gateway refuses it at once."""
    from slipstream.gateway.tokens import revoke_token

    revoke_token(run_dir, name)
