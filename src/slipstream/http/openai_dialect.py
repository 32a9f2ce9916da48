"""OpenAI's API: /v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field
from pydantic_core import to_json

from slipstream import types
from slipstream.bridge.incremental_text import IncrementalDetokenizer, TextDelta
from slipstream.errors import InvalidPrompt, InvalidSampling
from slipstream.gateway.admission import Ticket
from slipstream.http import openai_choices as choices
from slipstream.http.errors import JSON, HttpError
from slipstream.http.event_stream import EVENT_STREAM, EventStream
from slipstream.http.generation import (
    MAX_INT,
    NumLogprobs,
    NumTokens,
    Prompts,
    SamplingFields,
    collect_completions,
    list_prompts,
    make_requests,
    stream_results,
)
from slipstream.http.limits import LimitedRoute, cancel_on_disconnect
from slipstream.http.request_models import JsonModel
from slipstream.http.state import CurrentFront, CurrentTicket, Front
from slipstream.types import Completion, Progress, Score

router = APIRouter(tags=["OpenAI"], route_class=LimitedRoute)
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {EVENT_STREAM: {}}}}


class StreamOptions(JsonModel):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and ignored: chunks are never padded."""


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


class ChatCompletionRequest(SamplingFields):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: NumTokens | None = None
    """By default, as many as the context has room for."""
    max_completion_tokens: NumTokens | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    tools: list[dict[str, Any]] | None = None
    """Rendered into the prompt. Tool calls come back as text: they are not parsed."""
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = None


@router.get("/v1/models")
async def models(front: CurrentFront) -> dict[str, Any]:
    """List the model that the fleet serves."""
    info, name = await front.engine_info(), front.model_name
    model = {"id": name, "object": "model", "created": front.started, "owned_by": "slipstream"}
    return {"object": "list", "data": [model | {"root": name, "parent": None, "max_model_len": info.max_model_len}]}


@router.post("/v1/completions", responses=STREAMED)
@cancel_on_disconnect
async def create_completion(
    request: Request, front: CurrentFront, ticket: CurrentTicket, body: CompletionRequest
) -> Response:
    """Complete prompts."""
    front.check_model(body.model)
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
    requests = make_requests(list_prompts(body.prompt), params, answer_id, body.priority, body.stream)
    head = {"id": answer_id, "object": "text_completion", "created": int(time.time()), "model": front.model_name}
    if body.stream:

        def to_chunk(delta: TextDelta) -> dict[str, Any]:
            return {"text": delta.text, "logprobs": _logprobs(front, body, delta)}

        return EventStream(_stream_chunks(front, ticket, head, requests, body.stream_options, to_chunk))
    completions = await collect_completions(front, ticket, answer_id, requests)
    scores = await _score_prompts(front, body, completions)
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
    logprobs = choices.CompletionLogprobs(front.tokenizer, body.logprobs, body.return_tokens_as_token_ids)
    if body.echo and isinstance(completion, Completion) and scores is not None:
        logprobs.add_prompt(completion.prompt_token_ids, scores.get(completion.prompt_token_ids))
    if body.max_tokens:
        logprobs.add_completion(completion)
    return logprobs.value


async def _score_prompts(
    front: Front, body: CompletionRequest, completions: Sequence[Completion]
) -> dict[tuple[int, ...], Score]:
    """Score the prompts whose logprobs are asked for. A prompt of one token has none."""
    if body.prompt_logprobs is None and not (body.echo and body.logprobs is not None):
        return {}
    num_top = max((body.logprobs or 0) if body.echo else 0, body.prompt_logprobs or 0)
    prompts = [tokens for tokens in dict.fromkeys(c.prompt_token_ids for c in completions) if len(tokens) > 1]
    return dict(zip(prompts, await front.fleet.score(prompts, "", num_top))) if prompts else {}


@router.post("/v1/chat/completions", responses=STREAMED)
@cancel_on_disconnect
async def create_chat_completion(
    request: Request, front: CurrentFront, ticket: CurrentTicket, body: ChatCompletionRequest
) -> Response:
    """Generate the next message of a conversation."""
    front.check_model(body.model)
    if body.tool_choice not in (None, "none", "auto"):
        message = "tool_choice must be 'none' or 'auto': tool calls are not enforced"
        raise HttpError(400, message, "unsupported", "tool_choice")
    if body.response_format is not None and body.response_format.get("type") != "text":
        message = "response_format must have type 'text': output is not constrained"
        raise HttpError(400, message, "unsupported", "response_format")
    if body.top_logprobs and not body.logprobs:
        raise InvalidSampling("top_logprobs needs logprobs=true")
    max_model_len = (await front.engine_info()).max_model_len
    conversation = (body.messages, body.tools, body.chat_template_kwargs, body.add_generation_prompt)
    prompt = await asyncio.to_thread(front.tokenizer.encode_chat, max_model_len, *conversation)
    if len(prompt) >= max_model_len:
        raise InvalidPrompt(
            f"the conversation has {len(prompt)} tokens, which leaves no room for a completion in {max_model_len=}"
        )
    answer_id = body.answer_id("chatcmpl")
    max_tokens = body.max_completion_tokens or body.max_tokens or max_model_len - len(prompt)
    params = body.sampling_params(max_tokens, body.top_logprobs or 0)
    requests = make_requests([prompt], params, answer_id, body.priority, body.stream)
    head = {"id": answer_id, "object": "chat.completion", "created": int(time.time()), "model": front.model_name}

    def logprobs(completion: Completion | TextDelta) -> dict[str, Any] | None:
        if not body.logprobs:
            return None
        return choices.chat_logprobs(
            front.tokenizer, completion, body.top_logprobs or 0, body.return_tokens_as_token_ids
        )

    if body.stream:
        head["object"] = "chat.completion.chunk"
        opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

        def to_chunk(delta: TextDelta) -> dict[str, Any]:
            return {"delta": {"content": delta.text}, "logprobs": logprobs(delta)}

        return EventStream(_stream_chunks(front, ticket, head, requests, body.stream_options, to_chunk, opening))
    completions = await collect_completions(front, ticket, answer_id, requests)
    rows = [
        {
            "index": index,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": logprobs(completion),
            "finish_reason": completion.finish_reason,
            **choices.choice_additions(completion, body.return_token_ids),
        }
        for index, completion in enumerate(completions)
    ]
    answer = {**head, "choices": rows, "usage": choices.usage(completions)}
    if body.return_token_ids:
        answer["prompt_token_ids"] = list(prompt)
    return Response(to_json(answer), media_type=JSON)


async def _stream_chunks(
    front: Front,
    ticket: Ticket,
    head: dict[str, Any],
    requests: Sequence[types.Request],
    options: StreamOptions,
    to_chunk: Callable[[TextDelta], dict[str, Any]],
    opening: dict[str, Any] | None = None,
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield tokens as they are generated. The last chunk of a choice says how it ended and under which policy version;
    `opening` is sent before the first."""
    params = requests[0].sampling
    detokenizers: dict[int, IncrementalDetokenizer] = {}
    completions: list[Completion] = []

    def to_choices(result: Completion | Progress) -> Iterator[dict[str, Any]]:
        index = result.prompt_index * params.n + result.sample_index
        if index not in detokenizers:
            detokenizers[index] = IncrementalDetokenizer(front.tokenizer, params.stop)
            if opening is not None:
                yield {"index": index, **opening}
        detokenizer, end = detokenizers[index], dict[str, Any](finish_reason=None)
        if isinstance(result, Completion):
            completions.append(result)
            end = {"finish_reason": result.finish_reason, **choices.choice_additions(result)}
        delta = detokenizer.finish(result) if isinstance(result, Completion) else detokenizer.add(result)
        if delta is None:
            return
        if delta.restarted:
            raise HttpError(
                409,
                "the completion restarted with other tokens, because an engine was lost or the weights changed; discard the "
                "streamed text and retry",
                "began_anew",
            )
        yield {"index": index, **to_chunk(delta), **end, "token_ids": list(delta.token_ids)}

    results = stream_results(front, ticket, head["id"], requests)
    async with contextlib.aclosing(results):
        async for result in results:
            for choice in to_choices(result):
                yield {**head, "choices": [choice]}
    if options.include_usage:
        yield {**head, "choices": [], "usage": choices.usage(completions)}
