"""Keeps a drawing up to date on a terminal until the user leaves. Where the output is no terminal, it is drawn once."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TypeAlias

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

Draw: TypeAlias = Callable[[int, int], Sequence[Text]]
"""Returns lines for a width and a height."""
LOOK_SECONDS = 0.1
_ESCAPE = re.compile(rb"\x1b(\[[0-9;]*[A-Za-z~]|O.)?")
"""Arrows and other keys that send several bytes."""
WIDTH, HEIGHT = 80, 24
"""Size of output that is no terminal."""


def keep_drawing(draw: Draw, keys: Mapping[str, Callable[[], None]] | None = None, seconds: float = 1.0) -> None:
    """Draw every `seconds`, when the size changes, and after a key of `keys`, until q or Ctrl-C. A drawing that fails shows the
    error in its place."""
    console = Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        width = int(os.environ.get("COLUMNS") or WIDTH)
        for line in draw(width, int(os.environ.get("LINES") or HEIGHT)):
            console.print(line, soft_wrap=True)
        return
    live = Live(console=console, screen=True, auto_refresh=False)
    with _left_by_signals(), contextlib.suppress(KeyboardInterrupt), _keyboard() as read_key, live:
        due, size = 0.0, (0, 0)
        while True:
            now_size = (console.width, console.height)
            if time.monotonic() >= due or now_size != size:
                due, size = time.monotonic() + seconds, now_size
                live.update(Group(*_drawn(draw, *size)), refresh=True)
            if (key := read_key()) == "q":
                return
            if keys and key in keys:
                keys[key]()
                due = 0.0


def _drawn(draw: Draw, width: int, height: int) -> list[Text]:
    try:
        lines = list(draw(width, height))[:height]
    except Exception as error:  # whatever is in the files of a run: the view goes on
        lines = [Text(f"cannot be shown: {type(error).__name__}: {error}"[:width], style="red")]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return lines


@contextlib.contextmanager
def _keyboard() -> Iterator[Callable[[], str]]:
    """Yield a function that returns the key pressed within `LOOK_SECONDS`, or an empty text."""
    if not sys.stdin.isatty():

        def wait() -> str:
            time.sleep(LOOK_SECONDS)
            return ""

        yield wait
        return
    import termios
    import tty

    number, before = sys.stdin.fileno(), termios.tcgetattr(sys.stdin)

    def read_key() -> str:
        if not select.select([number], [], [], LOOK_SECONDS)[0]:
            return ""
        pressed = os.read(number, 64)
        if not pressed:  # the terminal is gone
            raise KeyboardInterrupt
        keys = _ESCAPE.sub(b"", pressed).decode(errors="replace")
        return "q" if "q" in keys else keys[:1]

    tty.setcbreak(number)
    try:
        yield read_key
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _left_by_signals() -> Iterator[None]:
    """Leave as by Ctrl-C when the terminal closes or the process is terminated, so that the terminal is restored."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
