"""`DTensor`s as boxes of a trainer's processes, compared with PyTorch's own arithmetic, and what they are read as."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.errors import MappingError
from slipstream.tensors.boxes import exact_cover, full_box
from slipstream.weights.sources.named_tensors import boxes, describe, named_tensors, read
from slipstream.weights.sources.torch_shards import replicated


@pytest.fixture(params=range(4))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One of four ranks, which do not communicate."""
    distributed.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield request.param
    distributed.destroy_process_group()


PLACEMENTS = list(itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2))


def test_every_rank_knows_which_box_each_rank_holds(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for shape, placements in itertools.product([(8, 4), (5, 7), (1, 3), (3, 1)], PLACEMENTS):
        local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        whole = torch.arange(35.0)[: shape[0] * shape[1]].reshape(shape)
        expected = tuple((start, start + size) for start, size in zip(offset, local_shape))
        local = whole[tuple(slice(*part) for part in expected)]
        given = DTensor.from_local(
            local, mesh, placements, shape=torch.Size(shape), stride=(shape[1], 1), run_check=False
        )
        tensors = named_tensors({"w": given})
        source = describe(tensors)["w"]
        assert source.shape == shape and source.dtype == "float32"
        held = dict(source.shards)
        assert not exact_cover(sorted(set(held.values())), full_box(shape)), (shape, placements)
        if local.numel():
            assert boxes(tensors["w"]) == (expected,) == (held[rank],), (shape, placements)
            np.testing.assert_array_equal(read(tensors["w"], expected), local.numpy())
        else:
            assert boxes(tensors["w"]) == () and rank not in held
        if local.shape != whole.shape:
            with pytest.raises(MappingError, match="this process holds"):
                read(tensors["w"], full_box(shape))


def test_sums_that_are_not_added_up_yet_are_refused() -> None:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        partial = DTensor.from_local(torch.zeros(2, 2), mesh, [Partial()], run_check=False)
        with pytest.raises(MappingError, match=r"w is placed as P.*redistribute"):
            named_tensors({"w": partial})
    finally:
        distributed.destroy_process_group()


def test_plain_tensors_of_several_processes_are_replicas_and_a_tied_head_is_sent_once() -> None:
    embed = torch.zeros(4, 2, dtype=torch.bfloat16)
    state = {"model.embed_tokens.weight": embed, "lm_head.weight": embed, "model.norm.weight": torch.ones(2)}
    tensors = named_tensors(replicated(state, 3))
    assert tensors.keys() == {"model.embed_tokens.weight", "model.norm.weight"}
    sources = describe(tensors, rank=2)
    box = ((0, 4), (0, 2))
    assert sources["model.embed_tokens.weight"].shards == ((0, box), (1, box), (2, box))
    assert sources["model.embed_tokens.weight"].dtype == "bfloat16"
