"""One call over ASGI: read it within limits, run it, answer it, and notice when the client is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from slipstream.errors import SlipstreamError
from slipstream.http import shapes
from slipstream.http.answers import EVENTS, Answer, Events, HttpError, Reply, encoded, error_reply, error_value, reply
from slipstream.http.front import Front

log = logging.getLogger(__name__)

PING_SECONDS = 10.0
"""So often a stream says that it is alive, and so long errors may still become an answer of their own."""


@dataclass(frozen=True)
class Call:
    """A path, a method, and what is run for it: `run(front)`, with the body or the query if it has one."""

    method: str
    path: str
    run: Callable[..., Awaitable[Answer]]
    says: str
    body: type | None = None
    query: type | None = None
    is_given_up: bool = False
    """Ended when the client is gone. Others run to their end: what they change is changed for all."""
    answers: str = "application/json"


class Exchange:
    """The ASGI application of one call."""

    def __init__(self, call: Call, front: Front) -> None:
        self._call, self._front = call, front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, sender = time.perf_counter(), _Sender(send)
        try:
            await self._answered(scope, receive, sender)
        finally:
            seconds = time.perf_counter() - started
            self._front.metrics.answered(self._call.path, scope["method"], sender.status, seconds)

    async def _answered(self, scope: Scope, receive: Receive, sender: _Sender) -> None:
        try:
            arguments = await self._arguments(scope, receive)
            if self._call.is_given_up:
                await _unless_gone(receive, self._run(arguments, sender))
            else:
                await self._run(arguments, sender)
        except (HttpError, SlipstreamError) as error:
            await sender.error(error)
        except Exception as error:
            log.exception("%s %s failed", self._call.method, self._call.path)
            await sender.error(error)

    async def _run(self, arguments: list[Any], sender: _Sender) -> None:
        answer = await self._call.run(self._front, *arguments)
        if isinstance(answer, Reply):
            await sender.reply(answer)
        elif isinstance(answer, dict):
            await sender.reply(reply(answer))
        else:
            async with contextlib.aclosing(answer):  # type: ignore[type-var]
                await sender.stream(answer)  # type: ignore[arg-type]

    async def _arguments(self, scope: Scope, receive: Receive) -> list[Any]:
        found: list[Any] = []
        raw = await self._body(scope, receive)
        if self._call.body is not None:
            found.append(shapes.parse(self._call.body, _json(raw), shapes.IGNORED))
        if self._call.query is not None:
            pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=100)
            found.append(shapes.parse_query(self._call.query, pairs))
        return found

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        most, parts, size = self._front.config.max_body_bytes, [], 0
        too_large = HttpError(
            413, f"the body is larger than {most} bytes (max_body_bytes); send less at once", "too_large"
        )
        said = next((value for key, value in scope["headers"] if key == b"content-length"), b"0")
        if not said.isdigit() or int(said) > most:
            raise too_large
        try:
            async with asyncio.timeout(self._front.config.body_seconds):
                while (message := await receive())["type"] == "http.request":
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise HttpError(
                408,
                f"the body did not come within {self._front.config.body_seconds:g} s (body_seconds)",
                "too_slow",
                headers={"Connection": "close"},
            ) from None
        raise HttpError(400, "the client went before all of the body had come", "incomplete")


class _Sender:
    """Knows what has been said already: an error after the answer's beginning can only be its last event."""

    def __init__(self, send: Send) -> None:
        self._send, self.status = send, 0

    async def reply(self, answer: Reply) -> None:
        self.status = answer.status
        await send_reply(answer, self._send)

    async def error(self, error: Exception) -> None:
        if not self.status:
            await self.reply(error_reply(error))
        else:
            await self._event(encoded(error_value(error)))
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def stream(self, events: Events) -> None:
        """Server-sent events; a comment now and then while there is nothing to say."""
        coming = asyncio.ensure_future(anext(events))
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=PING_SECONDS)
                if not done:
                    await self._begin()
                    await self._send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
                    continue
                try:
                    event = coming.result()
                except StopAsyncIteration:
                    break
                await self._begin()
                await self._event(encoded(event))
                coming = asyncio.ensure_future(anext(events))
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        await self._begin()
        await self._event(b"[DONE]")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self) -> None:
        if not self.status:
            self.status = 200
            headers = [(b"content-type", EVENTS.encode()), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _event(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


async def send_reply(answer: Reply, send: Send) -> None:
    headers = {"content-type": answer.media_type, "content-length": str(len(answer.content)), **answer.headers}
    pairs = [(key.lower().encode(), value.encode()) for key, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": pairs})
    await send({"type": "http.response.body", "body": answer.content})


async def _unless_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Runs `work` while the client is there. All of the body has been read, so whatever comes next is the end."""
    running, gone = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        for task in (running, gone):
            task.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)


def _json(raw: bytes) -> Any:
    if not raw.strip():
        return {}
    try:
        value = json.loads(raw, parse_constant=_no_number)
        if b"\\ud" in raw.lower():  # half a character, which no text has
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {str(error)[:200]}", "invalid_json") from None
    return value


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON's")
