"""Replaces NCCL by sockets in the weight transfer of a real vLLM server on CPU.

Copied beside a `sitecustomize.py` that imports it, so that it runs in every process of the server. Everything around a broadcast
is vLLM's own code: parsing the HTTP request, splitting the stream into chunks, unpacking, loading."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import sockets  # tests/engines/sockets.py, copied too


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


class Finder:
    """Patches `nccl_engine` after it is imported. Importing it here would load all of vLLM into every process."""

    NAME = "vllm.distributed.weight_transfer.nccl_engine"

    def find_spec(self, name, path=None, target=None):
        if name != self.NAME:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
