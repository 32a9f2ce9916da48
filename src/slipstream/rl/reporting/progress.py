"""Progress of a training run: a live progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from slipstream.rl.reporting.records import Evaluation, Record, StepRecord, WarmupRecord

PLAIN_EVERY = 10
"""Steps between plain lines."""


class Display(Protocol):
    def show(self, record: Record) -> None: ...


@contextmanager
def training_display(console: Console, warmup_steps: int, steps: int) -> Iterator[Display]:
    """A live or plain display. On exit, the last state of the live display stays on the screen."""
    if not console.is_terminal:
        yield PlainDisplay(console, warmup_steps)
        return
    with LiveDisplay(console, warmup_steps, steps) as display:
        yield display


class PlainDisplay:
    """Prints a line for every tenth step and every evaluation."""

    def __init__(self, console: Console, warmup_steps: int) -> None:
        self._console, self._warmup_steps = console, warmup_steps

    def show(self, record: Record) -> None:
        match record:
            case WarmupRecord(step=step, loss=loss) if step in (1, self._warmup_steps):
                self._console.print(f"warm-up {step}/{self._warmup_steps}  cross-entropy {loss:.3f}")
            case StepRecord(step=step) if step == 1 or step % PLAIN_EVERY == 0:
                self._console.print(f"step {step:4d}  {describe_step(record)}", soft_wrap=True)
            case Evaluation():
                self._console.print(describe_evaluation(record), soft_wrap=True)


class LiveDisplay:
    """Two progress bars, the second with the metrics of the latest step; evaluations are printed above them."""

    def __init__(self, console: Console, warmup_steps: int, steps: int) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self._warmup: TaskID | None = None
        if warmup_steps:
            self._warmup = self._progress.add_task("warm-up", total=warmup_steps, figures="")
        self._steps = self._progress.add_task("RL", total=steps, start=False, figures="")

    def __enter__(self) -> LiveDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, record: Record) -> None:
        match record:
            case WarmupRecord(step=step, loss=loss) if self._warmup is not None:
                self._progress.update(self._warmup, completed=step, figures=f"cross-entropy {loss:.3f}")
            case StepRecord(step=step):
                self._progress.start_task(self._steps)  # a resumed run has no evaluation at its start
                self._progress.update(self._steps, completed=step, figures=describe_step(record))
            case Evaluation(step=step):
                self._progress.console.print(describe_evaluation(record))
                if step == 0:
                    self._progress.start_task(self._steps)


def describe_step(record: StepRecord) -> str:
    return (
        f"reward {record.reward:.3f}  accuracy {record.accuracy:.3f}  {record.tokens_per_second:,.0f} tokens/s  "
        f"sync {record.sync.total_seconds * 1e3:.1f} ms  version {record.sync.version}"
    )


def describe_evaluation(record: Evaluation) -> str:
    def both(sampled: float, greedy: float) -> str:
        return f"{sampled:.3f} sampled, {greedy:.3f} greedy"

    line = f"evaluation after {record.step} steps: training prompts {both(record.sampled_train, record.greedy_train)}"
    if record.sampled_heldout is not None and record.greedy_heldout is not None:
        line += f"; held-out {both(record.sampled_heldout, record.greedy_heldout)}"
    return line
