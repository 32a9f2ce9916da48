"""LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, which vLLM reads, too."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import ConfigError, MappingError
from slipstream.model.config import ModelConfig
from slipstream.model.families import tensors
from slipstream.model.lora import A, adapter_tensors, target_of
from slipstream.model.tree import flatten, unflatten
from slipstream.tensors.safetensors_dir import open_file, write_arrays, write_json
from slipstream.types import Lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": ([],),
    "fan_in_fan_out": (False,),
}
"""Settings that would change the result in ways that we do not compute, with the values that do not."""


def load_adapter(directory: str | Path, model: ModelConfig, name: str = "") -> tuple[dict[str, Any], Lora]:
    """Read an adapter of `model`: the tree of its weights as numpy arrays, and its description. `name` is by default that of
    the directory. Projections that it lacks in some layers are zero."""
    directory = Path(directory)
    config = _read_config(directory / CONFIG)
    with open_file(directory / WEIGHTS) as file:
        stored = {key.removeprefix(_PREFIX): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    found = tuple(target_of(key.removesuffix(A)) for key in stored if key.endswith(A))
    rank, alpha = config["r"], float(config["lora_alpha"])
    if config.get("use_rslora"):  # its scale is alpha / √rank
        alpha *= math.sqrt(rank)
    lora = Lora(name or directory.resolve().name, rank, alpha, found)
    expected = {spec.name: spec.shape for spec in adapter_tensors(tensors(model), lora)}
    for key, array in stored.items():
        if expected.get(key) != array.shape:
            raise MappingError(
                f"{directory / WEIGHTS}: {key} has shape {list(array.shape)}, and an adapter of rank {rank} for this model has "
                + (f"{list(expected[key])}" if key in expected else "no such tensor")
            )
    dtype = next(iter(stored.values())).dtype
    return unflatten({key: stored.get(key, np.zeros(shape, dtype)) for key, shape in expected.items()}), lora


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        rank, alpha = config["r"], config["lora_alpha"]
        if not isinstance(rank, int) or not isinstance(alpha, int | float):
            raise TypeError(f"r is {rank!r} and lora_alpha is {alpha!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not the config of a LoRA adapter: {type(error).__name__}: {error}") from None
    for setting, allowed in _NEUTRAL.items():
        value = config.get(setting)
        if value is not None and value not in allowed:
            raise ConfigError(f"{path}: {setting} is {value!r}; supported: {', '.join(map(repr, allowed))}")
    return config


def save_adapter(directory: str | Path, adapter: Mapping[str, Any], lora: Lora, base: str | Path) -> None:
    """Write an adapter; `base` is the directory or name of the model that it belongs to. Files are written under another name
    and renamed, so that they are never seen incomplete."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {_PREFIX + name: np.asarray(leaf) for name, leaf in flatten(adapter).items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    write_arrays(directory / WEIGHTS, arrays)
    write_json(directory / CONFIG, config)
