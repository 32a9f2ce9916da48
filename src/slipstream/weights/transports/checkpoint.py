"""`disk`, towards a server that somebody else started: each version is a checkpoint, in a directory that the trainer and the
server both see, and the server is told where it lies. `transport="disk:/path/to/directory"`.

Written under another name, synced and renamed, so that the server finds all of it or nothing. It is removed when the next
version is written, or the trainer is done."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import save_file

from slipstream.errors import TransferError
from slipstream.weights.image import Image
from slipstream.weights.plan import Move
from slipstream.weights.stored import SINGLE
from slipstream.weights.transports.base import fact, pack_link, unpack_link
from slipstream.weights.transports.gathering import Gathering

LINK = "checkpoint"
"""What the links say; the transport that a trainer asks for is `disk`."""


def new_name() -> str:
    """Of an engine's checkpoints."""
    return f"slipstream-{secrets.token_hex(8)}"


def make_link(directory: str, name: str) -> bytes:
    return pack_link(LINK, directory=directory, name=name)


def place(directory: str, name: str, version: int) -> Path:
    """Where a version lies, for both ends."""
    return Path(directory) / f"{name}-v{version}"


class CheckpointSender(Gathering):
    def __init__(self, link: bytes, image: Image, moves: Mapping[int, Move]) -> None:
        facts = unpack_link(link)
        self._directory, self._name = fact(facts, "directory", str), fact(facts, "name", str)
        if not re.fullmatch(r"slipstream-[0-9a-f]{16}", self._name):
            raise TransferError(f"the {LINK} link's name {self._name!r} is not one of Slipstream's")
        if not Path(self._directory).is_dir():
            raise TransferError(
                f"the disk transport's directory {self._directory} does not exist for the trainer; the server must see it, too"
            )
        super().__init__(image, moves)
        self._path: Path | None = None

    def begin(self, version: int) -> None:
        self._remove()
        super().begin(version)
        self._path = place(self._directory, self._name, version)

    def flush(self) -> None:
        assert self._path is not None
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            part.mkdir(exist_ok=True)
            save_file(self._gathered(), part / SINGLE, metadata={"format": "pt"})
            with open(part / SINGLE, "rb") as file:
                os.fsync(file.fileno())
            shutil.rmtree(self._path, ignore_errors=True)  # of an update that was rolled back
            part.rename(self._path)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise TransferError(
                f"disk: cannot write a checkpoint to {self._directory}: {error}; is it full or read-only?"
            ) from None

    def close(self) -> None:
        self._remove()
        self._pieces = {}

    def _remove(self) -> None:
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
