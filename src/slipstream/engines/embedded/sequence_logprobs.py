"""Logprobs of whole sequences, computed by the engine's own programs from a trainer's weights.

A trainer whose forward pass is a program of its own gets logprobs that differ from the engine's in their last bits: matrix
products, softmax and sums are added in another order. Here the sequences are cut into the engine's blocks, their keys and
values go to pages of the engine's size, and the programs for prefill and scoring compute them. Tokens that the engine drew with
the same weights get the same logprobs, to the bit, wherever the engine's own results do not depend on the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.assembly import programs_for, shapes_for
from slipstream.engines.embedded.compute.programs import PrefillBatch
from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.model.transformer.decoder import Params

CPU_TOKENS = 1024
"""Tokens per call on CPU, where results do not depend on their number. Elsewhere it is the engine's."""
CACHE_BYTES = 2 << 30
"""The most memory for keys and values, except that one sequence must fit. Further sequences are computed afterwards."""


class _Blocks(NamedTuple):
    """Consecutive tokens `[start, stop)` of sequences, at most a block each. Arrays of the same length."""

    row: np.ndarray
    start: np.ndarray
    stop: np.ndarray


class SequenceLogprobs:
    """`logprobs = SequenceLogprobs(model, options)`, then `logprobs(params, tokens, wanted, temperature)`.

    `options` are those of the engines, of which the trainer must have as many devices as one engine has."""

    def __init__(self, model: ModelConfig, options: EmbeddedConfig) -> None:
        on_cpu = jax.default_backend() == "cpu"
        if not on_cpu and not options.deterministic:
            raise ConfigError(
                "equal logprobs need deterministic=True in the engine's config on an accelerator; otherwise results depend "
                "on the batch there"
            )
        self._model = model
        self._options = options.resolve_dtype(model.dtype).replace(speculation="off", draft_model="")
        shapes = replace(shapes_for(model, self._options), num_pages=1)
        if on_cpu:
            shapes = replace(shapes, blocks=(CPU_TOKENS // shapes.block,))
        self._programs = programs_for(model, self._options, shapes)
        self._max_pages = max(shapes.table_width, CACHE_BYTES // self._programs.cache_bytes)

    def __call__(self, params: Params, tokens: np.ndarray, wanted: np.ndarray, temperature: float) -> np.ndarray:
        """`[rows, length − 1]`: where `wanted`, the logprob of `tokens[:, t + 1]` under the distribution at `temperature`, from
        which the engine draws; 0 elsewhere. `tokens` is `[rows, length]`, padded on the right."""
        tokens, wanted = np.asarray(tokens), np.asarray(wanted)
        logprobs = np.zeros(wanted.shape, np.float32)
        params = self._programs.placement.place(params, copy=False)
        for rows in self._waves(wanted):
            logprobs[rows] = self._compute(params, tokens[rows], wanted[rows], np.float32(temperature))
        return logprobs

    def _waves(self, wanted: np.ndarray) -> Iterator[np.ndarray]:
        """Rows that have room in the cache at the same time; those without a wanted token are left out."""
        page_size, wave, room = self._programs.shapes.page_size, list[int](), self._max_pages
        for row in np.flatnonzero(wanted.any(axis=1)).tolist():
            needed = _last(wanted[row]) // page_size + 1
            if needed > room:
                yield np.array(wave)
                wave, room = [], self._max_pages
            wave.append(row)
            room -= needed
        if wave:
            yield np.array(wave)

    def _compute(self, params: Params, tokens: np.ndarray, wanted: np.ndarray, temperature: np.float32) -> np.ndarray:
        tables, num_pages, prefill, scoring = self._plan(tokens, wanted)
        self._grow(num_pages)
        programs, cache, scores = self._programs, self._programs.new_cache(), []
        for blocks in self._calls(prefill):
            _, cache = programs.prefill(params, cache, self._batch(blocks, tokens, tables)[0])
        for blocks in self._calls(scoring):
            batch, valid = self._batch(blocks, tokens, tables)
            (score,), cache = programs.score(params, cache, batch._replace(temperature=temperature), 0)
            scores.append((blocks, batch.positions[valid], valid, score))
        logprobs = np.zeros(wanted.shape, np.float32)
        for blocks, positions, valid, score in scores:
            rows = np.repeat(blocks.row, valid[: len(blocks.row)].sum(axis=1))
            logprobs[rows, positions] = np.asarray(score)[valid]
        return np.where(wanted, logprobs, 0.0)

    def _plan(self, tokens: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, int, _Blocks, _Blocks]:
        """Page tables, the number of pages, and the blocks to prefill and to score. Sequences that begin alike, as the samples
        of a prompt do, share the full pages that precede the first wanted token."""
        shapes, known, num_pages = self._programs.shapes, dict[tuple[int, bytes], int](), 0
        tables = np.zeros((len(tokens), shapes.table_width), np.int32)
        prefill, scoring = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
        for row, (sequence, at) in enumerate(zip(tokens, wanted)):
            first, stop, start, before = int(at.argmax()), _last(at) + 1, 0, -1
            for place, begin in enumerate(range(0, stop, shapes.page_size)):
                end = begin + shapes.page_size
                key = (before, sequence[begin:end].tobytes())
                if end <= first and key in known:
                    before, start = known[key], end
                else:
                    before, num_pages = num_pages, num_pages + 1
                    if end <= first:
                        known[key] = before
                tables[row, place] = before
            middle = start + (first - start) // shapes.block * shapes.block
            prefill.append((row, start, middle))
            scoring.append((row, middle, stop))
        return tables, num_pages, self._cut(prefill), self._cut(scoring)

    def _cut(self, parts: list[tuple[int, int, int]]) -> _Blocks:
        block = self._programs.shapes.block
        starts = [np.arange(start, stop, block) for _, start, stop in parts]
        counts = [len(each) for each in starts]
        row, stop = (np.repeat([part[i] for part in parts], counts) for i in (0, 2))
        start = np.concatenate(starts)
        return _Blocks(row, start, np.minimum(start + block, stop))

    def _calls(self, blocks: _Blocks) -> Iterator[_Blocks]:
        (size,) = self._programs.shapes.blocks
        for begin in range(0, len(blocks.row), size):
            yield _Blocks(*(column[begin : begin + size] for column in blocks))

    def _batch(self, blocks: _Blocks, tokens: np.ndarray, tables: np.ndarray) -> tuple[PrefillBatch, np.ndarray]:
        """The arguments of a call, and which of its positions are not padding."""
        (size,), block = self._programs.shapes.blocks, self._programs.shapes.block
        row, start, stop = (np.pad(column, (0, size - len(blocks.row))) for column in blocks)
        positions = start[:, None] + np.arange(block)
        valid = positions < stop[:, None]
        now, later = (np.where(valid, positions + i, 0) for i in (0, 1))
        here, targets = (tokens[row[:, None], at].astype(np.int32) for at in (now, later))
        positions = np.where(valid, positions, -1).astype(np.int32)
        return PrefillBatch(here, positions, tables[row], targets), valid

    def _grow(self, num_pages: int) -> None:
        """A larger cache is another program, so it at least doubles."""
        shapes = self._programs.shapes
        if num_pages > shapes.num_pages:
            num_pages = min(1 << (num_pages - 1).bit_length(), self._max_pages)
            self._programs = programs_for(self._model, self._options, replace(shapes, num_pages=num_pages))


def _last(flags: np.ndarray) -> int:
    return len(flags) - 1 - int(flags[::-1].argmax())
