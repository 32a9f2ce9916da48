"""Long waits say what they wait for: after three seconds on stderr, or in the progress display, and then kept up to date.

    with waiting_for("2 engine(s) to register", lambda: "engine-1: compiling"):
        ...

One thread per process looks at all waits, so that a wait that ends soon costs next to nothing. SLIPSTREAM_QUIET=1 turns the
messages off."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

Show: TypeAlias = Callable[[str], None]
"""Shows a message in place of the last one; an empty one ends it."""

AFTER_SECONDS = 3.0
EVERY_SECONDS = 0.5
REPEAT_SECONDS = 30.0
"""Where lines cannot be replaced, a message that has changed is printed again after this time."""


class _Wait(NamedTuple):
    what: str
    detail: Callable[[], str]
    since: float

    def text(self) -> str:
        try:
            detail = self.detail()
        except Exception:  # a message about a wait must not break it
            detail = ""
        seconds = f"{time.monotonic() - self.since:.0f} s"
        return f"waiting for {self.what} ({seconds})" + (f": {detail}" if detail else "")


_numbers = itertools.count()
_waits: dict[int, _Wait] = {}
_begun = threading.Event()
_thread: threading.Thread | None = None
_owner = 0


@contextmanager
def waiting_for(what: str, detail: Callable[[], str] = str) -> Iterator[None]:
    """Say what the body waits for, if it takes long. `detail` is called from another thread, and says how it stands."""
    if os.environ.get("SLIPSTREAM_QUIET"):
        yield
        return
    _start()
    number = next(_numbers)
    _waits[number] = _Wait(what, detail, time.monotonic())
    _begun.set()
    try:
        yield
    finally:
        del _waits[number]


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Show messages in a progress display while the context is open."""
    global _show
    before, _show = _show, show
    try:
        yield
    finally:
        _show = before


def _start() -> None:
    global _thread, _owner
    if _thread is None or _owner != os.getpid():  # the thread does not survive a fork
        _owner = os.getpid()
        _thread = threading.Thread(target=_watch, name="slipstream-waits", daemon=True)
        _thread.start()


def _watch() -> None:
    while True:
        _begun.wait()
        _begun.clear()
        said: Show | None = None
        while _waits:
            time.sleep(EVERY_SECONDS)
            oldest = next(iter(list(_waits.values())), None)
            if oldest is not None and time.monotonic() - oldest.since >= AFTER_SECONDS:
                text = oldest.text()
                if oldest in list(_waits.values()):  # it may have ended meanwhile
                    said = _show
                    said(text)
            elif said is not None:
                said("")
                said = None
        if said is not None:
            said("")


class _Lines:
    """Says a message once, and again when it has changed, but not often."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say, self._last, self._said_at = say, ("", ""), 0.0

    def __call__(self, text: str) -> None:
        what, _, rest = text.partition(" (")
        news = what, rest.partition(")")[2]  # the seconds are no news
        is_due = what != self._last[0] or time.monotonic() - self._said_at >= REPEAT_SECONDS
        if text and news != self._last and is_due:
            self._last, self._said_at = news, time.monotonic()
            self._say(text)


_print = _Lines(lambda text: print(text, file=sys.stderr, flush=True))


def _on_stderr(text: str) -> None:
    """Replace the line on a terminal; print lines elsewhere."""
    try:
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[2K{text[:width]}")
            sys.stderr.flush()
        else:
            _print(text)
    except (OSError, ValueError, AttributeError):  # stderr is closed, or there is none
        pass


_show: Show = _on_stderr


def say_in_log() -> None:
    """Log the messages from now on, instead of writing them to stderr."""
    global _show
    _show = _Lines(logging.getLogger(__name__).info)
