"""Requests in the words of vLLM's HTTP interface, and its answers in ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import xxhash

from slipstream.engines.remote.dialect import is_plain
from slipstream.engines.remote.server import Server
from slipstream.engines.sequence import Sample
from slipstream.errors import EngineFailure, ProtocolMismatch, Unsupported
from slipstream.types import SamplingParams, TopLogprobs

PATH = "/v1/completions"
STREAM_INTERVAL = 16
"""Tokens per event."""
LEAST_LOGPROB = -9999.0
"""vLLM writes this for whatever is less."""

_NONSENSE = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""What comes of reading an answer that has another shape."""

Nonsense = Callable[[str, str, Any], ProtocolMismatch]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


@dataclass(frozen=True, slots=True)
class VllmServer(Server):
    model: str
    """The name that requests carry."""
    logprobs_mode: LogprobsMode
    has_priorities: bool
    nccl: str
    """Version, where it says."""


def needs_score(sampling: SamplingParams, server: VllmServer) -> bool:
    """Whether raw logprobs must be asked for afterwards. Raises `Unsupported` where the others cannot be known."""
    if is_plain(sampling):
        return False
    if server.logprobs_mode == "processed_logprobs":
        return True
    if sampling.temperature == 0:  # whose logprobs are raw by definition
        return False
    raise Unsupported(
        "this vLLM server reports raw logprobs, so those of the distribution that is sampled are not known; start it with "
        "--logprobs-mode processed_logprobs, or sample at temperature 1 without truncation, penalties and bias"
    )


def completion_request(sample: Sample, server: VllmServer, salt: str) -> dict[str, Any]:
    """From the prompt, or from what there is of the completion."""
    ticket, sampling, drawn = sample.ticket, sample.ticket.sampling, len(sample.tokens)
    body = {
        "model": server.model,
        "prompt": list(sample.ids),
        "stream": True,
        "stream_interval": STREAM_INTERVAL,
        "max_tokens": ticket.limit - drawn,
        "min_tokens": max(0, sampling.min_tokens - drawn),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        # A generator of torch's heeds 32 bits of its seed only: all of ours go into them.
        "seed": xxhash.xxh3_64_intdigest(f"{ticket.seed} {sample.sample_index} {drawn}".encode()) >> 1,
        "stop_token_ids": list(ticket.stop),
        "ignore_eos": True,  # the model's own end-of-sequence tokens are among the stop tokens, if they count
        "logprobs": 0 if needs_score(sampling, server) else sampling.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "cache_salt": salt,
    }
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): value for token, value in sampling.logit_bias}
    if server.has_priorities:
        body["priority"] = ticket.priority
    return body


def score_request(tokens: tuple[int, ...], top_k: int, server: VllmServer, salt: str, priority: int) -> dict[str, Any]:
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


def take_event(sample: Sample, event: Any, version: int, count: int, nonsense: Nonsense) -> bool:
    """What an event brings, `count` likeliest tokens for each that was drawn; true when it was the last one."""
    wanted = "an event with token ids and as many logprobs"
    if isinstance(event, dict) and "error" in event:
        raise EngineFailure(f"the vLLM server ended a request: {event['error']}")
    try:
        (choice,) = event["choices"]
        tokens, columns, reason = choice["token_ids"], choice["logprobs"], choice["finish_reason"]
        logprobs = [] if columns is None else columns["token_logprobs"]
        tops = [] if columns is None else columns["top_logprobs"]
        if not all(type(token) is int for token in tokens) or len(logprobs) != len(tokens) or len(tops) != len(tokens):
            raise ValueError
        found = [_logprob(value) for value in logprobs]
        likeliest = [_likeliest(row, count) for row in tops if count]
    except _NONSENSE:
        raise nonsense(f"POST {PATH}", wanted, event) from None
    if tokens:
        ends = reason == "stop"
        if ends and tokens[-1] not in sample.ticket.stop:
            raise EngineFailure(f"the vLLM server stopped at token {tokens[-1]}, which it was not asked to")
        sample.extend(list(tokens), found, found, likeliest, ends, version)
    if reason not in (None, "stop", "length"):
        raise EngineFailure(f"the vLLM server gave a request up ({reason}); somebody else may have aborted it")
    return reason is not None


def take_score(
    answer: Any, tokens: tuple[int, ...], top_k: int, nonsense: Nonsense
) -> tuple[list[float], list[TopLogprobs]]:
    """Raw logprobs of all tokens but the first, and the likeliest at each position where asked for."""
    try:
        rows = answer["choices"][0]["prompt_logprobs"]
        if len(rows) != len(tokens):
            raise ValueError
        logprobs, tops = [], []
        for token, row in zip(tokens[1:], rows[1:]):  # nothing precedes the first token
            logprobs.append(_logprob(row[str(token)]["logprob"]))
            if top_k:
                tops.append(_likeliest({key: entry["logprob"] for key, entry in row.items()}, top_k))
        return logprobs, tops
    except _NONSENSE:
        raise nonsense(f"POST {PATH}", f"prompt_logprobs of {len(tokens)} tokens", answer) from None


def _logprob(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not LEAST_LOGPROB < value < 1e-3:
        raise ValueError(f"{value!r} is no logprob")
    return float(value)


def _likeliest(row: dict[str, Any], count: int) -> TopLogprobs:
    """The drawn token is among them; where it is not likely, there is one too many. The others may be impossible."""
    pairs = sorted(
        ((int(key.removeprefix("token_id:")), float(value)) for key, value in row.items()), key=lambda p: -p[1]
    )
    if len(pairs) < count or not all(value < 1e-3 for _, value in pairs):
        raise ValueError
    return TopLogprobs(tuple(t for t, _ in pairs[:count]), tuple(v for _, v in pairs[:count]))
