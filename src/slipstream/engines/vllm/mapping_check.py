"""Checks that the plan writes every tensor where vLLM's own loader puts it.

An engine on a GPU runs `check_mapping` when it starts. As a command, this module checks models without an engine: for
`slipstream doctor --model`, and to test every family and split.

    python -m slipstream.engines.vllm.mapping_check [--rank 0 --tp 1 --port 0] [--dtype bfloat16] DIRECTORY…

It builds each model as vLLM would, with random weights (a directory needs only a config.json), lets vLLM's loader fill it, and
compares every parameter with what the plan would write. It prints one line of JSON per model."""

from __future__ import annotations

import argparse
import json
import socket
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from slipstream.engines.vllm import compat
from slipstream.engines.vllm.engine_args import ENVIRONMENT, set_defaults
from slipstream.engines.vllm.shared_names import remove_names
from slipstream.model import families
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.families.vllm_parameters import vllm_parameters
from slipstream.tensors.boxes import slices
from slipstream.types import Parameter, ParameterPart

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_mapping(
    live: Mapping[str, torch.Tensor], parameters: Sequence[Parameter], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    """Return the live parameters that do not hold what the plan would write, with the reason. `parameters` describes one
    rank; `tensors` are what vLLM's loader has loaded into `live`."""
    failed = dict.fromkeys(live, "no tensor of the checkpoint is known to go there")
    parts: dict[str, list[tuple[str, ParameterPart]]] = defaultdict(list)
    unchecked: dict[str, set[ParameterPart]] = {}
    for parameter in parameters:
        failed.pop(parameter.name, None)
        if parameter.name not in live:
            failed[parameter.name] = "vLLM's model has no such parameter"
        elif tuple(live[parameter.name].shape) != parameter.shape:
            shape = list(live[parameter.name].shape)
            failed[parameter.name] = f"it has shape {shape}, the plan says {list(parameter.shape)}"
        else:
            unchecked[parameter.name] = set(parameter.parts)
            for part in parameter.parts:
                parts[part.tensor].append((parameter.name, part))
    for tensor_name, tensor in tensors:
        for name, part in parts.get(tensor_name, ()):
            actual = live[name][slices(part.local_box)]
            expected = tensor[slices(part.tensor_box)].to(actual.device, actual.dtype).reshape(actual.shape)
            if not same_bits(actual, expected):
                failed.setdefault(
                    name, f"it does not hold {tensor_name}{list(part.tensor_box)} where the plan writes it"
                )
            unchecked[name].discard(part)
    for name, missing in unchecked.items():
        if missing:
            failed.setdefault(name, f"vLLM's loader was not given {min(part.tensor for part in missing)}")
    return failed


def module_siblings(failed: Collection[str], names: Iterable[str]) -> set[str]:
    """Return the names in the same modules as `failed`: vLLM's loader takes the parameters of a module together."""
    modules = {name.rpartition(".")[0] for name in failed}
    return {name for name in names if name.rpartition(".")[0] in modules}


def random_tensors(
    specs: Iterable[tuple[str, Sequence[int]]], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random tensors for vLLM's loader, the same each time for the same names."""
    for name, shape in specs:
        generator = torch.Generator(device).manual_seed(xxhash.xxh32_intdigest(name.encode()))
        yield name, torch.randn(tuple(shape), generator=generator, dtype=dtype, device=device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = _INTEGERS[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


# --- as a command ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--port", type=int, default=0, help="port on this host where the ranks meet")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("directories", nargs="+", type=Path)
    arguments = parser.parse_args()
    set_defaults(ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "1", "VLLM_DIST_IDENT": f"mapping-check-{arguments.port}"})
    compat.inspect_models_here()
    for directory in arguments.directories:
        port = arguments.port or _free_port()
        print(json.dumps(check_model(directory, arguments.rank, arguments.tp, port, arguments.dtype)), flush=True)


def check_model(directory: Path, rank: int, tp: int, port: int, dtype: str) -> dict[str, Any]:
    """Return the names of the rank's `parameters`, those that `failed` the check and why, and those `differing` after they
    were wiped and rewritten piece by piece, as an update does."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    on_cpu = compat.is_cpu()
    device, torch_dtype = torch.device("cpu") if on_cpu else torch.device("cuda", 0), getattr(torch, dtype)
    settings: dict[str, Any] = {"model": str(directory), "dtype": dtype, "tensor_parallel_size": tp}
    config = EngineArgs(**settings, skip_tokenizer_init=True, enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config), torch.device(device):
        if not torch.distributed.is_initialized():
            backend = "gloo" if on_cpu else "nccl"
            init_distributed_environment(tp, rank, f"tcp://127.0.0.1:{port}", 0, backend)
            initialize_model_parallel(tp, 1)
            torch.distributed.barrier()
            remove_names()
        torch.set_default_dtype(torch_dtype)
        model = initialize_model(config)
        torch.set_default_dtype(torch.float32)
        model_config = read_config(directory)
        specs = [(t.name, t.shape) for t in families.tensors(model_config)]
        model.load_weights(random_tensors(specs, torch_dtype, device))
        if not on_cpu:  # on CPU this packs linear weights, which are then no longer parameters
            process_weights_after_loading(model, config.model_config, device)
        live = {name: parameter.data for name, parameter in model.named_parameters()}
        rank_parameters = [p for p in vllm_parameters(model_config, tp) if p.rank == rank]
        failed = check_mapping(live, rank_parameters, random_tensors(specs, torch_dtype, device))
        differing = _rewrite(live, rank_parameters, dict(random_tensors(specs, torch_dtype, device)))
    return {"parameters": sorted(live), "failed": failed, "differing": differing}


def _rewrite(
    live: dict[str, torch.Tensor], parameters: Sequence[Parameter], tensors: dict[str, torch.Tensor]
) -> list[str]:
    """Wipe every parameter and write it again by the plan. Return the names of those that changed."""
    before = {name: tensor.clone() for name, tensor in live.items()}
    for parameter in (p for p in parameters if p.name in live):
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
