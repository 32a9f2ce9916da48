"""Tables and lines that fit a terminal's width: what matters less is left out, and nothing wraps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

from slipstream.runtime.log_lines import printable

GAP = 2
BARS = "▁▂▃▄▅▆▇█"


class Column(NamedTuple):
    title: str
    cells: Sequence[str]
    rank: int = 0
    """Columns of the highest rank are left out first where there is no room."""
    is_number: bool = True
    styles: Sequence[str] = ()
    """One per cell."""
    keeps_end: bool = False
    """What does not fit is cut off at the left, as of a path."""


def table(columns: Sequence[Column], width: int, num_rows: int) -> list[Text]:
    """Return a heading and `num_rows` lines of at most `width` cells. The last column, if it is text, takes what is left."""
    shown = list(columns)
    while len(shown) > 1 and _total(shown) > width:
        worst = max(shown, key=lambda column: column.rank)
        if worst.rank == 0:
            break
        shown.remove(worst)
    widths = [_width(column) for column in shown]
    excess = sum(widths) + GAP * (len(shown) - 1) - width
    if excess > 0:
        widest = max((i for i, column in enumerate(shown) if not column.is_number), key=widths.__getitem__, default=0)
        widths[widest] = max(4, widths[widest] - excess)
    lines = [_line([(column, column.title, "bold dim") for column in shown], widths, width)]
    for row in range(num_rows):
        cells = [(c, c.cells[row], c.styles[row] if c.styles else "") for c in shown]
        lines.append(_line(cells, widths, width))
    return lines


def _total(columns: Sequence[Column]) -> int:
    return sum(map(_width, columns)) + GAP * (len(columns) - 1)


def _width(column: Column) -> int:
    return max(map(len, (column.title, *column.cells)), default=0)


def _line(cells: Sequence[tuple[Column, str, str]], widths: Sequence[int], width: int) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for (column, cell, style), size in zip(cells, widths):
        text = Text(end_of(printable(cell), size) if column.keeps_end else printable(cell), style=style)
        text.truncate(size, overflow="ellipsis")
        text.align("right" if column.is_number else "left", size)
        line.append_text(text).append(" " * GAP)
    line.rstrip()
    return fitted(line, width)


def fitted(line: Text | str, width: int) -> Text:
    """Return a line that takes at most `width` cells."""
    text = Text(printable(line)) if isinstance(line, str) else line
    text.no_wrap = True
    text.truncate(width, overflow="ellipsis")
    return text


def end_of(text: str, width: int) -> str:
    """Return the end of a text that is too long."""
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}"


def rule(title: str, rest: str, width: int) -> Text:
    """Return a heading that fills the line."""
    line = (
        Text("── ", style="dim")
        .append(title, style="bold cyan not dim")
        .append(f" {printable(rest)} " if rest else " ")
    )
    line.truncate(width, overflow="ellipsis")
    return line.append("─" * max(0, width - line.cell_len), style="dim")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as bars, one per column, each the mean of its part; from the least to the greatest."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    edges = [round(i * len(finite) / count) for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)
