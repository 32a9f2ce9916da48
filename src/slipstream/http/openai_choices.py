"""Choices, logprobs and usage in OpenAI's format, with vLLM's additions and ours. Pure functions of completions and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from slipstream.bridge.chat_tokenizer import ChatTokenizer
from slipstream.bridge.incremental_text import TextDelta
from slipstream.types import Completion, SamplingParams, Score, TopLogprobs

MIN_LOGPROB = -9999.0
"""Logprob of impossible tokens, as in vLLM: JSON has no infinity."""


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def choice_additions(completion: Completion, return_token_ids: bool = False) -> dict[str, Any]:
    """Return the fields that OpenAI does not have: the tokens, and which policy versions generated them."""
    additions = {
        "token_ids": list(completion.token_ids),
        "policy_version": completion.version,
        "version_spans": [{"version": s.version, "start": s.start, "stop": s.stop} for s in completion.spans],
        "engine": completion.engine,
    }
    if return_token_ids:
        additions["prompt_token_ids"] = list(completion.prompt_token_ids)
        additions["raw_logprobs"] = [finite(logprob) for logprob in completion.raw_logprobs]
    return additions


def usage(completions: Sequence[Completion], num_generated: int | None = None) -> dict[str, int]:
    """Count tokens. A prompt counts once, however many samples it has."""
    prompts = sum({c.prompt_index: len(c.prompt_token_ids) for c in completions}.values())
    generated = sum(len(c.token_ids) for c in completions) if num_generated is None else num_generated
    return {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}


class CompletionLogprobs:
    """The `logprobs` object of /v1/completions: first the positions of an echoed prompt, then those of the completion."""

    def __init__(self, tokenizer: ChatTokenizer, num_top: int, as_token_ids: bool, params: SamplingParams) -> None:
        self._tokenizer, self._num_top, self._as_token_ids, self._params = tokenizer, num_top, as_token_ids, params
        self._offset = 0
        self.value: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add_prompt(self, tokens: Sequence[int], score: Score | None) -> None:
        """`score` is None for a prompt of one token: the first token has no logprob."""
        self._append(self._text(tokens[0]), None, None)
        for index, token in enumerate(tokens[1:]):
            assert score is not None
            top = score.top_logprobs[index] if score.top_logprobs else None
            self._add(token, score.logprobs[index], _likeliest(top, self._num_top))

    def add_completion(self, completion: Completion | TextDelta) -> None:
        for index, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs)):
            self._add(token, logprob, _sampled_top(completion, index, self._num_top, self._params))

    def _add(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Add a token. If several have the same text, the likeliest counts."""
        row: dict[str, float] = {}
        for other, value in (dict(top) | {token: logprob}).items():
            text = self._text(other)
            row[text] = max(finite(value), row.get(text, MIN_LOGPROB))
        self._append(self._text(token), finite(logprob), row)

    def _append(self, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        for column, value in zip(self.value.values(), (text, logprob, top, self._offset)):
            column.append(value)
        self._offset += len(text)

    def _text(self, token: int) -> str:
        return self._tokenizer.token_text(token, self._as_token_ids)


def chat_logprobs(
    tokenizer: ChatTokenizer,
    completion: Completion | TextDelta,
    num_top: int,
    as_token_ids: bool,
    params: SamplingParams,
) -> dict[str, Any]:
    """Return the `logprobs` object of /v1/chat/completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.token_text(token, as_token_ids)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}

    content = []
    for index, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs)):
        top = _sampled_top(completion, index, num_top, params)
        content.append(entry(token, logprob) | {"top_logprobs": [entry(t, v) for t, v in top]})
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: ChatTokenizer, tokens: Sequence[int], score: Score | None, num_top: int
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each position the likeliest tokens and the prompt's own, by token id. The rank of a
    token that is not among the likeliest is unknown; it is reported as the next one."""
    rows: list[dict[str, Any] | None] = [None]
    for position, token in enumerate(tokens[1:]):
        assert score is not None
        likeliest = _likeliest(score.top_logprobs[position] if score.top_logprobs else None, num_top)
        ranked = {t: (value, rank) for rank, (t, value) in enumerate(likeliest, 1)}
        ranked.setdefault(token, (score.logprobs[position], len(likeliest) + 1))
        rows.append(
            {
                str(t): {"logprob": finite(value), "rank": rank, "decoded_token": tokenizer.token_text(t)}
                for t, (value, rank) in ranked.items()
            }
        )
    return rows


def _likeliest(top: TopLogprobs | None, count: int) -> list[tuple[int, float]]:
    return [] if top is None else list(zip(top.token_ids, top.logprobs))[:count]


def _sampled_top(
    completion: Completion | TextDelta, index: int, count: int, params: SamplingParams
) -> list[tuple[int, float]]:
    """Return the likeliest tokens at a position with logprobs of the kind that sampled tokens have, after temperature and
    truncation, so that clients can merge both. Engines report the model's own.

    The sampled token has both kinds, and their difference is that of the normalizers: log p(t) = raw(t) / T − log Z. Truncated
    are the tokens beyond those whose probabilities add up to one. Penalties and biases cannot be derived: with them, values are
    the model's own, except the sampled token's."""
    token, logprob = completion.token_ids[index], completion.logprobs[index]
    top = _likeliest(completion.top_logprobs[index] if completion.top_logprobs else None, count)
    if params.is_plain_or_greedy or not top:
        return top
    raw = completion.raw_logprobs[index] if completion.raw_logprobs else dict(top).get(token)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    is_derivable = raw is not None and penalties == (1, 0, 0) and not params.logit_bias and not params.min_tokens
    if is_derivable and raw is not None:
        temperature = params.temperature or 1.0
        is_truncated = (params.top_k, params.top_p, params.min_p) != (0, 1, 0)
        mass, processed = 0.0, []
        for other, value in top:
            value = logprob + (value - raw) / temperature
            processed.append((other, -math.inf if is_truncated and mass > 1 - 1e-5 else value))
            mass += math.exp(min(value, 0.0))
        top = processed
    return [(other, logprob if other == token else value) for other, value in top]
