"""Sampling settings as device arrays: one packed row per sample, built once and stacked in every tick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from slipstream.engines.frontend.request_parser import check_stop_ids
from slipstream.types import MAX_BIASES, MAX_STOPS, SamplingParams

Column: TypeAlias = Any
"""A numpy array on the host, a JAX array inside a program."""
PackedRow: TypeAlias = bytes
"""The settings of one sample."""

LARGEST = 1e30
"""Bound of logit biases; banned tokens get its negative. Differences of such numbers are finite, so no NaN arises."""

_PACKED = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.uint32, (2,)),
        ("sample_index", np.int32),
        ("stop_ids", np.int32, (MAX_STOPS,)),
        ("min_length", np.int32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("prompt_length", np.int32),
        ("bias_ids", np.int32, (MAX_BIASES,)),
        ("bias", np.float32, (MAX_BIASES,)),
    ]
)


class BatchSettings(NamedTuple):
    """Columns with one entry per row of the batch. Padding rows are neutral: greedy, with nothing to compute."""

    temperature: Column
    top_k: Column
    top_p: Column
    min_p: Column
    seed: Column
    """`[rows, 2]`: high and low 32 bits."""
    sample_index: Column
    stop_ids: Column
    """`[rows, MAX_STOPS]`, padded with -1."""
    min_length: Column
    """Stop tokens are banned at positions before this one."""
    # The following are None if no row needs them: the plain programs do not read them.
    repetition: Column = None
    presence: Column = None
    frequency: Column = None
    prompt_length: Column = None
    bias_ids: Column = None
    """`[rows, MAX_BIASES]`, padded with -1."""
    bias: Column = None

    @staticmethod
    def row(
        sampling: SamplingParams, seed: int, sample_index: int, prompt_length: int, stop_ids: Sequence[int]
    ) -> PackedRow:
        """Pack the settings of one sample. `stop_ids` includes the model's own unless the sample ignores them."""
        check_stop_ids(stop_ids)
        temperature = np.float32(sampling.temperature)
        record = np.zeros((), _PACKED)
        # A device may flush subnormal numbers to zero, and divide by it.
        record["temperature"] = temperature if temperature >= np.finfo(np.float32).tiny else 0
        record["top_k"], record["top_p"], record["min_p"] = sampling.top_k, sampling.top_p, sampling.min_p
        record["seed"], record["sample_index"] = (seed >> 32, seed & 0xFFFFFFFF), sample_index
        record["stop_ids"][...] = -1
        record["stop_ids"][: len(stop_ids)] = stop_ids
        record["min_length"] = min(prompt_length + sampling.min_tokens, 2**31 - 1)
        record["repetition"] = sampling.repetition_penalty
        record["presence"], record["frequency"] = sampling.presence_penalty, sampling.frequency_penalty
        record["prompt_length"] = prompt_length
        record["bias_ids"][...] = -1
        for i, (token, bias) in enumerate(sampling.logit_bias):
            record["bias_ids"][i], record["bias"][i] = token, min(max(bias, -LARGEST), LARGEST)
        return record.tobytes()

    @classmethod
    def stack(cls, rows: Sequence[PackedRow], num_rows: int, rich: bool = True) -> BatchSettings:
        """Stack `rows` and neutral padding into new arrays of `num_rows` rows."""
        packed = np.frombuffer(b"".join([*rows, _NEUTRAL * (num_rows - len(rows))]), _PACKED)
        return cls(*(packed[name].copy() if rich or name not in cls._field_defaults else None for name in cls._fields))


def is_rich(sampling: SamplingParams) -> bool:
    """Whether a sample needs the rich programs: it has penalties or logit biases, or wants top logprobs."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return penalties != (1, 0, 0) or bool(sampling.logit_bias) or sampling.top_logprobs > 0


_NEUTRAL = BatchSettings.row(SamplingParams(temperature=0), 0, 0, 0, ())
