"""OpenAI's API: /v1/completions and /v1/models. `openai_chat.py` has the chat."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field
from pydantic_core import to_json

from slipstream import types
from slipstream.bridge.incremental_text import TextDelta
from slipstream.errors import InvalidSampling
from slipstream.http import openai_choices as choices
from slipstream.http.completion_stream import StreamOptions, stream_chunks
from slipstream.http.errors import JSON
from slipstream.http.event_stream import EVENT_STREAM, EventStream
from slipstream.http.generation import (
    MAX_INT,
    NumLogprobs,
    Prompts,
    SamplingFields,
    collect_completions,
    list_prompts,
    make_requests,
)
from slipstream.http.limits import LimitedRoute, cancel_on_disconnect
from slipstream.http.state import CurrentFront, CurrentTicket, Front
from slipstream.types import Completion, Score

router = APIRouter(tags=["OpenAI"], route_class=LimitedRoute)
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {EVENT_STREAM: {}}}}


class CompletionRequest(SamplingFields):
    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] = 16
    """0 is allowed with `echo`, to get the prompt's logprobs alone."""
    echo: bool = False
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    best_of: int | None = None
    suffix: None = None


@router.get("/v1/models")
async def models(front: CurrentFront) -> dict[str, Any]:
    """List the model that the fleet serves, and its adapters."""
    info, name = await front.engine_info(), front.model_name
    model = {"id": name, "object": "model", "created": front.started, "owned_by": "slipstream"}
    model |= {"root": name, "parent": None, "max_model_len": info.max_model_len}
    adapters = [model | {"id": adapter, "root": adapter, "parent": name} for adapter in await front.adapters()]
    return {"object": "list", "data": [model, *adapters]}


@router.post("/v1/completions", responses=STREAMED)
@cancel_on_disconnect
async def create_completion(
    request: Request, front: CurrentFront, ticket: CurrentTicket, body: CompletionRequest
) -> Response:
    """Complete prompts."""
    adapter = await front.adapter_of(body.model)
    if body.best_of not in (None, body.n):
        raise InvalidSampling(
            f"best_of must equal n, got best_of={body.best_of} and n={body.n}: all samples are returned"
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidSampling("max_tokens is 0 without echo: the answer would be empty")
    if body.stream and (body.echo or body.prompt_logprobs is not None):
        raise InvalidSampling("echo and prompt_logprobs are not streamed; ask without stream")
    answer_id = body.answer_id("cmpl")
    params = body.sampling_params(max(body.max_tokens, 1), body.logprobs or 0)  # an engine draws at least one token
    requests = make_requests(list_prompts(body.prompt), params, answer_id, body.priority, body.stream, adapter)
    model = adapter or front.model_name
    head = {"id": answer_id, "object": "text_completion", "created": int(time.time()), "model": model}
    if body.stream:

        def to_chunk(_: int, delta: TextDelta, __: Completion | None) -> dict[str, Any]:
            return {"text": delta.text, "logprobs": _logprobs(front, body, delta)}

        return EventStream(stream_chunks(front, ticket, head, requests, body.stream_options, to_chunk))
    completions = await collect_completions(front, ticket, answer_id, requests)
    scores = await _score_prompts(front, body, completions, adapter)
    rows = [
        {"index": index, **_completion_choice(front, body, completion, requests[completion.prompt_index], scores)}
        for index, completion in enumerate(completions)
    ]
    usage = choices.usage(completions, None if body.max_tokens else 0)
    return Response(to_json({**head, "choices": rows, "usage": usage}), media_type=JSON)


def _completion_choice(
    front: Front,
    body: CompletionRequest,
    completion: Completion,
    request: types.Request,
    scores: dict[tuple[int, ...], Score],
) -> dict[str, Any]:
    tokens = completion.prompt_token_ids
    text = completion.text if body.max_tokens else ""
    if body.echo:
        text = (request.prompt if isinstance(request.prompt, str) else front.tokenizer.decode(tokens)) + text
    choice = {
        "text": text,
        "logprobs": _logprobs(front, body, completion, scores),
        "finish_reason": completion.finish_reason,
        **choices.choice_additions(completion, body.return_token_ids),
    }
    if not body.max_tokens:
        choice |= {"finish_reason": "length", "token_ids": [], "version_spans": []}
    if body.prompt_logprobs is not None:
        choice["prompt_logprobs"] = choices.prompt_logprobs(
            front.tokenizer, tokens, scores.get(tokens), body.prompt_logprobs
        )
    return choice


def _logprobs(
    front: Front,
    body: CompletionRequest,
    completion: Completion | TextDelta,
    scores: dict[tuple[int, ...], Score] | None = None,
) -> dict[str, Any] | None:
    if body.logprobs is None:
        return None
    as_ids, params = body.return_tokens_as_token_ids, body.sampling_params(max(body.max_tokens, 1), 0)
    logprobs = choices.CompletionLogprobs(front.tokenizer, body.logprobs, as_ids, params)
    if body.echo and isinstance(completion, Completion) and scores is not None:
        logprobs.add_prompt(completion.prompt_token_ids, scores.get(completion.prompt_token_ids))
    if body.max_tokens:
        logprobs.add_completion(completion)
    return logprobs.value


async def _score_prompts(
    front: Front, body: CompletionRequest, completions: Sequence[Completion], adapter: str
) -> dict[tuple[int, ...], Score]:
    """Score the prompts whose logprobs are asked for. A prompt of one token has none."""
    if body.prompt_logprobs is None and not (body.echo and body.logprobs is not None):
        return {}
    num_top = max((body.logprobs or 0) if body.echo else 0, body.prompt_logprobs or 0)
    prompts = [tokens for tokens in dict.fromkeys(c.prompt_token_ids for c in completions) if len(tokens) > 1]
    return dict(zip(prompts, await front.fleet.score(prompts, "", num_top, adapter))) if prompts else {}
