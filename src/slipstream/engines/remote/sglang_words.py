"""Requests in the words of SGLang's `/generate`, and its answers in ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from slipstream.engines.remote.dialect import Scores
from slipstream.engines.remote.server import Server
from slipstream.engines.sequence import Sample
from slipstream.errors import EngineFailure, InvalidSampling, ProtocolMismatch, Unsupported
from slipstream.types import SamplingParams, TopLogprobs

PATH = "/generate"
STREAM_INTERVAL = 16
"""Tokens per event."""

_NONSENSE = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""What comes of reading an answer that has another shape."""

Nonsense = Callable[[str, str, Any], ProtocolMismatch]


@dataclass(frozen=True, slots=True)
class SglangServer(Server):
    num_tokens: int
    """Of the vocabulary."""
    ends: tuple[int, ...]
    """The model's end-of-sequence tokens."""
    is_deterministic: bool
    """It heeds seeds."""
    priority_sign: int
    """0 where it knows no priorities; ours are lower for what goes first."""
    keeps_weights: bool
    """They survive a sleep, in host memory."""
    can_join: bool
    """Its workers can meet a trainer."""


def is_truncated(sampling: SamplingParams) -> bool:
    return sampling.temperature != 0 and (sampling.top_k, sampling.top_p, sampling.min_p) != (0, 1.0, 0.0)


def check_sampling(sampling: SamplingParams, server: SglangServer) -> None:
    """What SGLang would take, and do something else."""
    if sampling.repetition_penalty != 1.0:
        raise Unsupported(
            f"repetition_penalty is {sampling.repetition_penalty:g}, and SGLang would apply it to what was drawn and not to "
            "the prompt; use presence_penalty or frequency_penalty"
        )
    if sampling.min_p and server.is_deterministic and sampling.temperature != 0:
        raise Unsupported(
            "min_p with --enable-deterministic-inference ends an SGLang server; start it without, or use top_p or top_k"
        )


def completion_request(sample: Sample, server: SglangServer, salt: str, rid: str, count: int) -> dict[str, Any]:
    """From the prompt, or from what there is of the completion."""
    ticket, sampling, drawn = sample.ticket, sample.ticket.sampling, len(sample.tokens)
    settings: dict[str, Any] = {
        "max_new_tokens": ticket.limit - drawn,
        "min_new_tokens": max(0, sampling.min_tokens - drawn),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        # With the token's position it decides what is drawn.
        "sampling_seed": xxhash.xxh3_64_intdigest(f"{ticket.seed} {sample.sample_index}".encode()) >> 1,
        "stop_token_ids": list(ticket.stop),
        # Unless it ignores them, SGLang stops at the model's own, too; while it does, it stops at none, and we do.
        "ignore_eos": not ticket.stop or not set(server.ends) <= set(ticket.stop),
        "stream_interval": STREAM_INTERVAL,
        "skip_special_tokens": False,
    }
    if sampling.logit_bias:
        settings["logit_bias"] = {str(token): value for token, value in sampling.logit_bias}
    body = {"stream": True, "top_logprobs_num": count, "sampling_params": settings}
    if is_truncated(sampling):
        # Its logprobs are those before truncation; of what was sampled it tells with the set of tokens that were left.
        body["return_sampling_mask"] = True
        if sampling.min_p and not sampling.top_k and sampling.top_p == 1.0:
            settings["top_k"] = server.num_tokens  # which leaves out nothing; without, it tells no set
    return body | _request(sample.ids, server, salt, rid, ticket.priority)


def score_request(
    tokens: tuple[int, ...], top_k: int, server: SglangServer, salt: str, rid: str, priority: int
) -> dict[str, Any]:
    settings = {"max_new_tokens": 0, "temperature": 0.0}
    body = {"sampling_params": settings, "logprob_start_len": 0, "top_logprobs_num": top_k}
    return body | _request(tokens, server, salt, rid, priority)


def _request(tokens: tuple[int, ...], server: SglangServer, salt: str, rid: str, priority: int) -> dict[str, Any]:
    body: dict[str, Any] = {"input_ids": list(tokens), "return_logprob": True, "extra_key": salt, "rid": rid}
    return body | ({"priority": priority * server.priority_sign} if server.priority_sign else {})


def take_event(sample: Sample, event: Any, version: int, count: int, nonsense: Nonsense) -> tuple[bool, str]:
    """What an event brings, `count` likeliest tokens for each that was drawn; whether it was the last one, and the label."""
    _check_refusal(event)
    try:
        tokens, meta = event["output_ids"], event["meta_info"]
        reason, label = meta["finish_reason"], meta["weight_version"]
        kind = None if reason is None else reason["type"]
        if kind == "abort":
            _abort(reason)
        rows = meta["output_token_logprobs"]
        logprobs = meta["output_token_sampling_logprobs"] if is_truncated(sample.ticket.sampling) else _column(rows)
        tops = meta["output_top_logprobs"] if count else []
        whole = len(rows) == len(logprobs) == len(tokens) and len(tops) == (len(tokens) if count else 0)
        if not whole or not all(type(token) is int for token in tokens) or not isinstance(label, str):
            raise ValueError
        if [token for _, token, _ in rows] != tokens:
            raise ValueError
        found = [_logprob(value) for value in logprobs]
        likeliest = [_likeliest(row, count) for row in tops]
    except _NONSENSE:
        raise nonsense(f"POST {PATH}", "an event with token ids and as many logprobs", event) from None
    if kind not in (None, "stop", "length"):
        raise EngineFailure(f"the SGLang server ended a request for a reason of its own: {kind}")
    _extend(sample, tokens, found, likeliest, kind == "stop", version)
    return kind is not None, label


def take_score(answer: Any, tokens: tuple[int, ...], top_k: int, nonsense: Nonsense) -> Scores:
    """Raw logprobs of all tokens but the first, and the likeliest at each position where asked for."""
    _check_refusal(answer)
    try:
        meta = answer["meta_info"]
        label, rows = meta["weight_version"], meta["input_token_logprobs"]
        if (meta["finish_reason"] or {}).get("type") == "abort":
            _abort(meta["finish_reason"])
        if [token for _, token, _ in rows] != list(tokens) or not isinstance(label, str):
            raise ValueError
        logprobs = [_logprob(value) for value in _column(rows[1:])]  # nothing precedes the first token
        tops = [_likeliest(row, top_k) for row in meta["input_top_logprobs"][1:]] if top_k else []
        if len(tops) != (len(logprobs) if top_k else 0):
            raise ValueError
        return Scores(logprobs, tops, label)
    except _NONSENSE:
        raise nonsense(f"POST {PATH}", f"input_token_logprobs of {len(tokens)} tokens", answer) from None


def probe(server: SglangServer, rid: str) -> dict[str, Any]:
    """One token at a temperature at which all are equally likely: as long as the logprob is that of what was sampled."""
    settings = {"max_new_tokens": 1, "temperature": 1e6, "ignore_eos": True}
    return {"input_ids": [0], "return_logprob": True, "sampling_params": settings, "rid": rid}


def tells_processed(answer: Any, server: SglangServer, nonsense: Nonsense) -> bool:
    """Whether the logprob of the probe is that of the distribution that was sampled."""
    try:
        (value,) = _column(answer["meta_info"]["output_token_logprobs"])
        return abs(_logprob(value) + math.log(server.num_tokens)) < 0.01
    except _NONSENSE:
        raise nonsense(f"POST {PATH}", "the logprob of one token", answer) from None


def _extend(
    sample: Sample, tokens: list[int], logprobs: list[float], tops: list[TopLogprobs], stopped: bool, version: int
) -> None:
    if not tokens:
        return
    ticket, drawn = sample.ticket, len(sample.tokens)
    ends = [i for i, t in enumerate(tokens) if t in ticket.stop and drawn + i >= ticket.sampling.min_tokens]
    if stopped and not ends:
        raise EngineFailure(
            f"the SGLang server stopped at token {tokens[-1]}, which is not among the end-of-sequence tokens of the model in "
            "--model; is its generation_config.json the server's?"
        )
    stop = ends[0] + 1 if ends else len(tokens)
    sample.extend(tokens[:stop], logprobs[:stop], logprobs[:stop], tops[:stop], bool(ends), version)


def _check_refusal(answer: Any) -> None:
    if isinstance(answer, dict) and "error" in answer:
        error = answer["error"]
        code, said = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
        kind = InvalidSampling if code in (400, 422) else EngineFailure
        raise kind(f"the SGLang server ended a request: {said}")


def _abort(reason: dict[str, Any]) -> None:
    """Its own reasons come with a status; without one, somebody has called it off."""
    kind = InvalidSampling if reason.get("status_code") == 400 else EngineFailure
    raise kind(f"the SGLang server gave a request up: {reason.get('message')}")


def _column(rows: Sequence[Any]) -> list[Any]:
    return [logprob for logprob, _, _ in rows]


def _logprob(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not -math.inf < value < 1e-3:
        raise ValueError(f"{value!r} is no logprob")
    return float(value)


def _likeliest(row: Any, count: int) -> TopLogprobs:
    pairs = [(token, float(logprob)) for logprob, token, _ in row[:count]]
    if len(pairs) != count or not all(type(token) is int and value < 1e-3 for token, value in pairs):
        raise ValueError
    return TopLogprobs(tuple(t for t, _ in pairs), tuple(v for _, v in pairs))
