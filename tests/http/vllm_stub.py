"""A stand-in for those two modules of vLLM that `nccl_receiver.py` uses, over a Unix socket. Written as the package `vllm` for a
process of its own, by `write`."""

from pathlib import Path

COMMUNICATOR = """
import os, socket
import torch


class PyNcclCommunicator:
    @classmethod
    def from_unique_id_bytes(cls, unique_id, rank, world_size, device):
        assert (len(unique_id), rank, world_size, device) == (128, 1, 2, "cuda:0")
        self = cls()
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(os.path.join(os.environ["STUB_DIR"], unique_id[:4].hex()))
        return self

    def broadcast(self, tensor, src):
        view = memoryview(tensor.numpy())
        while len(view):
            count = self.socket.recv_into(view)
            assert count, "the trainer has left"
            view = view[count:]
"""
PACKED = """
import math
import torch

DEFAULT_PACKED_BUFFER_SIZE_BYTES = 1 << 30


def packed_nccl_broadcast_consumer(iterator, group, src, post_unpack_func, buffer_size_bytes):
    chunk, total = [], 0
    for name, (shape, dtype) in iterator:
        chunk.append((name, shape, dtype, math.prod(shape) * dtype.itemsize))
        total += chunk[-1][3]
        if total > buffer_size_bytes:
            receive(chunk, total, group, src, post_unpack_func)
            chunk, total = [], 0
    if chunk:
        receive(chunk, total, group, src, post_unpack_func)


def receive(chunk, total, group, src, post_unpack_func):
    packed = torch.empty(total, dtype=torch.uint8)
    group.broadcast(packed, src)
    parts = packed.split([size for *_, size in chunk])
    post_unpack_func([(name, part.view(dtype).view(shape)) for (name, shape, dtype, _), part in zip(chunk, parts)])
"""


def write(directory: Path) -> Path:
    """Write the package; return the folder for `PYTHONPATH`."""
    for path, text in {
        "device_communicators/pynccl.py": COMMUNICATOR,
        "weight_transfer/packed_tensor.py": PACKED,
    }.items():
        file = directory / "vllm" / "distributed" / path
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return directory
