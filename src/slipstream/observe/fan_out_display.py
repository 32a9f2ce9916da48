"""A fan-out on the terminal: a bar while it runs, a table when it is done; plain lines where the output is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from slipstream.topology.fan_out import Tally

PLAIN_LINES = 10
"""That a run says of itself where there is no bar."""


@contextmanager
def fan_out_display(console: Console, total: int) -> Iterator[Callable[[Tally], None]]:
    """Gives what is to be called for every prompt that is finished."""
    if not console.is_terminal:
        yield _plain(console, total)
        return
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("prompts"), *columns, TextColumn("{task.fields[figures]}"), console=console) as progress:
        task = progress.add_task("", total=total, figures="")
        yield lambda tally: progress.update(task, completed=_finished(tally), figures=_figures(tally))


def _plain(console: Console, total: int) -> Callable[[Tally], None]:
    said = 0

    def show(tally: Tally) -> None:
        nonlocal said
        if (tenth := _finished(tally) * PLAIN_LINES // max(total, 1)) > said:
            said = tenth
            console.print(f"{_finished(tally)} of {total} prompts  {_figures(tally)}", soft_wrap=True)

    return show


def _finished(tally: Tally) -> int:
    return tally.num_skipped + tally.num_rows + tally.failed.total()


def _figures(tally: Tally) -> str:
    failed = f"  {tally.failed.total()} failed" if tally.failed else ""
    return f"{tally.tokens.total():,} tokens{failed}"


def summary(tally: Tally) -> Table:
    """What a run has come to, and who did it."""
    title = (
        f"{tally.num_rows} prompts, {tally.samples.total()} completions, {tally.tokens.total():,} tokens in "
        f"{tally.seconds:.1f} s: {tally.tokens_per_second:,.0f} tokens/s"
    )
    table = Table("engine", "completions", "tokens", "share", title=title)
    for name, tokens in sorted(tally.tokens.items()):
        share = tokens / max(tally.tokens.total(), 1)
        table.add_row(name, str(tally.samples[name]), f"{tokens:,}", f"{share:.0%}")
    if tally.num_skipped:
        table.add_row("done before", "", "", f"{tally.num_skipped} prompts")
    for kind, count in tally.failed.most_common():
        table.add_row(f"[red]{kind}[/]", "", "", f"{count} prompts")
    return table
