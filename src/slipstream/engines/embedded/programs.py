"""What runs on the device: prefill, decode, verification of guesses, scoring, page copies; each compiled once per shape.

Nothing but the KV pages stays on the device between calls: tokens, positions, page tables and settings come from the host
each time. The cache is donated to every program that changes it: after a call only the returned cache is valid, and after
a failed call none is."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.engines.embedded.attention import CacheLayer, PagedAttention, Shared
from slipstream.engines.embedded.placement import Placement
from slipstream.engines.embedded.sampling import Counts, counts_of, counts_with, raw_logprobs, sample
from slipstream.engines.embedded.settings import Settings
from slipstream.engines.embedded.shapes import COPIES, Shapes, bucket
from slipstream.engines.embedded.thrift import Thrift
from slipstream.model.config import LayerAttention, ModelConfig
from slipstream.model.decoder import apply_layers, unembed
from slipstream.model.layers import Params
from slipstream.types import MAX_TOP_LOGPROBS

log = logging.getLogger(__name__)

Cache: TypeAlias = list[CacheLayer]
Array: TypeAlias = Any
"""A numpy array on the host, a JAX array inside a program."""

PREFILL, VERIFY, COPY = "prefill", "verify", "copy"
DECODE, SCORE = ("decode", "decode rich"), ("score", "score with alternatives")
"""Names of programs; of pairs, the plain one first."""

MAX_LOGITS = 1 << 25
"""Logits that exist at once while scoring."""


class Rows(NamedTuple):
    """Sequences about to be continued; numpy arrays of `[rows]`, padded with position -1."""

    tokens: Array
    """The newest token of each, not yet in the cache."""
    positions: Array
    """Where it stands."""
    room: Array
    """Tokens that may be drawn in this call."""
    tables: Array
    """`[rows, table_width]`."""
    shared: Shared
    """Which of them begin with the same pages."""


class Steps(NamedTuple):
    """What was drawn: `[steps, rows]`, of which the first `num_drawn[row]` count."""

    tokens: Array
    logprobs: Array
    raw_logprobs: Array
    top_ids: Array
    top_logprobs: Array
    """`[steps, rows, num_top]`, raw."""
    num_drawn: Array
    stopped: Array
    """The last token drawn is one of the row's stop tokens."""


class Chunk(NamedTuple):
    """Blocks of prompt tokens: `[blocks, block]`, padded with position -1."""

    tokens: Array
    positions: Array
    tables: Array
    targets: Array = None
    """Scoring: the token that follows each."""


class Programs:
    """Holds no weights and no cache: both are arguments."""

    def __init__(self, config: ModelConfig, placement: Placement, shapes: Shapes, attention: PagedAttention) -> None:
        self._config, self.placement, self.shapes, self._attention = config, placement, shapes, attention
        self.thrift = Thrift()
        cache, replicated = placement.cache, placement.replicated
        jit = functools.partial(jax.jit, donate_argnums=1)
        self._prefill = jit(self._prefill_program, out_shardings=(replicated, cache))
        self._decode = jit(self._decode_program, static_argnames="num_top", out_shardings=(replicated, cache))
        self._verify = jit(self._verify_program, out_shardings=(replicated, cache))
        self._score = jit(self._score_program, static_argnames="num_top", out_shardings=(replicated, cache))
        self._copy = jax.jit(_copy_program, donate_argnums=0, out_shardings=cache)

    @property
    def max_top(self) -> int:
        """Likeliest tokens that are reported where some are wanted: one number, so that there is one program."""
        return min(MAX_TOP_LOGPROBS, self._config.vocab_size)

    @property
    def cache_bytes(self) -> int:
        config, shapes = self._config, self.shapes
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.placement.dtype.itemsize
        return per_token * shapes.num_pages * shapes.page_size

    def new_cache(self) -> Cache:
        config, shapes, placement = self._config, self.shapes, self.placement
        sizes = (shapes.num_pages, config.num_kv_heads, shapes.page_size, config.head_dim)
        keys, values = self._attention.layer_shapes(*sizes)
        zeros = functools.partial(jnp.zeros, dtype=placement.dtype, device=placement.cache)
        return [(zeros(keys), zeros(values)) for _ in range(config.num_layers)]

    # --- called by the executor, with host arrays; nothing is waited for ---

    def prefill(self, params: Params, cache: Cache, chunk: Chunk) -> tuple[jax.Array, Cache]:
        """The first result is nothing but a thing to wait for."""
        return self._run(PREFILL, self._prefill, params, cache, chunk, size=len(chunk.tokens))

    def decode(
        self,
        params: Params,
        cache: Cache,
        rows: Rows,
        settings: Settings,
        steps: int,
        history: np.ndarray | None,
        floor: int = 0,
    ) -> tuple[Steps, Cache]:
        """Up to `steps` tokens for each row; fewer, but one, when no more than `floor` rows are left. `history` is every row's
        sequence `[rows, max_length]`, padded with -1, and given where some row has penalties, biases or wants alternatives."""
        rich, size, limits = history is not None, len(rows.tokens), np.array((steps, floor), np.int32)
        args, num_top = (params, cache, rows, settings, limits, history), self.max_top if rich else 0
        return self._run(DECODE[rich], self._decode, *args, num_top=num_top, size=size)

    def verify(
        self, params: Params, cache: Cache, rows: Rows, settings: Settings, guesses: np.ndarray | jax.Array
    ) -> tuple[Steps, Cache]:
        """Draws what follows the newest token and what follows each guess `[rows, guesses]`, as if each were right; those
        that count are the first up to the first wrong guess. A guess of -1 is none."""
        return self._run(VERIFY, self._verify, params, cache, rows, settings, guesses, size=len(rows.tokens))

    def score(self, params: Params, cache: Cache, chunk: Chunk, num_top: int) -> tuple[tuple[jax.Array, ...], Cache]:
        """Raw logprobs of the targets `[blocks, block]`, and the `num_top` likeliest tokens with theirs."""
        name, size = SCORE[num_top > 0], len(chunk.tokens)
        return self._run(name, self._score, params, cache, chunk, num_top=num_top, size=size)

    def copy(self, cache: Cache, copies: Sequence[tuple[int, int]]) -> Cache:
        """Pages `(from, to)`."""
        done = 0
        while done < len(copies):
            part = copies[done : done + COPIES[-1]]
            done += len(part)
            padded = np.full((2, bucket(len(part), COPIES)), self.shapes.num_pages, np.int32)
            padded[:, : len(part)] = np.array(part, np.int32).T
            cache = self._run(COPY, self._copy, cache, padded[0], padded[1], size=padded.shape[1])
        return cache

    def _run(self, name: str, program: Callable[..., Any], *args: Any, size: int, **static: Any) -> Any:
        compiled = self.thrift.compiled
        if (name, size) in compiled:
            return program(*args, **static)
        start = time.perf_counter()
        result = program(*args, **static)
        seconds = compiled[name, size] = time.perf_counter() - start
        most = self.shapes.num_programs
        log.info("compiled %s %d in %.1f s (%d of at most %d)", name, size, seconds, len(compiled), most)
        return result

    # --- traced ---

    def _forward(
        self,
        params: Params,
        cache: Cache,
        tokens: jax.Array,
        positions: jax.Array,
        tables: jax.Array,
        shared: Shared | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Writes the tokens' keys and values into their pages; returns their final hidden states."""

        def attention(
            q: jax.Array, k: jax.Array, v: jax.Array, layer: CacheLayer, how: LayerAttention
        ) -> tuple[jax.Array, CacheLayer]:
            # Weights that have diverged make NaN. In a page it would outlive them: a key that may not be seen has weight 0,
            # and 0 times NaN is NaN.
            layer = self._attention.write(layer, jnp.nan_to_num(k), jnp.nan_to_num(v), tables, positions)
            return self._attention.attend(q, layer, tables, positions, how, shared), layer

        return apply_layers(params, self._config, tokens, positions, attention, cache)

    def _logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        # Split over the vocabulary, every draw would be several rounds between devices.
        logits = unembed(params, self._config, hidden)
        return jax.lax.with_sharding_constraint(logits, self.placement.replicated)

    def _prefill_program(self, params: Params, cache: Cache, chunk: Chunk) -> tuple[jax.Array, Cache]:
        hidden, cache = self._forward(params, cache, chunk.tokens, chunk.positions, chunk.tables)
        return hidden[0, 0, 0], cache

    def _decode_program(
        self,
        params: Params,
        cache: Cache,
        rows: Rows,
        settings: Settings,
        limits: jax.Array,
        history: jax.Array | None,
        num_top: int,
    ) -> tuple[Steps, Cache]:
        (steps, floor), num_rows, most = limits, rows.tokens.shape[0], self.shapes.max_steps
        counts = None if history is None else counts_of(history, settings.prompt_length, self._config.vocab_size)

        class Loop(NamedTuple):
            step: jax.Array
            cache: Cache
            tokens: jax.Array
            positions: jax.Array
            active: jax.Array
            counts: Counts | None
            out: Steps

        def one(loop: Loop) -> Loop:
            positions = jnp.where(loop.active, loop.positions, -1)
            hidden, cache = self._forward(
                params, loop.cache, loop.tokens[:, None], positions[:, None], rows.tables, rows.shared
            )
            drawn = sample(self._logits(params, hidden[:, 0]), loop.positions + 1, settings, loop.counts, num_top)
            out = loop.out
            columns = (drawn.token, drawn.logprob, drawn.raw_logprob, drawn.top_ids, drawn.top_logprobs)
            kept = [seen.at[loop.step].set(new) for seen, new in zip(out[:5], columns)]
            num_drawn = out.num_drawn + loop.active
            stopped = jnp.where(loop.active, drawn.stopped, out.stopped)
            return Loop(
                loop.step + 1,
                cache,
                jnp.where(loop.active, drawn.token, loop.tokens),
                loop.positions + 1,
                loop.active & ~drawn.stopped & (num_drawn < rows.room),
                None if loop.counts is None else counts_with(loop.counts, drawn.token, loop.active),
                Steps(kept[0], kept[1], kept[2], kept[3], kept[4], num_drawn, stopped),
            )

        def empty(dtype: Any, *shape: int) -> jax.Array:
            return jnp.zeros((most, num_rows, *shape), dtype)

        out = Steps(
            empty(jnp.int32),
            empty(jnp.float32),
            empty(jnp.float32),
            empty(jnp.int32, num_top),
            empty(jnp.float32, num_top),
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros(num_rows, bool),
        )
        active = (rows.positions >= 0) & (rows.room > 0)
        start = Loop(jnp.int32(0), cache, rows.tokens, rows.positions, active, counts, out)

        def goes_on(loop: Loop) -> jax.Array:
            return (loop.step < steps) & (loop.active.sum() > jnp.where(loop.step == 0, 0, floor))

        end = jax.lax.while_loop(goes_on, one, start)
        return end.out, end.cache

    def _verify_program(
        self, params: Params, cache: Cache, rows: Rows, settings: Settings, guesses: jax.Array
    ) -> tuple[Steps, Cache]:
        num_rows, width = guesses.shape[0], guesses.shape[1] + 1
        offsets = jnp.arange(width)
        tokens = jnp.concatenate((rows.tokens[:, None], jnp.maximum(guesses, 0)), axis=1)
        real = jnp.concatenate((rows.positions[:, None] >= 0, guesses >= 0), axis=1) & (offsets < rows.room[:, None])
        positions = jnp.where(real, rows.positions[:, None] + offsets, -1)
        hidden, cache = self._forward(params, cache, tokens, positions, rows.tables)
        logits = self._logits(params, hidden.reshape(num_rows * width, -1))
        each = jax.tree.map(lambda column: jnp.repeat(column, width, axis=0), settings)
        drawn = sample(logits, (rows.positions[:, None] + offsets + 1).reshape(-1), each, None, 0)
        token, logprob, raw, stopped = (
            x.reshape(num_rows, width) for x in (drawn.token, drawn.logprob, drawn.raw_logprob, drawn.stopped)
        )
        # Draw i counts if all guesses before it were right and none of the draws before it ended the sequence.
        right = (token[:, :-1] == guesses) & real[:, 1:] & ~stopped[:, :-1]
        counts = jnp.concatenate((real[:, :1], right), axis=1).astype(jnp.int32)
        num_drawn = jnp.cumprod(counts, axis=1).sum(axis=1)
        last = jnp.maximum(num_drawn - 1, 0)[:, None]
        ended = jnp.take_along_axis(stopped, last, axis=1)[:, 0] & (num_drawn > 0)
        none = jnp.zeros((width, num_rows, 0))
        return Steps(token.T, logprob.T, raw.T, none, none, num_drawn, ended), cache

    def _score_program(
        self, params: Params, cache: Cache, chunk: Chunk, num_top: int
    ) -> tuple[tuple[jax.Array, ...], Cache]:
        hidden, cache = self._forward(params, cache, chunk.tokens, chunk.positions, chunk.tables)
        count, block = chunk.tokens.shape
        flat = hidden.reshape(count * block, -1)
        part = count * block
        while part > 8 and part % 2 == 0 and part * self._config.vocab_size > MAX_LOGITS:
            part //= 2

        def one_part(pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            return raw_logprobs(self._logits(params, pair[0]), pair[1], num_top)

        assert chunk.targets is not None, "scoring needs targets"
        parts = (flat.reshape(-1, part, flat.shape[-1]), chunk.targets.reshape(-1, part))
        found = jax.lax.map(one_part, parts)
        return tuple(x.reshape(count, block, *x.shape[2:]) for x in found), cache


def _copy_program(cache: Cache, sources: jax.Array, targets: jax.Array) -> Cache:
    return jax.tree.map(lambda x: x.at[targets].set(x.at[sources].get(mode="clip"), mode="drop"), cache)
