"""OpenAI's interface: /v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from slipstream.errors import InvalidPrompt, InvalidSampling
from slipstream.http import choices
from slipstream.http.answers import Answer, HttpError
from slipstream.http.front import Front
from slipstream.http.sampling import (
    MAX_INT,
    Prompts,
    Sampled,
    Tokens,
    Top,
    completions,
    prompts_of,
    requests,
)
from slipstream.http.shapes import Limits
from slipstream.http.streams import stream_events
from slipstream.http.telling import Part
from slipstream.types import Completion, Request, Score


@dataclass(frozen=True, kw_only=True)
class CompletionBody(Sampled):
    prompt: Prompts
    max_tokens: Annotated[int, Limits(0, MAX_INT)] = 16
    """0 with `echo`: the prompt's logprobs are all there is. (A token is drawn, and not told.)"""
    echo: bool = False
    logprobs: Top | None = None
    prompt_logprobs: Top | None = None
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    best_of: int | None = None
    suffix: None = None


@dataclass(frozen=True, kw_only=True)
class ChatBody(Sampled):
    messages: Annotated[list[dict[str, Any]], Limits(min_items=1)]
    max_tokens: Tokens | None = None
    """None: as many as the context leaves."""
    max_completion_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: Top | None = None
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    """What is said in calls of tools stays text: nobody parses it here."""
    response_format: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = None


async def models(front: Front) -> Answer:
    info = await front.info()
    entry = {"id": front.name, "object": "model", "created": front.started, "owned_by": "slipstream"}
    return {
        "object": "list",
        "data": [entry | {"root": front.name, "parent": None, "max_model_len": info.max_model_len}],
    }


async def complete(front: Front, body: CompletionBody) -> Answer:
    front.check_model(body.model)
    if body.best_of not in (None, body.n):
        raise InvalidSampling(
            f"best_of is {body.best_of} and n is {body.n}: all samples are returned, so they must be the same"
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidSampling("max_tokens is 0 without echo: nothing would be answered")
    if body.stream and (body.echo or body.prompt_logprobs is not None):
        raise InvalidSampling("echo and prompt_logprobs are not streamed; ask without stream")
    name = body.name("cmpl")
    sampling = body.sampling(max(body.max_tokens, 1), body.logprobs or 0)
    asked = requests(prompts_of(body.prompt), sampling, name, body.priority, body.stream)
    head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": front.name}
    if body.stream:
        return stream_events(front, head, asked, body.stream_options, lambda p, i: _chunk(front, body, p, i))
    found = await _gathered(front, name, asked)
    scores = await _scores(front, body, found)
    rows = []
    for index, completion in enumerate(found):
        choice = _choice(front, body, completion, index, asked[completion.prompt_index], scores)
        if body.prompt_logprobs is not None:
            tokens = completion.prompt_token_ids
            choice["prompt_logprobs"] = choices.prompt_logprobs(
                front.words, tokens, scores.get(tokens), body.prompt_logprobs
            )
        rows.append(choice)
    drawn = sum(len(c.token_ids) for c in found) if body.max_tokens else 0
    return {**head, "choices": rows, "usage": choices.usage(choices.prompt_tokens(found), drawn)}


def _choice(
    front: Front,
    body: CompletionBody,
    completion: Completion,
    index: int,
    request: Request | None = None,
    scores: dict[tuple[int, ...], Score] | None = None,
) -> dict[str, Any]:
    text = completion.text if body.max_tokens else ""
    table = choices.Table(front.words, body.logprobs or 0, body.return_tokens_as_token_ids)
    if body.echo and request is not None and scores is not None:
        tokens = completion.prompt_token_ids
        text = (request.prompt if isinstance(request.prompt, str) else front.words.decode(tokens)) + text
        table.add_prompt(tokens, scores.get(tokens))
    if body.max_tokens:
        table.add_completion(completion)
    logprobs = None if body.logprobs is None else table.value()
    choice = choices.completion_choice(completion, index, text, logprobs, body.return_token_ids)
    if not body.max_tokens:
        choice |= {"finish_reason": "length", "token_ids": [], "version_spans": []}
    return choice


async def _scores(front: Front, body: CompletionBody, found: Sequence[Completion]) -> dict[tuple[int, ...], Score]:
    """Of the prompts, where their logprobs are wanted. A prompt of one token has none."""
    top = max((body.logprobs or 0) if body.echo else 0, body.prompt_logprobs or 0)
    if body.prompt_logprobs is None and not (body.echo and body.logprobs is not None):
        return {}
    prompts = [tokens for tokens in dict.fromkeys(c.prompt_token_ids for c in found) if len(tokens) > 1]
    return dict(zip(prompts, await front.fleet.score(prompts, "", top))) if prompts else {}


async def chat(front: Front, body: ChatBody) -> Answer:
    front.check_model(body.model)
    if body.tool_choice not in (None, "none", "auto"):
        raise HttpError(
            400, "tool_choice must be 'none' or 'auto': calls of tools are not enforced", "unsupported", "tool_choice"
        )
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise HttpError(
            400, "response_format must be of type 'text': output is not constrained", "unsupported", "response_format"
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidSampling("top_logprobs needs logprobs to be true")
    prompt = await asyncio.to_thread(
        front.words.chat, body.messages, body.tools, body.chat_template_kwargs, body.add_generation_prompt
    )
    longest = (await front.info()).max_model_len
    if len(prompt) >= longest:
        raise InvalidPrompt(
            f"the conversation has {len(prompt)} tokens, which leaves no room in max_model_len={longest}"
        )
    name = body.name("chatcmpl")
    most = body.max_completion_tokens or body.max_tokens or longest - len(prompt)
    asked = requests([prompt], body.sampling(most, body.top_logprobs or 0), name, body.priority, body.stream)
    head = {"id": name, "object": "chat.completion", "created": int(time.time()), "model": front.name}
    if body.stream:
        chunk = head | {"object": "chat.completion.chunk"}
        return stream_events(
            front, chunk, asked, body.stream_options, lambda p, i: _chat_chunk(front, body, p, i), _OPENING
        )
    found = await _gathered(front, name, asked)
    rows = [
        choices.chat_choice(c, i, _chat_logprobs(front, body, c), body.return_token_ids) for i, c in enumerate(found)
    ]
    total = choices.usage(choices.prompt_tokens(found), sum(len(c.token_ids) for c in found))
    more = {"prompt_token_ids": list(prompt)} if body.return_token_ids else {}
    return {**head, "choices": rows, "usage": total, **more}


def _chat_logprobs(front: Front, body: ChatBody, part: Completion | Part) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    return choices.chat_logprobs(front.words, part, body.top_logprobs or 0, body.return_tokens_as_token_ids)


_OPENING = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _chat_chunk(front: Front, body: ChatBody, part: Part, index: int) -> dict[str, Any]:
    return {"index": index, "delta": {"content": part.text}, "logprobs": _chat_logprobs(front, body, part)}


def _chunk(front: Front, body: CompletionBody, part: Part, index: int) -> dict[str, Any]:
    table = choices.Table(front.words, body.logprobs or 0, body.return_tokens_as_token_ids)
    table.add_completion(part)
    return {"index": index, "text": part.text, "logprobs": None if body.logprobs is None else table.value()}


async def _gathered(front: Front, name: str, asked: Sequence[Request]) -> list[Completion]:
    """All of a call's completions: the samples of the first prompt, then those of the second, and so on."""
    async with contextlib.aclosing(front.flights.watch(name, completions(front.fleet, asked))) as found:
        rows = [completion async for completion in found]
    front.metrics.generated(rows)
    return sorted(rows, key=lambda c: (c.prompt_index, c.sample_index))
