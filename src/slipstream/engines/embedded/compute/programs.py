"""The jitted programs: prefill, decode, verification of draft tokens, scoring, page copies. Each is compiled once per shape.

Only weights and KV pages stay on the device between calls; tokens, positions, page tables and sampling settings come from the
host each time. The cache is donated to every program that changes it: after a call only the returned cache is valid, and
after a failed call none is."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.engines.embedded.compute.adapter_slots import Stacks, with_adapters
from slipstream.engines.embedded.compute.attention import BlockwiseAttention, CacheLayer, NaiveAttention, SharedPrefixes
from slipstream.engines.embedded.compute.placement import Placement
from slipstream.engines.embedded.compute.program_choice import ProgramChoice
from slipstream.engines.embedded.compute.route_pages import new_route_pages, write_routes
from slipstream.engines.embedded.sampling.batch_settings import BatchSettings
from slipstream.engines.embedded.sampling.sampler import (
    TokenCounts,
    add_tokens,
    count_tokens,
    raw_logprobs,
    sample,
    sampling_logprobs,
)
from slipstream.engines.embedded.scheduling.shapes import COPIES, Shapes, bucket
from slipstream.model.config import LayerAttention, ModelConfig
from slipstream.model.transformer.decoder import apply_layers, unembed
from slipstream.model.transformer.layers import Params
from slipstream.types import MAX_TOP_LOGPROBS

if TYPE_CHECKING:  # imported only where it is used: it needs Triton
    from slipstream.engines.embedded.compute.attention_gpu import PallasAttention

log = logging.getLogger(__name__)

PagedAttention: TypeAlias = "NaiveAttention | BlockwiseAttention | PallasAttention"
Array: TypeAlias = Any
"""A numpy array on the host, a JAX array inside a program."""

PREFILL, VERIFY, COPY = "prefill", "verify", "copy"
DECODE, SCORE = ("decode", "decode rich"), ("score", "score with alternatives")
"""Names of programs; pairs have the plain one first."""
DECODE_GROUPS = ("decode groups", "decode groups rich")
"""Those with `DecodeBatch.shared`, which take almost twice as long to compile."""

MAX_LOGITS = 1 << 25
"""The most logits that scoring materializes at once."""


class Cache(NamedTuple):
    """What is kept of cached tokens: pages of each kind, in dimension 0."""

    layers: list[CacheLayer]
    routes: jax.Array | None = None
    """Their experts (`route_pages.py`), if they are recorded."""


class DecodeBatch(NamedTuple):
    """Sequences to decode: arrays of `[rows]`, padded with position -1."""

    tokens: Array
    """The newest token of each sequence, not yet in the cache."""
    positions: Array
    """The position of that token."""
    room: Array
    """Tokens that may be drawn in this call."""
    tables: Array
    """Page tables, `[rows, table_width]`."""
    shared: SharedPrefixes | None
    """Groups of rows that start with the same pages. None changes no result."""
    slots: Array = None
    """The slot of each row's adapter, if the engine serves adapters."""


class DecodeResult(NamedTuple):
    """Drawn tokens, `[steps, rows]`; the first `num_drawn[row]` of each row are valid."""

    tokens: Array
    logprobs: Array
    raw_logprobs: Array
    top_ids: Array
    top_logprobs: Array
    """Raw logprobs, `[steps, rows, num_top]`."""
    num_drawn: Array
    stopped: Array
    """The last token drawn is one of the row's stop tokens."""


class PrefillBatch(NamedTuple):
    """Blocks of prompt tokens, `[blocks, block]`, padded with position -1."""

    tokens: Array
    positions: Array
    tables: Array
    targets: Array = None
    """When scoring: the token after each."""
    temperature: Array = None
    """When scoring: that of the distribution; None gives raw logprobs."""
    slots: Array = None
    """As in `DecodeBatch`, of each block."""


class Programs:
    """The programs of one model and shape. Stateless: weights and cache are arguments."""

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement,
        shapes: Shapes,
        attention: PagedAttention,
        record_routes: bool = False,
    ) -> None:
        self.config, self.placement, self.shapes, self._attention = config, placement, shapes, attention
        self.record_routes = record_routes
        self.choice = ProgramChoice()
        replicated = placement.replicated
        cache = Cache(placement.cache, replicated if record_routes else None)  # type: ignore[arg-type]
        # By default XLA on CPU rounds intermediate bfloat16 results or not, depending on what it fuses in a program.
        options = {"xla_allow_excess_precision": False} if placement.platform == "cpu" else None
        jit = functools.partial(jax.jit, donate_argnums=1, compiler_options=options)
        self._prefill = jit(self._prefill_program, out_shardings=(replicated, cache))
        self._decode = jit(self._decode_program, static_argnames="num_top", out_shardings=(replicated, cache))
        self._verify = jit(self._verify_program, out_shardings=(replicated, cache))
        self._score = jit(self._score_program, static_argnames="num_top", out_shardings=(replicated, cache))
        self._copy = jax.jit(_copy_program, donate_argnums=0, out_shardings=cache)

    @property
    def max_top(self) -> int:
        """Top logprobs computed whenever a request asks for any: a single number, so that a single program suffices."""
        return min(MAX_TOP_LOGPROBS, self.config.vocab_size)

    @property
    def shares_prefixes(self) -> bool:
        """Whether `DecodeBatch.shared` makes a difference."""
        return isinstance(self._attention, BlockwiseAttention)

    @property
    def cache_bytes(self) -> int:
        config, shapes = self.config, self.shapes
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.placement.dtype.itemsize
        if self.record_routes and config.moe is not None:
            per_token += len(config.expert_layers) * config.moe.experts_per_token * config.moe.route_size
        return per_token * shapes.num_pages * shapes.page_size

    def new_cache(self) -> Cache:
        config, shapes, placement = self.config, self.shapes, self.placement
        sizes = (shapes.num_pages, config.num_kv_heads, shapes.page_size, config.head_dim)
        keys, values = self._attention.layer_shapes(*sizes)
        zeros = functools.partial(jnp.zeros, dtype=placement.dtype, device=placement.cache)
        layers = [(zeros(keys), zeros(values)) for _ in range(config.num_layers)]
        return Cache(layers, new_route_pages(config, shapes, placement.replicated) if self.record_routes else None)

    # --- called by the executor with host arrays; asynchronous ---

    def prefill(
        self, params: Params, cache: Cache, batch: PrefillBatch, adapters: Stacks | None = None
    ) -> tuple[jax.Array, Cache]:
        """Compute keys and values. The first result carries no information; it exists to be waited for."""
        return self._run(PREFILL, self._prefill, params, cache, batch, adapters, size=len(batch.tokens))

    def decode(
        self,
        params: Params,
        cache: Cache,
        rows: DecodeBatch,
        settings: BatchSettings,
        steps: int,
        history: np.ndarray | None,
        early_exit_rows: int = 0,
        adapters: Stacks | None = None,
    ) -> tuple[DecodeResult, Cache]:
        """Draw up to `steps` tokens per row; stop after at least one step when `early_exit_rows` or fewer rows are unfinished.

        `history` has every row's sequence, `[rows, max_length]`, padded with -1. It is given if a row has penalties or logit
        biases, or wants top logprobs."""
        rich, size, limits = history is not None, len(rows.tokens), np.array((steps, early_exit_rows), np.int32)
        args, num_top = (params, cache, rows, settings, limits, history, adapters), self.max_top if rich else 0
        name = DECODE[rich] if rows.shared is None else DECODE_GROUPS[rich]
        return self._run(name, self._decode, *args, num_top=num_top, size=size)

    def verify(
        self,
        params: Params,
        cache: Cache,
        rows: DecodeBatch,
        settings: BatchSettings,
        draft_tokens: np.ndarray | jax.Array,
        adapters: Stacks | None = None,
    ) -> tuple[DecodeResult, Cache]:
        """Draw the token after the newest one and after each of `draft_tokens [rows, num_speculative]` in one forward pass. A
        row keeps its draws up to the first that differs from its draft token. -1 stands for no draft token."""
        args = (params, cache, rows, settings, draft_tokens, adapters)
        return self._run(VERIFY, self._verify, *args, size=len(rows.tokens))

    def score(
        self, params: Params, cache: Cache, batch: PrefillBatch, num_top: int, adapters: Stacks | None = None
    ) -> tuple[tuple[jax.Array, ...], Cache]:
        """Raw logprobs of the targets, `[blocks, block]`; ids and raw logprobs of the `num_top` likeliest tokens. With a
        temperature, only the logprobs of the targets under the distribution that is sampled from."""
        name, size = SCORE[num_top > 0], len(batch.tokens)
        return self._run(name, self._score, params, cache, batch, adapters, num_top=num_top, size=size)

    def copy(self, cache: Cache, copies: Sequence[tuple[int, int]]) -> Cache:
        """Copy pages; `copies` has pairs `(source, target)`."""
        done = 0
        while done < len(copies):
            part = copies[done : done + COPIES[-1]]
            done += len(part)
            padded = np.full((2, bucket(len(part), COPIES)), self.shapes.num_pages, np.int32)
            padded[:, : len(part)] = np.array(part, np.int32).T
            cache = self._run(COPY, self._copy, cache, padded[0], padded[1], size=padded.shape[1])
        return cache

    def _run(self, name: str, program: Callable[..., Any], *args: Any, size: int, **static: Any) -> Any:
        compiled = self.choice.compiled
        if (name, size) in compiled:
            return program(*args, **static)
        start = time.perf_counter()
        self.choice.compiling = f"compiling {name} {size}"
        try:
            result = program(*args, **static)
        finally:
            self.choice.compiling = ""
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
        shared: SharedPrefixes | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Write the tokens' keys, values and experts to their pages; returns their final hidden states."""

        def attention(
            q: jax.Array, k: jax.Array, v: jax.Array, layer: CacheLayer, spec: LayerAttention
        ) -> tuple[jax.Array, CacheLayer]:
            # Diverged weights produce NaN, which would outlive them in a page: a masked key has weight 0, and 0 * NaN is NaN.
            layer = self._attention.write(layer, jnp.nan_to_num(k), jnp.nan_to_num(v), tables, positions)
            return self._attention.attend(q, layer, tables, positions, spec, shared), layer

        hidden, layers, chosen = apply_layers(params, self.config, tokens, positions, attention, cache.layers)
        routes = cache.routes
        return hidden, Cache(layers, None if routes is None else write_routes(routes, chosen, tables, positions))

    def _logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        # With the vocabulary sharded, every draw would take several collectives.
        logits = unembed(params, self.config, hidden)
        return jax.lax.with_sharding_constraint(logits, self.placement.replicated)

    def _prefill_program(
        self, params: Params, cache: Cache, batch: PrefillBatch, adapters: Stacks | None
    ) -> tuple[jax.Array, Cache]:
        params = _adapted(params, adapters, batch.slots)
        hidden, cache = self._forward(params, cache, batch.tokens, batch.positions, batch.tables)
        return hidden[0, 0, 0], cache

    def _decode_program(
        self,
        params: Params,
        cache: Cache,
        rows: DecodeBatch,
        settings: BatchSettings,
        limits: jax.Array,
        history: jax.Array | None,
        adapters: Stacks | None,
        num_top: int,
    ) -> tuple[DecodeResult, Cache]:
        params = _adapted(params, adapters, rows.slots)
        (steps, early_exit_rows), num_rows, most = limits, rows.tokens.shape[0], self.shapes.max_steps
        counts = None if history is None else count_tokens(history, settings.prompt_length, self.config.vocab_size)

        class Carry(NamedTuple):
            step: jax.Array
            cache: Cache
            tokens: jax.Array
            positions: jax.Array
            active: jax.Array
            counts: TokenCounts | None
            out: DecodeResult

        def step(carry: Carry) -> Carry:
            positions = jnp.where(carry.active, carry.positions, -1)
            hidden, cache = self._forward(
                params, carry.cache, carry.tokens[:, None], positions[:, None], rows.tables, rows.shared
            )
            drawn = sample(self._logits(params, hidden[:, 0]), carry.positions + 1, settings, carry.counts, num_top)
            out = carry.out
            columns = (drawn.token, drawn.logprob, drawn.raw_logprob, drawn.top_ids, drawn.top_logprobs)
            kept = [column.at[carry.step].set(new) for column, new in zip(out[:5], columns)]
            num_drawn = out.num_drawn + carry.active
            stopped = jnp.where(carry.active, drawn.stopped, out.stopped)
            return Carry(
                carry.step + 1,
                cache,
                jnp.where(carry.active, drawn.token, carry.tokens),
                carry.positions + 1,
                carry.active & ~drawn.stopped & (num_drawn < rows.room),
                None if carry.counts is None else add_tokens(carry.counts, drawn.token, carry.active),
                DecodeResult(kept[0], kept[1], kept[2], kept[3], kept[4], num_drawn, stopped),
            )

        def empty(dtype: Any, *shape: int) -> jax.Array:
            return jnp.zeros((most, num_rows, *shape), dtype)

        out = DecodeResult(
            empty(jnp.int32),
            empty(jnp.float32),
            empty(jnp.float32),
            empty(jnp.int32, num_top),
            empty(jnp.float32, num_top),
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros(num_rows, bool),
        )
        active = (rows.positions >= 0) & (rows.room > 0)
        start = Carry(jnp.int32(0), cache, rows.tokens, rows.positions, active, counts, out)

        def continues(carry: Carry) -> jax.Array:
            return (carry.step < steps) & (carry.active.sum() > jnp.where(carry.step == 0, 0, early_exit_rows))

        end = jax.lax.while_loop(continues, step, start)
        return end.out, end.cache

    def _verify_program(
        self,
        params: Params,
        cache: Cache,
        rows: DecodeBatch,
        settings: BatchSettings,
        draft_tokens: jax.Array,
        adapters: Stacks | None,
    ) -> tuple[DecodeResult, Cache]:
        params = _adapted(params, adapters, rows.slots)
        num_rows, width = draft_tokens.shape[0], draft_tokens.shape[1] + 1
        offsets = jnp.arange(width)
        tokens = jnp.concatenate((rows.tokens[:, None], jnp.maximum(draft_tokens, 0)), axis=1)
        real = jnp.concatenate((rows.positions[:, None] >= 0, draft_tokens >= 0), axis=1)
        real &= offsets < rows.room[:, None]
        positions = jnp.where(real, rows.positions[:, None] + offsets, -1)
        hidden, cache = self._forward(params, cache, tokens, positions, rows.tables)
        logits = self._logits(params, hidden.reshape(num_rows * width, -1))
        repeated = jax.tree.map(lambda column: jnp.repeat(column, width, axis=0), settings)
        drawn = sample(logits, (rows.positions[:, None] + offsets + 1).reshape(-1), repeated, None, 0)
        token, logprob, raw, stopped = (
            x.reshape(num_rows, width) for x in (drawn.token, drawn.logprob, drawn.raw_logprob, drawn.stopped)
        )
        # Draw i is kept if all draft tokens before it were right and no draw before it ended the sequence.
        right = (token[:, :-1] == draft_tokens) & real[:, 1:] & ~stopped[:, :-1]
        kept = jnp.concatenate((real[:, :1], right), axis=1).astype(jnp.int32)
        num_drawn = jnp.cumprod(kept, axis=1).sum(axis=1)
        last = jnp.maximum(num_drawn - 1, 0)[:, None]
        ended = jnp.take_along_axis(stopped, last, axis=1)[:, 0] & (num_drawn > 0)
        none = jnp.zeros((width, num_rows, 0))
        return DecodeResult(token.T, logprob.T, raw.T, none, none, num_drawn, ended), cache

    def _score_program(
        self, params: Params, cache: Cache, batch: PrefillBatch, adapters: Stacks | None, num_top: int
    ) -> tuple[tuple[jax.Array, ...], Cache]:
        params = _adapted(params, adapters, batch.slots)
        hidden, cache = self._forward(params, cache, batch.tokens, batch.positions, batch.tables)
        count, block = batch.tokens.shape
        flat = hidden.reshape(count * block, -1)
        part = count * block
        while part > 8 and part % 2 == 0 and part * self.config.vocab_size > MAX_LOGITS:
            part //= 2

        def score_part(pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            logits = self._logits(params, pair[0])
            if self.config.num_labels:  # the target is the label; its output is not normalized
                label = jnp.clip(pair[1], 0, self.config.num_labels - 1)
                none = jnp.zeros((part, 0))
                return jnp.take_along_axis(logits, label[:, None], axis=1)[:, 0], none.astype(jnp.int32), none
            if batch.temperature is not None:
                return (sampling_logprobs(logits, pair[1], batch.temperature),)
            return raw_logprobs(logits, pair[1], num_top)

        assert batch.targets is not None, "scoring needs targets"
        parts = (flat.reshape(-1, part, flat.shape[-1]), batch.targets.reshape(-1, part))
        scores = jax.lax.map(score_part, parts)
        return tuple(x.reshape(count, block, *x.shape[2:]) for x in scores), cache


def _adapted(params: Params, adapters: Stacks | None, slots: jax.Array) -> Params:
    """Return the tree in which each row has its adapter; the model's own if the engine serves none."""
    return params if adapters is None else with_adapters(params, adapters, slots)


def _copy_program(cache: Cache, sources: jax.Array, targets: jax.Array) -> Cache:
    return jax.tree.map(lambda x: x.at[targets].set(x.at[sources].get(mode="clip"), mode="drop"), cache)
