"""`slipstream logs`: the logs of a run's processes, as they are or as they grow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from slipstream.observe.terminal.columns import Column, table
from slipstream.observe.terminal.run_files import age_in_words
from slipstream.observe.terminal.run_list import size_in_words
from slipstream.runtime.log_lines import BLOCK, tail

FOLLOW_SECONDS = 0.2


def listing(files: Mapping[str, Path], width: int, now: float) -> list[Text]:
    """Return a table of the logs."""
    facts = [path.stat() for path in files.values()]
    columns = [
        Column("process", list(files), is_number=False),
        Column("size", [size_in_words(fact.st_size) for fact in facts]),
        Column("written", [f"{age_in_words(now - fact.st_mtime)} ago" for fact in facts]),
        Column("file", [str(path) for path in files.values()], 0, False, keeps_end=True),
    ]
    return table(columns, width, len(files))


def last_lines(files: Mapping[str, Path], count: int, wanted: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Yield `(process, line)` of the last lines of each log that are wanted."""
    for name, path in files.items():
        # A filter looks at the whole log, as far as `tail` reads.
        lines = [line for line in tail(path, count if wanted is everything else 10**9) if wanted(line)]
        yield from ((name, line) for line in lines[-count:] if count)


def everything(line: str) -> bool:
    return True


@dataclass
class _Followed:
    path: Path
    offset: int
    inode: int
    partial: bytes = b""

    def new_lines(self) -> list[str]:
        """Return the lines written since the last call; from the start if the file was truncated or replaced."""
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_size < self.offset or facts.st_ino != self.inode:
                    self.offset, self.inode, self.partial = 0, facts.st_ino, b""
                file.seek(self.offset)
                data = file.read(BLOCK)
        except OSError:
            return []
        self.offset += len(data)
        *lines, self.partial = (self.partial + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def follow(
    find: Callable[[], Mapping[str, Path]], wanted: Callable[[str], bool], is_over: Callable[[], bool] = lambda: False
) -> Iterator[tuple[str, str]]:
    """Yield `(process, line)` of what is written from now on, also to logs that appear later, until the run is over."""
    followed: dict[str, _Followed] = {}
    for name, path in find().items():
        facts = path.stat()
        followed[name] = _Followed(path, facts.st_size, facts.st_ino)
    while True:
        ends = is_over()  # before the last look
        for name, path in find().items():
            file = followed.setdefault(name, _Followed(path, 0, path.stat().st_ino))
            while lines := file.new_lines():
                yield from ((name, line) for line in lines if wanted(line))
        if ends:
            return
        time.sleep(FOLLOW_SECONDS)
