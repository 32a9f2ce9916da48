"""The mapping file that local trainers read: which of an engine's parameters holds a tensor of the checkpoint, and which part
of it. Written into the run's directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.types import EngineInfo, Part

FILE = "vllm_bridge_config.json"


def mapping(model_name: str, engines: Sequence[EngineInfo]) -> dict[str, Any]:
    """By engine and tensor, for example, on two ranks:

    {"model_name": "my-model", "engines": {"engine-0": {"tp": 2, "parameters": {"model.layers.0.self_attn.k_proj.weight": {
        "engine_name": "model.layers.0.self_attn.qkv_proj.weight", "shape": [128, 256], "local_shape": [64, 256],
        "dtype": "bfloat16", "tp_degree": 2, "data_shard_degree": 1}}}}}
    """
    return {
        "model_name": model_name,
        "engines": {e.name: {"kind": e.kind, "tp": e.num_ranks, "parameters": _parameters(e)} for e in engines},
    }


def _parameters(engine: EngineInfo) -> dict[str, Any]:
    shapes = {tensor.name: list(tensor.shape) for tensor in engine.tensors}
    found: dict[str, Any] = {}
    cuts: dict[str, set[Any]] = {}
    for parameter in engine.parameters:
        for part in parameter.parts:
            cuts.setdefault(part.tensor, set()).add(part.tensor_box)
            found.setdefault(
                part.tensor,
                {
                    "engine_name": parameter.name,
                    "shape": shapes[part.tensor],
                    "local_shape": _shape(part),
                    "dtype": engine.dtype,
                    "data_shard_degree": 1,  # no engine cuts weights over replicas of data
                },
            )
    return {name: {**row, "tp_degree": len(cuts[name])} for name, row in found.items()}


def _shape(part: Part) -> list[int]:
    """Of what one rank holds of the tensor."""
    return [stop - start for start, stop in part.tensor_box]


def write(directory: Path, found: dict[str, Any]) -> None:
    """Whole or not at all."""
    beside = directory / f".{FILE}.new"
    beside.write_text(json.dumps(found, indent=1) + "\n")
    beside.replace(directory / FILE)
