"""Limits on what clients may send, hold and leave unread, and work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.gateway.admission import Admission, Ticket
from slipstream.http.errors import JSON, HttpError
from slipstream.http.metrics import ROUTE_PATH
from slipstream.http.request_models import unknown_field

log = logging.getLogger(__name__)

T = TypeVar("T")

TICKET = "slipstream.ticket"
"""Key of the ASGI scope under which a request's `Ticket` is."""
FREE_BODY_BYTES = 4096
"""Bodies up to this size are not counted, so that control calls work while the server is overloaded."""
PIECE_BYTES = 1 << 16
SEND_SECONDS = 60.0
"""A client that does not take a piece of its answer within this time is disconnected."""


class AdmissionMiddleware:
    """ASGI middleware: gives each request a `Ticket` for what it holds until its answer is sent. Large answers are sent in
    pieces, so that an answer which its client does not read is still counted."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app, self._admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        piecewise = _PiecewiseSend(send)
        with self._admission.ticket(_caller(scope)) as ticket:
            try:
                await self._app({**scope, TICKET: ticket}, receive, piecewise)
            except Exception:
                if not piecewise.is_stuck:
                    raise
                log.info("disconnected a client that has not read for %g s", SEND_SECONDS)


def _caller(scope: Scope) -> str:
    """Callers are told apart by their host and their token."""
    token = next((value for key, value in scope["headers"] if key == b"authorization"), b"")
    return f"{(scope['client'] or [''])[0]} {hash(token)}"


class _PiecewiseSend:
    def __init__(self, send: Send) -> None:
        self._send, self.is_stuck = send, False

    async def __call__(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            return await self._send(message)
        body, more = message.get("body", b""), message.get("more_body", False)
        for start in range(0, len(body) or 1, PIECE_BYTES):
            stop = start + PIECE_BYTES
            await self._send_piece({**message, "body": body[start:stop], "more_body": more or stop < len(body)})

    async def _send_piece(self, message: Message) -> None:
        try:
            if not self.is_stuck:
                async with asyncio.timeout(SEND_SECONDS):
                    return await self._send(message)
        except TimeoutError:
            self.is_stuck = True
        raise ClientDisconnect


class LimitedRoute(APIRoute):
    """Reads the whole body within the configured limits, and rejects unknown query parameters.

    A body is JSON whatever its content type says, and an empty one is an empty object, so plain `curl -d` works."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        parameters = [field.alias for field in self.dependant.query_params]

        async def handle(request: Request) -> Response:
            request.scope[ROUTE_PATH] = self.path
            headers = [(key, value) for key, value in request.scope["headers"] if key != b"content-type"]
            headers.append((b"content-type", JSON.encode()))
            limited = _LimitedRequest({**request.scope, "headers": headers}, request.receive)
            await limited.body()
            for name in request.query_params if parameters else ():
                if name not in parameters:
                    raise HttpError(400, unknown_field(name, parameters), "unknown_field", name[:100])
            return await handler(limited)

        return handle


class _LimitedRequest(Request):
    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            seconds = self.app.state.front.config.body_seconds
            try:
                async with asyncio.timeout(seconds):
                    body = await super().body()
            except TimeoutError:
                message = f"the body did not arrive within {seconds:g} s (body_seconds)"
                raise HttpError(408, message, "too_slow", headers={"Connection": "close"}) from None
            except ClientDisconnect:
                raise HttpError(400, "the client disconnected before sending the whole body", "incomplete") from None
            self._body = body if body.strip() else b"{}"
        return self._body

    async def stream(self) -> AsyncGenerator[bytes, None]:
        max_bytes = self.app.state.front.config.max_body_bytes
        declared, size = self.headers.get("content-length", "0"), 0
        message = f"the body is larger than {max_bytes} bytes (max_body_bytes); send less at once"
        if not declared.isdecimal() or int(declared) > max_bytes:
            raise HttpError(413, message, "too_large")
        ticket: Ticket = self.scope[TICKET]
        async for chunk in super().stream():
            size += len(chunk)
            if size > max_bytes:
                raise HttpError(413, message, "too_large")
            if size > FREE_BODY_BYTES:
                ticket.take(num_bytes=size - ticket.bytes)
            yield chunk

    async def json(self) -> Any:
        """Unlike `json.loads`, reject NaN and unpaired surrogates: no tokenizer can encode the latter."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HttpError(400, f"the body is not JSON: {str(error)[:200]}", "invalid_json") from None


def cancel_on_disconnect(handler: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Cancel an endpoint when its client disconnects. The endpoint takes the `request` as an argument.

    Endpoints without this run to their end: what they change, they change for every client."""

    @functools.wraps(handler)
    async def cancellable(*, request: Request, **arguments: Any) -> Response:
        return await run_until_disconnect(request.receive, handler(request=request, **arguments))

    return cancellable


async def run_until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Return what `work` returns; cancel it when the client disconnects. The body must have been read: the next message is
    then the disconnect."""
    running, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({running, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise HttpError(499, "the client disconnected", "client_disconnected")
    finally:
        for task in (running, disconnected):
            task.cancel()
        await asyncio.gather(running, disconnected, return_exceptions=True)
