"""The mapping file for local trainers: which parameter of an engine holds which part of each tensor of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.types import EngineInfo

FILE = "vllm_bridge_config.json"


def mapping(model_name: str, engines: Sequence[EngineInfo]) -> dict[str, Any]:
    """Describe where tensors lie, by engine and tensor. For example, with two ranks:

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
    rows: dict[str, Any] = {}
    boxes: dict[str, set[Any]] = {}
    for parameter in engine.parameters:
        for part in parameter.parts:
            boxes.setdefault(part.tensor, set()).add(part.tensor_box)
            rows.setdefault(
                part.tensor,
                {
                    "engine_name": parameter.name,
                    "shape": shapes[part.tensor],
                    "local_shape": [stop - start for start, stop in part.tensor_box],
                    "dtype": engine.dtype,
                    "data_shard_degree": 1,  # no engine shards weights over data-parallel replicas
                },
            )
    return {name: {**row, "tp_degree": len(boxes[name])} for name, row in rows.items()}


def write(directory: Path, parameters: dict[str, Any]) -> None:
    """Write the mapping file atomically."""
    temporary = directory / f".{FILE}.new"
    temporary.write_text(json.dumps(parameters, indent=1) + "\n")
    temporary.replace(directory / FILE)
