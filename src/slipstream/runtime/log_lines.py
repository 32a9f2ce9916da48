"""Reading the logs of a run's processes, in either format of `--log-format`. Their text is not trusted: prompts and model
servers have a say in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

BLOCK = 1 << 16
MAX_TAIL_BYTES = 64 << 20
"""Most that `tail` reads of the end of a file."""
_TEXT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)\S* (DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)")


class LogLine(NamedTuple):
    time: str
    """`2026-05-01 12:00:00`, or empty for a line that is not a record: of a traceback, or of another program."""
    level: str
    message: str


def parse(line: str) -> LogLine:
    if line.startswith("{"):
        try:
            fields = json.loads(line)
            time = str(fields["time"])[:19].replace("T", " ")
            return LogLine(time, str(fields["level"]), printable(str(fields["message"])))
        except (ValueError, KeyError, TypeError):
            pass
    if match := _TEXT.fullmatch(line):
        date, clock, level, _, message = match.groups()
        return LogLine(f"{date} {clock}", level, printable(message))
    return LogLine("", "", printable(line))


def tail(path: Path, count: int) -> list[str]:
    """Return the last lines of a file, without reading the rest; none if it cannot be read."""
    if count < 1:
        return []
    try:
        with path.open("rb") as file:
            end = start = file.seek(0, 2)
            data = b""
            while start > 0 and data.count(b"\n") <= count and end - start < MAX_TAIL_BYTES:
                start = max(0, start - BLOCK)
                file.seek(start)
                data = file.read(end - start)
    except OSError:
        return []
    return data.decode(errors="replace").splitlines()[-count:]


def last_message(path: Path) -> str:
    """Return the message of the last line that is not empty."""
    return next((parse(line).message for line in reversed(tail(path, 10)) if line.strip()), "")


def printable(text: str) -> str:
    """Return text on one line without control characters, which would drive the terminal."""
    return "".join(char if char.isprintable() else " " if char in "\t\r\n" else "�" for char in text)
