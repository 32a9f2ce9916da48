"""Engines compute the same logits as Tunix's models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from slipstream.errors import ConfigError
from slipstream.model.transformer import decoder
from slipstream.model.tree import unflatten
from slipstream.plugins.tunix_models import model_config, with_adapters
from slipstream.weights.sources.known_trees import tunix as tunix_mapping
from slipstream.weights.sources.named_tensors import named_tensors
from tests.plugins import tunix_tiny

TOKENS = jnp.asarray(np.random.default_rng(5).integers(3, 96, (2, 12)), jnp.int32)


def theirs(model):
    """Logits by Tunix."""
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((TOKENS.shape[1],) * 2, bool)), (2, 12, 12))
    graph, state = nnx.split(model)
    return jax.jit(lambda state: nnx.merge(graph, state)(TOKENS, positions, None, mask)[0])(state)


def ours(model, leaves):
    """Logits by the decoder that the embedded engine runs."""
    config = model_config(model, max_length=64)
    tensors = tunix_mapping(config).tensors(leaves)
    params = unflatten({name: jnp.asarray(np.asarray(tensor)) for name, tensor in tensors.items()})
    return jax.jit(decoder.forward, static_argnums=1)(params, config, TOKENS)


@pytest.mark.parametrize(
    ("kind", "over"),
    [
        ("llama3", {}),
        ("qwen2", {"use_tied_embedding": True}),
        ("qwen3", {}),
        ("qwen3", {"num_experts": 4, "num_experts_per_tok": 2}),
        ("gemma2", {}),
        ("gemma3", {}),
        ("gemma3", {"num_kv_heads": 4, "num_layers": 1}),  # q, k and v in one kernel
    ],
)
def test_the_same_logits(kind, over):
    model = tunix_tiny.make(kind, **over)
    np.testing.assert_allclose(ours(model, nnx.state(model, nnx.Param)), theirs(model), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_adapters_are_added_to_kernels_as_qwix_applies_them(kind):
    """Gemma's kernels have the contracted dimension in the middle, of three or four."""
    plain = tunix_tiny.make(kind, num_layers=1)
    model = tunix_tiny.with_lora(plain, rank=3, alpha=5.0)
    leaves = named_tensors(nnx.state(model, nnx.Param))
    assert sum(name.endswith("_lora_b") for name in leaves) >= 6
    merged = with_adapters(model, leaves, alpha=5.0)
    assert merged.keys() == named_tensors(nnx.state(plain, nnx.Param)).keys()
    assert (
        sum(not np.allclose(merged[name], leaves[name], atol=0.05) for name in merged) >= 6
    )  # adapters have an effect
    np.testing.assert_allclose(ours(model, merged), theirs(model), rtol=1e-3, atol=1e-3)
    with pytest.raises(ConfigError, match="lora_alpha"):
        with_adapters(model, leaves, alpha=None)


@pytest.mark.parametrize("kind", ["llama3", "qwen3"])
def test_a_rotary_base_is_the_one_that_tunix_computes_with(kind):
    """The attention of these two ignores the config's rotary base; if a later Tunix uses it, so do we."""
    model = tunix_tiny.make(kind)
    assert model_config(model, 64).rope_theta == 1_000_000 != model.config.rope_theta

    class Heeding:
        def block(self):
            return self.config.rope_theta

    class Later:
        config = model.config
        layers = (type("Layer", (), {"attn": Heeding()}),)

    assert model_config(Later(), 64).rope_theta == model.config.rope_theta


def test_what_engines_cannot_compute_is_refused():
    class Model:
        def __init__(self, config):
            self.config = config

    with pytest.raises(ConfigError, match="first-generation"):
        model_config(Model(tunix_tiny.gemma2_config(use_post_attn_norm=False)), 64)
    with pytest.raises(ConfigError, match="local_scale_factor is 2"):
        model_config(Model(tunix_tiny.gemma3_config(local_scale_factor=2.0)), 64)
    with pytest.raises(ConfigError, match="text_only"):
        model_config(Model(dataclasses.replace(tunix_tiny.gemma3_config(), vision_config=object())), 64)
    with pytest.raises(ConfigError, match=r"supported are Tunix's llama3, .*mapping="):
        model_config(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 64)
