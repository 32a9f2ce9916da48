"""From a GGUF file to a Hugging Face model directory, without torch."""

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
from slipstream.model import checkpoint
from slipstream.model.config import ModelConfig
from slipstream.model.gguf import tokenizer
from slipstream.model.gguf.file import GgufFile, gguf_package
from slipstream.model.gguf.weights import model_config, named_tensors
from slipstream.model.tree import unflatten
from slipstream.weights.stored import SINGLE

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def convert(
    source: str | Path,
    directory: str | Path,
    dtype: str = "float32",
    progress: Callable[[int, int], None] = lambda done, total: None,
    card: str = "",
) -> ModelConfig:
    """Writes `config.json`, `model.safetensors`, `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`,
    and `card`, where there is one, as `README.md`.

    The directory appears whole or not at all: it is made beside its place and renamed. It must not exist yet, or be
    empty. `progress(done, total)` is called after each tensor. `ConfigError` where the file or an argument does not fit."""
    directory = Path(directory)
    check(directory, dtype)
    file = GgufFile(source)
    config = model_config(file)
    tensors = named_tensors(file, config)
    text = tokenizer.build(file, config.vocab_size)
    facts = tokenizer.facts(file, config)
    with _whole(directory) as draft:
        arrays: dict[str, np.ndarray] = {}
        for tensor in tensors:
            arrays[tensor.name] = tensor.read(file).astype(DTYPES[dtype], copy=False)
            progress(len(arrays), len(tensors))
        checkpoint.save(draft, unflatten(arrays), config)
        # safetensors makes its files readable by their owner alone; the model is as public as its config.
        (draft / SINGLE).chmod((draft / "config.json").stat().st_mode)
        text.save(str(draft / "tokenizer.json"))
        _write_json(draft / "tokenizer_config.json", facts)
        hf = config.to_hf()
        _write_json(draft / "generation_config.json", {k: hf[k] for k in _GENERATION if hf[k] is not None})
        if card:
            (draft / "README.md").write_text(card, encoding="utf-8")
    return config


_GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id")


def check(directory: Path, dtype: str) -> None:
    """`ConfigError` unless a conversion to this directory can begin."""
    gguf_package()
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not an empty directory; name another, or delete it first")


@contextmanager
def _whole(directory: Path) -> Iterator[Path]:
    """A draft beside the directory, which takes its place at the end, on disk by then; dropped after an error."""
    directory = directory.absolute()
    draft = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)  # of a process that had the same pid and was killed
    draft.mkdir(parents=True)
    try:
        yield draft
        for path in (*draft.iterdir(), draft):
            _flush(path)
        try:
            draft.replace(directory)
        except OSError as error:
            raise ConfigError(f"{directory} cannot be made: {error.strerror}; was it made meanwhile?") from None
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
