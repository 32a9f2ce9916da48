"""Samples: derived lengths, appending tokens, version spans, stop strings."""

from __future__ import annotations

from slipstream.engines.frontend.sequence import EngineRequest, Sample
from slipstream.types import SamplingParams, TopLogprobs, VersionSpan


def sample_of(prompt: tuple[int, ...] = (5, 6, 7), limit: int = 4, find_stop_string=None, priority: int = 0) -> Sample:
    request = EngineRequest("r", prompt, SamplingParams(), 0, limit, (), None, priority, find_stop_string)
    (sample,) = request.samples()
    return sample


def extend(sample: Sample, *tokens: int, stopped: bool = False, version: int = 0) -> None:
    logprobs = [-float(token) for token in tokens]
    tops = [TopLogprobs((token,), (-1.0,)) for token in tokens]
    sample.extend(list(tokens), logprobs, [2 * x for x in logprobs], tops, stopped, version)


def test_a_request_has_n_samples() -> None:
    request = EngineRequest("r", (1, 2), SamplingParams(n=3), seed=7, max_new_tokens=4, stop_ids=(), sink=None)
    samples = request.samples()
    assert [sample.sample_index for sample in samples] == [0, 1, 2]
    assert all(sample.request is request for sample in samples)
    assert samples[0] != Sample(request, 0)  # compared by identity


def test_lengths() -> None:
    sample = sample_of()
    assert (sample.length, sample.end, sample.prefill_end, sample.ids) == (3, 7, 2, (5, 6, 7))
    extend(sample, 8, 9)
    assert (sample.length, sample.end, sample.prefill_end, sample.ids) == (5, 7, 4, (5, 6, 7, 8, 9))


def test_finish_reason() -> None:
    sample = sample_of(limit=3)
    extend(sample, 1, 2)
    assert sample.finish_reason is None
    extend(sample, 3)
    assert sample.finish_reason == "length"
    stopped = sample_of(limit=2)
    extend(stopped, 1, 2, stopped=True)
    assert stopped.finish_reason == "stop"


def test_a_score_draws_nothing() -> None:
    sample = sample_of(limit=0)
    assert sample.request.is_scoring and sample.prefill_end == 2


def test_spans_follow_the_version_of_each_token() -> None:
    sample = sample_of(limit=9)
    assert sample.spans == ()
    for tokens, version in [((1,), 3), ((2, 3), 3), ((4,), 4), ((5, 6), 6)]:
        extend(sample, *tokens, version=version)
    assert sample.spans == (VersionSpan(3, 0, 3), VersionSpan(4, 3, 4), VersionSpan(6, 4, 6))


def test_tokens_after_a_stop_string_are_dropped() -> None:
    sample = sample_of(limit=9, find_stop_string=lambda tokens: tokens.index(4) + 1 if 4 in tokens else None)
    extend(sample, 1, 2, version=1)
    assert sample.finish_reason is None
    extend(sample, 3, 4, 5, 6, version=2)
    assert (sample.tokens, sample.finish_reason) == ([1, 2, 3, 4], "stop")
    assert (sample.logprobs, sample.raw_logprobs) == ([-1.0, -2.0, -3.0, -4.0], [-2.0, -4.0, -6.0, -8.0])
    assert [top.token_ids for top in sample.top_logprobs] == [(1,), (2,), (3,), (4,)]
    assert sample.spans == (VersionSpan(1, 0, 2), VersionSpan(2, 2, 4))


def test_a_stop_string_at_the_limit_counts_as_stop() -> None:
    sample = sample_of(limit=2, find_stop_string=lambda tokens: len(tokens) if len(tokens) == 2 else None)
    extend(sample, 1, 2)
    assert sample.finish_reason == "stop"


def test_restart_leaves_the_prompt() -> None:
    sample = sample_of(limit=2)
    extend(sample, 1, 2, stopped=True)
    sample.restart()
    assert sample.ids == (5, 6, 7) and sample.finish_reason is None
    assert sample.logprobs == sample.raw_logprobs == sample.top_logprobs == sample.versions == []
    extend(sample, 3, version=5)
    assert sample.spans == (VersionSpan(5, 0, 1),)


def test_order_is_by_priority_and_then_by_age() -> None:
    first, second, urgent = sample_of(), sample_of(), sample_of(priority=-1)
    first.arrival, second.arrival, urgent.arrival = 0, 1, 2
    assert sorted([second, first, urgent], key=lambda s: s.order) == [urgent, first, second]
