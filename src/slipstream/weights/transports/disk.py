"""`disk`: the slow path that everyone can fall back on: a directory that trainer and engine both see.

A sender's pieces become one safetensors file, written under a temporary name, synced and renamed, so that a reader sees
all of it or nothing. The directory is the trainer's choice: `transport="disk:/path/to/directory"`."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from slipstream.errors import TransferError
from slipstream.weights.checksum import checksum
from slipstream.weights.transports.base import fact, pack_link, unpack_link
from slipstream.weights.transports.memory import anonymous


class DiskLanding:
    def __init__(self, size: int, directory: Path) -> None:
        if not directory.is_dir():
            raise TransferError(
                f"the disk transport's directory {directory} does not exist for the engine; both sides must see it"
            )
        self.buffer = anonymous(size)
        self._directory, self._name = directory, f"slipstream-{secrets.token_hex(8)}"
        self._pieces: Mapping[int, np.ndarray] = {}
        self._version, self._hashed = -1, True
        self.link = pack_link("disk", directory=str(directory), name=self._name)

    def expect(self, version: int, pieces: Mapping[int, np.ndarray], hashed: bool) -> None:
        self._remove_files()
        self._version, self._pieces, self._hashed = version, pieces, hashed

    def checksums(self, expected: Mapping[int, int]) -> dict[int, int]:
        found: dict[int, int] = {}
        try:
            for path in self._files():
                with safe_open(path, framework="numpy") as file:
                    for key in file.keys():  # noqa: SIM118  # not a mapping
                        index, data = int(key), file.get_tensor(key)
                        piece = self._pieces[index]
                        piece[...] = data.view(piece.dtype).reshape(piece.shape)
                        found[index] = checksum(piece) if self._hashed else 0
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise TransferError(f"disk: the weights in {self._directory} cannot be read: {error}") from None
        if missing := expected.keys() - found.keys():
            raise TransferError(
                f"disk: {len(missing)} piece(s) are not in {self._directory}; do both sides see the same directory?"
            )
        return {index: found[index] for index in expected}

    def settle(self) -> None:
        self._remove_files()

    def close(self) -> None:
        self._remove_files()

    def _files(self) -> list[Path]:
        return sorted(self._directory.glob(f"{self._name}-v{self._version}-*.safetensors"))

    def _remove_files(self) -> None:
        """Those of the version before: a sender may be writing the next one already."""
        for path in self._directory.glob(f"{self._name}-v{self._version}-*"):
            path.unlink(missing_ok=True)


class DiskSender:
    def __init__(self, link: bytes, dtypes: Mapping[int, np.dtype], hashed: bool) -> None:
        facts = unpack_link(link)
        self._directory, name = Path(fact(facts, "directory", str)), fact(facts, "name", str)
        if not re.fullmatch(r"slipstream-[0-9a-f]{16}", name):
            raise TransferError(f"the disk link's name {name!r} is not one of Slipstream's")
        self._prefix, self._path = self._directory / name, Path()
        self._dtypes, self._hashed = dtypes, hashed
        self._pending: dict[str, np.ndarray] = {}

    def begin(self, version: int) -> None:
        self._pending, self._path = {}, Path(f"{self._prefix}-v{version}-{secrets.token_hex(4)}.safetensors")

    def send(self, index: int, array: np.ndarray) -> int:
        piece = np.ascontiguousarray(array, self._dtypes[index]).reshape(-1).view(np.uint8)
        self._pending[str(index)] = (
            piece.copy() if piece.base is not None else piece
        )  # the trainer may go on before flush
        return checksum(piece) if self._hashed else 0

    def flush(self) -> None:
        pending, self._pending = self._pending, {}
        if not pending:
            return
        part = self._path.with_suffix(".part")
        try:
            save_file(pending, part)
            with open(part, "rb") as file:
                os.fsync(file.fileno())
            part.rename(self._path)
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise TransferError(
                f"disk: cannot write weights to {self._directory}: {error}; is it full or read-only?"
            ) from None

    def close(self) -> None:
        self._pending = {}
