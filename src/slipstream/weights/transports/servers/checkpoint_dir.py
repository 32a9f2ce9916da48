"""`disk` for an external server: each version is a checkpoint in a directory that trainer and server both see, and the
engine passes its path to the server. `transport="disk:/path/to/directory"`.

A checkpoint is written under a temporary name, synced and renamed, so the server finds a complete one or none. It is
removed when the next version begins or the trainer closes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError

from slipstream.errors import TransferError
from slipstream.tensors.safetensors_dir import SINGLE, save_synced
from slipstream.weights.checksum import ScanOptions
from slipstream.weights.plan import Move
from slipstream.weights.rank_image import RankImage
from slipstream.weights.transports.contract import link_field, link_name, pack_link, unpack_link
from slipstream.weights.transports.servers.gather import GatheringSender

LINK = "checkpoint"
"""The transport in links; trainers request it as `disk`."""


def make_link(directory: str, name: str) -> bytes:
    """Return the link. `name` is a `contract.random_name` for the engine's checkpoints."""
    return pack_link(LINK, directory=directory, name=name)


def checkpoint_path(directory: str, name: str, version: int) -> Path:
    """Return where a version is written; both ends use this."""
    return Path(directory) / f"{name}-v{version}"


class CheckpointSender(GatheringSender):
    def __init__(self, link: bytes, image: RankImage, moves: Mapping[int, Move], options: ScanOptions) -> None:
        fields = unpack_link(link)
        self._directory, self._name = link_field(fields, "directory", str), link_name(fields)
        if not Path(self._directory).is_dir():
            raise TransferError(
                f"the disk transport's directory {self._directory} does not exist on the trainer's side; both sides must see it"
            )
        super().__init__(image, moves, options)
        self._path: Path | None = None

    def begin(self, version: int) -> None:
        self._remove()
        super().begin(version)
        self._path = checkpoint_path(self._directory, self._name, version)

    def flush(self) -> None:
        assert self._path is not None
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            part.mkdir(exist_ok=True)
            save_synced(self._gathered(), part / SINGLE, metadata={"format": "pt"})
            shutil.rmtree(self._path, ignore_errors=True)  # left by an update that was rolled back
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
