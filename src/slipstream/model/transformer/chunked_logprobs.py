"""Logprobs and entropies of tokens without the logits of all of them.

Logits `[batch, time, vocab]` in float32 are by far the largest array of a train step: 4.2 GB for 8 × 1,024 tokens of a
vocabulary of 128,256. Here they exist for `chunk` positions of each row at a time, in the forward pass and, computed again, in
the backward pass. Chunks without a position that is needed are skipped."""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from slipstream.model.transformer.layers import PRECISION


class Projection(NamedTuple):
    """How hidden states become logits, and how many at a time."""

    chunk: int
    """Positions of each row."""
    temperature: float
    """Divides logits, after the soft cap."""
    softcap: float | None
    """Limit logits to (-softcap, softcap) with tanh; None means no limit."""
    entropies: bool
    """Whether entropies are needed, too."""


_Saved: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def chunked_logprobs(
    hidden: jax.Array, head: jax.Array, tokens: jax.Array, needed: jax.Array, how: Projection
) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of `tokens` `[batch, time]` and the entropy of each distribution, in float32.

    `hidden` is `[batch, time, hidden]` and gives the dtype of matrix products; `head` `[vocab, hidden]` may have another, in
    which its gradient is returned. `needed` `[batch, time]` is nonzero where results are needed; elsewhere they may be 0 and
    have no gradient. Entropies are 0 unless `how` asks for them."""
    time = hidden.shape[1]
    tail = -time % how.chunk
    tokens, needed = (jnp.pad(a, ((0, 0), (0, tail))) for a in (tokens, needed))
    hidden = jnp.pad(hidden, ((0, 0), (0, tail), (0, 0)))
    logprobs, entropies = _project(how, hidden, head, tokens, needed > 0)
    return logprobs[:, :time], entropies[:, :time]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(
    how: Projection, hidden: jax.Array, head: jax.Array, tokens: jax.Array, needed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _forward(how, hidden, head, tokens, needed)[0]


def _forward(
    how: Projection, hidden: jax.Array, head: jax.Array, tokens: jax.Array, needed: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], _Saved]:
    weight = head.astype(hidden.dtype)

    def chunk(
        start: jax.Array, found: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits, _ = _logits(how, _part(hidden, start, how), weight)
        total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, _part(tokens, start, how)[..., None], axis=-1)[..., 0]
        entropy = jnp.zeros_like(total)
        if how.entropies:
            entropy = total - jnp.sum(jnp.exp(logits - total[..., None]) * logits, axis=-1)
        own = chosen - total, entropy, total
        return tuple(_put(all_, part, start) for all_, part in zip(found, own))  # type: ignore[return-value]

    zeros = (jnp.zeros(tokens.shape, jnp.float32),) * 3
    logprobs, entropies, totals = _over_needed(how, needed, chunk, zeros)
    return (logprobs, entropies), (hidden, head, tokens, needed, entropies, totals)


def _backward(
    how: Projection, saved: _Saved, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None, None]:
    hidden, head, tokens, needed, entropies, totals = saved
    weight = head.astype(hidden.dtype)

    def chunk(start: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        d_hidden, d_head = sums
        d_logprob, d_entropy, entropy, total, token = (
            _part(a, start, how)[..., None] for a in (*cotangents, entropies, totals, tokens)
        )
        part = _part(hidden, start, how)
        logits, slope = _logits(how, part, weight)
        p = jnp.exp(logits - total)
        # ∂ log p_token / ∂ logit_v = [v = token] − p_v;  ∂ H / ∂ logit_v = −p_v (log p_v + H)
        is_token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == token
        d_logits = d_logprob * (is_token.astype(jnp.float32) - p)
        if how.entropies:
            d_logits -= d_entropy * p * (logits - total + entropy)
        d_logits = (d_logits * slope).astype(hidden.dtype)
        d_part = jnp.einsum("btv,vi->bti", d_logits, weight, precision=PRECISION)
        d_head += jnp.einsum("btv,bti->vi", d_logits, part, precision=PRECISION, preferred_element_type=jnp.float32)
        return _put(d_hidden, d_part, start), d_head

    zeros = jnp.zeros_like(hidden), jnp.zeros(head.shape, jnp.float32)
    d_hidden, d_head = _over_needed(how, needed, chunk, zeros)
    return d_hidden, d_head.astype(head.dtype), None, None


_project.defvjp(_forward, _backward)


def _logits(how: Projection, hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """The logits of a chunk, and their derivative by the products of hidden states and head."""
    logits = jnp.einsum("bti,vi->btv", hidden, weight, precision=PRECISION, preferred_element_type=jnp.float32)
    slope: jax.Array | float = 1 / how.temperature
    if how.softcap is not None:
        bounded = jnp.tanh(logits / how.softcap)
        logits, slope = how.softcap * bounded, slope * (1 - jnp.square(bounded))
    return logits / how.temperature, slope


def _over_needed(how: Projection, needed, chunk, init):  # type: ignore[no-untyped-def]
    """Call `chunk(start, sums)` for each chunk in which a position is needed."""
    used = jnp.any(needed.reshape(needed.shape[0], -1, how.chunk), axis=(0, 2))
    starts = jnp.argsort(~used) * how.chunk  # those in use first; the sort is stable
    return jax.lax.fori_loop(0, jnp.sum(used), lambda i, sums: chunk(starts[i], sums), init)


def _part(array: jax.Array, start: jax.Array, how: Projection) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, start, how.chunk, 1)


def _put(array: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), start, 1)
