"""Reference for `weight_sync_gpu.py`: vLLM's own NCCL weight transfer between a torch trainer and vLLM on one GPU.

Runs in vLLM's environment. `weight_sync_vllm.py DIRECTORY ROUNDS` prints the seconds of each complete update."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path


def trainer(root: str, rounds: int, port: int) -> None:
    import torch
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as Engine

    shapes = json.loads((Path(root) / "shapes.json").read_text())
    weights = [(n, torch.randn(*s, device="cuda", dtype=torch.bfloat16) * 0.02) for n, s in shapes]
    group = Engine.trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": 2})
    for _ in range(rounds):
        Engine.trainer_send_weights(iter(weights), {"group": group, "packed": True})
        torch.cuda.synchronize()


def engine(root: str, rounds: int) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    llm = LLM(
        root, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", gpu_memory_utilization=0.3, max_model_len=512,
        enforce_eager=True, weight_transfer_config={"backend": "nccl"},
    )  # fmt: skip
    peer = subprocess.Popen([sys.executable, __file__, root, str(rounds), str(port)])
    address = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    llm.init_weight_transfer_engine({"init_info": address})
    shapes = json.loads((Path(root) / "shapes.json").read_text())
    info = {"names": [n for n, _ in shapes], "shapes": [s for _, s in shapes], "packed": True}
    info["dtype_names"] = ["bfloat16"] * len(shapes)
    for number in range(rounds):
        start = time.perf_counter()
        llm.start_weight_update()
        llm.update_weights({"update_info": info})
        llm.finish_weight_update()
        if number >= 2:
            print(f"native> {time.perf_counter() - start}", flush=True)
    peer.wait(60)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        trainer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        engine(sys.argv[1], int(sys.argv[2]) + 2)
