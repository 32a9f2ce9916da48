"""Helpers for `nccl` transport tests: a trainer's arrays as pieces, and the expected contents of each rank."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.model import families
from slipstream.model.families.vllm_parameters import vllm_parameters
from slipstream.tensors.boxes import full_box, shift, slices, split
from slipstream.types import Box
from slipstream.weights.plan import SourceTensor, make_plan
from slipstream.weights.rank_image import numpy_dtype
from tests.tiny import tiny_config
from tests.weights.naive_checksum import naive_checksum


@dataclass(frozen=True)
class Piece:
    array: jax.Array
    box: Box
    checksum: int | None = None

    def slice(self, array):
        return array[slices(self.box)]


class Model:
    """A tiny model in vLLM's layout on `tp` engine ranks, with rows sharded over `trainers` trainer ranks."""

    def __init__(self, tp=1, trainers=1, dtype="bfloat16", source="float32", config=None, most=1 << 20):
        self.config = config or tiny_config("qwen2", vocab_size=70, tie_word_embeddings=True)
        self.specs, self.dtype, self.source = families.tensors(self.config), dtype, source
        self.parameters = vllm_parameters(self.config, tp)
        self.shards = {t.name: self._shards(t.shape, trainers) for t in self.specs}
        sources = {t.name: SourceTensor(t.shape, source, tuple(enumerate(self.shards[t.name]))) for t in self.specs}
        self.plan = make_plan(sources, self.specs, self.parameters, dtype, most)

    @staticmethod
    def _shards(shape, trainers):
        box = full_box(shape)
        if shape[0] % trainers:
            return [box] * trainers
        return [split(box, 0, rank, trainers) for rank in range(trainers)]

    def weights(self, seed):
        rng = np.random.default_rng(seed)
        kind = numpy_dtype(self.source)
        return {t.name: rng.standard_normal(t.shape, np.float32).astype(kind) for t in self.specs}

    def pieces(self, weights, trainer, rank, only=lambda move: True, device=None):
        """Return the pieces that a trainer rank sends to an engine rank, by index."""
        arrays = {}
        found = {}
        for index, move in self.plan.stream(trainer, rank).items():
            if only(move):
                shard = self.shards[move.tensor][trainer]
                if move.tensor not in arrays:
                    arrays[move.tensor] = jax.device_put(jnp.asarray(weights[move.tensor][slices(shard)]), device)
                values = weights[move.tensor][slices(move.tensor_box)].astype(numpy_dtype(self.dtype))
                checksum = naive_checksum(values)
                found[index] = Piece(arrays[move.tensor], shift(move.tensor_box, shard), checksum)
        return found

    def expected(self, weights, rank, before=None, only=lambda move: True):
        """Return every parameter of a rank, moved with numpy. Parameters that are not sent keep their value in `before`, or zero."""
        kind = numpy_dtype(self.dtype)
        local = {
            p.name: np.zeros(p.shape, kind) if before is None else before[p.name].copy()
            for p in self.parameters
            if p.rank == rank
        }
        for move in self.plan.incoming[rank]:
            if only(move):
                target = local[move.parameter][slices(move.local_box)]
                target[...] = weights[move.tensor][slices(move.tensor_box)].astype(kind).reshape(target.shape)
        return local


def staged(receiver, model, rank):
    """Return a receiver's parameters, copied as raw bytes because torch cannot convert bfloat16 to numpy."""
    import torch

    found = {}
    for p in model.parameters:
        if p.rank == rank:
            bits = receiver.view(p.name).contiguous().flatten().view(torch.uint8)
            found[p.name] = bits.cpu().numpy().view(numpy_dtype(model.dtype)).reshape(p.shape)
    return found


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name
