"""A safetensors checkpoint directory as lazily read tensors: headers first, then single boxes from disk."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from slipstream.errors import ConfigError, MappingError
from slipstream.tensors.boxes import full_box, slices
from slipstream.types import Box

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_ROWS = 4096
"""Rows compared at a time when a checkpoint stores a tied head as well."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file. Reading a box reads only its bytes. Each read opens the file again, so no file
    stays open and several threads may read."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def boxes(self) -> tuple[Box, ...]:
        return (full_box(self.shape),)

    def read_box(self, box: Box) -> np.ndarray:
        with open_file(self.path) as file:
            return file.get_slice(self.name)[slices(box)] if box else file.get_tensor(self.name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read_box(full_box(self.shape)).astype(dtype or self.dtype, copy=False)


def stored_tensors(directory: str | Path) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors by name, from the file headers. What the config determines (`is_buffer`) is left out, and
    so is a head that `config.json` ties to the embedding."""
    found: dict[str, StoredTensor] = {}
    for path in weight_files(Path(directory)):
        with open_file(path) as file:
            for name in file.keys():  # noqa: SIM118
                header = file.get_slice(name)
                if name in found:
                    raise MappingError(f"{name} is in both {found[name].path} and {path}; remove one")
                if is_buffer(name):
                    continue
                if header.get_dtype() not in _DTYPES:
                    raise MappingError(
                        f"{path}: {name} has dtype {header.get_dtype()}; supported: {', '.join(_DTYPES)}"
                    )
                dtype = np.dtype(_DTYPES[header.get_dtype()])
                found[name] = StoredTensor(path, name, tuple(header.get_shape()), dtype)
    if HEAD in found and EMBED in found and _is_tied(Path(directory)):
        _check_tied(found[HEAD], found[EMBED], directory)
        del found[HEAD]
    return found


def weight_files(directory: Path) -> list[Path]:
    """Return the files that hold a checkpoint's tensors: those its index names, or the single weights file."""
    if (directory / INDEX).exists():
        _check_regular(directory / INDEX)
        try:
            weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
            return sorted({directory / name for name in weight_map.values()})
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{directory / INDEX} is not a safetensors index: {error!r}") from None
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    raise ConfigError(f"{directory} holds no weights: expected {SINGLE} or {INDEX}")


def save_synced(tensors: dict[str, np.ndarray], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file and flush it to disk. Raise `OSError` or `SafetensorError`."""
    save_file(tensors, path, metadata)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file as `transformers` reads it. It is renamed when it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # safetensors writes raw memory, so transposed views must be made contiguous.
    save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, temporary, metadata={"format": "pt"})
    temporary.replace(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the JSON file beside the weights. It is renamed when it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


_BUFFERS = (
    "rotary_emb.inv_freq",
    *(f".{at}.{name}" for at in ("attn", "attention") for name in ("bias", "masked_bias")),
)


def is_buffer(name: str) -> bool:
    """Return whether a tensor holds rotary frequencies or the mask of a GPT, which old checkpoints store; they follow from
    the config."""
    return name.endswith(_BUFFERS)


def open_file(path: Path) -> Any:
    """Open a safetensors file. The library holds the GIL while it waits for a file, so read from it here first: if its file
    system hangs, this thread hangs, and not the process."""
    try:
        _check_regular(path)
        with open(path, "rb", buffering=0) as file:
            file.read(1)
        return safe_open(path, framework="np")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist, but the checkpoint's index lists it") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from None


def _check_regular(path: Path) -> None:
    """Raise for a FIFO or a device: opening one waits for whoever writes to it."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ConfigError(f"{path} is not a regular file")


def _is_tied(directory: Path) -> bool:
    path = directory / "config.json"
    if not path.exists():
        return False
    _check_regular(path)
    try:
        return bool(json.loads(path.read_text()).get("tie_word_embeddings", False))
    except (json.JSONDecodeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a JSON object: {error}") from None


def _check_tied(head: StoredTensor, embed: StoredTensor, directory: str | Path) -> None:
    rows = ((start, min(start + _ROWS, head.shape[0])) for start in range(0, head.shape[0], _ROWS))
    boxes = (((r, (0, head.shape[1]))) for r in rows)
    if head.shape != embed.shape or not all(np.array_equal(head.read_box(b), embed.read_box(b)) for b in boxes):
        raise MappingError(
            f"checkpoint {directory} sets tie_word_embeddings, but its {HEAD} differs from {EMBED}; "
            "set tie_word_embeddings to false in config.json to use both"
        )
