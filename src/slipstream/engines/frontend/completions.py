"""Finished samples to completions and scores, including detokenization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.engines.frontend.request_parser import MIN_THREADED_BATCH
from slipstream.engines.frontend.sequence import Sample
from slipstream.types import Completion, Score


def make_completions(samples: Sequence[Sample], tokenizer: Any, engine: str) -> list[Completion]:
    texts = [""] * len(samples) if tokenizer is None else _decode([_visible_tokens(s) for s in samples], tokenizer)
    return [_completion(sample, text, engine) for sample, text in zip(samples, texts)]


def make_score(sample: Sample, engine: str) -> Score:
    ((version, _),) = sample.versions
    return Score(
        token_ids=sample.request.prompt,
        logprobs=tuple(sample.raw_logprobs),
        version=version,
        engine=engine,
        top_logprobs=tuple(sample.top_logprobs),
    )


def _completion(sample: Sample, text: str, engine: str) -> Completion:
    reason = sample.finish_reason
    assert reason is not None, "only finished samples become completions"
    return Completion(
        request_id=sample.request.request_id,
        sample_index=sample.sample_index,
        prompt_token_ids=sample.request.prompt,
        token_ids=tuple(sample.tokens),
        text=_before_stop_string(text, sample) if sample.stopped else text,
        logprobs=tuple(sample.logprobs),
        raw_logprobs=tuple(sample.raw_logprobs),
        finish_reason=reason,
        spans=sample.spans,
        engine=engine,
        top_logprobs=tuple(sample.top_logprobs),
    )


def _visible_tokens(sample: Sample) -> list[int]:
    """The tokens without the stop token that ended the sample."""
    ends_with_stop = sample.stopped and sample.tokens[-1] in sample.request.stop_ids
    return sample.tokens[:-1] if ends_with_stop else sample.tokens


def _before_stop_string(text: str, sample: Sample) -> str:
    return text[: min((at for stop in sample.request.sampling.stop if (at := text.find(stop)) >= 0), default=len(text))]


def _decode(rows: list[list[int]], tokenizer: Any) -> list[str]:
    if len(rows) >= MIN_THREADED_BATCH:
        texts: list[str] = tokenizer.decode_batch(rows, skip_special_tokens=True)
        return texts
    return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
