"""HF checkpoints: a directory with `config.json` and safetensors, in and out, every tensor accounted for by name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from slipstream.errors import ConfigError, MappingError
from slipstream.model.config import ModelConfig
from slipstream.model.tree import flatten, unflatten
from slipstream.weights.families import tensors
from slipstream.weights.stored import INDEX, SINGLE, weight_files

if TYPE_CHECKING:
    from jax.typing import DTypeLike

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load(directory: str | Path, config: ModelConfig | None = None, dtype: DTypeLike | None = None) -> dict[str, Any]:
    """The tree of parameters, as JAX arrays, in the stored dtype unless `dtype` says otherwise."""
    arrays = read_arrays(directory, config or ModelConfig.read(directory))
    return unflatten({name: jnp.asarray(array, dtype) for name, array in arrays.items()})


def save(directory: str | Path, params: Mapping[str, Any], config: ModelConfig) -> None:
    """Writes `config.json` and `model.safetensors`, which `transformers` and vLLM read.

    Each is written beside its place and renamed, so that a reader or a crash never meets half a file."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.asarray(leaf) for name, leaf in flatten(params).items()}
    check_shapes({name: array.shape for name, array in arrays.items()}, config, "the parameters to save")
    dtypes = sorted({str(array.dtype) for array in arrays.values()})
    hf = config.to_hf() | {"torch_dtype": dtypes[0]} if len(dtypes) == 1 else config.to_hf()

    temporary = directory / f".{SINGLE}.{os.getpid()}"
    # safetensors writes the bytes as they lie in memory: a transposed view must be laid out first.
    save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, temporary, metadata={"format": "pt"})
    temporary.replace(directory / SINGLE)
    (directory / INDEX).unlink(missing_ok=True)  # an older sharded checkpoint would win over the file just written
    temporary = directory / f".config.json.{os.getpid()}"
    temporary.write_text(json.dumps(hf, indent=2) + "\n")
    temporary.replace(directory / "config.json")


def has_weights(directory: str | Path) -> bool:
    return any((Path(directory) / name).exists() for name in (SINGLE, INDEX))


def read_arrays(directory: str | Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """Exactly the tensors that the family defines, by HF name, in its order. `MappingError` names what does not fit."""
    stored: dict[str, np.ndarray] = {}
    for path in weight_files(Path(directory)):
        try:
            with safe_open(path, framework="np") as file:
                for stored_name in file.keys():  # noqa: SIM118
                    name = config.definition.stored_name(stored_name)
                    if name is not None and not _is_buffer(name):
                        stored[name] = file.get_tensor(stored_name)
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist, but the checkpoint's index names it") from None
        except SafetensorError as error:
            raise ConfigError(f"{path} is not a readable safetensors file: {error}") from None
    if config.tie_word_embeddings and _HEAD in stored:
        _drop_tied_head(stored, directory)
    check_shapes({name: array.shape for name, array in stored.items()}, config, f"the checkpoint {directory}")
    return {spec.name: stored[spec.name] for spec in tensors(config)}


def _is_buffer(name: str) -> bool:
    """Old checkpoints store the rotary frequencies, which follow from the config."""
    return name.endswith("rotary_emb.inv_freq")


def _drop_tied_head(stored: dict[str, np.ndarray], directory: str | Path) -> None:
    head = stored.pop(_HEAD)
    if _EMBED in stored and not np.array_equal(head, stored[_EMBED]):
        raise MappingError(
            f"the checkpoint {directory} has tie_word_embeddings set, but its {_HEAD} differs from {_EMBED}; "
            "set tie_word_embeddings to false in config.json if both are meant"
        )


def check_shapes(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, what: str) -> None:
    """`MappingError` with names, unless `shapes` are exactly those of the model's tensors; `what` names the owner."""
    expected = {spec.name: spec.shape for spec in tensors(config)}
    complaints = []
    if missing := [name for name in expected if name not in shapes]:
        complaints.append(f"missing: {_some(missing)}")
    if extra := [name for name in shapes if name not in expected]:
        complaints.append(f"not in a {config.family} model of this config: {_some(extra)}")
    wrong = [n for n in expected if n in shapes and shapes[n] != expected[n]]
    if wrong:
        complaints.append("wrong shape: " + _some([f"{n} is {shapes[n]}, expected {expected[n]}" for n in wrong]))
    if complaints:
        raise MappingError(f"{what} does not fit the model config. " + "; ".join(complaints))


def _some(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
