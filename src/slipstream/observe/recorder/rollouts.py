"""The completions of a step as rows and compressed arrays, and back.

Consecutive samples share a chunk of about `CHUNK_TOKENS` tokens, so that short samples compress well and a long one is read
alone. What repeats is left out: an array is missing where the sample's row says all (one advantage for all tokens)."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
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


class Chunk(NamedTuple):
    """The tokens of consecutive samples, one after the other."""

    completions: Sequence[Completion]
    groups: np.ndarray
    """[samples]"""
    places: np.ndarray
    """[samples]: in their groups."""
    lengths: np.ndarray
    ids: np.ndarray
    engine: np.ndarray
    """The engine's logprobs."""
    raw: np.ndarray | None
    """None if they are the same."""
    gaps: np.ndarray | None
    """The trainer's logprobs minus the engine's. NaN where one of them is not known, as for text of an environment."""
    advantages: np.ndarray
    mask: np.ndarray
    ages: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths

    @property
    def owners(self) -> np.ndarray:
        """[tokens]: the sample of each."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def means(self, values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """[samples]: the mean over the chosen tokens of each; NaN without any."""
        owners, count = self.owners[chosen], len(self.lengths)
        with np.errstate(invalid="ignore"):
            return np.bincount(owners, values[chosen], count) / np.bincount(owners, minlength=count)

    def largest(self, values: np.ndarray) -> np.ndarray:
        """[samples]: the largest value of each that is known; NaN without any."""
        found = np.full(len(self.lengths), np.nan)
        filled = self.lengths > 0
        if filled.any():
            found[filled] = np.fmax.reduceat(values, self.starts[filled])
        return found


def chunks(step: StepRollouts, kept: Sequence[int]) -> Iterator[Chunk]:
    """Yield the tokens of the groups that are `kept`, chunk by chunk."""
    trainer = step.trained.trainer_logprobs() if step.trained.trainer_logprobs is not None else None
    completions = [completion for number in kept for completion in step.groups[number].completions]
    lengths = np.array([len(c.token_ids) for c in completions], np.int64)
    sizes = [len(step.groups[number].completions) for number in kept]
    groups = np.repeat(np.array(kept, np.int64), sizes)
    places = np.concatenate([np.arange(size) for size in sizes]) if sizes else groups
    first_rows = np.array(step.rows, np.int64)[groups]
    rows = np.where(first_rows >= 0, first_rows + places, -1)
    ends, start = np.cumsum(lengths), 0
    while start < len(completions):
        if start:
            yield_to_caller()
        limit = ends[start] - lengths[start] + CHUNK_TOKENS
        own = slice(start, max(start + 1, int(np.searchsorted(ends, limit, "right"))))
        start = own.stop
        yield _chunk(completions[own], groups[own], places[own], rows[own], lengths[own], step.trained, trainer)


def _chunk(
    completions: Sequence[Completion],
    groups: np.ndarray,
    places: np.ndarray,
    rows: np.ndarray,
    lengths: np.ndarray,
    trained: TrainedTokens,
    trainer: np.ndarray | None,
) -> Chunk:
    known = np.repeat(rows >= 0, lengths)
    """Whether the step trains on a token. Those of groups that it leaves out are not in `trained`."""
    first = np.array([len(c.prompt_token_ids) for c in completions]) - 1
    column = np.arange(len(known)) + np.repeat(first - (np.cumsum(lengths) - lengths), lengths)
    at = np.repeat(rows, lengths)[known], column[known]

    def tokens_of(values: np.ndarray, otherwise: float, offset: int = 0) -> np.ndarray:
        found = np.full(len(known), otherwise, values.dtype)
        found[known] = values[at[0], at[1] + offset]
        return found

    ids, engine = tokens_of(trained.tokens, 0, 1), tokens_of(trained.logprobs, 0)
    if not known.all():
        left_out = [c for c, row in zip(completions, rows) if row < 0]
        ids[~known] = list(chain.from_iterable(c.token_ids for c in left_out))
        engine[~known] = list(chain.from_iterable(c.logprobs for c in left_out))
    raw = None
    if any(c.raw_logprobs != c.logprobs for c in completions):
        columns = (c.raw_logprobs if len(c.raw_logprobs) == n else [np.nan] * n for c, n in zip(completions, lengths))
        raw = np.fromiter(chain.from_iterable(columns), np.float32, len(known))
    mask = tokens_of(trained.mask, 0)
    gaps = np.where(mask > 0, tokens_of(trainer, np.nan) - engine, np.nan) if trainer is not None else None
    return Chunk(
        *(completions, groups, places, lengths, ids, engine, raw, gaps),
        *(tokens_of(trained.advantages, 0), mask, tokens_of(trained.ages, 0)),
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
        # An episode that failed has a prompt of its own, and no tokens.
        completions = [c for c in group.completions if c.token_ids] or group.completions
        prompt = completions[0].prompt_token_ids if completions else ()
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
    texts = [c.text for c in chunk.completions]
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
    completions, group, place = chunk.completions, chunk.groups, chunk.places
    if chunk.gaps is None:
        gap = gap_max = np.full(len(completions), np.nan)
    else:
        distance = np.abs(chunk.gaps)
        gap, gap_max = chunk.means(distance, ~np.isnan(distance)), chunk.largest(distance)
    used = chunk.largest(chunk.mask) > 0
    counted = (chunk.mask > 0) | ~used[chunk.owners]
    spans = [c.spans for c in completions]
    oldest = [span[0].version if span else None for span in spans]
    asked = [rollouts.groups[number].version for number in group]
    parts: Iterable[str | None] = repeat(None)
    if rollouts.parts:
        given = (rollouts.parts[number] for number in group * rollouts.rewards.shape[1] + place)
        parts = [None if part is None else json.dumps(part) for part in given]
    # By column, which takes a third of the time that it takes by row.
    columns = (
        *(repeat(step), group.tolist(), place.tolist(), repeat(number), chunk.starts.tolist(), chunk.lengths.tolist()),
        [storable(c.text[:HEAD_CHARACTERS]) for c in completions],
        *(rollouts.rewards[group, place].tolist(), parts, chunk.means(chunk.advantages, counted).tolist()),
        *([c.finish_reason for c in completions], [c.engine for c in completions]),
        *(oldest, [span[-1].version if span else None for span in spans]),
        [json.dumps([[s.version, s.start, s.stop] for s in span]) if len(span) > 1 else None for span in spans],
        [None if first is None else version - first for first, version in zip(oldest, asked)],
        *(gap.tolist(), gap_max.tolist()),
        *(used.astype(int).tolist(), zero_variance[group].astype(int).tolist()),
    )
    return list(zip(*columns))


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
