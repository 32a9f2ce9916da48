"""Files with secrets for other processes of this user, which disappear with this process, even if it is killed.

The text is in an anonymous memory file. Its path is a symbolic link to this process's file descriptor."""

from __future__ import annotations

import os
from pathlib import Path


class SecretFile:
    """A secret readable at `link` until `close`. Without anonymous files (outside Linux) it is a regular file."""

    def __init__(self, link: Path, text: str) -> None:
        self._link = link
        link.unlink(missing_ok=True)  # a dangling link of a killed process
        if hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create("slipstream-secret"), "w")
            os.fchmod(self._file.fileno(), 0o600)
        else:
            self._file = os.fdopen(os.open(link, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w")
        self._file.write(text)
        self._file.flush()
        if not link.exists():
            link.symlink_to(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")

    def close(self) -> None:
        """Remove the file. Idempotent."""
        self._link.unlink(missing_ok=True)
        self._file.close()
