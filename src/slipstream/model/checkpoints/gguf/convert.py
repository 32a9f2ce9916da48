"""Convert a GGUF file to an HF model directory, without torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np

from slipstream.errors import ConfigError
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.gguf import tokenizer
from slipstream.model.checkpoints.gguf.file import GgufFile, gguf_package
from slipstream.model.checkpoints.gguf.weights import model_config, named_tensors
from slipstream.model.checkpoints.hf_config import generation_config
from slipstream.model.config import ModelConfig
from slipstream.model.tree import unflatten
from slipstream.tensors.safetensors_dir import SINGLE

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def convert(
    source: str | Path,
    directory: str | Path,
    dtype: str = "float32",
    progress: Callable[[int, int], None] = lambda done, total: None,
    card: str = "",
) -> ModelConfig:
    """Write `config.json`, `model.safetensors`, `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`, and
    `card`, if given, as `README.md`.

    The directory is written under another name and renamed, so that it appears complete or not at all. It must not exist, or
    be empty. `progress(done, total)` is called after each tensor. Raise `ConfigError` for an unsupported file or argument."""
    directory = Path(directory)
    check(directory, dtype)
    file = GgufFile(source)
    config = model_config(file)
    tensors = named_tensors(file, config)
    text_tokenizer = tokenizer.build(file, config.vocab_size)
    tokenizer_config = tokenizer.tokenizer_config(file, config)
    with _atomic_directory(directory) as draft:
        arrays: dict[str, np.ndarray] = {}
        for tensor in tensors:
            arrays[tensor.name] = tensor.read(file).astype(DTYPES[dtype], copy=False)
            progress(len(arrays), len(tensors))
        hf_weights.save(draft, unflatten(arrays), config)
        # safetensors makes files readable by their owner only; give the weights the permissions of the config.
        (draft / SINGLE).chmod((draft / "config.json").stat().st_mode)
        text_tokenizer.save(str(draft / "tokenizer.json"))
        _write_json(draft / "tokenizer_config.json", tokenizer_config)
        _write_json(draft / "generation_config.json", generation_config(config))
        if card:
            (draft / "README.md").write_text(card, encoding="utf-8")
    return config


def check(directory: Path, dtype: str) -> None:
    """Raise `ConfigError` unless a conversion to this directory can start."""
    gguf_package()
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not an empty directory; choose another, or delete it first")


@contextmanager
def _atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a draft directory that is flushed to disk and renamed to `directory` at the end, or removed after an error."""
    directory = directory.absolute()
    draft = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)  # left by a killed process with the same pid
    draft.mkdir(parents=True)
    try:
        yield draft
        for path in (*draft.iterdir(), draft):
            _flush(path)
        try:
            draft.replace(directory)
        except OSError as error:
            raise ConfigError(f"cannot create {directory}: {error.strerror}; was it created meanwhile?") from None
        _flush(directory.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_json(path: Path, contents: dict[str, object]) -> None:
    path.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
