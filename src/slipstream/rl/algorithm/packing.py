"""Sequence packing: several sequences per row, to save padding.

Example: lengths 5, 3, 4 in rows of 8 become two rows, [5, 3] and [4]. Segment numbers separate the attention of the
sequences, positions restart in each (`decoder.hidden_states`), and losses are summed by segment (`batch.sequence_sums`).
Logprobs and loss equal those of the unpacked batch up to the order of summation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.errors import ConfigError
from slipstream.rl.algorithm.batch import Batch, unknown_expert


def plan_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The sequences of each row, by first fit decreasing: longest first, each into the first row with room."""
    if too_long := [i for i, length in enumerate(lengths) if length > capacity]:
        raise ConfigError(
            f"sequence {too_long[0]} has {lengths[too_long[0]]} tokens and does not fit into a row of {capacity}; increase "
            "row_tokens to at least the longest prompt plus its completion"
        )
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, free in enumerate(room) if free >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def round_up(count: int) -> int:
    """Round up to three significant binary digits, so that few shapes are compiled: 1, 2, … 8, 10, 12, 14, 16, 20, 24, 28,
    32, 40, … Adds less than a quarter."""
    step = 1 << max(0, count.bit_length() - 3)
    return max(1, -(-count // step) * step)


def learned_lengths(batch: Batch) -> list[int]:
    """For each row of an unpacked batch, the length up to the last token with mask 1; 0 if there is none."""
    last = batch.mask.shape[1] - np.argmax(batch.mask[:, ::-1] > 0, axis=1)
    return np.where((batch.mask > 0).any(axis=1), last + 1, 0).tolist()


def pack(batch: Batch, lengths: Sequence[int], row_tokens: int, rows_multiple: int = 1) -> Batch:
    """Pack a batch into rows of `row_tokens` tokens. `lengths` are those of prompt plus completion, row by row.

    The number of rows is a multiple of `rows_multiple` (micro-batches × devices), rounded up, since each new number compiles
    a new program. Empty rows have mask 0."""
    if batch.segments is not None:
        raise ConfigError("the batch is already packed")
    if len(lengths) != len(batch.tokens):
        raise ConfigError(f"the batch has {len(batch.tokens)} rows, got {len(lengths)} lengths")
    rows = plan_rows(lengths, row_tokens)
    num_rows = round_up(-(-len(rows) // rows_multiple)) * rows_multiple
    tokens = np.zeros((num_rows, row_tokens), np.int32)
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    columns = {
        name: np.full(
            (num_rows, row_tokens - 1, *value.shape[2:]),
            unknown_expert(value.dtype) if name == "routes" else 0,
            value.dtype,
        )
        for name, value in batch._asdict().items()
        if name != "tokens" and value is not None
    }
    for row, members in enumerate(rows):
        start = 0
        for number, index in enumerate(members, start=1):
            length = lengths[index]
            tokens[row, start : start + length] = batch.tokens[index, :length]
            segments[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            # One column less than tokens: the last would describe the first token of the next sequence.
            for name, column in columns.items():
                column[row, start : start + length - 1] = getattr(batch, name)[index, : length - 1]
            start += length
    return batch._replace(tokens=tokens, segments=segments, positions=positions, **columns)


def unpack(column: np.ndarray, lengths: Sequence[int], row_tokens: int) -> np.ndarray:
    """[B, row_tokens − 1]: a column of the packed batch in the rows that it had before `pack`, with zeros behind each."""
    unpacked = np.zeros((len(lengths), row_tokens - 1), column.dtype)
    for row, members in enumerate(plan_rows(lengths, row_tokens)):
        start = 0
        for index in members:
            length = lengths[index]
            unpacked[index, : length - 1] = column[row, start : start + length - 1]
            start += length
    return unpacked
