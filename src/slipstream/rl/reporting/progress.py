"""Progress of a training run: a live progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from slipstream.rl.reporting.records import Evaluation, Record, StepRecord, WarmupRecord
from slipstream.runtime.waiting import shown_by

log = logging.getLogger(__name__)

PLAIN_EVERY = 10
"""Steps between plain lines."""


@contextmanager
def training_display(console: Console, warmup_steps: int, steps: int) -> Iterator[Callable[[Record], None]]:
    """Yield a function to call with each record. On exit, the last state of a live display stays on the screen."""
    if not console.is_terminal:
        yield partial(_show_plain, partial(console.print, soft_wrap=True), warmup_steps)
        return
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[figures]}"))
    with Progress(SpinnerColumn(), TextColumn("[bold]{task.description}"), *columns, console=console) as progress:
        warmup = progress.add_task("warm-up", total=warmup_steps, figures="", visible=warmup_steps > 0)
        rl = progress.add_task("RL", total=steps, start=False, figures="")
        wait = progress.add_task("", total=None, start=False, visible=False, figures="")
        with shown_by(lambda text: progress.update(wait, figures=escape(text), visible=bool(text))):
            yield partial(_show_live, progress, warmup, rl)


@contextmanager
def logged_display(console: Console, warmup_steps: int, steps: int) -> Iterator[Callable[[Record], None]]:
    """As `training_display`, but plain lines go to the log."""
    yield partial(_show_plain, log.info, warmup_steps)


def _show_plain(show: Callable[[str], object], warmup_steps: int, record: Record) -> None:
    """Show a line for every tenth step and every evaluation."""
    match record:
        case WarmupRecord(step=step, loss=loss) if step in (1, warmup_steps):
            show(f"warm-up {step}/{warmup_steps}  cross-entropy {loss:.3f}")
        case StepRecord(step=step) if step == 1 or step % PLAIN_EVERY == 0:
            show(f"step {step:4d}  {describe_step(record)}")
        case Evaluation():
            show(describe_evaluation(record))


def _show_live(progress: Progress, warmup: TaskID, rl: TaskID, record: Record) -> None:
    """Advance the two bars, the second with the metrics of the latest step; print evaluations above them."""
    match record:
        case WarmupRecord(step=step, loss=loss):
            progress.update(warmup, completed=step, figures=f"cross-entropy {loss:.3f}")
        case StepRecord(step=step):
            progress.start_task(rl)  # a resumed run has no evaluation at its start
            progress.update(rl, completed=step, figures=describe_step(record))
        case Evaluation(step=step):
            progress.console.print(describe_evaluation(record))
            if step == 0:
                progress.start_task(rl)


def describe_step(record: StepRecord) -> str:
    utilization = "" if record.mfu is None else f"MFU {record.mfu:.2f}  "
    return (
        f"reward {record.reward:.3f}  accuracy {record.accuracy:.3f}  {record.tokens_per_second:,.0f} tokens/s  "
        f"{utilization}sync {record.sync.total_seconds * 1e3:.1f} ms  version {record.sync.version}"
    )


def describe_evaluation(record: Evaluation) -> str:
    def both(sampled: float, greedy: float) -> str:
        return f"{sampled:.3f} sampled, {greedy:.3f} greedy"

    line = f"evaluation after {record.step} steps: training prompts {both(record.sampled_train, record.greedy_train)}"
    if record.sampled_heldout is not None and record.greedy_heldout is not None:
        line += f"; held-out {both(record.sampled_heldout, record.greedy_heldout)}"
    return line
