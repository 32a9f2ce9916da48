"""The decoder of all model families, as pure functions over a tree of parameters.

Trainer and engine run the same layers. They differ only in the `attention` that they pass: causal over whole sequences, or
over a KV cache. The tree mirrors Hugging Face names, with matrices in HF orientation (`[out, in]`):
`params["model"]["layers"][0]["self_attn"]["q_proj"]["weight"]`. The loop over layers is unrolled, so that every tensor is a
separate array and a new version is swapped in by reference.

Biases, q/k norms and experts are used if the tree has them; the `Family` defines everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.model.config import ModelConfig
from slipstream.model.families import family_of, tensors
from slipstream.model.transformer.attention import Attention, causal_attention, packed_attention, rotary_angles, rotate
from slipstream.model.transformer.experts import feed_forward
from slipstream.model.transformer.layers import Params, linear, rms_norm, wide_einsum
from slipstream.model.tree import unflatten

if TYPE_CHECKING:
    from jax.typing import DTypeLike

RotaryTables: TypeAlias = dict[bool, tuple[jax.Array, jax.Array]]


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
) -> tuple[jax.Array, list[Any], list[jax.Array]]:
    """Return the final hidden states `[batch, time, hidden]`, normalized for `unembed`, the new cache of each layer, and those
    chosen in each layer with experts, `[batch, time, experts_per_token]`.

    `positions`, `[batch, time]` or `[1, time]`, affect rotary embeddings only; masking is up to `attention`."""
    model = params["model"]
    x, angles = embed(params, config, tokens), rotary_tables(config, positions)
    new_cache, routes = [], []
    for index, layer in enumerate(model["layers"]):
        old = cache[index] if cache is not None else None
        x, entry, chosen = apply_layer(layer, config, index, x, angles, attention, old)
        new_cache.append(entry)
        if chosen is not None:
            routes.append(chosen)
    return rms_norm(x, model["norm"], config), new_cache, routes


def rotary_tables(config: ModelConfig, positions: jax.Array) -> RotaryTables:
    """Return cosines and sines for layers with the global rotary base (False) and with the local one (True)."""
    kinds = {config.has_local_rope(index) for index in range(config.num_layers)}
    return {is_local: rotary_angles(config, positions, is_local) for is_local in kinds}


def apply_layer(
    layer: Params,
    config: ModelConfig,
    index: int,
    x: jax.Array,
    angles: RotaryTables,
    attention: Attention,
    cache_layer: Any = None,
    routes: jax.Array | None = None,
) -> tuple[jax.Array, Any, jax.Array | None]:
    """Return the output of layer `index`, `[batch, time, hidden]`, its new cache, and the experts that its router chooses.
    `routes` are as for `feed_forward`."""
    norms = family_of(config).norms
    q, k, v = _project_qkv(layer["self_attn"], config, _norm(x, layer, norms.before_attention, config))
    q, k = (rotate(heads, *angles[config.has_local_rope(index)]) for heads in (q, k))
    out, entry = attention(q, k, v, cache_layer, config.attention(index))
    out = linear(out.reshape(*out.shape[:2], -1), layer["self_attn"]["o_proj"])
    x = x + _norm(out, layer, norms.after_attention, config)
    out, chosen = feed_forward(layer, config, _norm(x, layer, norms.before_mlp, config), routes)
    return x + _norm(out, layer, norms.after_mlp, config), entry, chosen


def embed(params: Params, config: ModelConfig, tokens: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Return the input of the first layer, in the dtype of the weights or in `dtype`."""
    x = params["model"]["embed_tokens"]["weight"][tokens]
    if dtype is not None:
        x = x.astype(dtype)
    if not family_of(config).scale_embedding:
        return x
    # The factor is rounded to this dtype, as in training: in bfloat16 the root of 3072 is 55.5, not 55.4256.
    return x * jnp.asarray(np.sqrt(np.float32(config.hidden_size)), x.dtype)


def unembed(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Return logits, in float32 for hidden states of any dtype; those of the labels, if the model classifies sequences."""
    logits = wide_einsum("...i,vi->...v", hidden, head_weight(params, config).astype(hidden.dtype))
    cap = config.final_softcap
    return logits if cap is None or config.num_labels else cap * jnp.tanh(logits / cap)


def head_weight(params: Params, config: ModelConfig) -> jax.Array:
    """Return the matrix `[vocab, hidden]` that hidden states are multiplied with: the embedding's, if they share it, or that of
    the labels."""
    if config.num_labels:
        head: Params = params["score"]
    else:
        head = params["model"]["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    weight: jax.Array = head["weight"]
    return weight


def _norm(x: jax.Array, layer: Params, name: str | None, config: ModelConfig) -> jax.Array:
    return x if name is None else rms_norm(x, layer[name], config)


def _project_qkv(attn: Params, config: ModelConfig, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    def heads(name: str) -> jax.Array:
        return linear(x, attn[name]).reshape(*x.shape[:2], -1, config.head_dim)

    q, k, v = heads("q_proj"), heads("k_proj"), heads("v_proj")
    if "q_norm" in attn:
        q, k = rms_norm(q, attn["q_norm"], config), rms_norm(k, attn["k_norm"], config)
    return q, k, v
