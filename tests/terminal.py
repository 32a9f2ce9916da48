"""A command in a real terminal of a given size, and what its screen shows: a pty, and pyte as the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence

import pyte
from rich.console import Console
from rich.text import Text

DEADLINE = 90.0


class Terminal:
    def __init__(self, arguments: Sequence[str], columns: int, lines: int, **environment: str) -> None:
        """Run `slipstream` with these arguments."""
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self._ours, theirs = pty.openpty()
        self._set_size(columns, lines)
        own = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.cli", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=own | {"TERM": "xterm-256color"} | environment,
            start_new_session=True,
            close_fds=True,
        )
        os.close(theirs)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        self.screen.reset()
        self._set_size(columns, lines)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    @property
    def rows(self) -> list[str]:
        return [row.rstrip() for row in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.rows).rstrip()

    def read(self, seconds: float) -> bool:
        """Show what the command writes within this time. Return whether it may write more."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._ours], [], [], left)[0]:
                try:
                    data = os.read(self._ours, 1 << 16)
                except OSError:  # the command has ended
                    return False
                self.written += data
                self._stream.feed(data)
        return True

    def until(self, holds: Callable[[str], bool]) -> str:
        """Wait until the screen is as it should be; return it."""
        deadline = time.monotonic() + DEADLINE
        while not holds(self.text):
            may_change = self.read(0.1)
            assert holds(self.text) or (may_change and time.monotonic() < deadline), f"the screen shows:\n{self.text}"
        return self.text

    def wait(self) -> int:
        """Show the rest; return the exit code."""
        deadline = time.monotonic() + DEADLINE
        while self.read(0.1):
            assert time.monotonic() < deadline, f"it does not end:\n{self.text}"
        return self.process.wait(DEADLINE)

    def svg(self, title: str) -> str:
        """Return the screen as a picture."""
        width, height = self.screen.columns, self.screen.lines
        with open(os.devnull, "w") as nowhere:
            console = Console(
                width=width, height=height, record=True, file=nowhere, force_terminal=True, highlight=False
            )
            for row in range(height):
                line = Text()
                cells = [self.screen.buffer[row][column] for column in range(width)]
                for style, alike in itertools.groupby(cells, key=_style):
                    line.append("".join(cell.data for cell in alike), style)
                console.print(line, no_wrap=True, overflow="crop", crop=True)
            picture = console.export_svg(title=title, unique_id=title.replace(" ", "-"))
        return re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # fonts from the web

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE)
        os.close(self._ours)


def _style(cell: pyte.screens.Char) -> str:
    names = {"brown": "yellow", "default": ""}
    color = names.get(cell.fg, cell.fg)
    if len(color) == 6 and all(c in "0123456789abcdef" for c in color):
        color = f"#{color}"
    return " ".join(filter(None, ["bold" if cell.bold else "", color.replace("bright", "bright_")]))


@contextlib.contextmanager
def terminal(*arguments: str, columns: int = 80, lines: int = 24, **environment: str) -> Iterator[Terminal]:
    found = Terminal(arguments, columns, lines, **environment)
    try:
        yield found
    finally:
        found.close()
