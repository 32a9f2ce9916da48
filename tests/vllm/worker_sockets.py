"""Replaces NCCL by sockets in the weight transfer of a real vLLM server on CPU.

Copied beside a `sitecustomize.py` that imports it, so that it runs in every process of the server. Everything around a broadcast
is vLLM's own code: parsing the HTTP request, splitting the stream into chunks, unpacking, loading."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import sockets  # tests/engines/sockets.py, copied too
from after_import import after_import  # tests/vllm/after_import.py, too


class Group:
    """Stands in for vLLM's communicator."""

    def __init__(self, unique_id: bytes) -> None:
        self._peer = sockets.dial(unique_id)

    def broadcast(self, tensor, src, stream=None):
        import torch

        data = sockets.receive(self._peer, tensor.numel())
        if (switch := Path(os.environ["BREAK"])).exists():
            switch.unlink()
            raise RuntimeError("told to break in the middle")
        tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def destroy(self):
        self._peer.close()


class Stream:
    def synchronize(self):
        pass


def patch(module) -> None:
    import torch
    from vllm.distributed.weight_transfer import packed_tensor

    packed_tensor._get_streams = lambda device, count: (Stream(),) * count
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda *_: None
    torch.cuda.stream = lambda stream: contextlib.nullcontext()

    def join(init_info, parallel_config):
        assert init_info.rank_offset == 1 and init_info.world_size == 1 + parallel_config.world_size
        return Group(init_info.nccl_unique_id_bytes)

    module.worker_init_process_group = join


after_import("vllm.distributed.weight_transfer.nccl_engine", patch)
