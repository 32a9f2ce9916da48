"""`slipstream dashboard`: shows runs of this machine in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def dashboard(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories, or directories that hold some; they may still be empty.")
    ],
    port: Annotated[int, typer.Option(help="Port on loopback; 0 takes a free one.")] = 0,
) -> None:
    """Show runs in a browser: live, finished, or several to compare.

    The page is served on this machine only. Open the URL that is printed; it
    holds a code that works once.
    """
    import asyncio

    from slipstream.observe.dashboard.local_server import serve

    try:
        asyncio.run(serve(runs, port, lambda *lines: print(*lines, sep="\n", flush=True)))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
