"""One rank of a torch trainer, run by tests: `python -m tests.deploy.torch_rank MODEL OUT`, with the environment of its job.

Its module is sharded by FSDP2. Each step changes the shards and brings them to the engines; the first rank then compares what they
generate with what transformers does with the whole module."""

import copy
import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import slipstream
from slipstream.plugins import TorchWeightBridge
from slipstream.plugins.torch_trainer import update_weights
from tests.tiny import hf_greedy

PROMPT, COUNT, STEPS = (5, 7, 11, 13, 17), 8, 2
GREEDY = slipstream.SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)


def step(module, number):
    """Take a step whose gradient a shard can compute by itself."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.cos(parameter.detach() * (50 + number))
    optimizer.step()


def main(model, out):
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    mode, transport = os.environ.get("MODE"), os.environ.get("TRANSPORT")
    bridge = TorchWeightBridge(copy.deepcopy(whole), mode=mode, transport=transport, timeout=120)
    if device.type == "cuda":  # PyTorch's NCCL takes one rank per GPU, and FSDP2's own steps are not of interest here
        torch.distributed.init_process_group(
            "gloo", init_method=bridge._job.trainers_url("gloo"), rank=int(os.environ["RANK"]), world_size=2
        )
    facts = {"mode": bridge.mode, "steps": [], "shards": 0}
    bridge.initialize()
    rank = torch.distributed.get_rank()
    store = torch.distributed.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    facts["rendezvous"] = f"{store.host}:{store.port}"
    module = bridge.get_trainable_model()
    mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (2,))
    fully_shard(module, mesh=mesh)
    facts["shards"] = sum(isinstance(p, DTensor) and p.to_local().shape != p.shape for p in module.parameters())
    for number in range(STEPS):
        step(module, number)
        step(whole, number)
        bridge.broadcast_weights()
        version = bridge.notify_update()
        if rank == 0:
            with slipstream.connect(os.environ.get("SLIPSTREAM_RUN_DIR")) as client:
                names = [engine.info.name for engine in client.status().engines]
                found = [client.generate([PROMPT], GREEDY, engine=name)[0] for name in names]
            tokens = hf_greedy(whole, PROMPT, COUNT)
            facts["steps"].append(
                [version, [list(c.token_ids) for c in found], list(tokens), [c.version for c in found]]
            )
    report = update_weights(bridge._delivery._bridge, module)
    facts["transports"] = [engine.transport for engine in report.engines]
    facts["num_bytes"], facts["model_bytes"] = report.num_bytes, sum(p.nbytes for p in whole.parameters())
    bridge.close()
    Path(f"{out}-{rank}.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
