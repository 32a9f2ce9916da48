"""Sampling settings on the host: packing a row, stacking rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream.engines.embedded.sampling.batch_settings import LARGEST, BatchSettings, is_rich
from slipstream.errors import InvalidSampling
from slipstream.types import MAX_BIASES, MAX_STOPS, SamplingParams

STOPS = (1, 4)


def test_a_row_holds_every_setting() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, min_tokens=3, repetition_penalty=1.5, presence_penalty=-0.5,
        frequency_penalty=0.75, logit_bias={9: 2.0, 40: -1e300, 41: 1e300},
    )  # fmt: skip
    settings = BatchSettings.stack([BatchSettings.row(params, (3 << 32) + 5, 2, 10, STOPS)], 1)
    assert {name: column[0].tolist() for name, column in zip(BatchSettings._fields, settings)} == {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": [3, 5],
        "sample_index": 2,
        "stop_ids": [1, 4] + [-1] * (MAX_STOPS - 2),
        "min_length": 13,
        "repetition": 1.5,
        "presence": -0.5,
        "frequency": 0.75,
        "prompt_length": 10,
        "bias_ids": [9, 40, 41] + [-1] * (MAX_BIASES - 3),
        "bias": [2.0, -np.float32(LARGEST), np.float32(LARGEST)] + [0.0] * (MAX_BIASES - 3),
    }


def test_rows_are_stacked_in_order_and_padded_with_neutral_ones() -> None:
    params = [SamplingParams(temperature=1 + i, min_tokens=i, logit_bias={i: 1.0}) for i in range(5)]
    rows = [BatchSettings.row(each, (3 << 32) + i, i, 10, STOPS) for i, each in enumerate(params)]
    stacked = BatchSettings.stack(rows, 8)
    neutral = BatchSettings.row(SamplingParams(temperature=0), 0, 0, 0, ())
    alone = [BatchSettings.stack([row], 1) for row in [*rows, neutral, neutral, neutral]]
    for name, column, *each in zip(BatchSettings._fields, stacked, *alone):
        np.testing.assert_array_equal(column, np.concatenate(each), err_msg=name)
        assert len(column) == 8
    assert stacked.seed[4].tolist() == [3, 4] and stacked.stop_ids[4, :3].tolist() == [1, 4, -1]
    assert stacked.min_length.tolist()[:5] == [10 + each.min_tokens for each in params]
    assert stacked.temperature[5:].tolist() == [0, 0, 0] and (stacked.stop_ids[5:] == -1).all()


def test_plain_settings_omit_what_only_rich_programs_read() -> None:
    plain, rich = BatchSettings.stack([], 8, rich=False), BatchSettings.stack([], 8)
    left_out = [name for name, column in zip(BatchSettings._fields, plain) if column is None]
    assert left_out == ["repetition", "presence", "frequency", "prompt_length", "bias_ids", "bias"]
    assert plain.bias is None and all(column is not None for column in rich)


def test_too_many_stop_tokens_are_rejected() -> None:
    full = BatchSettings.stack([BatchSettings.row(SamplingParams(), 0, 0, 1, range(MAX_STOPS))], 1)
    assert full.stop_ids[0].tolist() == list(range(24))
    with pytest.raises(InvalidSampling, match="at most 24"):
        BatchSettings.row(SamplingParams(), 0, 0, 1, range(MAX_STOPS + 1))


def test_what_needs_a_rich_program() -> None:
    plain = {"temperature": 0.3, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "min_tokens": 3, "stop_token_ids": (4,)}
    assert not is_rich(SamplingParams(**plain))
    rich: list[dict[str, Any]] = [{"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1}]
    for fields in [*rich, {"logit_bias": {3: 1.0}}, {"top_logprobs": 1}]:
        assert is_rich(SamplingParams(**plain, **fields))
