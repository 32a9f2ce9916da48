"""OpenAI's /v1/chat/completions: the next message of a conversation, with tool calls and in sessions (`sessions.py`)."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field
from pydantic_core import to_json

from slipstream import types
from slipstream.bridge.incremental_text import TextDelta
from slipstream.errors import InvalidPrompt, InvalidSampling
from slipstream.gateway.admission import Ticket
from slipstream.http import openai_choices as choices
from slipstream.http.completion_stream import StreamOptions, stream_chunks
from slipstream.http.errors import JSON, HttpError
from slipstream.http.event_stream import EVENT_STREAM, EventStream
from slipstream.http.generation import NumLogprobs, NumTokens, SamplingFields, collect_completions, make_requests
from slipstream.http.limits import LimitedRoute, cancel_on_disconnect
from slipstream.http.sessions import ChatTurn, make_turn
from slipstream.http.state import CurrentFront, CurrentTicket, Front
from slipstream.model.tool_calls import ToolCall, ToolCallParser, assistant_message
from slipstream.types import Completion

router = APIRouter(tags=["OpenAI"], route_class=LimitedRoute)
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {EVENT_STREAM: {}}}}
SESSION_HEADER = "x-slipstream-session"


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
    """Rendered into the prompt. Calls are parsed if the model's format is known, unless `tool_choice` is "none"."""
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    """Accepted and ignored: how many calls the model makes is up to it."""
    response_format: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = None
    session: str = ""
    """Session that keeps the tokens of this conversation (docs/agents.md); also the header `X-Slipstream-Session`."""


@router.post("/v1/chat/completions", responses=STREAMED)
@cancel_on_disconnect
async def create_chat_completion(
    request: Request, front: CurrentFront, ticket: CurrentTicket, body: ChatCompletionRequest
) -> Response:
    """Generate the next message of a conversation."""
    return await _answer(request, front, ticket, body)


@router.post("/sessions/{session}/v1/chat/completions", responses=STREAMED)
@cancel_on_disconnect
async def create_chat_completion_in_session(
    request: Request, front: CurrentFront, ticket: CurrentTicket, session: str, body: ChatCompletionRequest
) -> Response:
    """The same in a session, for agents that can be given only a base URL: `/sessions/ID/v1`."""
    return await _answer(request, front, ticket, body, session)


async def _answer(
    request: Request, front: Front, ticket: Ticket, body: ChatCompletionRequest, session: str = ""
) -> Response:
    adapter = await front.adapter_of(body.model)
    _check(body)
    named = {name for name in (session, body.session, request.headers.get(SESSION_HEADER, "")) if name}
    if len(named) > 1:
        raise HttpError(
            400, f"path, header and field name different sessions: {sorted(named)}", "invalid_value", "session"
        )
    chat = _ChatAnswer(front, ticket, body, next(iter(named), ""), adapter)
    return EventStream(chat.stream()) if body.stream else await chat.answer()


def _check(body: ChatCompletionRequest) -> None:
    if body.tool_choice not in (None, "none", "auto"):
        message = "tool_choice must be 'none' or 'auto': tool calls are not enforced"
        raise HttpError(400, message, "unsupported", "tool_choice")
    if body.response_format is not None and body.response_format.get("type") != "text":
        message = "response_format must have type 'text': output is not constrained"
        raise HttpError(400, message, "unsupported", "response_format")
    if body.top_logprobs and not body.logprobs:
        raise InvalidSampling("top_logprobs needs logprobs=true")


class _ChatAnswer:
    """One request."""

    def __init__(self, front: Front, ticket: Ticket, body: ChatCompletionRequest, session: str, adapter: str) -> None:
        self._front, self._ticket, self._body, self._session, self._adapter = front, ticket, body, session, adapter
        self._head: dict[str, Any] = {
            "id": body.answer_id("chatcmpl"),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": adapter or front.model_name,
        }
        self._turn, self._params = ChatTurn(()), types.SamplingParams()
        self._replies: dict[int, _Reply] = {}

    async def answer(self) -> Response:
        with contextlib.ExitStack() as held:
            requests = await self._start(held)
            completions = await collect_completions(self._front, self._ticket, self._head["id"], requests)
            rows = [self._choice(index, completion) for index, completion in enumerate(completions)]
        answer: dict[str, Any] = {**self._head, "choices": rows, "usage": choices.usage(completions)}
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = list(self._turn.prompt)
        return Response(to_json(answer), media_type=JSON)

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        with contextlib.ExitStack() as held:
            requests = await self._start(held)
            options = self._body.stream_options
            chunks = stream_chunks(self._front, self._ticket, self._head, requests, options, self._chunk, opening)
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    async def _start(self, held: contextlib.ExitStack) -> Sequence[types.Request]:
        """Hold the session, if there is one, and return the request to the engines."""
        front, body = self._front, self._body
        session = held.enter_context(front.sessions.turn(self._session)) if self._session else None
        if session is not None and body.n != 1:
            raise InvalidSampling(f"a session continues from one answer, got n={body.n}; use one session per sample")
        if session is not None and session.sampling:
            body = body.model_copy(update=dict(session.sampling))
        max_model_len = (await front.engine_info()).max_model_len
        options = (body.tools, body.chat_template_kwargs, body.add_generation_prompt)
        self._turn = await make_turn(front.tokenizer, max_model_len, session, body.messages, *options)
        if (num_prompt := len(self._turn.prompt)) >= max_model_len:
            raise InvalidPrompt(
                f"the conversation has {num_prompt} tokens, which leaves no room for a completion in {max_model_len=}"
            )
        self._head |= self._turn.facts
        max_tokens = body.max_completion_tokens or body.max_tokens or max_model_len - num_prompt
        if session is not None and session.sampling:  # the client did not choose the limit for this prompt
            max_tokens = min(max_tokens, max_model_len - num_prompt)
        self._params = body.sampling_params(max_tokens, body.top_logprobs or 0)
        how = (self._head["id"], body.priority, body.stream, self._adapter)
        return make_requests([self._turn.prompt], self._params, *how)

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        reply = self._reply(index)
        reply.add(completion.text, is_last=True)
        self._turn.record(self._front.sessions, self._front.tokenizer, completion, reply.message)
        return {
            "index": index,
            "message": reply.message,
            "logprobs": self._logprobs(completion),
            "finish_reason": reply.finish_reason(completion),
            **choices.choice_additions(completion, self._body.return_token_ids),
        }

    def _chunk(self, index: int, delta: TextDelta, completion: Completion | None) -> dict[str, Any]:
        reply = self._reply(index)
        chunk = {"delta": reply.add(delta.text, completion is not None), "logprobs": self._logprobs(delta)}
        if completion is None:
            return chunk
        self._turn.record(self._front.sessions, self._front.tokenizer, completion, reply.message)
        return {**chunk, "finish_reason": reply.finish_reason(completion)}

    def _reply(self, index: int) -> _Reply:
        if index not in self._replies:
            tool_format = self._front.tokenizer.tool_format
            has_tools = bool(self._body.tools) and self._body.tool_choice != "none"
            parser = ToolCallParser(tool_format) if has_tools and tool_format is not None else None
            self._replies[index] = _Reply(parser)
        return self._replies[index]

    def _logprobs(self, completion: Completion | TextDelta) -> dict[str, Any] | None:
        body = self._body
        if not body.logprobs:
            return None
        as_ids, num_top = body.return_tokens_as_token_ids, body.top_logprobs or 0
        return choices.chat_logprobs(self._front.tokenizer, completion, num_top, as_ids, self._params)


class _Reply:
    """The message of one choice, as it grows."""

    def __init__(self, parser: ToolCallParser | None) -> None:
        self._parser, self._content, self._calls = parser, "", list[dict[str, Any]]()

    @property
    def message(self) -> dict[str, Any]:
        return assistant_message(self._content, self._calls)

    def add(self, text: str, is_last: bool) -> dict[str, Any]:
        """Add text; return what the message gains by it, as a delta of a stream."""
        content, calls = text, list[ToolCall]()
        if self._parser is not None:
            content, calls = self._parser.finish(text) if is_last else self._parser.add(text)
        delta: dict[str, Any] = {"content": content}
        for call in calls:
            row = call.row(f"call_{secrets.token_hex(12)}")
            delta.setdefault("tool_calls", []).append({"index": len(self._calls), **row})
            self._calls.append(row)
        self._content += content
        return delta

    def finish_reason(self, completion: Completion) -> str:
        return "tool_calls" if self._calls and completion.finish_reason == "stop" else completion.finish_reason
