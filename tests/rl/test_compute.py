"""What trades time for memory, and precision, beside the plain forward pass: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.model.config import LayerAttention, MoeConfig
from slipstream.model.transformer import decoder
from slipstream.model.transformer.attention import causal_attention, packed_attention
from slipstream.model.transformer.chunked_logprobs import Projection, chunked_logprobs
from slipstream.model.transformer.long_attention import chunked_attention, fused_attention
from slipstream.model.transformer.stacked_layers import LayerGroup, layer_groups, stack, unstack
from slipstream.rl.algorithm import compute, utilization
from slipstream.rl.algorithm.batch import make_batch
from slipstream.rl.algorithm.compute import make_plan
from slipstream.rl.algorithm.forward import logprob_fn
from slipstream.rl.algorithm.packing import pack
from slipstream.rl.algorithm.train_step import init_state, make_train_step
from slipstream.rl.config import AlgorithmConfig, ComputeConfig, OptimizerConfig
from tests.rl.batches import completion
from tests.tiny import random_params, tiny_config, variant

ALL = ComputeConfig(scan_layers=True, remat="full", logits_chunk=4)
CONFIG = AlgorithmConfig(
    prompts=2,
    group=4,
    max_tokens=5,
    temperature=0.7,
    entropy_weight=0.05,
    optimizer=OptimizerConfig(learning_rate=3e-2),
)
LENGTHS = (1, 2, 3, 5, 5, 4, 2, 3)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    rows = [completion(rng.integers(4, 90, 12), rng.integers(4, 90, n)) for n in LENGTHS]
    return make_batch(rows, version=0, max_tokens=CONFIG.max_tokens, advantages=rng.normal(size=len(rows)))


def assert_close(found, expected, scale=1e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=scale * float(np.abs(b).max()) + 1e-6)


# --- logits ---


@pytest.mark.parametrize("softcap, entropies", [(None, False), (3.0, True)])
def test_chunked_logprobs_have_the_values_and_gradients_of_whole_logits(softcap, entropies):
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 11, 16), (50, 16)))
    tokens, mask = jnp.asarray(rng.integers(0, 50, (3, 11))), np.zeros((3, 11), np.float32)
    mask[:, 5:7] = mask[0, 9] = 1  # of chunks of 4, the first is not needed
    weights = [jnp.asarray(rng.normal(size=mask.shape) * mask, jnp.float32) for _ in range(2)]

    def naive(hidden, head):
        logits = jnp.einsum("bti,vi->btv", hidden, head)
        logits = (logits if softcap is None else softcap * jnp.tanh(logits / softcap)) / 0.7
        return decoder.token_logprobs(logits, tokens), decoder.entropies(logits) * entropies

    def chunked(hidden, head):
        return chunked_logprobs(hidden, head, tokens, jnp.asarray(mask), Projection(4, 0.7, softcap, entropies))

    def both(score):
        def loss(*args):
            return sum(jnp.sum(w * part) for w, part in zip(weights, score(*args)))

        return jax.jit(lambda *args: ([part * mask for part in score(*args)], jax.grad(loss, (0, 1))(*args)))

    (values, gradients), (expected, expected_gradients) = both(chunked)(hidden, head), both(naive)(hidden, head)
    assert_close(values, expected)
    assert_close(gradients, expected_gradients)
    found = jax.jit(chunked)(hidden, head)[0]
    assert (
        not np.asarray(found[:, :4]).any() and np.asarray(found[:, 4:]).all()
    )  # a chunk is computed whole or not at all


# --- attention ---

HOWS = {
    "plain": LayerAttention(0.3, window=None, softcap=None),
    "window": LayerAttention(0.3, window=5, softcap=None),
    "window and cap": LayerAttention(0.3, window=9, softcap=2.0),
}


@pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS.keys())
def test_attention_in_chunks_is_that_over_whole_sequences(how, is_packed):
    rng = np.random.default_rng(0)
    q, k, v, weights = (jnp.asarray(rng.normal(size=(2, 21, n, 8)), jnp.float32) for n in (4, 2, 2, 4))
    segments = jnp.asarray([[1] * 9 + [2] * 7 + [0] * 5, [1] * 21]) if is_packed else None
    whole = causal_attention if segments is None else packed_attention(segments)

    def results(attention, dtype):
        def loss(*qkv):
            return jnp.sum(attention(*(a.astype(dtype) for a in qkv), None, how)[0].astype(jnp.float32) * weights)

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)

    expected = results(whole, jnp.float32)
    assert_close(results(chunked_attention(segments, 4), jnp.float32), expected)
    # The same call as that of cuDNN's kernel, computed by XLA in bfloat16. Soft caps fall back.
    fused = fused_attention(segments, whole, "xla")
    for a, b in zip(jax.tree.leaves(results(fused, jnp.bfloat16)), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, atol=0.04 * float(jnp.abs(b).max()))


# --- layers ---


def test_layers_are_divided_into_the_repetitions_that_cover_most():
    assert layer_groups("aaaa") == ((0, 1, 4),)
    assert layer_groups("ababab") == ((0, 2, 3),)
    assert layer_groups("aaaaabaaaaabaa") == ((0, 6, 2), (12, 1, 2))
    assert layer_groups("daaaa") == ((0, 1, 1), (1, 1, 4))
    assert layer_groups("abc") == ((0, 1, 1), (1, 1, 1), (2, 1, 1))
    assert layer_groups("") == ()


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_moe-dense-layer"])
def test_stacked_layers_are_unstacked_to_the_same_tree(name):
    types = {"layer_types": ("sliding_attention", "full_attention") * 2 + ("sliding_attention",)}
    model = variant(name, num_layers=5, **(types if name == "gemma3_text" else {}))
    layers = random_params(model)["model"]["layers"]
    stacked = stack(layers, model)
    expected = (
        (LayerGroup(0, 2, 2), LayerGroup(4, 1, 1))
        if types["layer_types"] == model.layer_types
        else ((0, 1, 1), (1, 1, 4))
    )
    assert stacked.groups == expected
    jax.tree.map(np.testing.assert_array_equal, unstack(stacked), layers)


# --- all together ---


def step(model, params, batch, config, mesh=None):
    return make_train_step(model, config, mesh)(init_state(params, model, config, mesh), batch)


@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe-dense-layer"])
def test_a_step_that_saves_memory_is_the_plain_step(name, batch):
    """Scanned, computed again in the backward pass, chunked, in micro-batches and packed."""
    over = {"gemma2": {"num_layers": 4, "layer_types": ("sliding_attention", "full_attention") * 2}}
    experts = {"num_layers": 3, "moe": MoeConfig(2, 1, 24, dense_layers=(0,))}
    model = variant(name, **over.get(name, experts))
    params = random_params(model)
    plain, expected = step(model, params, batch, CONFIG)
    packed = pack(batch, [12 + n for n in LENGTHS], row_tokens=36, rows_multiple=2)
    state, metrics = step(model, params, packed, CONFIG.replace(compute=ALL, micro_batches=2))
    assert_close(metrics, expected)
    assert jax.tree.structure(state.policy) == jax.tree.structure(params)
    assert_close(state.opt_state, plain.opt_state)  # moments after one step: the gradient and its square


def test_a_sharded_step_that_saves_memory_is_the_plain_step(batch):
    model = tiny_config(num_layers=2)
    params = random_params(model)
    plain, expected = step(model, params, batch, CONFIG)
    config = CONFIG.replace(compute=ALL.replace(remat="selective"), micro_batches=2)
    state, metrics = step(model, params, batch, config, jax.make_mesh((2,), ("fsdp",)))
    assert_close(metrics, expected)
    assert_close(state.opt_state, plain.opt_state)
    gate = state.policy["model"]["layers"][1]["mlp"]["gate_proj"]["weight"]
    assert {shard.data.shape for shard in gate.addressable_shards} == {(24, 32)}


def test_bfloat16_computes_with_float32_master_weights(batch):
    model = tiny_config(num_layers=2)
    params = random_params(model)
    plain, expected = step(model, params, batch, CONFIG)
    mixed = ComputeConfig(dtype="bfloat16", param_dtype="float32", scan_layers=True)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    state, metrics = step(model, params, batch, CONFIG.replace(compute=mixed, micro_batches=2))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves((state.params, state.opt_state))} == {"float32", "int32"}
    for name in ("loss", "entropy", "gradient_norm"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=0.05, atol=0.02)
    gradient, exact = (
        jnp.concatenate([m.ravel() for m in jax.tree.leaves(s.opt_state[1][0].mu)]) for s in (state, plain)
    )
    cosine = jnp.vdot(gradient, exact) / (jnp.linalg.norm(gradient) * jnp.linalg.norm(exact))
    assert cosine > 0.995
    # It is the forward pass of weights in bfloat16.
    score = logprob_fn(model, 0.7, mixed)
    np.testing.assert_array_equal(score(params, batch), score(rounded, batch))
    # A checkpoint in bfloat16 is trained in float32: an update too small for bfloat16 is not lost.
    state = init_state(rounded, model, CONFIG.replace(compute=mixed))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.policy)} == {"float32"}


# --- decisions ---


def test_auto_is_plain_on_cpu_and_mixed_precision_on_accelerators():
    auto = ComputeConfig()
    assert compute.compute_dtype(auto, "cpu") is compute.param_dtype(auto, "cpu") is None
    assert compute.compute_dtype(auto, "gpu") == "bfloat16" and compute.param_dtype(auto, "gpu") == "float32"
    assert not compute.scans_layers(auto, "cpu") and compute.scans_layers(auto, "gpu")
    assert compute.compute_dtype(ComputeConfig(dtype="float32"), "gpu") == "float32"


LARGE = tiny_config(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
)


@pytest.mark.parametrize(
    ("config", "model", "shape", "plan"),
    [
        (ComputeConfig(), tiny_config(), (256, 24), ("none", "whole", 0)),
        (ComputeConfig(), LARGE, (8, 1023), ("selective", "whole", 128)),
        (ComputeConfig(), LARGE, (4, 8191), ("full", "chunked", 256)),
        (ComputeConfig(), LARGE, (1, 8191), ("selective", "chunked", 1024)),
        (ComputeConfig(remat="none", attention="cudnn", logits_chunk=64), LARGE, (8, 1023), ("none", "cudnn", 64)),
        (ComputeConfig(logits_chunk=64), tiny_config(), (2, 24), ("none", "whole", 24)),
    ],
)
def test_the_plan_follows_from_size(config, model, shape, plan):
    found = make_plan(config, model, *shape, item_size=2)
    assert (found.remat, found.attention, found.logits_chunk) == plan


def test_flops_are_those_of_products_and_visible_pairs():
    model = tiny_config("mistral", sliding_window=2)
    per_layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48
    weights = 2 * per_layer + 96 * 32 + 5 * 32  # with the head and norms, without the lookup
    pairs = 2 * ((1 + 2 + 2 + 2) + (1 + 2))
    assert utilization.training_flops(model, [4, 2]) == 3 * (2 * weights * 6 + 4 * 32 * pairs)
    whole = utilization.training_flops(tiny_config("mistral", sliding_window=None), [4, 2])
    assert whole == 3 * (2 * weights * 6 + 4 * 32 * 2 * (10 + 3))
    assert utilization.peak_flops("NVIDIA H100 PCIe") < utilization.peak_flops("NVIDIA H200")
    assert utilization.peak_flops("cpu") is None
