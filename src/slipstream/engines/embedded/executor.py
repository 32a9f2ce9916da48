"""From a planned tick to arrays, programs and back. Owns the KV cache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from slipstream.engines.embedded.attention import Shared
from slipstream.engines.embedded.placement import to_host
from slipstream.engines.embedded.programs import DECODE, PREFILL, SCORE, VERIFY, Cache, Chunk, Programs, Rows, Steps
from slipstream.engines.embedded.scheduler import Piece, Tick
from slipstream.engines.embedded.settings import Settings, is_rich
from slipstream.engines.embedded.speculative import lookup
from slipstream.engines.embedded.thrift import Size, Thrift
from slipstream.engines.sequence import Sample
from slipstream.model.decoder import Params
from slipstream.types import MemoryReport, MemoryTag, TopLogprobs

MEMBERS = 8
"""Rows that look at shared pages together."""


class Policy(NamedTuple):
    params: Params | None
    """None while the weights are asleep."""
    version: int
    draft: Params | None = None
    """Of the draft model, where there is one: a part of the same version."""


class Executor:
    """A tick is dispatched as a whole and then waited for once: `dispatch(policy, tick).wait(version)`."""

    def __init__(self, programs: Programs, draft: Programs | None = None, guesses: int = 0) -> None:
        self._programs, self._draft, self._guesses = programs, draft, guesses
        self._models = [programs] if draft is None else [programs, draft]
        self.shapes = programs.shapes
        self._cache: Cache | None = None
        """None while a tick is being dispatched: it is in its hands, and lost if that fails."""
        self._draft_cache: Cache | None = None
        self._has_cache = False

    @property
    def max_steps(self) -> int:
        return self.shapes.max_steps

    @property
    def num_programs(self) -> int:
        return sum(len(programs.thrift.compiled) for programs in self._models)

    @property
    def compile_seconds(self) -> float:
        return sum((sum(programs.thrift.compiled.values()) for programs in self._models), 0.0)

    # --- memory ---

    def drop_cache(self) -> None:
        """Gives the pages' memory back. What was in them is gone."""
        self._cache, self._draft_cache, self._has_cache = None, None, False

    def make_cache(self) -> None:
        if not self._has_cache:
            self._cache = self._programs.new_cache()
            self._draft_cache = self._draft.new_cache() if self._draft else None
            self._has_cache = True

    def placed(self, policy: Policy) -> Policy:
        """With its weights on the devices, wherever they were."""
        params, draft = policy.params, policy.draft
        if params is not None:
            params = self._programs.placement.to_devices(params)
        if draft is not None and self._draft is not None:
            draft = self._draft.placement.to_devices(draft)
        return Policy(params, policy.version, draft)

    def copied(self, policy: Policy) -> Policy:
        """With its weights in memory that nobody else has."""
        return (
            policy if policy.params is None else policy._replace(params=self._programs.placement.place(policy.params))
        )

    def without_weights(self, policy: Policy, keep: bool) -> Policy:
        """Off the devices: in host memory if they are to be kept, else nowhere."""
        if not keep:
            return Policy(None, policy.version)
        return Policy(to_host(policy.params), policy.version, to_host(policy.draft))

    def memory(self, policy: Policy | None, asleep: tuple[MemoryTag, ...]) -> MemoryReport:
        weights = 0 if policy is None else _device_bytes((policy.params, policy.draft))
        kv_cache = sum(programs.cache_bytes for programs in self._models) if self._has_cache else 0
        return MemoryReport(weights, kv_cache, self._programs.placement.bytes_in_use(), asleep)

    # --- a tick ---

    def dispatch(self, policy: Policy, tick: Tick) -> Flight:
        """Hands a tick to the device. Should it raise, the cache is gone: drop it."""
        params, programs, draft = policy.params, self._programs, self._draft
        assert params is not None, "no tick is planned while the weights are asleep"
        self.make_cache()
        cache, draft_cache = self._cache, self._draft_cache
        self._cache = self._draft_cache = None
        assert cache is not None
        flight = Flight(tick, self.shapes.block, programs.thrift)
        if tick.copies:
            cache = programs.copy(cache, tick.copies)
            if draft and draft_cache:
                draft_cache = draft.copy(draft_cache, tick.copies)
        if tick.prefill:
            chunk, size = self._chunk(tick.prefill, PREFILL)
            prefilled, cache = programs.prefill(params, cache, chunk)
            flight.prefill = Work(prefilled, size)
            if draft and draft_cache:
                _, draft_cache = draft.prefill(policy.draft or {}, draft_cache, chunk)
        if tick.scoring:
            wants_top = any(piece.sample.ticket.sampling.top_logprobs for piece in tick.scoring)
            chunk, size = self._chunk(tick.scoring, SCORE[wants_top])
            scores, cache = programs.score(params, cache, chunk, programs.max_top if wants_top else 0)
            flight.scoring = Work(scores, size)
        if tick.decode:
            rich = any(is_rich(sample.ticket.sampling) for sample in tick.decode)
            guessing = self._guesses and not rich
            program = VERIFY if guessing else DECODE[rich]
            size = programs.thrift.choose(program, self.shapes.rows, len(tick.decode), tick.soon)
            rows, settings = self._rows(tick, size.taken), self._settings(tick.decode, size.taken, rich)
            if guessing:
                guesses: Any
                if draft and draft_cache:
                    drafted, draft_cache = draft.decode(
                        policy.draft or {}, draft_cache, rows, settings, self._guesses + 1, None
                    )
                    guesses = drafted.tokens[: self._guesses].T
                    found = np.full(len(tick.decode), self._guesses)
                else:
                    guesses = self._lookups(tick.decode, len(rows.tokens))
                    found = (guesses[: len(tick.decode)] >= 0).sum(axis=1)
                flight.num_guessed = int(np.minimum(found, np.array(tick.room) - 1).sum())
                steps, cache = programs.verify(params, cache, rows, settings, guesses)
            else:
                history = self._history(tick.decode, len(rows.tokens)) if rich else None
                steps, cache = programs.decode(params, cache, rows, settings, tick.steps, history, tick.floor)
            flight.decode = Work(steps, size)
        self._cache, self._draft_cache = cache, draft_cache
        return flight

    # --- arrays ---

    def _chunk(self, pieces: Sequence[Piece], program: str) -> tuple[Chunk, Size]:
        block = self.shapes.block
        starts = [(piece, start) for piece in pieces for start in range(piece.start, piece.stop, block)]
        size = self._programs.thrift.choose(program, self.shapes.blocks, len(starts))
        count = size.taken
        tokens = np.zeros((count, block), np.int32)
        targets = np.zeros((count, block), np.int32)
        positions = np.full((count, block), -1, np.int32)
        tables = np.zeros((count, self.shapes.table_width), np.int32)
        ids = {piece.sample: np.array(piece.sample.ids, np.int32) for piece in pieces}
        for row, (piece, start) in enumerate(starts):
            stop, sequence = min(start + block, piece.stop), ids[piece.sample]
            tokens[row, : stop - start] = sequence[start:stop]
            targets[row, : stop - start] = sequence[start + 1 : stop + 1]
            positions[row, : stop - start] = np.arange(start, stop)
            tables[row, : len(piece.sample.pages)] = piece.sample.pages
        return Chunk(tokens, positions, tables, targets if pieces[0].sample.ticket.is_scoring else None), size

    def _rows(self, tick: Tick, count: int) -> Rows:
        samples = tick.decode
        tokens, room = np.zeros(count, np.int32), np.zeros(count, np.int32)
        positions = np.full(count, -1, np.int32)
        tables = np.zeros((count, self.shapes.table_width), np.int32)
        tokens[: len(samples)] = [(s.tokens or s.ticket.prompt)[-1] for s in samples]
        positions[: len(samples)] = [s.length - 1 for s in samples]
        room[: len(samples)] = tick.room
        for row, sample in zip(tables, samples):
            row[: len(sample.pages)] = sample.pages
        return Rows(tokens, positions, room, tables, shared_pages(samples, count))

    def _settings(self, samples: Sequence[Sample], count: int, rich: bool) -> Settings:
        for sample in samples:
            if sample.settings is None:
                ticket = sample.ticket
                sample.settings = Settings.row(
                    ticket.sampling, ticket.seed, sample.sample_index, len(ticket.prompt), ticket.stop
                )
        return Settings.stack([s.settings for s in samples], count, rich)

    def _history(self, samples: Sequence[Sample], count: int) -> np.ndarray:
        history = np.full((count, self.shapes.max_length), -1, np.int32)
        for row, sample in zip(history, samples):
            row[: sample.length] = sample.ids
        return history

    def _lookups(self, samples: Sequence[Sample], count: int) -> np.ndarray:
        guesses = np.full((count, self._guesses), -1, np.int32)
        for row, sample in zip(guesses, samples):
            found = lookup(sample.ids, self._guesses)
            row[: len(found)] = found
        return guesses


def shared_pages(samples: Sequence[Sample], num_rows: int) -> Shared:
    """Groups of rows that begin with the same pages: the samples of a prompt. A page is shared only when it is full and will
    not be written again, so equal page ids are all there is to look for."""
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.pages[0], []).append(row)
    rows = np.full((num_rows // 4, MEMBERS), num_rows, np.int32)
    num_pages = np.zeros(num_rows // 4, np.int32)
    parts = [group[i : i + MEMBERS] for group in groups.values() for i in range(0, len(group), MEMBERS)]
    for place, part in enumerate([part for part in parts if len(part) > 1][: len(rows)]):
        rows[place, : len(part)] = part
        num_pages[place] = _num_common([samples[row].pages for row in part])
    return Shared(rows, num_pages)


def _num_common(tables: Sequence[Sequence[int]]) -> int:
    columns = zip(*tables)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


class Work(NamedTuple):
    """Of one program."""

    result: Any
    size: Size


class Flight:
    """A tick on the device, where its parts run one after another."""

    def __init__(self, tick: Tick, block: int, thrift: Thrift) -> None:
        self._tick, self._block, self._thrift = tick, block, thrift
        self.prefill: Work | None = None
        self.scoring: Work | None = None
        self.decode: Work | None = None
        self.num_guessed = 0

    def wait(self, version: int) -> Outcome:
        """Waits for the device and gives every sample what is its own."""
        start = time.perf_counter()
        if self.prefill is not None:
            self._land(self.prefill)
        if self.scoring is not None:
            self._take_scores(self._land(self.scoring), version)
        middle = time.perf_counter()
        num_drawn = num_steps = num_accepted = 0
        if self.decode is not None:
            steps: Steps = self._land(self.decode)
            num_drawn, num_steps = int(steps.num_drawn.sum()), int(steps.num_drawn.max(initial=0))
            self._take_steps(steps, version)
            num_accepted = num_drawn - len(self._tick.decode) if self.num_guessed else 0
        end = time.perf_counter()
        return Outcome(middle - start, end - middle, num_drawn, num_steps, self.num_guessed, num_accepted)

    def _land(self, work: Work) -> Any:
        start = time.perf_counter()
        result = jax.device_get(work.result)
        self._thrift.ran(work.size, time.perf_counter() - start)
        return result

    def _take_scores(self, scores: Sequence[np.ndarray], version: int) -> None:
        row = 0
        for piece in self._tick.scoring:
            count = -(-(piece.stop - piece.start) // self._block)
            flat = [
                x[row : row + count].reshape(count * self._block, *x.shape[2:])[: piece.stop - piece.start]
                for x in scores
            ]
            row += count
            sample, num_top = piece.sample, piece.sample.ticket.sampling.top_logprobs
            sample.raw_logprobs += flat[0].tolist()
            sample.versions = [(version, 0)]
            if num_top:
                sample.tops += _tops(flat[1], flat[2], num_top)

    def _take_steps(self, steps: Steps, version: int) -> None:
        tokens, logprobs, raw = (np.asarray(x).T.tolist() for x in steps[:3])
        for row, (sample, count) in enumerate(zip(self._tick.decode, steps.num_drawn.tolist())):
            num_top = sample.ticket.sampling.top_logprobs
            tops = _tops(steps.top_ids[:count, row], steps.top_logprobs[:count, row], num_top) if num_top else []
            stopped = bool(steps.stopped[row])
            sample.extend(tokens[row][:count], logprobs[row][:count], raw[row][:count], tops, stopped, version)


class Outcome(NamedTuple):
    prefill_seconds: float
    decode_seconds: float
    num_drawn: int
    num_steps: int
    num_guessed: int
    num_accepted: int


def _device_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))


def _tops(ids: np.ndarray, logprobs: np.ndarray, count: int) -> list[TopLogprobs]:
    pairs = zip(ids[:, :count].tolist(), logprobs[:, :count].tolist())
    return [TopLogprobs(tuple(row_ids), tuple(row)) for row_ids, row in pairs]
