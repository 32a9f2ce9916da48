"""Script: receives the weights that a trainer broadcasts as to vLLM's workers, and writes them as safetensors.

Runs in an environment with vLLM and a GPU, started by `trainer_communicator.py`, with one JSON object per line:

    {"init": {"master_address", "master_port", "world_size", "packed", …}}      join the trainer's communicator as rank 1
    {"receive": {"names", "dtype_names", "shapes"}, "directory": …}             receive these tensors into a directory
    answer: {} or {"error": text}

The trainer's vLLM hands out NCCL's unique id as a pickle. It is not unpickled: the id is the only long run of bytes in it."""

from __future__ import annotations

import json
import pickletools
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

JOIN_SECONDS = 120
UNIQUE_ID_BYTES = 128


def unique_id_of(pickled: bytes) -> bytes:
    """Return the NCCL unique id in a pickled `ncclUniqueId`, without unpickling it."""
    found = [argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, bytes)]
    ids = [value for value in found if len(value) == UNIQUE_ID_BYTES]
    if len(ids) != 1:
        raise ValueError(f"the trainer's store should hold one id of {UNIQUE_ID_BYTES} bytes, got {len(ids)}")
    return ids[0]


class Receiver:
    def init(self, info: dict[str, Any]) -> None:
        if info.get("world_size") != 2 or info.get("rank_offset", 1) != 1:
            raise ValueError(f"the communicator must have the trainer and this process, got {info}")
        from torch.distributed import TCPStore
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        store = TCPStore(
            info["master_address"],
            int(info["master_port"]),
            2,
            False,
            timeout=timedelta(seconds=JOIN_SECONDS),
            use_libuv=False,  # as vLLM's
        )
        unique_id = unique_id_of(store.get("broadcast_from/0/0"))
        self._communicator = PyNcclCommunicator.from_unique_id_bytes(unique_id, rank=1, world_size=2, device="cuda:0")
        self._info, self._store = info, store

    def receive(self, update: dict[str, Any], directory: str) -> None:
        import torch
        from safetensors.torch import save_file
        from vllm.distributed.weight_transfer import packed_tensor

        places: dict[str, str] = {}

        def write(tensors: list[tuple[str, torch.Tensor]]) -> None:
            file = f"part-{len(places):06d}.safetensors"
            host = {name: tensor.to("cpu", copy=True) for name, tensor in tensors}
            save_file(host, Path(directory) / file)
            places.update(dict.fromkeys(host, file))

        if not (self._info.get("packed") or update.get("packed")):
            raise ValueError("tensors must come packed, as TRL 1.16 sends them")
        dtypes = [getattr(torch, name) for name in update["dtype_names"]]
        rows = list(zip(update["names"], zip(update["shapes"], dtypes), strict=True))
        size = self._info.get("packed_buffer_size_bytes", packed_tensor.DEFAULT_PACKED_BUFFER_SIZE_BYTES)
        packed_tensor.packed_nccl_broadcast_consumer(iter(rows), self._communicator, 0, write, size)
        (Path(directory) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def main() -> None:
    receiver, answers = Receiver(), sys.stdout
    sys.stdout = sys.stderr  # what libraries print is not an answer
    for line in sys.stdin:
        call = json.loads(line)
        try:
            if "init" in call:
                receiver.init(call["init"])
            else:
                receiver.receive(call["receive"], call["directory"])
            answer: dict[str, Any] = {}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
