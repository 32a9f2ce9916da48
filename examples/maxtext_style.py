"""Train a model with MaxText's parameter layout and serve it with an engine.

    python examples/maxtext_style.py

The layout differs from a checkpoint in four ways, which `known_trees.maxtext` undoes:

    each kernel is stacked over all layers, along dimension 1, for `jax.lax.scan`
    the rotary embedding is interleaved
    the query kernel includes the attention scale `1 / sqrt(head_dim)`
    the embedding is padded beyond the vocabulary

Every 10 steps the weights are synced, and the engine's greedy tokens are compared with the model's. Needs only JAX;
MaxText itself is not used."""

from __future__ import annotations

from functools import partial

import counting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from counting import CONFIG

from slipstream.weights.sources import known_trees

Params = dict[str, dict]
D, F, L, H, KV, K = (
    CONFIG.hidden_size,
    CONFIG.intermediate_size,
    CONFIG.num_layers,
    CONFIG.num_heads,
    CONFIG.num_kv_heads,
    CONFIG.head_dim,
)
PADDED_VOCAB = 48
STACKED = 1
"""Layer dimension of a stacked leaf (MaxText's `param_scan_axis`)."""

# --- the model: plain JAX ---


def init(seed: int) -> Params:
    rng = np.random.default_rng(seed)

    def kernel(*shape: int, scale: float = 0.1) -> dict[str, jax.Array]:
        return {"kernel": jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)}

    def norm(*shape: int) -> dict[str, jax.Array]:
        return {"scale": jnp.ones(shape)}

    layers = {
        "self_attention": {
            "query": kernel(D, L, H, K, scale=0.1 / np.sqrt(K)),
            "key": kernel(D, L, KV, K),
            "value": kernel(D, L, KV, K),
            "out": kernel(H, L, K, D),
        },
        "mlp": {"wi_0": kernel(D, L, F), "wi_1": kernel(D, L, F), "wo": kernel(F, L, D)},
        "pre_self_attention_layer_norm": norm(D, L),
        "post_self_attention_layer_norm": norm(D, L),
    }
    embedding = {"embedding": kernel(PADDED_VOCAB, D, scale=1.0)["kernel"]}
    decoder = {"layers": layers, "decoder_norm": norm(D), "logits_dense": kernel(D, PADDED_VOCAB)}
    return {"params": {"token_embedder": embedding, "decoder": decoder}}


@jax.jit
def logits_of(params: Params, ids: jax.Array) -> jax.Array:
    params = params["params"]
    decoder = params["decoder"]

    def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        x = x + attend(weights["self_attention"], rms_norm(x, weights["pre_self_attention_layer_norm"]))
        y = rms_norm(x, weights["post_self_attention_layer_norm"])
        gate, up = (jnp.einsum("btd,df->btf", y, weights["mlp"][name]["kernel"]) for name in ("wi_0", "wi_1"))
        return x + jnp.einsum("btf,fd->btd", jax.nn.silu(gate) * up, weights["mlp"]["wo"]["kernel"]), None

    x = params["token_embedder"]["embedding"][ids]
    x, _ = jax.lax.scan(layer, x, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, STACKED, 0), decoder["layers"]))
    x = rms_norm(x, decoder["decoder_norm"])
    return jnp.einsum("btd,dv->btv", x, decoder["logits_dense"]["kernel"])[..., : CONFIG.vocab_size]


def attend(weights: Params, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, weights[name]["kernel"]) for name in ("query", "key", "value"))
    # The query kernel already includes the scale.
    out = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True, scale=1.0)
    return jnp.einsum("bthk,hkd->btd", out, weights["out"]["kernel"])


def rms_norm(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    mean = jnp.square(x).mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + CONFIG.rms_norm_eps) * weights["scale"]


def rotate(x: jax.Array) -> jax.Array:
    """Apply interleaved rotary embeddings to `[batch, time, heads, head_dim]`: dimension 0 pairs with 1, 2 with 3."""
    frequencies = CONFIG.rope_theta ** (-jnp.arange(K // 2) / (K // 2))
    angles = (jnp.arange(x.shape[1])[:, None] * frequencies)[None, :, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.stack((even * cos - odd * sin, odd * cos + even * sin), axis=-1).reshape(x.shape)


# --- the mapping: the same as in MaxText's checkpoint converter ---

MAPPING = known_trees.maxtext(CONFIG)


def main() -> None:
    params = init(seed=0)
    optimizer = optax.adam(counting.LEARNING_RATE)
    state = optimizer.init(params)

    @jax.jit
    def train_step(params: Params, state: optax.OptState, ids: jax.Array) -> tuple[Params, optax.OptState]:
        gradients = jax.grad(lambda p: counting.loss_of(logits_of(p, ids), ids))(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    with counting.engine() as bridge:
        for step in range(counting.STEPS + 1):
            if step % 10 == 0:
                counting.compare(bridge, MAPPING.tensors(params), partial(logits_of, params))
            params, state = train_step(params, state, counting.batch(step))


if __name__ == "__main__":
    main()
