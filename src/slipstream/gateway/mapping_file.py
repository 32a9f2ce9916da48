"""The mapping file for torch trainers: which parameter of an engine holds which part of each tensor of the checkpoint.

The gateway writes `vllm_bridge_config.json` as soon as engines have registered, into its run directory and into `$LOGDIR`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream.types import EngineInfo

log = logging.getLogger(__name__)

FILE = "vllm_bridge_config.json"
SETTLE_SECONDS = 0.05
"""Engines that register this soon after another are written together with it."""


def mapping(model_name: str, engines: Sequence[EngineInfo]) -> dict[str, Any]:
    """Describe where tensors lie, by engine and tensor, and again for the first engine in the words of other trainers. For
    example, with two ranks:

    {"model_name": "my-model",
     "param_mappings": {"model.layers.0.self_attn.k_proj.weight": {
        "vllm_name": "model.layers.0.self_attn.qkv_proj.weight", "local_shape": [64, 256], "dtype": "bfloat16",
        "tp_degree": 2, "dp_shard_degree": 1}},
     "engines": {"engine-0": {"kind": "vllm", "tp": 2, "parameters": {"model.layers.0.self_attn.k_proj.weight": {
        "engine_name": "model.layers.0.self_attn.qkv_proj.weight", "shape": [128, 256], "local_shape": [64, 256],
        "dtype": "bfloat16", "tp_degree": 2, "data_shard_degree": 1}}}}}
    """
    by_engine = {e.name: {"kind": e.kind, "tp": e.num_ranks, "parameters": _parameters(e)} for e in engines}
    first: dict[str, Any] = by_engine[engines[0].name]["parameters"]  # type: ignore[assignment]
    rows = {
        name: {
            "vllm_name": row["engine_name"],
            "local_shape": row["local_shape"],
            "dtype": row["dtype"],
            "tp_degree": row["tp_degree"],
            "dp_shard_degree": row["data_shard_degree"],
        }
        for name, row in first.items()
    }
    return {"model_name": model_name, "param_mappings": rows, "engines": by_engine}


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


class MappingFile:
    """Keeps the file in each of the directories up to date. Belongs to one event loop."""

    def __init__(self, directories: Sequence[Path] = ()) -> None:
        self._directories = directories
        self._registered = asyncio.Event()
        self.model_name = "policy"
        for directory in directories:
            with contextlib.suppress(OSError):  # `_write` reports it
                (directory / FILE).unlink(missing_ok=True)  # of an earlier run: trainers wait for the new one

    def on_register(self) -> None:
        self._registered.set()

    async def follow(self, engines: Callable[[], Sequence[EngineInfo]]) -> None:
        """Write the file whenever engines have registered that it does not describe."""
        written: object = None
        while True:
            await self._registered.wait()
            await asyncio.sleep(SETTLE_SECONDS)
            self._registered.clear()
            found = engines()
            layouts = {(e.name, e.kind, e.model, e.dtype, e.num_ranks) for e in found}
            if found and layouts != written:
                await asyncio.to_thread(self._write, found)
                written = layouts

    def _write(self, engines: Sequence[EngineInfo]) -> None:
        content = mapping(self.model_name, engines)
        for directory in self._directories:
            temporary = directory / f".{FILE}.new"
            try:
                directory.mkdir(parents=True, exist_ok=True)
                temporary.write_text(json.dumps(content, indent=1) + "\n")
                temporary.replace(directory / FILE)
            except OSError as error:
                log.warning("cannot write %s: %s; trainers that wait for it will not start", directory / FILE, error)
