"""What runs on the device: prefill, copy, decode and score, each compiled once per bucket of shapes.

The KV cache is one `(keys, values)` pair per layer, `[slots, kv_heads, length, head_dim]`, in layers with a sliding
window too. It is donated to every program that changes it: after a call only the returned cache is valid, and after a
failed call none is."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.engines.embedded.placement import Placement
from slipstream.engines.embedded.sampling import Drawn, Settings, sample
from slipstream.engines.embedded.scheduler import Prefill, bucket
from slipstream.model.attention import attend, causal_attention, visible
from slipstream.model.config import LayerAttention, ModelConfig
from slipstream.model.decoder import apply_layers, token_logprobs, unembed
from slipstream.model.layers import Params

CacheLayer: TypeAlias = tuple[jax.Array, jax.Array]
Cache: TypeAlias = list[CacheLayer]

MIN_PREFILL, MIN_LENGTH = 8, 16
"""Smallest buckets of prompts and of the cache: below them a program's cost hardly falls."""
MAX_SCORE_LOGITS = 1 << 25
"""Logits that exist at once while scoring."""

# Apart from decode, whose shapes vary with the length of the cache: it is slow to compile, and all engines share it.
_sample = jax.jit(sample)


@functools.lru_cache(maxsize=16)
def programs_for(config: ModelConfig, tp: int, dtype: str, num_slots: int, max_length: int) -> Programs:
    """Engines of one shape in one process share what is compiled."""
    return Programs(config, Placement(config, tp, dtype), num_slots, max_length)


class Programs:
    """Holds no weights and no cache: both are arguments."""

    def __init__(self, config: ModelConfig, placement: Placement, num_slots: int, max_length: int) -> None:
        self._config, self.placement = config, placement
        self._num_slots, self._max_length = num_slots, max_length
        cache, replicated = placement.cache, placement.replicated
        self._prefill = jax.jit(self._prefill_program, donate_argnums=1, out_shardings=cache)
        self._copy = jax.jit(_copy_program, donate_argnums=0, static_argnums=3, out_shardings=cache)
        self._resize = jax.jit(_resize_program, static_argnums=1, out_shardings=cache)
        # Logits split over the vocabulary would make every draw several rounds between devices.
        self._decode = jax.jit(self._decode_program, donate_argnums=1, out_shardings=(replicated, cache))
        self._score = jax.jit(self._score_program, out_shardings=replicated)

    # --- called by the worker, with host arrays ---

    def new_cache(self, length: int) -> Cache:
        config, placement = self._config, self.placement
        shape = (self._num_slots, config.num_kv_heads, self.length_bucket(length), config.head_dim)
        zeros = functools.partial(jnp.zeros, shape, placement.dtype, device=placement.cache)
        return [(zeros(), zeros()) for _ in range(config.num_layers)]

    def fitted(self, cache: Cache, length: int) -> Cache:
        """The same first `length` positions, with room for them and not much more, as a step reads all of the cache. The
        gap between growing and shrinking keeps it from doing both in turn."""
        length, now = self.length_bucket(length), cache[0][0].shape[2]
        return self._resize(cache, length) if length > now or 4 * length <= now else cache

    def prefill(self, params: Params, cache: Cache, work: Prefill) -> Cache:
        """Fills the cache for prompts. Nothing is waited for: the next decode step comes after it on the device."""
        if not work.prompts:
            return cache
        length = bucket(work.longest, min(MIN_PREFILL, self._max_length), self._max_length)
        tokens = np.zeros((bucket(len(work.prompts), 1, self._num_slots), length), np.int32)
        for row, prompt in zip(tokens, work.prompts):
            row[: len(prompt)] = prompt
        cache = self._prefill(params, cache, tokens, self._padded_slots(work.slots, len(tokens)))
        if work.copies:
            count = bucket(len(work.copies), 1, self._num_slots)
            sources, targets = (self._padded_slots(slots, count) for slots in zip(*work.copies))
            cache = self._copy(cache, sources, targets, length)
        return cache

    def decode(
        self, params: Params, cache: Cache, tokens: np.ndarray, positions: np.ndarray, settings: Settings
    ) -> tuple[Drawn, Cache]:
        """One step over the first `len(tokens)` slots: takes each slot's newest token, at its position, and draws the
        next."""
        logits, cache = self._decode(params, cache, tokens, positions)
        return _sample(logits, positions + 1, settings), cache

    def score(self, params: Params, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Raw logprobs of each sequence's tokens but the first."""
        length = bucket(max(map(len, sequences)), MIN_LENGTH, 1 << 30)
        tokens = np.zeros((bucket(len(sequences), 1, 1 << 30), length), np.int32)
        for row, sequence in zip(tokens, sequences):
            row[: len(sequence)] = sequence
        scores = np.asarray(self._score(params, tokens))
        return [row[: len(sequence) - 1] for row, sequence in zip(scores, sequences)]

    def slot_bucket(self, count: int) -> int:
        """Slots to step over when the first `count` hold all live sequences: all of them, a quarter, a sixteenth …"""
        size = self._num_slots
        while size > 1 and -(-size // 4) >= count:
            size = -(-size // 4)
        return size

    def length_bucket(self, length: int) -> int:
        return bucket(length, min(MIN_LENGTH, self._max_length), self._max_length)

    def _padded_slots(self, slots: Sequence[int], count: int) -> np.ndarray:
        """A slot that does not exist fills up; what is written there is dropped."""
        return np.array([*slots, *[self._num_slots] * (count - len(slots))], np.int32)

    # --- traced ---

    def _prefill_program(self, params: Params, cache: Cache, tokens: jax.Array, slots: jax.Array) -> Cache:
        length = tokens.shape[1]

        def attention(
            q: jax.Array, k: jax.Array, v: jax.Array, layer: CacheLayer, how: LayerAttention
        ) -> tuple[jax.Array, CacheLayer]:
            out, _ = causal_attention(q, k, v, None, how)
            keys, values = layer
            keys = keys.at[slots, :, :length].set(k.swapaxes(1, 2), mode="drop")
            values = values.at[slots, :, :length].set(v.swapaxes(1, 2), mode="drop")
            return out, (keys, values)

        positions = jnp.arange(length, dtype=jnp.int32)[None]
        return apply_layers(params, self._config, tokens, positions, attention, cache)[1]

    def _decode_program(
        self, params: Params, cache: Cache, tokens: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, Cache]:
        num_rows = tokens.shape[0]
        rows = jnp.arange(num_rows)

        def attention(
            q: jax.Array, k: jax.Array, v: jax.Array, layer: CacheLayer, how: LayerAttention
        ) -> tuple[jax.Array, CacheLayer]:
            keys, values = layer
            keys = keys.at[rows, :, positions].set(k[:, 0])
            values = values.at[rows, :, positions].set(v[:, 0])
            seen_keys, seen_values = (x[:num_rows].swapaxes(1, 2) for x in (keys, values))
            mask = visible(positions[:, None], keys.shape[2], how.window)
            return attend(q, seen_keys, seen_values, mask, how), (keys, values)

        hidden, cache = apply_layers(params, self._config, tokens[:, None], positions[:, None], attention, cache)
        return unembed(params, self._config, hidden[:, 0]), cache

    def _score_program(self, params: Params, tokens: jax.Array) -> jax.Array:
        rows, length = tokens.shape
        positions = jnp.arange(length, dtype=jnp.int32)[None]
        hidden, _ = apply_layers(params, self._config, tokens, positions, causal_attention, None)
        targets = jnp.roll(tokens, -1, axis=1)  # the last column is meaningless, and cut off
        block = length  # a power of two, and so are its halves
        while block > 1 and rows * block * self._config.vocab_size > MAX_SCORE_LOGITS:
            block //= 2
        blocked = (hidden.reshape(rows, -1, block, hidden.shape[-1]), targets.reshape(rows, -1, block))

        def one_block(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
            return token_logprobs(unembed(params, self._config, pair[0]), pair[1])

        scores = jax.lax.map(one_block, jax.tree.map(lambda x: x.swapaxes(0, 1), blocked))
        return scores.swapaxes(0, 1).reshape(rows, length)[:, :-1]


def _copy_program(cache: Cache, sources: jax.Array, targets: jax.Array, length: int) -> Cache:
    def copied(x: jax.Array) -> jax.Array:
        return x.at[targets, :, :length].set(x.at[sources, :, :length].get(mode="clip"), mode="drop")

    return jax.tree.map(copied, cache)


def _resize_program(cache: Cache, length: int) -> Cache:
    def resized(x: jax.Array) -> jax.Array:
        x = x[:, :, :length]
        return jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)))

    return jax.tree.map(resized, cache)
