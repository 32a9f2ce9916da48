import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import MappingError, PlanMismatch
from slipstream.model import families
from slipstream.model.config import ModelConfig
from slipstream.tensors.boxes import full_box, shape_of, slices, split, volume
from slipstream.types import Parameter, ParameterPart, TensorSpec
from slipstream.weights.plan import Plan, SourceTensor, check_cover, make_plan
from slipstream.weights.rank_image import ALIGNMENT, rank_image


def model(family="llama", **over):
    shape = dict(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    )
    return ModelConfig(family=family, **{**shape, **over})


def replicated(tensors, ranks=1):
    return {
        t.name: SourceTensor(t.shape, "float32", tuple((r, full_box(t.shape)) for r in range(ranks))) for t in tensors
    }


def execute(plan, arrays, parameters):
    """Execute the moves one by one with numpy, counting writes."""
    local = {(p.name, p.rank): np.zeros(p.shape, np.float32) for p in parameters}
    writes = {key: np.zeros(a.shape, int) for key, a in local.items()}
    for move in plan.moves:
        key = move.parameter, move.receiver
        local[key][slices(move.local_box)] = arrays[move.tensor][slices(move.tensor_box)]
        writes[key][slices(move.local_box)] += 1
    assert all((w == 1).all() for w in writes.values())
    return local


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_model_to_tp_ranks_bit_for_bit(family, tp):
    config = model(family)
    tensors, parameters = families.tensors(config), families.parameters(config, tp)
    plan = make_plan(replicated(tensors), tensors, parameters, "float32")
    rng = np.random.default_rng(0)
    arrays = {t.name: rng.standard_normal(t.shape, np.float32) for t in tensors}
    local = execute(plan, arrays, parameters)
    dims = families.shard_dims(config, tp)
    for name, array in arrays.items():
        for rank in range(tp):
            expected = array if dims[name] is None else np.split(array, tp, axis=dims[name])[rank]
            np.testing.assert_array_equal(local[name, rank], expected)
    own = {rank: sum(4 * volume(full_box(p.shape)) for p in parameters if p.rank == rank) for rank in range(tp)}
    got = {rank: sum(map(plan.size_of, plan.incoming[rank])) for rank in range(tp)}
    assert got == own


def test_kv_heads_that_do_not_divide_are_replicated():
    config = model(num_kv_heads=1)
    dims = families.shard_dims(config, 2)
    assert dims["model.layers.0.self_attn.k_proj.weight"] is None
    assert dims["model.layers.0.self_attn.q_proj.weight"] == 0


@st.composite
def sharded(draw):
    """A tensor sharded over trainer ranks along one dimension, perhaps with replicas, and over engine ranks along another."""
    shape = tuple(draw(st.sampled_from([4, 8, 12, 24])) for _ in range(draw(st.integers(1, 3))))

    def cuts(counts):
        dim = draw(st.sampled_from([None, *range(len(shape))]))
        count = draw(st.sampled_from([c for c in counts if dim is None or shape[dim] % c == 0]))
        return [split(full_box(shape), dim, i, count) for i in range(count)]

    senders, receivers = cuts([1, 2, 3, 4]), cuts([1, 2, 3, 4])
    return shape, senders, receivers


@settings(max_examples=150, deadline=None)
@given(sharded())
def test_any_sharding_to_any_sharding(case):
    shape, senders, receivers = case
    tensors = [TensorSpec("w", shape)]
    sources = {"w": SourceTensor(shape, "float32", tuple(enumerate(senders)))}
    parameters = [
        Parameter(
            "w", rank, tuple(b - a for a, b in box), (ParameterPart("w", box, full_box(tuple(b - a for a, b in box))),)
        )
        for rank, box in enumerate(receivers)
    ]
    plan = make_plan(sources, tensors, parameters, "float32")
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    local = execute(plan, {"w": array}, parameters)
    for rank, box in enumerate(receivers):
        np.testing.assert_array_equal(local["w", rank], array[slices(box)])
    for move in plan.moves:  # a sender sends only what it holds
        box = senders[move.sender]
        assert all(a <= x and y <= b for (x, y), (a, b) in zip(move.tensor_box, box))
    assert Plan.from_bytes(plan.to_bytes()) == plan


@st.composite
def trees(draw):
    """Tensors on a trainer's mesh of two axes, each sharded by either, both or none of them, and engine ranks that
    shard each tensor along some dimension or replicate it."""
    mesh = draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    num_ranks = draw(st.integers(1, 5))
    sources, parameters, shapes = {}, [], {}
    for index in range(draw(st.integers(1, 5))):
        name = f"t{index}"
        # Small where there are many dimensions: a plan in buckets of 64 bytes has as many moves as there are buckets.
        num_dims = draw(st.integers(1, 3))
        sizes = st.sampled_from([12] if num_dims == 3 else [12, 24, 60])
        shape = shapes[name] = tuple(draw(sizes) for _ in range(num_dims))
        dims = [draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]
        if dims[0] == dims[1]:
            dims[1] = None
        shards = []
        for rank in range(mesh[0] * mesh[1]):
            box = split(full_box(shape), dims[0], rank // mesh[1], mesh[0])
            shards.append((rank, split(box, dims[1], rank % mesh[1], mesh[1])))
        sources[name] = SourceTensor(shape, "float32", tuple(shards))
        cut = draw(st.sampled_from([None, *range(len(shape))]))
        for rank in range(num_ranks):
            box = split(
                full_box(shape), cut if cut is not None and shape[cut] % num_ranks == 0 else None, rank, num_ranks
            )
            parameters.append(
                Parameter(name, rank, shape_of(box), (ParameterPart(name, box, full_box(shape_of(box))),))
            )
    return sources, parameters, shapes, num_ranks


@settings(max_examples=150, deadline=None)
@given(trees(), st.sampled_from([64, 1000, 1 << 20]))
def test_random_trees_meshes_and_targets(tree, bucket_bytes):
    sources, parameters, shapes, num_ranks = tree
    specs = [TensorSpec(name, shape) for name, shape in shapes.items()]
    plan = make_plan(sources, specs, parameters, "float32", bucket_bytes)
    arrays = {
        n: np.arange(np.prod(s), dtype=np.float32).reshape(s) + 1e4 * i for i, (n, s) in enumerate(shapes.items())
    }
    local = execute(plan, arrays, parameters)
    for parameter in parameters:
        direct = arrays[parameter.name][slices(parameter.parts[0].tensor_box)]
        np.testing.assert_array_equal(local[parameter.name, parameter.rank], direct)
    for rank in range(num_ranks):
        own = sum(4 * volume(full_box(p.shape)) for p in parameters if p.rank == rank)
        assert sum(map(plan.size_of, plan.incoming[rank])) == own
    assert all(plan.size_of(move) <= max(bucket_bytes, 4) for move in plan.moves)
    held = {(name, rank): box for name, source in sources.items() for rank, box in source.shards}
    for move in plan.moves:
        box = held[move.tensor, move.sender]
        assert all(a <= x and y <= b for (x, y), (a, b) in zip(move.tensor_box, box))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 9), st.integers(1, 4), st.integers(60, 120))
def test_replicas_share_the_load_evenly(replicas, num_ranks, count):
    specs = [TensorSpec(f"t{i}", (12, 8)) for i in range(count)]
    parameters = [
        Parameter(s.name, r, (12, 8), (ParameterPart(s.name, full_box((12, 8)), full_box((12, 8))),))
        for s in specs
        for r in range(num_ranks)
    ]
    plan = make_plan(replicated(specs, replicas), specs, parameters, "float32")
    sent = [sum(plan.size_of(m) for m in plan.moves if m.sender == rank) for rank in range(replicas)]
    assert max(sent) - min(sent) <= 4 * 96 and max(sent) <= 1.2 * min(sent)


def test_replicas_divide_the_sending():
    config = model(num_layers=8)
    tensors = families.tensors(config)
    plan = make_plan(replicated(tensors, ranks=3), tensors, families.parameters(config, 2), "bfloat16")
    sent = [sum(plan.size_of(m) for m in plan.moves if m.sender == rank) for rank in range(3)]
    assert max(sent) < 1.1 * min(sent)


def test_a_fused_parameter_has_several_parts():
    tensors = [TensorSpec("q", (4, 2)), TensorSpec("k", (2, 2))]
    fused = Parameter(
        "qkv",
        0,
        (3, 2),
        (
            ParameterPart("q", ((2, 4), (0, 2)), ((0, 2), (0, 2))),
            ParameterPart("k", ((1, 2), (0, 2)), ((2, 3), (0, 2))),
        ),
    )
    plan = make_plan(replicated(tensors), tensors, [fused], "float32")
    arrays = {"q": np.arange(8, dtype=np.float32).reshape(4, 2), "k": np.arange(10, 14, dtype=np.float32).reshape(2, 2)}
    expected = np.concatenate([arrays["q"][2:4], arrays["k"][1:2]])
    np.testing.assert_array_equal(execute(plan, arrays, [fused])["qkv", 0], expected)


def test_experts_stack_and_a_padded_vocabulary_is_covered():
    tensors = [TensorSpec("e0", (2, 3)), TensorSpec("e1", (2, 3)), TensorSpec("head", (5, 2))]
    whole_expert = ((0, 2), (0, 3))
    stacked = Parameter(
        "experts",
        0,
        (2, 2, 3),
        tuple(ParameterPart(f"e{i}", whole_expert, ((i, i + 1), *whole_expert)) for i in range(2)),
    )
    padded = Parameter(
        "head", 0, (8, 2), (ParameterPart("head", ((0, 5), (0, 2)), ((0, 5), (0, 2))),), padding=(((5, 8), (0, 2)),)
    )
    sources = replicated(tensors)
    sources["e0"] = SourceTensor((2, 3), "float32", ((0, ((0, 1), (0, 3))), (1, ((1, 2), (0, 3)))))  # rows of two ranks
    plan = make_plan(sources, tensors, [stacked, padded], "float32")
    rng = np.random.default_rng(0)
    arrays = {t.name: rng.standard_normal(t.shape, np.float32) for t in tensors}
    local = {("experts", 0): np.zeros((2, 2, 3), np.float32), ("head", 0): np.zeros((8, 2), np.float32)}
    for move in plan.moves:
        local[move.parameter, 0][slices(move.local_box)] = arrays[move.tensor][slices(move.tensor_box)]
    np.testing.assert_array_equal(local["experts", 0], np.stack([arrays["e0"], arrays["e1"]]))
    np.testing.assert_array_equal(local["head", 0][:5], arrays["head"])
    with pytest.raises(MappingError, match="not written"):
        make_plan(sources, tensors, [stacked, Parameter("head", 0, (8, 2), padded.parts)], "float32")


def test_no_move_is_larger_than_a_bucket():
    config = model(vocab_size=1000)
    tensors, parameters = families.tensors(config), families.parameters(config, 2)
    plan = make_plan(replicated(tensors), tensors, parameters, "float32", bucket_bytes=5000)
    assert max(plan.size_of(m) for m in plan.moves) <= 5000
    execute(plan, {t.name: np.ones(t.shape, np.float32) for t in tensors}, parameters)


def test_images_are_aligned_and_their_parameters_do_not_overlap():
    config = model(hidden_size=33)
    for rank in range(2):
        image = rank_image(families.parameters(config, 2), rank, "bfloat16")
        end = 0
        for offset, shape in image.places.values():
            assert offset % ALIGNMENT == 0 and offset >= end
            end = offset + 2 * int(np.prod(shape))
        assert image.num_bytes == end


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda s: s.update(extra=SourceTensor((2,), "float32", ())), "not in the model: extra"),
        (
            lambda s: s.update({"model.norm.weight": SourceTensor((31,), "float32", ())}),
            "expects shape [32], the trainer has [31]",
        ),
        (lambda s: s.update({"model.norm.weight": SourceTensor((32,), "int32", ())}), "dtype int32"),
    ],
)
def test_mismatches_are_refused_by_name(change, said):
    config = model()
    tensors = families.tensors(config)
    sources = replicated(tensors)
    change(sources)
    with pytest.raises(MappingError, match=said.replace("[", r"\[").replace("]", r"\]")):
        make_plan(sources, tensors, families.parameters(config), "float32")


def test_a_plan_that_leaves_a_gap_or_writes_twice_is_refused():
    config = model()
    tensors, parameters = families.tensors(config), families.parameters(config, 2)
    plan = make_plan(replicated(tensors), tensors, parameters, "float32")
    with pytest.raises(MappingError, match="not written"):
        check_cover(Plan(plan.dtype, plan.moves[1:]), parameters)
    with pytest.raises(MappingError, match="overlap"):
        check_cover(Plan(plan.dtype, (*plan.moves, plan.moves[0])), parameters)
    with pytest.raises(MappingError, match="has no such parameter"):
        check_cover(plan, [p for p in parameters if p.name != "model.norm.weight"])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_malformed_plans_are_refused(data):
    with pytest.raises(PlanMismatch):
        Plan.from_bytes(data)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_plan_is_refused_or_has_another_fingerprint(data):
    config = model(num_layers=1)
    tensors = families.tensors(config)
    plan = make_plan(replicated(tensors), tensors, families.parameters(config), "float32")
    tree = json.loads(plan.to_bytes())
    row = data.draw(st.integers(0, len(tree["moves"]) - 1))
    column = data.draw(st.integers(0, 5))
    junk = data.draw(st.none() | st.integers(-3, 99) | st.text(max_size=5) | st.lists(st.integers(-1, 5), max_size=3))
    if tree["moves"][row][column] == junk:
        return
    tree["moves"][row][column] = junk
    try:
        changed = Plan.from_bytes(json.dumps(tree).encode())
    except PlanMismatch:
        return
    assert changed.fingerprint != plan.fingerprint
