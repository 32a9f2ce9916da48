"""Runs planned ticks: builds the arrays, calls the programs, reads the results. Owns the KV cache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from slipstream.engines.embedded.compute.adapter_slots import AdapterSlots, StagedAdapter
from slipstream.engines.embedded.compute.attention import SharedPrefixes
from slipstream.engines.embedded.compute.program_choice import ProgramChoice, ProgramSize
from slipstream.engines.embedded.compute.programs import (
    DECODE,
    DECODE_GROUPS,
    PREFILL,
    SCORE,
    VERIFY,
    Cache,
    DecodeBatch,
    DecodeResult,
    PrefillBatch,
    Programs,
)
from slipstream.engines.embedded.compute.prompt_lookup import lookup
from slipstream.engines.embedded.compute.route_pages import take_routes
from slipstream.engines.embedded.sampling.batch_settings import BatchSettings, is_rich
from slipstream.engines.embedded.scheduling.scheduler import PrefillChunk, Tick
from slipstream.engines.frontend.sequence import Sample
from slipstream.model.transformer.decoder import Params
from slipstream.types import MemoryReport, MemoryTag, TopLogprobs

GROUP_SIZE = 8
"""Rows that attend to shared pages together."""


class Policy(NamedTuple):
    """The weights of one policy version."""

    params: Params | None
    """None once sleep level 2 has dropped them."""
    version: int
    draft: Params | None = None
    """Weights of the draft model, if any; they belong to the same version."""


class StagedUpdate(NamedTuple):
    """What an update brings."""

    version: int
    policy: Policy | None
    """None if the base model stays as it is."""
    adapters: Sequence[StagedAdapter] = ()

    @property
    def names(self) -> tuple[str, ...] | None:
        """The adapters whose results it changes; None if it changes all results."""
        return None if self.policy is not None else tuple(staged.lora.name for staged in self.adapters)


class Executor:
    """Dispatches a tick as a whole, then waits for it once: `dispatch(policy, tick).wait(version)`."""

    def __init__(self, programs: Programs, draft: Programs | None = None, adapters: AdapterSlots | None = None) -> None:
        self._programs, self._draft, self.adapters = programs, draft, adapters
        self._models = [programs] if draft is None else [programs, draft]
        self.shapes = programs.shapes
        self._cache: Cache | None = None
        """None while a tick is being dispatched: the programs take its donated buffers, which a failure loses."""
        self._draft_cache: Cache | None = None
        self._has_cache = False
        self._has_groups = False
        """Rows that start with the same pages have been seen. From then on one kind of program decodes all batches."""
        self._watch = ThreadPoolExecutor(1, thread_name_prefix="slipstream-clock")
        """Waits for prefills to end. On a GPU the thread that dispatches cannot: XLA returns from a loop's dispatch, and so
        from that of a decode program, only with its last step."""

    def close(self) -> None:
        self._watch.shutdown(wait=False)

    @property
    def activity(self) -> str:
        """The program being compiled, in words; empty if there is none."""
        return next((programs.choice.compiling for programs in self._models if programs.choice.compiling), "")

    @property
    def num_programs(self) -> int:
        return sum(len(programs.choice.compiled) for programs in self._models)

    @property
    def compile_seconds(self) -> float:
        return sum((sum(programs.choice.compiled.values()) for programs in self._models), 0.0)

    # --- memory ---

    def drop_cache(self) -> None:
        """Free the KV cache and lose its contents."""
        self._cache, self._draft_cache, self._has_cache = None, None, False

    def make_cache(self) -> None:
        if not self._has_cache:
            self._cache = self._programs.new_cache()
            self._draft_cache = self._draft.new_cache() if self._draft else None
            self._has_cache = True

    def to_devices(self, policy: Policy) -> Policy:
        """The policy with its weights on the devices, and the adapters there, too."""
        if self.adapters is not None:
            self.adapters.wake()
        params, draft = policy.params, policy.draft
        if params is not None:
            params = self._programs.placement.to_devices(params)
        if draft is not None and self._draft is not None:
            draft = self._draft.placement.to_devices(draft)
        return Policy(params, policy.version, draft)

    def copy_weights(self, policy: Policy) -> Policy:
        """The policy with its weights copied to memory that the engine owns."""
        if policy.params is None:
            return policy
        return policy._replace(params=self._programs.placement.place(policy.params))

    def offload(self, policy: Policy, keep: bool) -> Policy:
        """The policy with its weights in host memory, or dropped unless `keep`. On CPU nothing moves. Adapters are kept in any
        case: an update of the base model does not bring them."""
        if self.adapters is not None:
            self.adapters.sleep()
        if not keep:
            return Policy(None, policy.version)
        return Policy(jax.device_get(policy.params), policy.version, jax.device_get(policy.draft))

    def memory(self, policy: Policy | None, asleep: tuple[MemoryTag, ...]) -> MemoryReport:
        weights = 0 if policy is None else _device_bytes((policy.params, policy.draft))
        weights += 0 if self.adapters is None else _device_bytes(self.adapters.stacks)
        kv_cache = sum(programs.cache_bytes for programs in self._models) if self._has_cache else 0
        return MemoryReport(weights, kv_cache, self._programs.placement.bytes_in_use(), asleep)

    # --- a tick ---

    def dispatch(self, policy: Policy, tick: Tick) -> DispatchedTick:
        """Dispatch a tick asynchronously. If this raises, the cache is lost and must be dropped."""
        params, programs, draft = policy.params, self._programs, self._draft
        stacks = None if self.adapters is None else self.adapters.stacks
        assert params is not None, "no tick is planned while the weights are asleep"
        self.make_cache()
        cache, draft_cache = self._cache, self._draft_cache
        self._cache = self._draft_cache = None
        assert cache is not None
        dispatched = DispatchedTick(tick, self.shapes.block, programs.choice)
        if tick.copies:
            cache = programs.copy(cache, tick.copies)
            if draft and draft_cache:
                draft_cache = draft.copy(draft_cache, tick.copies)
        if tick.prefill:
            batch, size = self._prefill_batch(tick.prefill, PREFILL)
            started = self._started(size)
            prefilled, cache = programs.prefill(params, cache, batch, stacks)
            ended = self._watch.submit(_ended_at, prefilled) if tick.decode else None
            dispatched.prefill = ProgramRun(prefilled, size, started or time.perf_counter(), ended)
            if draft and draft_cache:
                _, draft_cache = draft.prefill(policy.draft or {}, draft_cache, batch)
        if tick.scoring:
            wants_top = any(chunk.sample.request.sampling.top_logprobs for chunk in tick.scoring)
            batch, size = self._prefill_batch(tick.scoring, SCORE[wants_top])
            started = self._started(size)
            scores, cache = programs.score(params, cache, batch, programs.max_top if wants_top else 0, stacks)
            dispatched.scoring = ProgramRun(scores, size, started or time.perf_counter())
        if tick.decode:
            rich = any(is_rich(sample.request.sampling) for sample in tick.decode)
            num_speculative = 0 if rich else self.shapes.num_speculative
            if not self._has_groups and programs.shares_prefixes:
                self._has_groups = has_shared_pages(tick.decode)
            decode = DECODE_GROUPS if self._has_groups else DECODE
            program = VERIFY if num_speculative else decode[rich]
            size = programs.choice.choose(program, self.shapes.rows, len(tick.decode), tick.upcoming)
            rows, settings = self._decode_batch(tick, size.taken), self._settings(tick.decode, size.taken, rich)
            started = self._started(size)
            if num_speculative:
                draft_tokens: Any
                if draft and draft_cache:
                    drafted, draft_cache = draft.decode(
                        policy.draft or {}, draft_cache, rows, settings, num_speculative + 1, None
                    )
                    draft_tokens = drafted.tokens[:num_speculative].T
                    num_drafted = np.full(len(tick.decode), num_speculative)
                else:
                    found = (lookup(sample.ids, num_speculative) for sample in tick.decode)
                    draft_tokens = _padded(found, len(rows.tokens), num_speculative, -1)
                    num_drafted = (draft_tokens[: len(tick.decode)] >= 0).sum(axis=1)
                dispatched.num_drafted = int(np.minimum(num_drafted, np.array(tick.room) - 1).sum())
                result, cache = programs.verify(params, cache, rows, settings, draft_tokens, stacks)
            else:
                sequences = (sample.ids for sample in tick.decode)
                history = _padded(sequences, len(rows.tokens), self.shapes.max_length, -1) if rich else None
                result, cache = programs.decode(
                    params, cache, rows, settings, tick.steps, history, tick.early_exit_rows, stacks
                )
            dispatched.decode = ProgramRun(result, size, started or time.perf_counter())
        self._cache, self._draft_cache = cache, draft_cache
        return dispatched

    def _started(self, size: ProgramSize) -> float | None:
        """The time, from which a program's own counts; None if the call compiles it, which is not the device's work."""
        return time.perf_counter() if (size.name, size.taken) in self._programs.choice.compiled else None

    def take_routes(self, samples: Sequence[Sample]) -> None:
        """Give finished samples the experts of their tokens, if they are recorded. Call while they have their pages."""
        if samples and self._cache is not None and self._cache.routes is not None:
            take_routes(self._cache.routes, self._programs.config, samples)

    # --- arrays ---

    def _prefill_batch(self, chunks: Sequence[PrefillChunk], program: str) -> tuple[PrefillBatch, ProgramSize]:
        block = self.shapes.block
        starts = [(chunk, start) for chunk in chunks for start in range(chunk.start, chunk.stop, block)]
        size = self._programs.choice.choose(program, self.shapes.blocks, len(starts))
        count = size.taken
        tokens = np.zeros((count, block), np.int32)
        targets = np.zeros((count, block), np.int32)
        positions = np.full((count, block), -1, np.int32)
        tables = np.zeros((count, self.shapes.table_width), np.int32)
        ids = {chunk.sample: np.array(chunk.sample.ids, np.int32) for chunk in chunks}
        for row, (chunk, start) in enumerate(starts):
            stop, sequence = min(start + block, chunk.stop), ids[chunk.sample]
            tokens[row, : stop - start] = sequence[start:stop]
            targets[row, : stop - start] = sequence[start + 1 : stop + 1]
            positions[row, : stop - start] = np.arange(start, stop)
            tables[row, : len(chunk.sample.pages)] = chunk.sample.pages
        is_scoring = chunks[0].sample.request.is_scoring
        slots = self._slots([chunk.sample for chunk, _ in starts], count)
        return PrefillBatch(tokens, positions, tables, targets if is_scoring else None, slots=slots), size

    def _decode_batch(self, tick: Tick, count: int) -> DecodeBatch:
        samples = tick.decode
        tokens, room = np.zeros(count, np.int32), np.zeros(count, np.int32)
        positions = np.full(count, -1, np.int32)
        tables = _padded((s.pages for s in samples), count, self.shapes.table_width, 0)
        tokens[: len(samples)] = [(s.tokens or s.request.prompt)[-1] for s in samples]
        positions[: len(samples)] = [s.length - 1 for s in samples]
        room[: len(samples)] = tick.room
        shared = shared_prefixes(samples, count) if self._has_groups else None
        return DecodeBatch(tokens, positions, room, tables, shared, self._slots(samples, count))

    def _slots(self, samples: Sequence[Sample], count: int) -> np.ndarray | None:
        if self.adapters is None:
            return None
        return self.adapters.rows([sample.request.adapter for sample in samples], count)

    def _settings(self, samples: Sequence[Sample], count: int, rich: bool) -> BatchSettings:
        for sample in samples:
            if sample.settings is None:
                request = sample.request
                sample.settings = BatchSettings.row(
                    request.sampling, request.seed, sample.sample_index, len(request.prompt), request.stop_ids
                )
        return BatchSettings.stack([s.settings for s in samples], count, rich)


def _padded(rows: Iterable[Sequence[int]], count: int, width: int, padding: int) -> np.ndarray:
    """`[count, width]`: the rows, padded at the end."""
    padded = np.full((count, width), padding, np.int32)
    for target, row in zip(padded, rows):
        target[: len(row)] = row
    return padded


def has_shared_pages(samples: Sequence[Sample]) -> bool:
    return len({sample.pages[0] for sample in samples}) < len(samples)


def shared_prefixes(samples: Sequence[Sample], num_rows: int) -> SharedPrefixes:
    """Group rows that start with the same pages, as the samples of one prompt do. Only full pages, which are never written
    again, are shared; so comparing page numbers is enough."""
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.pages[0], []).append(row)
    rows = np.full((num_rows // 4, GROUP_SIZE), num_rows, np.int32)
    num_pages = np.zeros(num_rows // 4, np.int32)
    parts = [group[i : i + GROUP_SIZE] for group in groups.values() for i in range(0, len(group), GROUP_SIZE)]
    for place, part in enumerate([part for part in parts if len(part) > 1][: len(rows)]):
        rows[place, : len(part)] = part
        num_pages[place] = _num_common([samples[row].pages for row in part])
    return SharedPrefixes(rows, num_pages)


def _num_common(tables: Sequence[Sequence[int]]) -> int:
    columns = zip(*tables)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def _ended_at(result: Any) -> float:
    jax.block_until_ready(result)
    return time.perf_counter()


class ProgramRun(NamedTuple):
    """A dispatched program and its result on the device."""

    result: Any
    size: ProgramSize
    started: float
    """When it was dispatched, or had been compiled. Its time counts from then on, or from the end of the program before it."""
    ended: Future[float] | None = None
    """When the device was done, if another program follows; otherwise that is when its result has been fetched."""


class DispatchedTick:
    """A tick on the device."""

    def __init__(self, tick: Tick, block: int, choice: ProgramChoice) -> None:
        self._tick, self._block, self._choice = tick, block, choice
        self.prefill: ProgramRun | None = None
        self.scoring: ProgramRun | None = None
        self.decode: ProgramRun | None = None
        self.num_drafted = 0
        self._ended = 0.0
        """When the last program that was fetched had ended."""

    def wait(self, version: int) -> TickResult:
        """Wait for the device and append the results to the samples."""
        prefill = scoring = decode = 0.0
        if self.prefill is not None:
            _, prefill = self._fetch(self.prefill)
        if self.scoring is not None:
            scores, scoring = self._fetch(self.scoring)
            self._add_scores(scores, version)
        num_drawn = num_steps = num_accepted = 0
        if self.decode is not None:
            result: DecodeResult
            result, decode = self._fetch(self.decode)
            num_drawn, num_steps = int(result.num_drawn.sum()), int(result.num_drawn.max(initial=0))
            self._add_tokens(result, version)
            num_accepted = num_drawn - len(self._tick.decode) if self.num_drafted else 0
        return TickResult(prefill + scoring, decode, num_drawn, num_steps, self.num_drafted, num_accepted)

    def _fetch(self, run: ProgramRun) -> tuple[Any, float]:
        """Return the result, and how long the device took for it."""
        result = jax.device_get(run.result)
        ended = time.perf_counter() if run.ended is None else run.ended.result()
        seconds = ended - max(run.started, self._ended)
        self._ended = ended
        self._choice.record(run.size, seconds)
        return result, seconds

    def _add_scores(self, scores: Sequence[np.ndarray], version: int) -> None:
        row = 0
        for chunk in self._tick.scoring:
            count = -(-(chunk.stop - chunk.start) // self._block)
            flat = [
                x[row : row + count].reshape(count * self._block, *x.shape[2:])[: chunk.stop - chunk.start]
                for x in scores
            ]
            row += count
            sample, num_top = chunk.sample, chunk.sample.request.sampling.top_logprobs
            sample.raw_logprobs += flat[0].tolist()
            sample.versions = [(version, 0)]
            if num_top:
                sample.top_logprobs += _top_logprobs(flat[1], flat[2], num_top)

    def _add_tokens(self, result: DecodeResult, version: int) -> None:
        tokens, logprobs, raw = (np.asarray(x).T.tolist() for x in result[:3])
        for row, (sample, count) in enumerate(zip(self._tick.decode, result.num_drawn.tolist())):
            top, num_top = [], sample.request.sampling.top_logprobs
            if num_top:
                top = _top_logprobs(result.top_ids[:count, row], result.top_logprobs[:count, row], num_top)
            stopped = bool(result.stopped[row])
            sample.extend(tokens[row][:count], logprobs[row][:count], raw[row][:count], top, stopped, version)


class TickResult(NamedTuple):
    """Counts of a finished tick, and how long the device worked on it."""

    prefill_seconds: float
    """Scoring included."""
    decode_seconds: float
    num_drawn: int
    num_steps: int
    num_drafted: int
    num_accepted: int


def _device_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))


def _top_logprobs(ids: np.ndarray, logprobs: np.ndarray, count: int) -> list[TopLogprobs]:
    pairs = zip(ids[:, :count].tolist(), logprobs[:, :count].tolist())
    return [TopLogprobs(tuple(row_ids), tuple(row)) for row_ids, row in pairs]
