"""The decoder against `transformers`, family by family."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.model import checkpoint, decoder
from slipstream.model.config import ModelConfig
from slipstream.weights.families import tensors
from tests.tiny import VARIANTS, hf_model, tiny_config, variant


def hf_params(model: Any) -> dict[str, Any]:
    tied = model.config.tie_word_embeddings
    named = {n: jnp.asarray(p.detach().numpy()) for n, p in model.state_dict().items()}
    return checkpoint.unflatten({n: p for n, p in named.items() if not (tied and n == "lm_head.weight")})


def hf_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


def random_tokens(config: ModelConfig, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str) -> None:
    config = variant(name)
    model = hf_model(config)
    tokens = random_tokens(config, 3, 40)
    ours = decoder.forward(hf_params(model), config, jnp.asarray(tokens))
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, hf_logits(model, tokens), atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_depend_on_every_tensor(name: str) -> None:
    """A tensor that is loaded and then ignored would survive a comparison in which it happens not to matter."""
    config = variant(name)
    params = hf_params(hf_model(config))
    tokens = jnp.asarray(random_tokens(config, 1, 12))
    grads = jax.grad(lambda p: jnp.square(decoder.forward(p, config, tokens)).sum())(params)
    still = [name for name, g in checkpoint.flatten(grads).items() if not np.abs(g).max() > 0]
    assert still == []


def test_padding_on_the_right_changes_nothing_to_its_left() -> None:
    config = tiny_config()
    params = decoder.init(config, jax.random.key(0))
    tokens = random_tokens(config, 2, 9)
    padded = np.concatenate([tokens, np.zeros((2, 5), tokens.dtype)], axis=1)
    np.testing.assert_allclose(
        decoder.forward(params, config, jnp.asarray(padded))[:, :9],
        decoder.forward(params, config, jnp.asarray(tokens)),
        atol=1e-6,
    )


def test_only_relative_positions_matter() -> None:
    """Rotary embeddings turn q and k alike, so that a constant offset cancels."""
    config = tiny_config()
    params = decoder.init(config, jax.random.key(0))
    tokens = jnp.asarray(random_tokens(config, 1, 9))
    shifted = decoder.forward(params, config, tokens, jnp.arange(9)[None] + 7)
    np.testing.assert_allclose(shifted, decoder.forward(params, config, tokens), atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_the_log_softmax_of_the_logits(temperature: float) -> None:
    config = tiny_config("qwen2")
    params = hf_params(hf_model(config))
    tokens = random_tokens(config, 2, 10)
    logits = np.asarray(decoder.forward(params, config, jnp.asarray(tokens)), np.float64) / temperature
    everything = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = np.take_along_axis(everything[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    ours = decoder.logprobs(params, config, jnp.asarray(tokens), temperature=temperature)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_init_makes_every_tensor_of_the_family(name: str) -> None:
    config = variant(name)
    flat = checkpoint.flatten(decoder.init(config, jax.random.key(3), jnp.bfloat16))
    assert {n: a.shape for n, a in flat.items()} == {t.name: t.shape for t in tensors(config)}
    assert all(a.dtype == jnp.bfloat16 for a in flat.values())
    again = checkpoint.flatten(decoder.init(config, jax.random.key(3), jnp.bfloat16))
    assert all((flat[n] == again[n]).all() for n in flat)


def test_bfloat16_weights_give_float32_logits_close_to_float32_weights() -> None:
    config = tiny_config("qwen3")
    params = hf_params(hf_model(config))
    tokens = jnp.asarray(random_tokens(config, 2, 10))
    rough = decoder.forward(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), config, tokens)
    exact = decoder.forward(params, config, tokens)
    assert rough.dtype == jnp.float32
    assert float(jnp.abs(rough - exact).max()) < 0.05 * float(jnp.abs(exact).max())
