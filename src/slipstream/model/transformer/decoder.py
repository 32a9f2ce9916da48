"""The decoder of all model families, as pure functions over a tree of parameters.

Trainer and engine run the same layers. They differ only in the `attention` that they pass: causal over whole sequences, or
over a KV cache. The tree mirrors Hugging Face names, with matrices in HF orientation (`[out, in]`):
`params["model"]["layers"][0]["self_attn"]["q_proj"]["weight"]`. The loop over layers is unrolled, so that every tensor is a
separate array and a new version is swapped in by reference.

Biases, q/k norms and experts are used if the tree has them; the `Family` defines everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.model.config import ModelConfig
from slipstream.model.families import family_of, tensors
from slipstream.model.transformer.attention import Attention, causal_attention, packed_attention, rotary_angles, rotate
from slipstream.model.transformer.layers import PRECISION, Params, feed_forward, linear, rms_norm
from slipstream.model.tree import unflatten

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def init(config: ModelConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Initialize random weights: matrices normal with standard deviation 0.02, norms the identity, biases zero."""
    leaves: dict[str, jax.Array] = {}
    for index, spec in enumerate(tensors(config)):
        if spec.name.endswith("bias"):
            leaves[spec.name] = jnp.zeros(spec.shape, dtype)
        elif len(spec.shape) == 1:
            leaves[spec.name] = jnp.full(spec.shape, 1 - family_of(config).norm_offset, dtype)
        else:
            normal = jax.random.normal(jax.random.fold_in(key, index), spec.shape, jnp.float32)
            leaves[spec.name] = (0.02 * normal).astype(dtype)
    return unflatten(leaves)


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Return causal logits `[batch, time, vocab]` in float32. Padding on the right does not affect tokens to its left."""
    return unembed(params, config, hidden_states(params, config, tokens, positions, segments))


def hidden_states(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Return the final hidden states `[batch, time, hidden]` over whole sequences, for `unembed`.

    Packed rows need `segments` and `positions`, both `[batch, time]`. Tokens attend only within their segment, and positions
    start at 0 in each segment."""
    if positions is None:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    attention = causal_attention if segments is None else packed_attention(segments)
    return apply_layers(params, config, tokens, positions, attention, None)[0]


def logprobs(params: Params, config: ModelConfig, tokens: jax.Array, temperature: float = 1.0) -> jax.Array:
    """Return the log-probability of each next token, `[batch, time - 1]`: `[:, i]` is that of `tokens[:, i + 1]`."""
    logits = forward(params, config, tokens[:, :-1]) / temperature
    return token_logprobs(logits, tokens[:, 1:])


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the log-probability of `tokens[...]` under `logits[..., vocab]`."""
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def entropies(logits: jax.Array) -> jax.Array:
    """Return the entropy in nats of the distributions with `logits[..., vocab]`: −Σ_v p_v log p_v."""
    logp = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def apply_layers(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    attention: Attention,
    cache: Sequence[Any] | None,
) -> tuple[jax.Array, list[Any]]:
    """Return the final hidden states `[batch, time, hidden]`, normalized for `unembed`, and the new cache of each layer.

    `positions`, `[batch, time]` or `[1, time]`, affect rotary embeddings only; masking is up to `attention`."""
    model, norms = params["model"], family_of(config).norms
    x = embed(params, config, tokens)
    local = [config.has_local_rope(index) for index in range(config.num_layers)]
    angles = {which: rotary_angles(config, positions, which) for which in set(local)}
    new_cache = []
    for index, layer in enumerate(model["layers"]):
        q, k, v = _project_qkv(layer["self_attn"], config, _norm(x, layer, norms.before_attention, config))
        q, k = (rotate(heads, *angles[local[index]]) for heads in (q, k))
        out, entry = attention(q, k, v, cache[index] if cache is not None else None, config.attention(index))
        new_cache.append(entry)
        out = linear(out.reshape(*out.shape[:2], -1), layer["self_attn"]["o_proj"])
        x = x + _norm(out, layer, norms.after_attention, config)
        out = feed_forward(layer, config, _norm(x, layer, norms.before_mlp, config))
        x = x + _norm(out, layer, norms.after_mlp, config)
    return rms_norm(x, model["norm"], config), new_cache


def embed(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Return the input of the first layer."""
    x = params["model"]["embed_tokens"]["weight"][tokens]
    if not family_of(config).scale_embedding:
        return x
    # The factor is rounded to the weights' dtype, as in training: in bfloat16 the root of 3072 is 55.5, not 55.4256.
    return x * jnp.asarray(np.sqrt(np.float32(config.hidden_size)), x.dtype)


def unembed(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Return logits, in float32 for weights of any dtype."""
    head = params["model"]["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    logits = jnp.einsum(
        "...i,vi->...v", hidden, head["weight"], precision=PRECISION, preferred_element_type=jnp.float32
    )
    cap = config.final_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _norm(x: jax.Array, layer: Params, name: str | None, config: ModelConfig) -> jax.Array:
    return x if name is None else rms_norm(x, layer[name], config)


def _project_qkv(attn: Params, config: ModelConfig, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    def heads(name: str) -> jax.Array:
        return linear(x, attn[name]).reshape(*x.shape[:2], -1, config.head_dim)

    q, k, v = heads("q_proj"), heads("k_proj"), heads("v_proj")
    if "q_norm" in attn:
        q, k = rms_norm(q, attn["q_norm"], config), rms_norm(k, attn["k_norm"], config)
    return q, k, v
