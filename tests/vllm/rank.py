"""One rank of vLLM's models, without an engine: `python rank.py RANK TP PORT DEVICE DTYPE DIRECTORY…` proves the mapping of each
model, and writes its parameters directly as an update would. Prints a line of JSON for each: what failed, what differs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

from slipstream.engines.vllm.live import _bits, invented, prove
from slipstream.model.config import ModelConfig
from slipstream.weights import families
from slipstream.weights.families.live import vllm_parameters
from slipstream.weights.layout import slices

NAN = float("nan")


def main(rank: int, tp: int, port: int, device: str, dtype: str, *directories: str) -> None:
    kind = getattr(torch, dtype)
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    for directory in directories:
        settings = {"model": directory, "dtype": dtype, "tensor_parallel_size": tp, "skip_tokenizer_init": True}
        config = EngineArgs(**settings, enforce_eager=True, max_model_len=64).create_engine_config()
        with set_current_vllm_config(config), torch.device(where):
            if not torch.distributed.is_initialized():
                backend = "nccl" if device == "cuda" else "gloo"
                init_distributed_environment(tp, rank, f"tcp://127.0.0.1:{port}", 0, backend)
                initialize_model_parallel(tp, 1)
            torch.set_default_dtype(kind)
            model = initialize_model(config)
            torch.set_default_dtype(torch.float32)
            shape = ModelConfig.read(Path(directory))
            specs = [(t.name, t.shape) for t in families.tensors(shape)]
            model.load_weights(invented(specs, kind, where))
            if device == "cuda":  # on CPU this packs linear weights, which are then no parameters any more
                process_weights_after_loading(model, config.model_config, where)
            live = {name: parameter.data for name, parameter in model.named_parameters()}
            own = [p for p in vllm_parameters(shape, tp) if p.rank == rank]
            failed = prove(live, own, invented(specs, kind, where))
            differing = rewrite(live, own, dict(invented(specs, kind, where)))
        print(json.dumps({"parameters": sorted(live), "failed": failed, "differing": differing}), flush=True)


def rewrite(live: dict[str, torch.Tensor], own: list, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Parameters that do not come back bit for bit when they are wiped and written anew, piece by piece."""
    before = {name: tensor.clone() for name, tensor in live.items()}
    for parameter in (p for p in own if p.name in live):
        live[parameter.name].fill_(NAN)
        for box in parameter.padding:
            live[parameter.name][slices(box)] = before[parameter.name][slices(box)]
        for part in parameter.parts:
            live[parameter.name][slices(part.local_box)].copy_(tensors[part.tensor][slices(part.tensor_box)])
    return [name for name, tensor in live.items() if not torch.equal(_bits(tensor), _bits(before[name]))]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
