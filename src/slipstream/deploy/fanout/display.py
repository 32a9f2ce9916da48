"""Progress of a fan-out: a bar and a final table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from slipstream.deploy.fanout.dispatch import FanOutStats

PLAIN_LINES = 10
"""Number of progress lines without a terminal."""


@contextmanager
def fan_out_display(console: Console, total: int) -> Iterator[Callable[[FanOutStats], None]]:
    """Yield a function to call for every finished prompt."""
    if not console.is_terminal:
        yield _plain(console, total)
        return
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("prompts"), *columns, TextColumn("{task.fields[figures]}"), console=console) as progress:
        task = progress.add_task("", total=total, figures="")
        yield lambda stats: progress.update(task, completed=_finished(stats), figures=_figures(stats))


def _plain(console: Console, total: int) -> Callable[[FanOutStats], None]:
    shown = 0

    def show(stats: FanOutStats) -> None:
        nonlocal shown
        if (tenth := _finished(stats) * PLAIN_LINES // max(total, 1)) > shown:
            shown = tenth
            console.print(f"{_finished(stats)} of {total} prompts  {_figures(stats)}", soft_wrap=True)

    return show


def _finished(stats: FanOutStats) -> int:
    return stats.num_skipped + stats.num_rows + stats.failed.total()


def _figures(stats: FanOutStats) -> str:
    failed = f"  {stats.failed.total()} failed" if stats.failed else ""
    return f"{stats.tokens.total():,} tokens{failed}"


def summary(stats: FanOutStats) -> Table:
    title = (
        f"{stats.num_rows} prompts, {stats.samples.total()} completions, {stats.tokens.total():,} tokens in "
        f"{stats.seconds:.1f} s: {stats.tokens_per_second:,.0f} tokens/s"
    )
    table = Table("engine", "completions", "tokens", "share", title=title)
    for name, tokens in sorted(stats.tokens.items()):
        share = tokens / max(stats.tokens.total(), 1)
        table.add_row(name, str(stats.samples[name]), f"{tokens:,}", f"{share:.0%}")
    if stats.num_skipped:
        table.add_row("completed earlier", "", "", f"{stats.num_skipped} prompts")
    for kind, count in stats.failed.most_common():
        table.add_row(f"[red]{kind}[/]", "", "", f"{count} prompts")
    return table
