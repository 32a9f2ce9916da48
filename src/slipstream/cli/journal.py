"""`slipstream journal`: check the rollout journal of a run, and save what is intact of a damaged one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.errors import ConfigError


def journal(
    run_dir: Annotated[Path, typer.Argument(help="Directory of the run, which holds journal.sqlite.")],
    repair: Annotated[
        bool, typer.Option("--repair", help="Replace a damaged journal by its intact records; no gateway may run.")
    ] = False,
) -> None:
    """Check the rollout journal of a run, or repair it.

    Says what is damaged or missing, and exits with 1 if anything is. With
    --repair, the intact records are written to a new journal, the damaged files
    are kept beside it, and every loss is named: prompts to submit again, groups
    that are generated again, and positions from before which no trainer can
    continue.
    """
    from slipstream.deploy.processes.process_group import running_gateway
    from slipstream.gateway import journal_recovery

    problems = journal_recovery.check(run_dir)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"the journal of {run_dir} is whole")
        return
    if not repair:
        print(f"{len(problems)} problem(s); `slipstream journal {run_dir} --repair` saves what is intact")
        raise typer.Exit(1)
    if pid := running_gateway(run_dir):
        raise ConfigError(f"a gateway is running in {run_dir} (pid {pid}); stop it before its journal is replaced")
    saved = journal_recovery.repair(run_dir)
    print(
        f"saved {saved.num_groups} prompts, {saved.num_taken} of them taken; the damaged files are in {saved.damaged}"
    )
    for loss in saved.losses:
        print(loss)
