"""The decoder against `transformers`, family by family."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.model.checkpoints import hf_weights
from slipstream.model.config import ModelConfig
from slipstream.model.families import names, tensors
from slipstream.model.transformer import decoder
from slipstream.model.tree import unflatten
from tests.tiny import VARIANTS, hf_model, random_params, tiny_config, variant

forward = jax.jit(decoder.forward, static_argnums=1)
logprobs = jax.jit(decoder.logprobs, static_argnums=1)


def hf_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


def random_tokens(config: ModelConfig, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str) -> None:
    config = variant(name)
    tokens = random_tokens(config, 3, 40)
    ours = forward(random_params(config), config, tokens)
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, hf_logits(hf_model(config), tokens), atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", names())
def test_logits_depend_on_every_tensor(family: str) -> None:
    """Every tensor affects the result; an ignored one could pass a comparison by chance."""
    config = variant(family)  # and tokens as above, so that one program serves both tests
    flat = hf_weights.flatten(random_params(config))
    tokens = random_tokens(config, 3, 40)
    before = np.asarray(forward(unflatten(flat), config, tokens))
    rng = np.random.default_rng(1)

    def has_effect(name: str) -> bool:
        other = jnp.asarray(np.asarray(flat[name]) + 0.3 * rng.standard_normal(flat[name].shape), jnp.float32)
        return np.abs(forward(unflatten(flat | {name: other}), config, tokens) - before).max() > 1e-3

    assert [name for name in flat if not has_effect(name)] == []


def test_padding_on_the_right_changes_nothing_to_its_left() -> None:
    config = tiny_config(num_layers=1)
    params = random_params(config)
    tokens = random_tokens(config, 2, 9)
    padded = np.concatenate([tokens, np.zeros((2, 5), tokens.dtype)], axis=1)
    np.testing.assert_allclose(
        forward(params, config, jnp.asarray(padded))[:, :9],
        forward(params, config, jnp.asarray(tokens)),
        atol=1e-6,
    )


def test_only_relative_positions_matter() -> None:
    """Rotary embeddings are relative: a constant offset cancels."""
    config = tiny_config(num_layers=1)
    params = random_params(config)
    tokens = jnp.asarray(random_tokens(config, 2, 9))
    shifted = forward(params, config, tokens, jnp.arange(9)[None] + 7)
    np.testing.assert_allclose(shifted, forward(params, config, tokens), atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_the_log_softmax_of_the_logits(temperature: float) -> None:
    config = variant("qwen2")
    params = random_params(config)
    tokens = random_tokens(config, 3, 40)
    logits = np.asarray(forward(params, config, tokens), np.float64) / temperature
    everything = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = np.take_along_axis(everything[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    ours = logprobs(params, config, tokens, temperature=temperature)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("name", [*names(), "llama-tied", "qwen3_moe-dense-layer"])
def test_init_makes_every_tensor_of_the_family(name: str) -> None:
    config = variant(name)
    flat, again = (hf_weights.flatten(decoder.init(config, jax.random.key(3), jnp.bfloat16)) for _ in range(2))
    assert {n: a.shape for n, a in flat.items()} == {t.name: t.shape for t in tensors(config)}
    assert all(a.dtype == jnp.bfloat16 for a in flat.values())
    assert all(np.array_equal(flat[n], again[n]) for n in flat)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3_text"])
def test_bfloat16_is_as_exact_as_in_transformers(name: str) -> None:
    """Both round differently; our error against float32 must not be larger than theirs."""
    import torch

    config = variant(name)
    tokens = random_tokens(config, 3, 40)
    rounded = jax.tree.map(lambda p: np.asarray(p).astype(jnp.bfloat16), random_params(config))
    ours = forward(rounded, config, tokens)
    exact = forward(jax.tree.map(lambda p: p.astype(np.float32), rounded), config, tokens)
    theirs = hf_logits(hf_model(config).to(torch.bfloat16), tokens)
    assert ours.dtype == jnp.float32
    assert np.abs(ours - exact).mean() < 1.1 * np.abs(theirs - exact).mean()


def test_embeddings_are_scaled_as_in_transformers_bit_for_bit() -> None:
    """In bfloat16 the scale itself is rounded; rounding only the product would give other bits."""
    import torch

    config = variant("gemma2")
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), random_params(config))
    tokens = np.arange(config.vocab_size)[None]
    with torch.no_grad():
        theirs = hf_model(config).to(torch.bfloat16).model.embed_tokens(torch.from_numpy(tokens)).float().numpy()
    np.testing.assert_array_equal(decoder.embed(params, config, tokens).astype(jnp.float32), theirs)
