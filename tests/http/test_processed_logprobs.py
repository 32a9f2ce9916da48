"""Logprobs of the likeliest tokens after temperature and truncation, beside a naive softmax."""

import math

import numpy as np
import pytest

from slipstream.bridge.chat_tokenizer import ChatTokenizer
from slipstream.http.openai_choices import MIN_LOGPROB, CompletionLogprobs, chat_logprobs
from slipstream.types import Completion, SamplingParams, TopLogprobs, VersionSpan

LOGITS = np.array([2.0, 1.5, 1.0, 0.0, -1.0, -2.0, -3.0])


def log_softmax(values):
    return values - np.log(np.exp(values).sum())


def completion(token, processed):
    raw, order = log_softmax(LOGITS), np.argsort(-LOGITS)[:5]
    top = TopLogprobs(tuple(map(int, order)), tuple(map(float, raw[order])))
    spans, own = (VersionSpan(0, 0, 1),), (float(processed[token]),)
    return Completion("r", 0, (1,), (token,), "", own, (float(raw[token]),), "length", spans, top_logprobs=(top,))


def naive(temperature, kept):
    values = LOGITS / temperature
    return log_softmax(np.where(np.arange(len(values)) < kept, values, -np.inf))


@pytest.mark.parametrize("token", [0, 2])
@pytest.mark.parametrize(
    "params, kept",
    [
        (SamplingParams(temperature=0.7), 7),
        (SamplingParams(temperature=1.6), 7),
        (SamplingParams(temperature=0.7, top_k=3), 3),
        (SamplingParams(temperature=1.3, top_p=0.8), 3),
        (SamplingParams(), 7),
    ],
)
def test_top_logprobs_are_of_the_kind_of_the_sampled_ones(params, kept, token):
    wanted = naive(params.temperature, kept)
    found = completion(token, wanted)
    rows = CompletionLogprobs(ChatTokenizer(), 5, True, params)
    rows.add_completion(found)
    (row,), (own,) = rows.value["top_logprobs"], rows.value["token_logprobs"]
    assert own == row[f"token_id:{token}"] == pytest.approx(wanted[token])
    (entry,) = chat_logprobs(ChatTokenizer(), found, 5, True, params)["content"]
    assert {top["token"]: top["logprob"] for top in entry["top_logprobs"]} == row
    for other in range(5):
        expected = wanted[other] if math.isfinite(wanted[other]) else MIN_LOGPROB
        assert row[f"token_id:{other}"] == pytest.approx(expected, abs=1e-6)


def test_with_penalties_only_the_sampled_token_has_its_processed_logprob():
    params = SamplingParams(temperature=0.5, presence_penalty=1.0)
    found = completion(1, np.full(7, -0.25))
    (entry,) = chat_logprobs(ChatTokenizer(), found, 3, True, params)["content"]
    raw = log_softmax(LOGITS)
    assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx([raw[0], -0.25, raw[2]])
