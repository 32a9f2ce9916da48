"""The proof of the mapping by itself, without an engine: for `slipstream doctor --model`, and to test every family and split.

    python -m slipstream.engines.vllm.proof [--rank 0 --tp 1 --port 0] [--dtype bfloat16] DIRECTORY…

Makes each model as vLLM would (of random weights: the directory need hold a config.json only), lets vLLM's loader fill it, and
compares every parameter with what the plan would write. Prints a line of JSON for each."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.engines.vllm import compat
from slipstream.engines.vllm.live import invented, prove, same_bits
from slipstream.model.config import ModelConfig
from slipstream.types import Parameter
from slipstream.weights import families
from slipstream.weights.families.live import vllm_parameters
from slipstream.weights.layout import slices

_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--port", type=int, default=0, help="at which ranks meet, on this host")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("directories", nargs="+", type=Path)
    arguments = parser.parse_args()
    for name, value in (_ENVIRONMENT | {"VLLM_DIST_IDENT": f"proof-{arguments.port}"}).items():
        os.environ.setdefault(name, value)
    for directory in arguments.directories:
        found = examine(directory, arguments.rank, arguments.tp, arguments.port or _free_port(), arguments.dtype)
        print(json.dumps(found), flush=True)


def examine(directory: Path, rank: int, tp: int, port: int, dtype: str) -> dict[str, Any]:
    """Names of the rank's parameters; which of them `failed` the proof, and why; which of them are `differing` when they are
    wiped and written anew, piece by piece, as an update does it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    on_cpu = compat.is_cpu()
    where, kind = torch.device("cpu") if on_cpu else torch.device("cuda", 0), getattr(torch, dtype)
    settings: dict[str, Any] = {"model": str(directory), "dtype": dtype, "tensor_parallel_size": tp}
    config = EngineArgs(**settings, skip_tokenizer_init=True, enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config), torch.device(where):
        if not torch.distributed.is_initialized():
            backend = "gloo" if on_cpu else "nccl"
            init_distributed_environment(tp, rank, f"tcp://127.0.0.1:{port}", 0, backend)
            initialize_model_parallel(tp, 1)
        torch.set_default_dtype(kind)
        model = initialize_model(config)
        torch.set_default_dtype(torch.float32)
        shape = ModelConfig.read(directory)
        specs = [(t.name, t.shape) for t in families.tensors(shape)]
        model.load_weights(invented(specs, kind, where))
        if not on_cpu:  # there it packs linear weights, which are then no parameters any more
            process_weights_after_loading(model, config.model_config, where)
        live = {name: parameter.data for name, parameter in model.named_parameters()}
        own = [p for p in vllm_parameters(shape, tp) if p.rank == rank]
        failed = prove(live, own, invented(specs, kind, where))
        differing = _rewrite(live, own, dict(invented(specs, kind, where)))
    return {"parameters": sorted(live), "failed": failed, "differing": differing}


def _rewrite(live: dict[str, torch.Tensor], own: Sequence[Parameter], tensors: dict[str, torch.Tensor]) -> list[str]:
    before = {name: tensor.clone() for name, tensor in live.items()}
    for parameter in (p for p in own if p.name in live):
        live[parameter.name].fill_(float("nan"))
        for box in parameter.padding:
            live[parameter.name][slices(box)] = before[parameter.name][slices(box)]
        for part in parameter.parts:
            live[parameter.name][slices(part.local_box)].copy_(tensors[part.tensor][slices(part.tensor_box)])
    return [name for name, tensor in live.items() if not same_bits(tensor, before[name])]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
