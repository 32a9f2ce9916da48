"""Parameter trees of other libraries, built from random HF tensors as their loaders do, and mapped back."""

from itertools import pairwise, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slipstream.errors import ConfigError, MappingError
from slipstream.model import families
from slipstream.model.tree import unflatten
from slipstream.tensors.boxes import full_box, slices
from slipstream.types import TensorSpec
from slipstream.weights.plan import make_plan
from slipstream.weights.sources import known_trees, named_tensors
from slipstream.weights.sources.transforms import Merge, Permute, Take, Unstack
from slipstream.weights.sources.tree_mapping import Rule, Target, TreeMapping, Within
from tests.tiny import VARIANTS, variant


def hf_tensors(config, seed=0):
    rng = np.random.default_rng(seed)
    return {t.name: rng.standard_normal(t.shape, np.float32) for t in families.tensors(config)}


def tunix_tree(config, hf):
    """Convert HF tensors to Tunix's tree as its loader does: transpose, then reshape."""
    d, k = config.hidden_size, config.head_dim
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    tree = {"embedder": {"input_embedding": hf["model.embed_tokens.weight"]}, "final_norm": {"w": hf["model.norm.weight"]}, "layers": {}}  # fmt: skip
    if "lm_head.weight" in hf:
        tree["lm_head"] = {"w": hf["lm_head.weight"].T}
    for i in range(config.num_layers):
        at = f"model.layers.{i}."
        attn = {f"{x}_proj": {"w": hf[f"{at}self_attn.{x}_proj.weight"].T.reshape(d, n, k)} for x, n in heads.items()}
        attn["o_proj"] = {"w": hf[at + "self_attn.o_proj.weight"].T.reshape(config.num_heads, k, d)}
        attn |= {f"{x}_bias": hf[f"{at}self_attn.{x}_proj.bias"] for x in "qkv" if config.family == "qwen2"}
        attn |= {f"{x}_norm": {"w": hf[f"{at}self_attn.{x}_norm.weight"]} for x in "qk" if config.family == "qwen3"}
        mlp = {f"{x}_proj": {"kernel": hf[f"{at}mlp.{x}_proj.weight"].T} for x in ("gate", "up", "down")}
        norms = {f"{x}_layernorm": {"w": hf[f"{at}{x}_layernorm.weight"]} for x in ("input", "post_attention")}
        tree["layers"][i] = {"attn": attn, "mlp": mlp, **norms}
    return tree


def maxtext_tree(config, hf, scanned):
    """Convert HF tensors to MaxText's tree as its converter does: transpose, reshape, interleave, scale, stack on dimension 1."""
    d, k, n, kv = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads

    def interleave(a):
        return np.stack(np.split(a, 2, axis=-1), axis=-1).reshape(a.shape) if config.family == "llama" else a

    def layer(i):
        get = lambda name: hf[f"model.layers.{i}.{name}"]  # noqa: E731
        scale = np.float32(1 / np.sqrt(k)) if config.family == "llama" else np.float32(1)
        found = {
            "self_attention.query.kernel": interleave(get("self_attn.q_proj.weight").T.reshape(d, n, k)) * scale,
            "self_attention.key.kernel": interleave(get("self_attn.k_proj.weight").T.reshape(d, kv, k)),
            "self_attention.value.kernel": get("self_attn.v_proj.weight").T.reshape(d, kv, k),
            "self_attention.out.kernel": get("self_attn.o_proj.weight").T.reshape(n, k, d),
            "mlp.wi_0.kernel": get("mlp.gate_proj.weight").T,
            "mlp.wi_1.kernel": get("mlp.up_proj.weight").T,
            "mlp.wo.kernel": get("mlp.down_proj.weight").T,
            "pre_self_attention_layer_norm.scale": get("input_layernorm.weight"),
            "post_self_attention_layer_norm.scale": get("post_attention_layernorm.weight"),
        }
        names = {"q": ("query", n), "k": ("key", kv), "v": ("value", kv)}
        if config.family == "qwen2":
            found |= {
                f"self_attention.{m}.bias": get(f"self_attn.{x}_proj.bias").reshape(h, k) for x, (m, h) in names.items()
            }
        if config.family == "qwen3":
            found |= {f"self_attention.{names[x][0]}_norm.scale": get(f"self_attn.{x}_norm.weight") for x in "qk"}
        return found

    layers = [layer(i) for i in range(config.num_layers)]
    flat = {"token_embedder.embedding": np.pad(hf["model.embed_tokens.weight"], ((0, 32), (0, 0))), "decoder.decoder_norm.scale": hf["model.norm.weight"]}  # fmt: skip
    if "lm_head.weight" in hf:
        flat["decoder.logits_dense.kernel"] = hf["lm_head.weight"].T
    if scanned:
        flat |= {f"decoder.layers.{name}": np.stack([x[name] for x in layers], axis=1) for name in layers[0]}
    else:
        flat |= {f"decoder.layers_{i}.{name}": a for i, x in enumerate(layers) for name, a in x.items()}
    return {"params": unflatten(flat)}


def differing(tensors, hf):
    """Return the names that only one has, or whose values differ."""
    shared = tensors.keys() & hf.keys()
    unequal = {name for name in shared if not np.array_equal(np.asarray(tensors[name]), hf[name])}
    return unequal | (tensors.keys() ^ hf.keys())


@pytest.mark.parametrize("name", [v for v in VARIANTS if v.split("-")[0] in ("llama", "qwen2", "qwen3")])
def test_trees_map_back_exactly(name):
    config = variant(name, **({"head_dim": 16} if name.startswith("llama") else {}))  # a scale of 4 rounds nothing
    hf = hf_tensors(config)
    assert hf
    assert differing(known_trees.identity(config).tensors(unflatten(hf)), hf) == set()
    assert differing(known_trees.tunix(config).tensors(tunix_tree(config, hf)), hf) == set()
    for scanned in (True, False):
        assert differing(known_trees.maxtext(config, scanned).tensors(maxtext_tree(config, hf, scanned)), hf) == set()


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_sharded_trees_through_a_plan(name, dim):
    """Leaves split over two devices, along the first or the last dimension: every move reads one shard."""
    config = variant(name, head_dim=16)
    hf, mesh = hf_tensors(config), Mesh(np.array(jax.devices()[:2]), ("x",))

    def put(array):
        axes = [None] * array.ndim
        axes[dim] = "x"
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    trees = ((known_trees.tunix, tunix_tree(config, hf)), (known_trees.maxtext, maxtext_tree(config, hf, True)))
    for make, tree in trees:
        mapping = make(config)
        tensors = mapping.tensors(jax.tree.map(put, tree))
        parameters = families.parameters(config, tp=2)
        plan = make_plan(named_tensors.describe(tensors), families.tensors(config), parameters, "float32")
        local = {(p.name, p.rank): np.full(p.shape, np.nan, np.float32) for p in parameters}
        for move in plan.moves:
            local[move.parameter, move.receiver][slices(move.local_box)] = named_tensors.read(
                tensors[move.tensor], move.tensor_box
            )
        dims = families.shard_dims(config, 2)
        for (tensor, rank), array in local.items():
            whole_tensor = hf[tensor]
            np.testing.assert_array_equal(
                array, whole_tensor if dims[tensor] is None else np.split(whole_tensor, 2, dims[tensor])[rank]
            )


FUSED = TreeMapping(
    (
        Rule(
            "blocks.qkv",  # [L, D, 3 * F]
            *(
                Target(f"l.{{layer}}.{x}", (Unstack(0, "layer"), Take(1, 4 * i, 4 * i + 4), Permute((1, 0))))
                for i, x in enumerate("qkv")
            ),
        ),
        Rule("half_{part}", *()),
        Rule("experts.{expert}.w.{layer}", Target("l.{layer}.e.{expert}", (Merge(0),))),
        Rule("first", Target("both", (), Within(0, 0, 5))),
        Rule("second", Target("both", (Permute((1, 0)),), Within(0, 2, 5))),
    )
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=3), st.lists(st.integers(0, 2), max_size=1), st.integers(0, 2**31))
def test_arbitrary_shards_of_a_fused_stack(columns, layers, seed):
    array = np.random.default_rng(seed).standard_normal((2, 3, 12), np.float32)
    found = {f"l.{i}.{x}": np.full((4, 3), np.nan, np.float32) for i in range(2) for x in "qkv"}
    edges = [sorted({0, size, *cut}) for size, cut in ((2, layers), (3, ()), (12, columns))]
    for box in product(*(pairwise(e) for e in edges)):
        for held in FUSED.expand("blocks.qkv", array.shape, tuple(box)):
            assert held.shape == (4, 3)
            found[held.name][slices(held.box)] = held.view(array[slices(tuple(box))])
    for i in range(2):
        for x, part in zip("qkv", np.split(array[i], 3, axis=1)):
            np.testing.assert_array_equal(found[f"l.{i}.{x}"], part.T)


def test_several_leaves_make_one_tensor_and_some_are_not_sent():
    a, b = np.arange(6.0).reshape(2, 3), np.arange(9.0).reshape(3, 3)
    tensors = FUSED.tensors(
        {"first": a, "second": b, "half_3": np.ones(2), "experts": {"7": {"w": {"1": np.ones((2, 2))}}}}
    )
    assert tensors.keys() == {"both", "l.1.e.7"}
    both = np.concatenate([a, b.T])
    np.testing.assert_array_equal(np.asarray(tensors["both"]), both)
    np.testing.assert_array_equal(
        named_tensors.read(tensors["both"], ((1, 4), (0, 2))), both[1:4, :2]
    )  # from both leaves
    assert np.shares_memory(named_tensors.read(tensors["both"], ((3, 4), (0, 2))), b)


def test_mismatches_are_refused_by_name():
    config = variant("qwen3")
    mapping, hf = known_trees.tunix(config), hf_tensors(config)

    def refuses(change, *words):
        tree = tunix_tree(config, hf)
        change(tree)
        with pytest.raises(MappingError) as caught:
            mapping.tensors(tree)
        for word in words:
            assert word in str(caught.value)

    refuses(lambda t: t["layers"][1]["attn"].pop("q_proj"), "model.layers.1.self_attn.q_proj.weight: missing", "expected a leaf layers.1.attn.q_proj.w")  # fmt: skip
    refuses(lambda t: t.update(extra={"w": np.ones(2)}), "no rule matches the leaf 'extra.w'")
    refuses(lambda t: t["layers"].update({9: t["layers"][1]}), "model.layers.9.mlp.up_proj.weight", "not in the model")
    refuses(lambda t: t["final_norm"].update(w=np.ones(3)), "final_norm.w", "[3]", f"[{config.hidden_size}]")
    refuses(lambda t: t["lm_head"].update(w=np.ones((2, 3, 4))), "leaf lm_head.w [2, 3, 4]", "Permute")
    tied = variant("qwen2")
    tree = tunix_tree(tied, hf_tensors(tied)) | {"lm_head": {"w": np.ones((tied.hidden_size, tied.vocab_size))}}
    with pytest.raises(MappingError, match="a tied head must not have a leaf"):
        known_trees.tunix(tied).tensors(tree)


def test_rules_that_contradict_each_other_are_refused():
    twice = TreeMapping((Rule("a", Target("t")), Rule("b", Target("t"))), (TensorSpec("t", (2,)),))
    with pytest.raises(MappingError, match=r"t, from a, b: .*overlap"):
        twice.tensors({"a": np.ones(2), "b": np.ones(2)})
    with pytest.raises(MappingError, match="several rules: a, a"):
        TreeMapping((Rule("a"), Rule("{n}a"), Rule("a")), ()).expand("a", (1,))
    with pytest.raises(MappingError, match="'layer'"):
        TreeMapping((Rule("a", Target("t.{layer}")),)).expand("a", (1,))
    mixed = TreeMapping((Rule("a", Target("t", (), Within(0, 0, 2))), Rule("b", Target("t", (), Within(0, 1, 2)))))
    with pytest.raises(MappingError, match="several dtypes: bfloat16, float32"):
        mixed.tensors({"a": jnp.ones(1), "b": jnp.ones(1, jnp.bfloat16)})
    with pytest.raises(MappingError, match="does not fit in"):
        mixed.expand("b", (2,), full_box((2,)))


def test_a_family_without_a_mapping_is_refused():
    for make, family in ((known_trees.tunix, "mixtral"), (known_trees.maxtext, "gemma2")):
        with pytest.raises(ConfigError, match=rf"no (tunix|maxtext) mapping for {family}"):
            make(variant(family))
