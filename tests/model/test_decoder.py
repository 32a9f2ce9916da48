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
    config = tiny_config(family)
    params = random_params(config)
    tokens = jnp.asarray(random_tokens(config, 2, 12))
    grads = jax.jit(jax.grad(lambda p: jnp.square(decoder.forward(p, config, tokens)).sum()))(params)
    still = [name for name, g in hf_weights.flatten(grads).items() if not np.abs(g).max() > 0]
    assert still == []


def test_padding_on_the_right_changes_nothing_to_its_left() -> None:
    config = tiny_config()
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
    config = tiny_config()
    params = random_params(config)
    tokens = jnp.asarray(random_tokens(config, 1, 9))
    shifted = forward(params, config, tokens, jnp.arange(9)[None] + 7)
    np.testing.assert_allclose(shifted, forward(params, config, tokens), atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_the_log_softmax_of_the_logits(temperature: float) -> None:
    config = tiny_config("qwen2")
    params = random_params(config)
    tokens = random_tokens(config, 2, 10)
    logits = np.asarray(forward(params, config, jnp.asarray(tokens)), np.float64) / temperature
    everything = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = np.take_along_axis(everything[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    ours = logprobs(params, config, jnp.asarray(tokens), temperature=temperature)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_init_makes_every_tensor_of_the_family(name: str) -> None:
    config = variant(name)
    flat = hf_weights.flatten(decoder.init(config, jax.random.key(3), jnp.bfloat16))
    assert {n: a.shape for n, a in flat.items()} == {t.name: t.shape for t in tensors(config)}
    assert all(a.dtype == jnp.bfloat16 for a in flat.values())
    again = hf_weights.flatten(decoder.init(config, jax.random.key(3), jnp.bfloat16))
    assert all((flat[n] == again[n]).all() for n in flat)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3_text"])
def test_bfloat16_is_as_exact_as_in_transformers(name: str) -> None:
    """Both round differently; our error against float32 must not be larger than theirs."""
    import torch

    config = variant(name)
    tokens = random_tokens(config, 3, 40)
    rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16), random_params(config))
    ours = forward(rounded, config, tokens)
    exact = forward(jax.tree.map(lambda p: p.astype(jnp.float32), rounded), config, tokens)
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
