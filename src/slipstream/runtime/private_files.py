"""Directories and files that only their owner can read, and files that are read again when they change."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from slipstream.errors import ConfigError


def private_directory(path: Path, what: str) -> Path:
    """Create a directory that only this user can enter, or make an existing one so. `what` names it in the error."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"{what} {path} cannot be used: {error.strerror}; choose a directory that you own, on a file system that can be "
            "written to"
        ) from None
    return path


def private_file(path: Path) -> Path:
    """Create a file that only this user can read, or make an existing one so."""
    try:
        path.touch(0o600)
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError(f"the file {path} cannot be written: {error.strerror}") from None
    return path


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, at once: a reader sees the old text or the new one."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(text)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class WatchedFile:
    """The text of a file, read again whenever the file has changed."""

    def __init__(self, path: Path, initial: str = "", keeps_last: bool = True) -> None:
        """`initial` is the text before the file exists. Once it is gone again, it has its last text, or `initial` unless
        `keeps_last`."""
        self._path, self._initial, self._keeps_last = path, initial, keeps_last
        self._text, self._stamp = initial, (0, 0, 0)

    def text(self) -> str:
        try:
            status = self._path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp != self._stamp:
                self._text, self._stamp = self._path.read_text(errors="replace"), stamp
        except OSError:
            if not self._keeps_last:
                self._text, self._stamp = self._initial, (0, 0, 0)
        return self._text
