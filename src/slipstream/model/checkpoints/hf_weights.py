"""Load and save HF checkpoints: a directory with `config.json` and safetensors. All tensors are checked by name and shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError

from slipstream.errors import ConfigError, MappingError
from slipstream.model.checkpoints.hf_config import read_config, to_hf
from slipstream.model.checkpoints.hub import model_directory
from slipstream.model.config import ModelConfig
from slipstream.model.families import family_of, tensors
from slipstream.model.tree import flatten, unflatten
from slipstream.tensors.safetensors_dir import (
    EMBED,
    HEAD,
    INDEX,
    SINGLE,
    is_buffer,
    open_file,
    weight_files,
    write_arrays,
    write_json,
)

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def load(model: str | Path, config: ModelConfig | None = None, dtype: DTypeLike | None = None) -> dict[str, Any]:
    """Load a tree of parameters as JAX arrays, in the stored dtype by default, from a directory or a model of the Hub."""
    directory = model_directory(model)
    arrays = read_arrays(directory, config or read_config(directory))
    return unflatten({name: jnp.asarray(array, dtype) for name, array in arrays.items()})


def save(directory: str | Path, params: Mapping[str, Any], config: ModelConfig) -> None:
    """Write `config.json` and `model.safetensors`, as `transformers` and vLLM read them.

    Files are written under another name and renamed, so that they are never seen incomplete, not even after a crash."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.asarray(leaf) for name, leaf in flatten(params).items()}
    check_shapes({name: array.shape for name, array in arrays.items()}, config, "the parameters to save")
    dtypes = sorted({str(array.dtype) for array in arrays.values()})
    hf = to_hf(config) | {"torch_dtype": dtypes[0]} if len(dtypes) == 1 else to_hf(config)

    write_arrays(directory / SINGLE, arrays)
    (directory / INDEX).unlink(missing_ok=True)  # the index of an older sharded checkpoint would take precedence
    write_json(directory / "config.json", hf)


def has_weights(directory: str | Path) -> bool:
    return any((Path(directory) / name).exists() for name in (SINGLE, INDEX))


def read_arrays(directory: str | Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return exactly the model's tensors by HF name, in the family's order. Raise `MappingError` naming others."""
    stored: dict[str, np.ndarray] = {}
    for path in weight_files(Path(directory)):
        with open_file(path) as file:
            for stored_name in file.keys():  # noqa: SIM118
                name = family_of(config).stored_name(stored_name)
                if name is not None and not is_buffer(name):
                    stored[name] = _read(file, stored_name, path)
    if config.tie_word_embeddings and HEAD in stored:
        _drop_tied_head(stored, directory)
    check_shapes({name: array.shape for name, array in stored.items()}, config, f"the checkpoint {directory}")
    return {spec.name: stored[spec.name] for spec in tensors(config)}


def _read(file: Any, name: str, path: Path) -> np.ndarray:
    try:
        array: np.ndarray = file.get_tensor(name)
        return array
    except (SafetensorError, OSError, AttributeError, TypeError, ValueError) as error:  # also types that numpy lacks
        raise ConfigError(f"{path}: the tensor {name} cannot be read: {error}") from None


def _drop_tied_head(stored: dict[str, np.ndarray], directory: str | Path) -> None:
    head = stored.pop(HEAD)
    if EMBED in stored and not np.array_equal(head, stored[EMBED]):
        raise MappingError(
            f"the checkpoint {directory} has tie_word_embeddings set, but its {HEAD} differs from {EMBED}; if both are "
            "intended, set tie_word_embeddings to false in config.json"
        )


def check_shapes(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, what: str) -> None:
    """Raise `MappingError` unless `shapes` are exactly those of the model's tensors. `what` is the subject of the message."""
    expected = {spec.name: spec.shape for spec in tensors(config)}
    problems = []
    if missing := [name for name in expected if name not in shapes]:
        problems.append(f"missing: {_shortened(missing)}")
    if extra := [name for name in shapes if name not in expected]:
        problems.append(f"unexpected for a {config.family} model with this config: {_shortened(extra)}")
    wrong = [n for n in expected if n in shapes and shapes[n] != expected[n]]
    if wrong:
        problems.append("wrong shape: " + _shortened([f"{n} is {shapes[n]}, expected {expected[n]}" for n in wrong]))
    if problems:
        raise MappingError(f"{what} does not match the model config. " + "; ".join(problems))


def _shortened(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
