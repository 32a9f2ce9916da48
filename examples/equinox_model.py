"""Train an Equinox model and serve it with an engine; declared rules map its leaves to HF tensors.

    python examples/equinox_model.py

Equinox stores matrices as checkpoints do, `[out, in]`. This model fuses q, k and v into one matrix, and gate and up
into another, so that one leaf holds several tensors. Every 10 steps the weights are synced, and the engine's greedy
tokens are compared with the model's. Needs equinox."""

from __future__ import annotations

from functools import partial

import counting
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from counting import CONFIG

from slipstream.model import families
from slipstream.weights.sources.transforms import Take
from slipstream.weights.sources.tree_mapping import Rule, Target, TreeMapping

Q, KV = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim

# --- the model: plain Equinox, for one sequence; `jax.vmap` adds the batch ---


class Attention(eqx.Module):
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    rope: eqx.nn.RotaryPositionalEmbedding

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key)
        self.qkv = linear(CONFIG.hidden_size, Q + 2 * KV, keys[0])
        self.out = linear(Q, CONFIG.hidden_size, keys[1])
        self.rope = eqx.nn.RotaryPositionalEmbedding(CONFIG.head_dim, CONFIG.rope_theta)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = jax.vmap(self.qkv)(x).reshape(len(x), -1, CONFIG.head_dim)
        q, k, v = jnp.split(heads, (CONFIG.num_heads, CONFIG.num_heads + CONFIG.num_kv_heads), axis=1)
        q, k = (jax.vmap(self.rope, in_axes=1, out_axes=1)(part) for part in (q, k))
        return jax.vmap(self.out)(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(len(x), -1))


class Mlp(eqx.Module):
    gate_up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key)
        self.gate_up = linear(CONFIG.hidden_size, 2 * CONFIG.intermediate_size, keys[0])
        self.down = linear(CONFIG.intermediate_size, CONFIG.hidden_size, keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x), 2)
        return self.down(jax.nn.silu(gate) * up)


class Block(eqx.Module):
    attention: Attention
    mlp: Mlp
    before_attention: eqx.nn.RMSNorm
    before_mlp: eqx.nn.RMSNorm

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key)
        self.attention, self.mlp = Attention(keys[0]), Mlp(keys[1])
        self.before_attention, self.before_mlp = norm(), norm()

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(jax.vmap(self.before_attention)(x))
        return x + jax.vmap(self.mlp)(jax.vmap(self.before_mlp)(x))


class Decoder(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, last, *keys = jax.random.split(key, 2 + CONFIG.num_layers)
        self.embed = eqx.nn.Embedding(CONFIG.vocab_size, CONFIG.hidden_size, key=first)
        self.blocks = [Block(key) for key in keys]
        self.norm, self.head = norm(), linear(CONFIG.hidden_size, CONFIG.vocab_size, last)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(ids)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def linear(size: int, out: int, key: jax.Array) -> eqx.nn.Linear:
    return eqx.nn.Linear(size, out, use_bias=False, key=key)


def norm() -> eqx.nn.RMSNorm:
    return eqx.nn.RMSNorm(CONFIG.hidden_size, CONFIG.rms_norm_eps, use_bias=False)


def make_train_step(optimizer: optax.GradientTransformation):  # type: ignore[no-untyped-def]
    @eqx.filter_jit
    def train_step(model: Decoder, state: optax.OptState, ids: jax.Array) -> tuple[Decoder, optax.OptState]:
        gradients = eqx.filter_grad(lambda m: counting.loss_of(jax.vmap(m)(ids), ids))(model)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state

    return train_step


# --- the mapping: from leaf paths and layouts to those of the checkpoint ---

LEAF, LAYER, F = "blocks.{layer}.", "model.layers.{layer}.", CONFIG.intermediate_size

MAPPING = TreeMapping(
    (
        Rule("embed.weight", Target("model.embed_tokens.weight")),
        Rule(
            LEAF + "attention.qkv.weight",
            Target(LAYER + "self_attn.q_proj.weight", (Take(0, 0, Q),)),
            Target(LAYER + "self_attn.k_proj.weight", (Take(0, Q, Q + KV),)),
            Target(LAYER + "self_attn.v_proj.weight", (Take(0, Q + KV, Q + 2 * KV),)),
        ),
        Rule(LEAF + "attention.out.weight", Target(LAYER + "self_attn.o_proj.weight")),
        Rule(
            LEAF + "mlp.gate_up.weight",
            Target(LAYER + "mlp.gate_proj.weight", (Take(0, 0, F),)),
            Target(LAYER + "mlp.up_proj.weight", (Take(0, F, 2 * F),)),
        ),
        Rule(LEAF + "mlp.down.weight", Target(LAYER + "mlp.down_proj.weight")),
        Rule(LEAF + "before_attention.weight", Target(LAYER + "input_layernorm.weight")),
        Rule(LEAF + "before_mlp.weight", Target(LAYER + "post_attention_layernorm.weight")),
        Rule("norm.weight", Target("model.norm.weight")),
        Rule("head.weight", Target("lm_head.weight")),
    ),
    families.tensors(CONFIG),
)


def main() -> None:
    model = Decoder(jax.random.key(0))
    optimizer = optax.adam(counting.LEARNING_RATE)
    state, train_step = optimizer.init(eqx.filter(model, eqx.is_array)), make_train_step(optimizer)
    logits = eqx.filter_jit(lambda model, ids: jax.vmap(model)(ids))
    with counting.engine() as bridge:
        for step in range(counting.STEPS + 1):
            if step % 10 == 0:
                tensors = MAPPING.tensors(eqx.filter(model, eqx.is_array))
                counting.compare(bridge, tensors, partial(logits, model))
            model, state = train_step(model, state, counting.batch(step))


if __name__ == "__main__":
    main()
