"""Request and response bodies of SGLang's `/generate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from slipstream.engines.frontend.sample_tasks import mixed_seed, shared_settings
from slipstream.engines.frontend.sequence import Sample
from slipstream.engines.remote.dialect import STREAM_INTERVAL, ServerScore
from slipstream.engines.remote.responses import MALFORMED, MakeMismatch, parse_logprob
from slipstream.engines.remote.sglang_info import SglangServerInfo
from slipstream.errors import EngineFailure, InvalidSampling, SlipstreamError, Unsupported
from slipstream.types import SamplingParams, TopLogprobs

PATH = "/generate"


def is_truncated(sampling: SamplingParams) -> bool:
    return sampling.temperature != 0 and (sampling.top_k, sampling.top_p, sampling.min_p) != (0, 1.0, 0.0)


def check_sampling(sampling: SamplingParams, server: SglangServerInfo) -> None:
    """Raise `Unsupported` for params that SGLang would accept and handle wrongly."""
    if sampling.repetition_penalty != 1.0:
        raise Unsupported(
            f"repetition_penalty is {sampling.repetition_penalty:g}, which SGLang applies to the completion but not to the "
            "prompt; use presence_penalty or frequency_penalty"
        )
    if sampling.min_p and server.is_deterministic and sampling.temperature != 0:
        raise Unsupported(
            "min_p crashes an SGLang server started with --enable-deterministic-inference; start it without, or use top_p or "
            "top_k"
        )


def completion_request(sample: Sample, server: SglangServerInfo, salt: str, rid: str, num_top: int) -> dict[str, Any]:
    """Continue from the prompt, or from the tokens so far."""
    request, sampling, drawn = sample.request, sample.request.sampling, len(sample.tokens)
    settings = shared_settings(sampling) | {
        "max_new_tokens": request.max_new_tokens - drawn,
        "min_new_tokens": max(0, sampling.min_tokens - drawn),
        "top_k": sampling.top_k or -1,
        # Together with the token's position, this determines the draw.
        "sampling_seed": mixed_seed(request.seed, sample.sample_index),
        "stop_token_ids": list(request.stop_ids),
        # Without ignore_eos, SGLang also stops at every EOS token. With it, SGLang ignores stop tokens too; `take_event` stops.
        "ignore_eos": not request.stop_ids or not set(server.eos_token_ids) <= set(request.stop_ids),
        "stream_interval": STREAM_INTERVAL,
        "skip_special_tokens": False,
    }
    if sampling.logit_bias:
        settings["logit_bias"] = {str(token): value for token, value in sampling.logit_bias}
    body = {"stream": True, "top_logprobs_num": num_top, "sampling_params": settings}
    if is_truncated(sampling):
        # Plain logprobs are those before truncation; with the sampling mask, SGLang reports those of the sampled distribution.
        body["return_sampling_mask"] = True
        if sampling.min_p and not sampling.top_k and sampling.top_p == 1.0:
            settings["top_k"] = server.vocab_size  # truncates nothing, but SGLang makes no mask for min_p alone
    return body | _common_fields(sample.ids, server, salt, rid, request.priority)


def score_request(
    tokens: tuple[int, ...], top_k: int, server: SglangServerInfo, salt: str, rid: str, priority: int
) -> dict[str, Any]:
    settings = {"max_new_tokens": 0, "temperature": 0.0}
    body = {"sampling_params": settings, "logprob_start_len": 0, "top_logprobs_num": top_k}
    return body | _common_fields(tokens, server, salt, rid, priority)


def _common_fields(
    tokens: tuple[int, ...], server: SglangServerInfo, salt: str, rid: str, priority: int
) -> dict[str, Any]:
    body: dict[str, Any] = {"input_ids": list(tokens), "return_logprob": True, "extra_key": salt, "rid": rid}
    return body | ({"priority": priority * server.priority_sign} if server.priority_sign else {})


def take_event(sample: Sample, event: Any, version: int, num_top: int, mismatch: MakeMismatch) -> tuple[bool, str]:
    """Append the tokens of an event up to the first stop token, with the `num_top` likeliest at each position. Return whether
    it is the last event, and the weight label."""
    _check_error(event)
    try:
        tokens, meta = event["output_ids"], event["meta_info"]
        reason, label = meta["finish_reason"], meta["weight_version"]
        kind = None if reason is None else reason["type"]
        if kind == "abort":
            raise _aborted(reason)
        rows = meta["output_token_logprobs"]
        logprobs = meta["output_token_sampling_logprobs"] if is_truncated(sample.request.sampling) else _column(rows)
        tops = meta["output_top_logprobs"] if num_top else []
        fits = len(rows) == len(logprobs) == len(tokens) and len(tops) == (len(tokens) if num_top else 0)
        if not fits or not all(type(token) is int for token in tokens) or not isinstance(label, str):
            raise ValueError
        if [token for _, token, _ in rows] != tokens:
            raise ValueError
        logprobs = [parse_logprob(value) for value in logprobs]
        top_logprobs = [_top_logprobs(row, num_top) for row in tops]
    except SlipstreamError:
        raise
    except MALFORMED:
        raise mismatch(f"POST {PATH}", "an event with token ids and as many logprobs", event) from None
    if kind not in (None, "stop", "length"):
        raise EngineFailure(f"the SGLang server ended a request for an unknown reason: {kind}")
    if tokens:
        request, drawn = sample.request, len(sample.tokens)
        stops = [i for i, t in enumerate(tokens) if t in request.stop_ids and drawn + i >= request.sampling.min_tokens]
        if kind == "stop" and not stops:
            raise EngineFailure(
                f"the SGLang server stopped at token {tokens[-1]}, which is not among the end-of-sequence tokens of the model "
                "in --model; is its generation_config.json the server's?"
            )
        end = stops[0] + 1 if stops else len(tokens)
        sample.extend(tokens[:end], logprobs[:end], logprobs[:end], top_logprobs[:end], bool(stops), version)
    return kind is not None, label


def take_score(response: Any, tokens: tuple[int, ...], top_k: int, mismatch: MakeMismatch) -> ServerScore:
    """Read raw logprobs of all tokens but the first, and of the `top_k` likeliest at each position."""
    _check_error(response)
    try:
        meta = response["meta_info"]
        label, rows = meta["weight_version"], meta["input_token_logprobs"]
        if (meta["finish_reason"] or {}).get("type") == "abort":
            raise _aborted(meta["finish_reason"])
        if [token for _, token, _ in rows] != list(tokens) or not isinstance(label, str):
            raise ValueError
        logprobs = [parse_logprob(value) for value in _column(rows[1:])]  # nothing precedes the first token
        top_logprobs = [_top_logprobs(row, top_k) for row in meta["input_top_logprobs"][1:]] if top_k else []
        if len(top_logprobs) != (len(logprobs) if top_k else 0):
            raise ValueError
        return ServerScore(logprobs, top_logprobs, label)
    except SlipstreamError:
        raise
    except MALFORMED:
        raise mismatch(f"POST {PATH}", f"input_token_logprobs of {len(tokens)} tokens", response) from None


def probe_request(rid: str) -> dict[str, Any]:
    """Sample one token at a temperature that makes all tokens equally likely: its logprob shows which kind is reported."""
    settings = {"max_new_tokens": 1, "temperature": 1e6, "ignore_eos": True}
    return {"input_ids": [0], "return_logprob": True, "sampling_params": settings, "rid": rid}


def reports_processed(response: Any, server: SglangServerInfo, mismatch: MakeMismatch) -> bool:
    """Return whether the logprob of the probe is that of the sampled distribution."""
    try:
        (value,) = _column(response["meta_info"]["output_token_logprobs"])
        return abs(parse_logprob(value) + math.log(server.vocab_size)) < 0.01
    except MALFORMED:
        raise mismatch(f"POST {PATH}", "the logprob of one token", response) from None


def _check_error(response: Any) -> None:
    if isinstance(response, dict) and "error" in response:
        error = response["error"]
        code, message = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
        kind = InvalidSampling if code in (400, 422) else EngineFailure
        raise kind(f"the SGLang server ended a request: {message}")


def _aborted(reason: dict[str, Any]) -> SlipstreamError:
    """A request the server rejects has a status; one that a client aborted has none."""
    kind = InvalidSampling if reason.get("status_code") == 400 else EngineFailure
    return kind(f"the SGLang server aborted a request: {reason.get('message')}")


def _column(rows: Sequence[Any]) -> list[Any]:
    return [logprob for logprob, _, _ in rows]


def _top_logprobs(row: Any, count: int) -> TopLogprobs:
    pairs = [(token, float(logprob)) for logprob, token, _ in row[:count]]
    if len(pairs) != count or not all(type(token) is int and value < 1e-3 for token, value in pairs):
        raise ValueError
    return TopLogprobs(tuple(t for t, _ in pairs), tuple(v for _, v in pairs))
