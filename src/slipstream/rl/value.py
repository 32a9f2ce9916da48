"""The critic of PPO: one linear map from the decoder's hidden states to what reward is still to come.

It shares the policy's layers and learns through them. It begins at zero: the first advantages are plain returns."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from slipstream.model import decoder
from slipstream.model.config import ModelConfig
from slipstream.model.layers import PRECISION, Params
from slipstream.rl.batch import Batch


def init(model: ModelConfig) -> Params:
    return {"weight": jnp.zeros((model.hidden_size,)), "bias": jnp.zeros(())}


def apply(head: Params, hidden: jax.Array) -> jax.Array:
    """`[batch, time]` in float32, from hidden states `[batch, time, hidden]`."""
    wide = hidden.astype(jnp.float32)
    return jnp.einsum("bti,i->bt", wide, head["weight"], precision=PRECISION) + head["bias"]


def values(policy: Params, head: Params, model: ModelConfig, batch: Batch) -> jax.Array:
    """`[B, T − 1]`: column t is what is expected once `tokens[:, t]` is known, before the next token is drawn."""
    return apply(head, hidden_states(policy, model, batch))


def hidden_states(policy: Params, model: ModelConfig, batch: Batch) -> jax.Array:
    """`[B, T − 1, hidden]`: of every token of a batch but the last, packed or not."""
    tokens, positions, segments = (
        None if array is None else jnp.asarray(array)[:, :-1]
        for array in (batch.tokens, batch.positions, batch.segments)
    )
    assert tokens is not None
    return decoder.hidden_states(policy, model, tokens, positions, segments)
