"""Train a Flax NNX model and serve it with an engine; declared rules map its leaves to HF tensors.

    python examples/flax_nnx.py

NNX stores kernels of linear layers as `[in, out]`, and this model's attention kernels are `[D, heads, head_dim]`. The
rules declare how each leaf becomes a checkpoint tensor. Every 10 steps the weights are synced, and the engine's greedy
tokens are compared with the model's. Needs flax."""

from __future__ import annotations

import counting
import jax
import jax.numpy as jnp
import optax
from counting import CONFIG
from flax import nnx

from slipstream.model import families
from slipstream.weights.sources.transforms import Merge, Permute
from slipstream.weights.sources.tree_mapping import Rule, Target, TreeMapping

# --- the model: plain Flax NNX ---


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        size, heads, kv_heads, head_dim = CONFIG.hidden_size, CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim
        self.query = nnx.LinearGeneral(size, (heads, head_dim), use_bias=False, rngs=rngs)
        self.key = nnx.LinearGeneral(size, (kv_heads, head_dim), use_bias=False, rngs=rngs)
        self.value = nnx.LinearGeneral(size, (kv_heads, head_dim), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral((heads, head_dim), size, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = rotate(self.query(x)), rotate(self.key(x)), self.value(x)
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        size, inner = CONFIG.hidden_size, CONFIG.intermediate_size
        self.gate = nnx.Linear(size, inner, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(size, inner, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(inner, size, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention, self.mlp = Attention(rngs), Mlp(rngs)
        self.before_attention, self.before_mlp = norm(rngs), norm(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(CONFIG.vocab_size, CONFIG.hidden_size, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(CONFIG.num_layers)])
        self.norm = norm(rngs)
        self.head = nnx.Linear(CONFIG.hidden_size, CONFIG.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def norm(rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(CONFIG.hidden_size, epsilon=CONFIG.rms_norm_eps, rngs=rngs)


def rotate(x: jax.Array) -> jax.Array:
    """Apply rotary embeddings to `[batch, time, heads, head_dim]`, pairing the first half of a head with the second."""
    half = x.shape[-1] // 2
    frequencies = CONFIG.rope_theta ** (-jnp.arange(half) / half)
    angles = (jnp.arange(x.shape[1])[:, None] * frequencies)[None, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


@nnx.jit
def train_step(model: Decoder, optimizer: nnx.Optimizer, ids: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda m: counting.loss_of(m(ids), ids))(model)
    optimizer.update(model, gradients)
    return loss


# --- the mapping: from leaf paths and layouts to those of the checkpoint ---

TRANSPOSE = (Permute((1, 0)),)  # [in, out] → [out, in]
HEADS_OUT = (Permute((1, 2, 0)), Merge(0))  # [D, heads, head_dim] → [heads * head_dim, D]
HEADS_IN = (Merge(0), Permute((1, 0)))  # [heads, head_dim, D] → [D, heads * head_dim]
LEAF, LAYER = "blocks.{layer}.", "model.layers.{layer}."

MAPPING = TreeMapping(
    (
        Rule("embed.embedding", Target("model.embed_tokens.weight")),
        Rule(LEAF + "attention.query.kernel", Target(LAYER + "self_attn.q_proj.weight", HEADS_OUT)),
        Rule(LEAF + "attention.key.kernel", Target(LAYER + "self_attn.k_proj.weight", HEADS_OUT)),
        Rule(LEAF + "attention.value.kernel", Target(LAYER + "self_attn.v_proj.weight", HEADS_OUT)),
        Rule(LEAF + "attention.out.kernel", Target(LAYER + "self_attn.o_proj.weight", HEADS_IN)),
        Rule(LEAF + "mlp.gate.kernel", Target(LAYER + "mlp.gate_proj.weight", TRANSPOSE)),
        Rule(LEAF + "mlp.up.kernel", Target(LAYER + "mlp.up_proj.weight", TRANSPOSE)),
        Rule(LEAF + "mlp.down.kernel", Target(LAYER + "mlp.down_proj.weight", TRANSPOSE)),
        Rule(LEAF + "before_attention.scale", Target(LAYER + "input_layernorm.weight")),
        Rule(LEAF + "before_mlp.scale", Target(LAYER + "post_attention_layernorm.weight")),
        Rule("norm.scale", Target("model.norm.weight")),
        Rule("head.kernel", Target("lm_head.weight", TRANSPOSE)),
    ),
    families.tensors(CONFIG),
)


def main() -> None:
    model = Decoder(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(counting.LEARNING_RATE), wrt=nnx.Param)
    with counting.engine() as bridge:
        for step in range(counting.STEPS + 1):
            if step % 10 == 0:
                counting.compare(bridge, MAPPING.tensors(nnx.state(model, nnx.Param)), nnx.jit(model))
            train_step(model, optimizer, counting.batch(step))


if __name__ == "__main__":
    main()
