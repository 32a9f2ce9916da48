"""Plans into vLLM's parameter layouts, compared with a direct implementation using numpy's concatenate and split."""

import numpy as np
import pytest

from slipstream.errors import ConfigError
from slipstream.model import families
from slipstream.model.families.vllm_parameters import expert_parameters, vllm_parameters, written_parameters
from slipstream.tensors.boxes import full_box, slices
from slipstream.types import TensorSpec
from slipstream.weights.plan import SourceTensor, make_plan
from tests.tiny import tiny_config, variant


def carried_out(specs, arrays, parameters):
    """Execute the moves and return each rank's parameters; padding is zero, as in a receiver."""
    sources = {t.name: SourceTensor(t.shape, "float32", ((0, full_box(t.shape)),)) for t in specs}
    local = {(p.name, p.rank): np.full(p.shape, np.nan, np.float32) for p in parameters}
    for move in make_plan(sources, specs, parameters, "float32").moves:
        piece = arrays[move.tensor][slices(move.tensor_box)]
        target = local[move.parameter, move.receiver][slices(move.local_box)]
        target[...] = piece.reshape(target.shape)
    for parameter in parameters:
        for box in parameter.padding:
            local[parameter.name, parameter.rank][slices(box)] = 0
    return local


def naive(config, hf, tp, pp):
    """Return every rank's parameters, built the way vLLM builds them."""

    def by_heads(array, heads):
        if heads >= tp:
            return np.split(array, tp)
        return [head for head in np.split(array, heads) for _ in range(tp // heads)]

    def vocabulary(array):
        return np.split(np.pad(array, ((0, -len(array) % 64), (0, 0))), tp)

    stages = {(2, 1): [2], (2, 2): [1, 1], (3, 1): [3], (3, 2): [2, 1]}[config.num_layers, pp]
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    found, layer = {}, 0
    for stage, count in enumerate(stages):
        last = stage == pp - 1
        for r in range(tp):
            rank, mine = stage * tp + r, {}
            if stage == 0 or (last and config.tie_word_embeddings):
                mine["model.embed_tokens.weight"] = vocabulary(hf["model.embed_tokens.weight"])[r]
            if last:
                mine["model.norm.weight"] = hf["model.norm.weight"]
            if last and not config.tie_word_embeddings:
                mine["lm_head.weight"] = vocabulary(hf["lm_head.weight"])[r]
            for i in range(layer, layer + count):
                at = f"model.layers.{i}."
                for name in ("input_layernorm", "post_attention_layernorm"):
                    mine[f"{at}{name}.weight"] = hf[f"{at}{name}.weight"]
                for kind in ("weight", "bias") if config.family == "qwen2" else ("weight",):
                    mine[f"{at}self_attn.qkv_proj.{kind}"] = np.concatenate(
                        [by_heads(hf[f"{at}self_attn.{x}_proj.{kind}"], n)[r] for x, n in heads.items()]
                    )
                for x in "qk" if config.family == "qwen3" else "":
                    mine[f"{at}self_attn.{x}_norm.weight"] = hf[f"{at}self_attn.{x}_norm.weight"]
                mine[at + "self_attn.o_proj.weight"] = np.split(hf[at + "self_attn.o_proj.weight"], tp, axis=1)[r]
                mine[at + "mlp.down_proj.weight"] = np.split(hf[at + "mlp.down_proj.weight"], tp, axis=1)[r]
                mine[at + "mlp.gate_up_proj.weight"] = np.concatenate(
                    [np.split(hf[f"{at}mlp.{x}_proj.weight"], tp)[r] for x in ("gate", "up")]
                )
            found |= {(name, rank): array for name, array in mine.items()}
        layer += count
    return found


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("family, tied", [("llama", False), ("qwen2", True), ("qwen3", False)])
def test_every_rank_holds_what_vllm_puts_there(family, tied, tp, pp):
    # 24 heads and 6 KV heads divide by 3 and leave groups of ranks at 8 (with 2 KV heads); 150 rows become 192.
    config = tiny_config(
        family, tie_word_embeddings=tied, num_layers=3 if tp == 2 else 2, num_heads=24, vocab_size=150,
        num_kv_heads=6 if tp == 3 else 2, head_dim=2,
    )  # fmt: skip
    specs = families.tensors(config)
    rng = np.random.default_rng(tp * 10 + pp)
    hf = {t.name: rng.standard_normal(t.shape, np.float32) for t in specs}
    local, expected = carried_out(specs, hf, vllm_parameters(config, tp, pp)), naive(config, hf, tp, pp)
    assert local.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(local[key], array, err_msg=str(key))


@pytest.mark.parametrize(
    "layers, pp, sizes", [(8, 4, [2, 2, 2, 2]), (6, 4, [1, 2, 2, 1]), (7, 4, [2, 2, 2, 1]), (7, 3, [2, 3, 2])]
)
def test_layers_that_do_not_divide_go_before_the_last_stage(layers, pp, sizes):
    norms = [p for p in vllm_parameters(tiny_config(num_layers=layers), pp=pp) if "input_layernorm" in p.name]
    assert [sum(p.rank == stage for p in norms) for stage in range(pp)] == sizes
    assert [int(p.name.split(".")[2]) for p in norms] == list(range(layers))


def test_a_stage_gets_whole_tensors_for_its_own_layers_only():
    """Of parameters that vLLM's loader fills."""
    config = tiny_config(num_layers=2)
    failed = {f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)}
    parameters, reloaded = written_parameters(config, 2, failed, pp=2)
    assert reloaded == failed
    assert {(p.name, p.rank) for p in parameters if p.name in failed} == {
        (f"model.layers.{rank // 2}.mlp.down_proj.weight", rank) for rank in range(4)
    }


def test_ranks_that_hold_only_padding():
    config = tiny_config(vocab_size=10, num_heads=8, num_kv_heads=8, head_dim=2)
    embeds = [p for p in vllm_parameters(config, tp=8) if p.name == "lm_head.weight"]
    assert [len(p.parts) for p in embeds] == [1, 1, 0, 0, 0, 0, 0, 0]
    assert {p.shape for p in embeds} == {(8, 32)}
    assert embeds[1].padding == (((2, 8), (0, 32)),)


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize("tp, num_experts", [(1, 3), (2, 3), (4, 8)])
def test_experts_are_stacked_and_distributed(ep, tp, num_experts):
    inner, hidden, at = 8, 6, "model.layers.0.mlp.experts."
    rng = np.random.default_rng(0)
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    hf = {
        f"{at}{e}.{x}.weight": rng.standard_normal(s, np.float32) for e in range(num_experts) for x, s in shapes.items()
    }
    specs = [TensorSpec(name, array.shape) for name, array in hf.items()]
    parameters = [p for r in range(tp) for p in expert_parameters(at, num_experts, inner, hidden, r, r, tp, ep)]
    local = carried_out(specs, hf, parameters)
    gate, up, down = (np.stack([hf[f"{at}{e}.{x}.weight"] for e in range(num_experts)]) for x in shapes)
    for r in range(tp):
        if ep:
            own = np.array_split(np.arange(num_experts), tp)[r]
            w13, w2 = np.concatenate([gate[own], up[own]], axis=1), down[own]
        else:
            w13 = np.concatenate([np.split(gate, tp, axis=1)[r], np.split(up, tp, axis=1)[r]], axis=1)
            w2 = np.split(down, tp, axis=2)[r]
        np.testing.assert_array_equal(local[at + "routed_experts.w13_weight", r], w13)
        np.testing.assert_array_equal(local[at + "routed_experts.w2_weight", r], w2)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "qwen3_moe-dense-layer"])
@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, False), (2, 1, False), (2, 2, False), (2, 1, True)])
def test_every_family_has_a_live_layout(name, tp, pp, ep):
    """Exactly the HF tensors arrive, and fused parameters are their concatenation."""
    config = variant(name)
    if ep and config.moe is None:
        return
    specs = families.tensors(config)
    rng = np.random.default_rng(0)
    hf = {t.name: rng.standard_normal(t.shape, np.float32) for t in specs}
    parameters = vllm_parameters(config, tp, pp, ep)
    local = carried_out(specs, hf, parameters)
    assert {part.tensor for p in parameters for part in p.parts} == set(hf)
    values = np.concatenate([x.reshape(-1) for x in hf.values()])
    arrived = np.concatenate([x.reshape(-1) for x in local.values()])
    assert set(values.tolist()) == set(arrived[arrived != 0].tolist())
    at, last = f"model.layers.{config.num_layers - 1}.", (pp - 1) * tp
    fused = np.concatenate([np.split(hf[f"{at}self_attn.{x}_proj.weight"], tp)[0] for x in "qkv"])
    if config.num_kv_heads % tp == 0:
        np.testing.assert_array_equal(local[at + "self_attn.qkv_proj.weight", last], fused)
    for x in (n for n in hf if n.startswith(at) and n.endswith("norm.weight")):
        np.testing.assert_array_equal(local[x, last], hf[x])


@pytest.mark.parametrize(
    "over, arguments, words",
    [
        ({}, {"tp": 3}, "num_heads"),
        ({"num_heads": 6, "num_kv_heads": 2}, {"tp": 3}, "num_kv_heads"),
        ({"num_heads": 6, "num_kv_heads": 6, "vocab_size": 60}, {"tp": 3}, "vocabulary .64."),
        ({}, {"pp": 3}, "num_layers"),
        ({}, {"ep": True}, "no experts"),
        ({}, {"tp": 0}, "positive"),
    ],
)
def test_splits_that_vllm_refuses(over, arguments, words):
    with pytest.raises(ConfigError, match=words):
        vllm_parameters(tiny_config(**over), **arguments)
