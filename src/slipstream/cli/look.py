"""Commands that look at runs, live or not: `top`, `logs` and `runs` (docs/operations.md)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from slipstream.errors import ConfigError

Run = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory of a training run or a fleet.")]
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def top(
    run_dir: Run,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time between two updates.")] = 1.0,
) -> None:
    """Show a run on one screen, live.

    Fleet, rollouts, staleness, the last syncs, the training curve and the last
    log lines. Also for a run that has ended or was killed. q quits, l shows the
    log of the next process.
    """
    from slipstream.deploy.fleet import connect
    from slipstream.observe.terminal.run_files import run_state
    from slipstream.observe.terminal.run_view import RunView
    from slipstream.observe.terminal.screen import keep_drawing

    _check(run_dir)
    view = RunView(run_dir, lambda: connect(run_dir))
    if run_state(run_dir) != "live":
        keep_drawing(view.draw, {"l": view.next_log}, seconds)
        return
    with view.poller.running():
        view.poller.asked.wait(1.0)
        keep_drawing(view.draw, {"l": view.next_log}, seconds)


def logs(
    run_dir: Run,
    processes: Annotated[
        list[str] | None, typer.Argument(metavar="PROCESS", help="Such as gateway or engine-0; all by default.")
    ] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Number of last lines of each log.")] = 20,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Also show what is written from now on.")] = False,
    grep: Annotated[str, typer.Option(metavar="REGEX", help="Only lines that match.")] = "",
    listing: Annotated[bool, typer.Option("--list", help="List the logs.")] = False,
) -> None:
    """Show the logs of a run's processes.

    With --follow until the run ends, or Ctrl-C.
    """
    import contextlib
    import time

    from rich.console import Console

    from slipstream.observe.terminal import log_reader
    from slipstream.observe.terminal.run_files import log_files, run_state
    from slipstream.runtime.log_lines import printable

    _check(run_dir)
    known = log_files(run_dir)
    if unknown := set(processes or ()) - known.keys():
        raise ConfigError(
            f"{run_dir} has no log of {', '.join(sorted(unknown))}; it has those of {', '.join(known) or 'no process'}"
        )
    try:
        wanted = re.compile(grep).search if grep else None
    except re.error as error:
        raise ConfigError(f"--grep {grep!r} is not a regular expression: {error}") from None

    def is_wanted(line: str) -> bool:
        return wanted is None or wanted(line) is not None

    def find() -> dict[str, Path]:
        return {name: path for name, path in log_files(run_dir).items() if not processes or name in processes}

    if listing:
        console = Console(highlight=False)
        for row in log_reader.listing(find(), console.width, time.time()):
            console.print(row, soft_wrap=True)
        return
    size = max(map(len, find()), default=0)

    def show(name: str, line: str) -> None:
        print(f"{name:<{size}}  {printable(line)}" if len(find()) > 1 else printable(line), flush=True)

    for name, line in log_reader.last_lines(find(), lines, is_wanted if grep else log_reader.everything):
        show(name, line)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            for name, line in log_reader.follow(find, is_wanted, lambda: run_state(run_dir) != "live"):
                show(name, line)


def runs(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR", help="Run directories, or directories of them; by default runs/ and those of `launch`."
        ),
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Delete what the next three options do not keep.")] = False,
    older_than: Annotated[str, typer.Option(metavar="AGE", help="Delete runs not written to since: 12h, 30d.")] = "",
    keep: Annotated[int | None, typer.Option(min=0, help="Keep this many of the latest runs.")] = None,
    max_size: Annotated[str, typer.Option(metavar="SIZE", help="Keep as many of the latest as fit: 500M, 20G.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
) -> None:
    """List run directories, or delete old ones.

    A run that is live is never deleted, nor one on another machine, nor one that
    has written in the last five minutes.
    """
    import time

    from rich.console import Console

    from slipstream.observe.terminal import run_list

    rules = run_list.Retention(_number(older_than, UNITS, "--older-than"), keep, _number(max_size, SIZES, "--max-size"))
    is_limited = rules != run_list.Retention()
    if prune != is_limited:
        raise ConfigError(
            "--prune needs --older-than, --keep or --max-size"
            if prune
            else "--older-than, --keep and --max-size need --prune"
        )
    if directories is None:
        from slipstream.deploy.processes.vllm_environment import home

        directories = [Path("runs"), home() / "runs"]
    elif missing := [path for path in directories if not path.is_dir()]:
        raise ConfigError(f"{missing[0]} is not a directory")
    found, console = run_list.find_runs(directories, time.time()), Console(highlight=False)
    shown = run_list.to_delete(found, rules) if prune else found
    if not shown:
        console.print("no run to delete" if prune else f"no runs in {', '.join(map(str, directories))}", soft_wrap=True)
        return
    for line in run_list.rows(shown, console.width):
        console.print(line, soft_wrap=True)
    total = run_list.size_in_words(sum(entry.num_bytes for entry in shown))
    if not prune:
        console.print(f"{len(shown)} runs, {total}")
    elif dry_run:
        console.print(f"{len(shown)} of {len(found)} runs would be deleted: {total}")
    elif yes or typer.confirm(f"Delete {len(shown)} of {len(found)} runs, {total}?"):
        deleted = sum(map(run_list.delete, shown))
        console.print(f"deleted {deleted} runs")
        if deleted < len(shown):
            console.print(f"{len(shown) - deleted} came to life meanwhile and were kept")


def _check(run_dir: Path) -> None:
    from slipstream.observe.terminal.run_files import is_run

    if not is_run(run_dir):
        raise ConfigError(f"{run_dir} is not a run directory; `slipstream runs` lists those of this machine")


def _number(text: str, units: dict[str, int], option: str) -> int | None:
    """Read `30d` or `20G`; None if the option was not given."""
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]?)B?", text)
    unit = match and next((u for u in units if u.lower() == match[2].lower()), None)
    if match is None or unit is None:
        raise ConfigError(f"{option} is {text!r}; expected a number with one of {', '.join(u for u in units if u)}")
    return int(float(match[1]) * units[unit])
