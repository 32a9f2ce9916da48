"""Secrets as files for other processes of this user, which are gone when this process is, also when it is killed.

The text is in memory, in a file without a name; what has a name is a link to it that leads through this process."""

from __future__ import annotations

import os
from pathlib import Path


class Lent:
    """A text under a name, until `close`. Where there are no files without a name (they are Linux's), it is a plain one."""

    def __init__(self, link: Path, text: str) -> None:
        self._link = link
        link.unlink(missing_ok=True)  # of one that was killed: it leads nowhere
        if hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create("slipstream-lent"), "w")
            os.fchmod(self._file.fileno(), 0o600)
        else:
            self._file = os.fdopen(os.open(link, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w")
        self._file.write(text)
        self._file.flush()
        if not link.exists():
            link.symlink_to(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")

    def close(self) -> None:
        """May be called twice."""
        self._link.unlink(missing_ok=True)
        self._file.close()
