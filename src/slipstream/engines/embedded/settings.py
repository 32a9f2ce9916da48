"""Sampling settings on their way to the device: one packed row per sample, made once and stacked at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from slipstream.engines.intake import check_stops
from slipstream.types import MAX_BIASES, MAX_STOPS, SamplingParams

Column: TypeAlias = Any
"""A numpy array on the host, a JAX array inside a program."""
Row: TypeAlias = bytes
"""One sample's settings."""

LARGEST = 1e30
"""Biases end here, and banned tokens get its negative: differences of such numbers are finite, so that no NaN arises."""

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


class Settings(NamedTuple):
    """One row per row of the batch. A neutral row, as padding has it, is greedy and asks for no work."""

    temperature: Column
    top_k: Column
    top_p: Column
    min_p: Column
    seed: Column
    """`[rows, 2]`: the high and the low 32 bits."""
    sample_index: Column
    stop_ids: Column
    """`[rows, MAX_STOPS]`, -1 where there is none."""
    min_length: Column
    """Stop tokens are not drawn at positions before this one."""
    # From here on None where no row needs them: the plain programs do not read them.
    repetition: Column = None
    presence: Column = None
    frequency: Column = None
    prompt_length: Column = None
    bias_ids: Column = None
    """`[rows, MAX_BIASES]`, -1 where there is none."""
    bias: Column = None

    @staticmethod
    def row(sampling: SamplingParams, seed: int, sample_index: int, prompt_length: int, stops: Sequence[int]) -> Row:
        """`stops`: every token that ends this sample, the model's own among them unless they are to be ignored."""
        check_stops(stops)
        temperature = np.float32(sampling.temperature)
        record = np.zeros((), _PACKED)
        # Below the normal numbers a device may round to zero, and divide by it.
        record["temperature"] = temperature if temperature >= np.finfo(np.float32).tiny else 0
        record["top_k"], record["top_p"], record["min_p"] = sampling.top_k, sampling.top_p, sampling.min_p
        record["seed"], record["sample_index"] = (seed >> 32, seed & 0xFFFFFFFF), sample_index
        record["stop_ids"][...] = -1
        record["stop_ids"][: len(stops)] = stops
        record["min_length"] = min(prompt_length + sampling.min_tokens, 2**31 - 1)
        record["repetition"] = sampling.repetition_penalty
        record["presence"], record["frequency"] = sampling.presence_penalty, sampling.frequency_penalty
        record["prompt_length"] = prompt_length
        record["bias_ids"][...] = -1
        for i, (token, bias) in enumerate(sampling.logit_bias):
            record["bias_ids"][i], record["bias"][i] = token, min(max(bias, -LARGEST), LARGEST)
        return record.tobytes()

    @classmethod
    def stack(cls, rows: Sequence[Row], num_rows: int, rich: bool = True) -> Settings:
        """New arrays, of `num_rows` rows, those after `rows` neutral."""
        packed = np.frombuffer(b"".join([*rows, _NEUTRAL * (num_rows - len(rows))]), _PACKED)
        return cls(*(packed[name].copy() if rich or name not in cls._field_defaults else None for name in cls._fields))


def is_rich(sampling: SamplingParams) -> bool:
    """Whether its tokens need more than a plain program offers: penalties, biases or top logprobs."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return penalties != (1, 0, 0) or bool(sampling.logit_bias) or sampling.top_logprobs > 0


_NEUTRAL = Settings.row(SamplingParams(temperature=0), 0, 0, 0, ())
