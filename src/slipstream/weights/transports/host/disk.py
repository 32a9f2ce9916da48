"""`disk`: a slow fallback that works everywhere, through a directory that trainer and engine both see.

A sender's pieces become one safetensors file, with the pieces' indices as tensor names and their bytes as uint8. The name of a
delta is the index, a dot and the number of its encoding. The file is written under a temporary name, synced and renamed, so a
reader sees a complete file or none. The trainer chooses the directory: `transport="disk:/path/to/directory"`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from slipstream.errors import TransferError
from slipstream.tensors.safetensors_dir import save_synced
from slipstream.weights.checksum import PieceScan, ScanOptions, checksum, copy_and_scan
from slipstream.weights.delta import Encoding
from slipstream.weights.transports.contract import (
    HostReceiver,
    HostSender,
    link_field,
    link_name,
    pack_link,
    random_name,
    unpack_link,
)
from slipstream.weights.transports.host.memory import anonymous_memory


class DiskReceiver(HostReceiver):
    def __init__(self, size: int, directory: Path) -> None:
        if not directory.is_dir():
            raise TransferError(
                f"the disk transport's directory {directory} does not exist on the engine's side; both sides must see it"
            )
        super().__init__(anonymous_memory(size))
        self._directory, self._name = directory, random_name()
        self.link = pack_link("disk", directory=str(directory), name=self._name)

    def expect(self, version: int, pieces: Mapping[int, np.ndarray], hashed: bool) -> None:
        self._remove_files()
        super().expect(version, pieces, hashed)

    def checksums(self, expected: Mapping[int, int]) -> dict[int, int]:
        checksums: dict[int, int] = {}
        files = sorted(self._directory.glob(f"{self._name}-v{self._version}-*.safetensors"))
        try:
            for path in files:
                with safe_open(path, framework="numpy") as file:
                    for key in file.keys():  # noqa: SIM118  # not a mapping
                        name, _, encoding = key.partition(".")
                        checksums[int(name)] = self._read(int(name), file.get_tensor(key), encoding)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise TransferError(f"disk: cannot read the weights in {self._directory}: {error}") from None
        if missing := expected.keys() - checksums.keys():
            raise TransferError(
                f"disk: {len(missing)} piece(s) are not in {self._directory}; do both sides see the same directory?"
            )
        self._remove_files()
        return {index: checksums[index] for index in expected}

    def _read(self, index: int, data: np.ndarray, encoding: str) -> int:
        """Write a piece; return its checksum."""
        piece = self._pieces[index]
        if encoding and self._hashed:
            return self._apply(index, data.tobytes(), Encoding(int(encoding)))
        piece[...] = data.view(piece.dtype).reshape(piece.shape)
        return checksum(piece) if self._hashed else 0

    def _remove_files(self) -> None:
        """Remove only this version's files: a sender may already be writing the next version."""
        for path in self._directory.glob(f"{self._name}-v{self._version}-*"):
            path.unlink(missing_ok=True)

    close = _remove_files


class DiskSender(HostSender):
    def __init__(self, link: bytes, dtype: np.dtype, options: ScanOptions) -> None:
        fields = unpack_link(link)
        self._directory = Path(link_field(fields, "directory", str))
        self._name, self._dtype, self._options = link_name(fields), dtype, options
        self._pending: dict[str, np.ndarray] = {}

    def begin(self, version: int) -> None:
        super().begin(version)
        self._pending = {}

    def send(self, index: int, array: np.ndarray) -> PieceScan:
        # A copy: the trainer may overwrite its array before `flush`.
        piece = np.empty(array.shape, self._dtype)
        self._pending[str(index)] = piece.reshape(-1).view(np.uint8)
        return copy_and_scan(piece, array, self._options)

    def send_delta(self, index: int, data: bytes, encoding: Encoding) -> None:
        self._pending[f"{index}.{encoding:d}"] = np.frombuffer(data, np.uint8)

    def flush(self) -> None:
        pending, self._pending = self._pending, {}
        if not pending:
            return
        path = self._directory / f"{self._name}-v{self._version}-{secrets.token_hex(4)}.safetensors"
        part = path.with_suffix(".part")
        try:
            save_synced(pending, part)
            part.rename(path)
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise TransferError(
                f"disk: cannot write weights to {self._directory}: {error}; is it full or read-only?"
            ) from None

    def close(self) -> None:
        self._pending = {}
