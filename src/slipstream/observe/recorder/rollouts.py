"""The completions of a step as rows and compressed arrays, and back.

Consecutive samples share a chunk of about `CHUNK_TOKENS` tokens, so that short samples compress well and a long one is read
alone. What repeats is left out: an array is missing where the sample's row says all (one advantage for all tokens)."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from slipstream.observe.recorder.background import yield_to_caller
from slipstream.types import Completion, RolloutGroup

CHUNK_TOKENS = 1 << 16
HEAD_CHARACTERS = 200
"""Characters of a completion in its row. A longer text is in the chunk, too."""
LEVEL = 1
"""zlib's fastest: higher levels save little on logprobs."""


class TrainedTokens(NamedTuple):
    """What the trainer knows of the tokens that it learned from: a batch without packing (`rl/algorithm/batch.py`). Column t of
    each `[B, T − 1]` array describes the token t + 1."""

    tokens: np.ndarray
    """[B, T]"""
    mask: np.ndarray
    logprobs: np.ndarray
    """The engines' logprobs."""
    advantages: np.ndarray
    ages: np.ndarray
    trainer_logprobs: Callable[[], np.ndarray] | None = None
    """Called on the recorder's thread, since the array may be on a device."""


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """All rollout groups of a step, in the order in which they were taken."""

    groups: Sequence[RolloutGroup]
    prompts: Sequence[str]
    """The task's text of each group's prompt."""
    rewards: np.ndarray
    """[groups, samples]; NaN where a sample has no reward."""
    parts: Sequence[Mapping[str, float] | None]
    """For each sample, its rewards by function; empty if the reward has no parts."""
    rows: Sequence[int]
    """For each group, the row of its first sample in `trained`; -1 if the step does not train on it."""
    trained: TrainedTokens


class PlacedSample(NamedTuple):
    group: int
    place: int
    """In its group."""
    completion: Completion
    row: int
    """In `TrainedTokens`; -1 if there is none."""


class Chunk(NamedTuple):
    """The tokens of consecutive samples, one after the other."""

    samples: list[PlacedSample]
    lengths: np.ndarray
    ids: np.ndarray
    engine: np.ndarray
    """The engine's logprobs."""
    raw: np.ndarray | None
    """None if they are the same."""
    gaps: np.ndarray | None
    """The trainer's logprobs minus the engine's."""
    advantages: np.ndarray
    mask: np.ndarray
    ages: np.ndarray
    trained: np.ndarray
    """[samples]: whether the step trains on the sample."""

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths

    def means(self, values: np.ndarray) -> np.ndarray:
        """[samples]: the mean over the tokens of each; NaN without tokens."""
        owner = np.repeat(np.arange(len(self.lengths)), self.lengths)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.bincount(owner, values, len(self.lengths)) / self.lengths

    def largest(self, values: np.ndarray) -> np.ndarray:
        """[samples]: the largest value of each; NaN without tokens."""
        found = np.full(len(self.lengths), np.nan)
        filled = self.lengths > 0
        if filled.any():
            found[filled] = np.maximum.reduceat(values, self.starts[filled])
        return found


def chunks(step: StepRollouts, num_kept: Callable[[int], bool]) -> Iterator[Chunk]:
    """Yield the tokens of a step, chunk by chunk. `num_kept(group)` says whether a group is recorded."""
    trainer = step.trained.trainer_logprobs() if step.trained.trainer_logprobs is not None else None
    waiting: list[PlacedSample] = []
    num_tokens = 0
    for number, group in enumerate(step.groups):
        if not num_kept(number):
            continue
        for index, completion in enumerate(group.completions):
            length = len(completion.token_ids)
            if waiting and num_tokens + length > CHUNK_TOKENS:
                yield _chunk(waiting, step.trained, trainer)
                yield_to_caller()
                waiting, num_tokens = [], 0
            row = step.rows[number] + index if step.rows[number] >= 0 else -1
            waiting.append(PlacedSample(number, index, completion, row))
            num_tokens += length
    if waiting:
        yield _chunk(waiting, step.trained, trainer)


def _chunk(samples: list[PlacedSample], trained: TrainedTokens, trainer: np.ndarray | None) -> Chunk:
    lengths = np.array([len(s.completion.token_ids) for s in samples])
    rows = np.array([s.row for s in samples])
    completions = [s.completion for s in samples]
    differs = any(c.raw_logprobs != c.logprobs for c in completions)
    raw = _joined([c.raw_logprobs for c in completions], lengths, np.float32) if differs else None
    if (rows >= 0).all():
        first = np.array([len(c.prompt_token_ids) for c in completions]) - 1
        place = np.arange(lengths.sum()) + np.repeat(first - (np.cumsum(lengths) - lengths), lengths)
        row = np.repeat(rows, lengths)
        engine = trained.logprobs[row, place]
        gaps = trainer[row, place] - engine if trainer is not None else None
        per_token = (trained.tokens[row, place + 1], engine, raw, gaps, trained.advantages[row, place])
        return Chunk(
            samples, lengths, *per_token, trained.mask[row, place], trained.ages[row, place], np.ones(len(rows), bool)
        )
    # Groups that the step leaves out have no rows. Samples of other groups in the same chunk are read one by one.
    parts = [_of_sample(sample, trained, trainer) for sample in samples]
    ids, engine, gap, advantages, mask, ages = (np.concatenate(columns) for columns in zip(*parts))
    return Chunk(samples, lengths, ids, engine, raw, gap, advantages, mask, ages, rows >= 0)


def _of_sample(sample: PlacedSample, trained: TrainedTokens, trainer: np.ndarray | None) -> tuple[np.ndarray, ...]:
    completion, row = sample.completion, sample.row
    length, first = len(completion.token_ids), len(completion.prompt_token_ids) - 1
    ids = np.array(completion.token_ids, np.uint32)
    engine = np.array(completion.logprobs, np.float32)
    if row < 0:
        none = np.zeros(length, np.float32)
        return ids, engine, np.full(length, np.nan, np.float32), none, none, np.zeros(length, np.int32)
    place = slice(first, first + length)
    gap = trainer[row, place] - engine if trainer is not None else np.full(length, np.nan, np.float32)
    return ids, engine, gap, trained.advantages[row, place], trained.mask[row, place], trained.ages[row, place]


def _joined(columns: Sequence[Sequence[float]], lengths: np.ndarray, dtype: Any) -> np.ndarray:
    """The columns one after the other; NaN for a sample without values."""
    return np.concatenate(
        [np.array(c, dtype) if len(c) == n else np.full(n, np.nan, dtype) for c, n in zip(columns, lengths)]
    )


def zero_variance(rewards: np.ndarray) -> np.ndarray:
    """[groups]: whether all known rewards of a group are equal."""
    known = ~np.isnan(rewards)
    low = np.where(known, rewards, np.inf).min(axis=1)
    high = np.where(known, rewards, -np.inf).max(axis=1)
    return np.asarray(~(low < high))


# --- the tables -------------------------------------------------------------------------------------------------------


def group_rows(
    step: int, rollouts: StepRollouts, kept: Sequence[int], zero_variance: np.ndarray
) -> list[tuple[Any, ...]]:
    """Rows of the table `groups`."""
    rows = []
    for number in kept:
        group = rollouts.groups[number]
        prompt = group.completions[0].prompt_token_ids if group.completions else ()
        rows.append(
            (
                *(
                    step,
                    number,
                    storable(group.id),
                    storable(rollouts.prompts[number]),
                    len(prompt),
                    np.array(prompt, "<u4").tobytes(),
                ),
                *(group.version, int(rollouts.rows[number] >= 0), int(zero_variance[number])),
            )
        )
    return rows


def chunk_row(step: int, number: int, chunk: Chunk) -> tuple[Any, ...]:
    """A row of the table `chunks`."""
    texts = [s.completion.text for s in chunk.samples]
    has_long = any(len(text) > HEAD_CHARACTERS for text in texts)
    gaps = chunk.gaps if chunk.gaps is not None and not np.isnan(chunk.gaps).all() else None
    with np.errstate(over="ignore"):
        return (
            step,
            number,
            len(chunk.ids),
            _packed(chunk.ids.astype("<u4")),
            _packed(chunk.engine.astype("<f4")),
            None if chunk.raw is None else _packed(chunk.raw.astype("<f4")),
            None if gaps is None else _packed(gaps.astype("<f2")),
            None if _is_constant(chunk, chunk.advantages) else _packed(chunk.advantages.astype("<f4")),
            None if _is_constant(chunk, chunk.mask) else _packed((chunk.mask > 0).astype("u1")),
            zlib.compress(json.dumps(texts).encode(), LEVEL) if has_long else None,
        )


def sample_rows(
    step: int, number: int, chunk: Chunk, rollouts: StepRollouts, zero_variance: np.ndarray
) -> list[tuple[Any, ...]]:
    """Rows of the table `samples`, for the chunk with this number."""
    groups, rewards, parts = rollouts.groups, rollouts.rewards, rollouts.parts
    group_size = rewards.shape[1]
    if chunk.gaps is None:
        gap = gap_max = np.full(len(chunk.samples), np.nan)
    else:
        distance = np.abs(chunk.gaps)
        gap, gap_max = chunk.means(distance), chunk.largest(distance)
    columns = zip(
        chunk.samples,
        chunk.starts.tolist(),
        chunk.lengths.tolist(),
        chunk.means(chunk.advantages).tolist(),
        gap.tolist(),
        gap_max.tolist(),
        (chunk.largest(chunk.mask) > 0).tolist(),
    )
    rows = []
    for (group, index, c, _), first, length, advantage, gap_mean, gap_most, used in columns:
        spans, part = c.spans, parts[group * group_size + index] if parts else None
        oldest = spans[0].version if spans else None
        rows.append(
            (
                *(step, group, index, number, first, length, storable(c.text[:HEAD_CHARACTERS])),
                *(float(rewards[group, index]), None if part is None else json.dumps(part), advantage),
                *(c.finish_reason, c.engine, oldest, spans[-1].version if spans else None),
                json.dumps([[s.version, s.start, s.stop] for s in spans]) if len(spans) > 1 else None,
                None if oldest is None else groups[group].version - oldest,
                *(gap_mean, gap_most, int(used), int(zero_variance[group])),
            )
        )
    return rows


def _is_constant(chunk: Chunk, values: np.ndarray) -> bool:
    """Whether all tokens of a sample have one value, in each sample."""
    if not len(values):
        return True
    changes = values[1:] != values[:-1]
    borders = chunk.starts[1:] - 1
    changes[borders[(borders >= 0) & (borders < len(changes))]] = False
    return not changes.any()


def storable(text: str) -> str:
    """The text without unpaired surrogates, which SQLite cannot store."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _packed(values: np.ndarray) -> bytes:
    return zlib.compress(values.tobytes(), LEVEL)


# --- back -------------------------------------------------------------------------------------------------------------


def unpacked(blob: bytes | None, dtype: str, start: int = 0, stop: int | None = None) -> np.ndarray | None:
    """An array of a chunk, or the part of it that belongs to a sample; None if it is left out."""
    return None if blob is None else np.frombuffer(zlib.decompress(blob), dtype)[start:stop]


def sample_text(sample: sqlite3.Row, chunk: sqlite3.Row, place: int) -> str:
    """The whole text of a sample, which is number `place` in its chunk."""
    if chunk["texts"] is None:
        return str(sample["head"])
    return str(json.loads(zlib.decompress(chunk["texts"]))[place])
