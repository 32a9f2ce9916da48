"""The train step on a GPU: cuDNN's attention, mixed precision, and memory."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.model.config import LayerAttention
from slipstream.model.transformer.attention import causal_attention, packed_attention
from slipstream.model.transformer.long_attention import chunked_attention, fused_attention
from slipstream.model.transformer.stacked_layers import stack, unstack
from slipstream.rl.algorithm.batch import Batch
from slipstream.rl.algorithm.train_step import TrainState, init_state, make_train_step
from slipstream.rl.algorithm.utilization import mfu
from slipstream.rl.config import AlgorithmConfig, ComputeConfig
from tests.gpu import models

pytestmark = pytest.mark.gpu

HOWS = {
    "plain": LayerAttention(0.125, window=None, softcap=None),
    "window": LayerAttention(0.125, window=50, softcap=None),
    "cap": LayerAttention(0.125, window=None, softcap=2.0),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS.keys())
def test_attention_is_that_of_the_reference(how: LayerAttention, is_packed: bool, head_dim: int) -> None:
    """Values and gradients of both ways without the matrix of scores, in bfloat16, beside float32."""
    rng = np.random.default_rng(0)
    q, k, v, weights = (jnp.asarray(rng.normal(size=(2, 301, n, head_dim)), jnp.float32) for n in (8, 2, 2, 8))
    segments = jnp.asarray([[1] * 100 + [2] * 150 + [0] * 51, [1] * 301]) if is_packed else None
    whole = causal_attention if segments is None else packed_attention(segments)

    def results(attention, dtype):  # type: ignore[no-untyped-def]
        def loss(*qkv):  # type: ignore[no-untyped-def]
            return jnp.sum(attention(*(a.astype(dtype) for a in qkv), None, how)[0].astype(jnp.float32) * weights)

        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v))

    expected = results(whole, jnp.float32)
    for attention in (fused_attention(segments, whole), chunked_attention(segments, 64)):
        for found, exact in zip(results(attention, jnp.bfloat16)[1:], expected[1:]):
            error = float(jnp.abs(found - exact).max() / jnp.abs(exact).max())
            assert error < 0.03, error


def rows(num_rows: int, length: int, vocab_size: int) -> Batch:
    rng = np.random.default_rng(0)
    mask = np.ones((num_rows, length - 1), np.float32)
    mask[:, :9] = 0
    advantages = rng.normal(size=(num_rows, 1)).astype(np.float32) * mask
    tokens = rng.integers(0, vocab_size, (num_rows, length)).astype(np.int32)
    return Batch(tokens, mask, -9.0 * mask, advantages, np.zeros(mask.shape, np.int32))


def step(compute: ComputeConfig, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    config = AlgorithmConfig(prompts=2, group=4, max_tokens=200, compute=compute)
    params = models.lively(models.SMALL, jnp.float32)
    return make_train_step(models.SMALL, config)(init_state(params, models.SMALL, config), batch)


@pytest.mark.parametrize("attention", ["xla", "cudnn"])
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_mixed_precision_has_the_gradient_of_float32(attention: str, remat: str) -> None:
    batch = rows(8, 256, models.SMALL.vocab_size)
    plain = ComputeConfig(dtype="float32", scan_layers=False, remat="none")
    exact, expected = step(plain, batch)
    state, metrics = step(ComputeConfig(attention=attention, remat=remat), batch)  # type: ignore[arg-type]
    np.testing.assert_allclose(metrics["gradient_norm"], expected["gradient_norm"], rtol=0.05)
    np.testing.assert_allclose(metrics["entropy"], expected["entropy"], rtol=0.01)
    mean, exact_mean = (
        jnp.concatenate([m.ravel() for m in jax.tree.leaves(s.opt_state[1][0].mu)]) for s in (state, exact)
    )
    assert jnp.vdot(mean, exact_mean) / (jnp.linalg.norm(mean) * jnp.linalg.norm(exact_mean)) > 0.99
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.policy)} == {"float32"}


def test_stacking_layers_changes_no_bit() -> None:
    layers = models.lively(models.SMALL)["model"]["layers"]
    again = jax.jit(lambda layers: unstack(stack(layers, models.SMALL)))(layers)
    jax.tree.map(np.testing.assert_array_equal, again, layers)


def test_a_row_of_8192_tokens_fits_into_a_few_gigabytes() -> None:
    """Whole, its logits and scores would take 0.3 and 2.1 GB, in several copies and for each layer."""
    model = replace(models.SMALL, max_position_embeddings=8192)
    config = AlgorithmConfig(prompts=2, group=2, max_tokens=8000, compute=ComputeConfig(remat="full"))
    batch = rows(1, 8192, model.vocab_size)
    state = init_state(models.lively(model, jnp.float32), model, config)
    program = make_train_step(model, config).update.lower(state.params, state.opt_state, batch).compile()  # type: ignore[attr-defined]
    assert program.memory_analysis().temp_size_in_bytes < 3e9
    _, _, metrics = program(state.params, state.opt_state, batch)
    assert jnp.isfinite(metrics["loss"]) and jnp.isfinite(metrics["gradient_norm"])


def test_utilization_of_this_gpu_is_known() -> None:
    """One second for this little must be far below the peak; a device kind that is not in the table gives None."""
    found = mfu(models.SMALL, rows(8, 256, models.SMALL.vocab_size), 1, seconds=1.0)
    assert found is not None and 0 < found < 0.01, jax.devices()[0].device_kind
