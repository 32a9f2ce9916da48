"""Request and response bodies of vLLM's HTTP API."""

from __future__ import annotations

from typing import Any

from slipstream.engines.frontend.sample_tasks import mixed_seed, shared_settings
from slipstream.engines.frontend.sequence import Sample
from slipstream.engines.remote.dialect import STREAM_INTERVAL, ServerScore
from slipstream.engines.remote.responses import MALFORMED, MakeMismatch, parse_logprob
from slipstream.engines.remote.vllm_info import VllmServerInfo
from slipstream.errors import EngineFailure
from slipstream.types import TopLogprobs

PATH = "/v1/completions"
MIN_LOGPROB = -9999.0
"""vLLM clamps logprobs to this."""


def completion_request(sample: Sample, server: VllmServerInfo, salt: str, num_top: int) -> dict[str, Any]:
    """Continue from the prompt, or from the tokens so far."""
    request, sampling, drawn = sample.request, sample.request.sampling, len(sample.tokens)
    body = shared_settings(sampling) | {
        "model": server.model,
        "prompt": list(sample.ids),
        "stream": True,
        "stream_interval": STREAM_INTERVAL,
        "max_tokens": request.max_new_tokens - drawn,
        "min_tokens": max(0, sampling.min_tokens - drawn),
        "repetition_penalty": sampling.repetition_penalty,
        "seed": mixed_seed(request.seed, sample.sample_index, drawn),
        "stop_token_ids": list(request.stop_ids),
        "ignore_eos": True,  # unless ignored, end-of-sequence tokens are among the stop tokens
        "logprobs": num_top,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "cache_salt": salt,
    }
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): value for token, value in sampling.logit_bias}
    if server.has_priorities:
        body["priority"] = request.priority
    return body


def score_request(
    tokens: tuple[int, ...], top_k: int, server: VllmServerInfo, salt: str, priority: int
) -> dict[str, Any]:
    body = {
        "model": server.model,
        "prompt": list(tokens),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": top_k,
        "ignore_eos": True,
        "cache_salt": salt,
    }
    return body | ({"priority": priority} if server.has_priorities else {})


def take_event(sample: Sample, event: Any, version: int, num_top: int, mismatch: MakeMismatch) -> bool:
    """Append the tokens of an event, with the `num_top` likeliest at each position. Return whether it is the last event."""
    if isinstance(event, dict) and "error" in event:
        raise EngineFailure(f"the vLLM server ended a request: {event['error']}")
    try:
        (choice,) = event["choices"]
        tokens, columns, reason = choice["token_ids"], choice["logprobs"], choice["finish_reason"]
        logprobs = [] if columns is None else columns["token_logprobs"]
        rows = [] if columns is None else columns["top_logprobs"]
        if not all(type(token) is int for token in tokens) or len(logprobs) != len(tokens) or len(rows) != len(tokens):
            raise ValueError
        logprobs = [parse_logprob(value, MIN_LOGPROB) for value in logprobs]
        top_logprobs = [_top_logprobs(row, num_top) for row in rows if num_top]
    except MALFORMED:
        raise mismatch(f"POST {PATH}", "an event with token ids and as many logprobs", event) from None
    if tokens:
        stopped = reason == "stop"
        if stopped and tokens[-1] not in sample.request.stop_ids:
            raise EngineFailure(
                f"the vLLM server stopped at token {tokens[-1]}, which is not a stop token of the request"
            )
        sample.extend(list(tokens), logprobs, logprobs, top_logprobs, stopped, version)
    if reason not in (None, "stop", "length"):
        raise EngineFailure(f"the vLLM server ended a request ({reason}); another client may have aborted it")
    return reason is not None


def take_score(response: Any, tokens: tuple[int, ...], top_k: int, mismatch: MakeMismatch) -> ServerScore:
    """Read raw logprobs of all tokens but the first, and of the `top_k` likeliest at each position."""
    try:
        rows = response["choices"][0]["prompt_logprobs"]
        if len(rows) != len(tokens):
            raise ValueError
        logprobs, top_logprobs = [], []
        for token, row in zip(tokens[1:], rows[1:]):  # nothing precedes the first token
            logprobs.append(parse_logprob(row[str(token)]["logprob"], MIN_LOGPROB))
            if top_k:
                top_logprobs.append(_top_logprobs({key: entry["logprob"] for key, entry in row.items()}, top_k))
        return ServerScore(logprobs, top_logprobs, None)
    except MALFORMED:
        raise mismatch(f"POST {PATH}", f"prompt_logprobs of {len(tokens)} tokens", response) from None


def _top_logprobs(row: dict[str, Any], count: int) -> TopLogprobs:
    """Return the `count` likeliest. The row also holds the drawn token; the logprobs of the others may be -inf."""
    pairs = sorted(
        ((int(key.removeprefix("token_id:")), float(value)) for key, value in row.items()), key=lambda p: -p[1]
    )
    if len(pairs) < count or not all(value < 1e-3 for _, value in pairs):
        raise ValueError
    return TopLogprobs(tuple(t for t, _ in pairs[:count]), tuple(v for _, v in pairs[:count]))
