"""Server-sent events."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from slipstream.errors import SlipstreamError
from slipstream.http.errors import HttpError, http_error
from slipstream.http.limits import run_until_disconnect

log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"


class EventStream(StreamingResponse):
    """Sends JSON values as events, then `[DONE]`. Sends no comments while it waits: vLLM's benchmark client, for one, takes a
    comment and what follows for one event.

    An exception before the first event propagates and becomes an ordinary error response. A later one is the last event."""

    def __init__(self, events: AsyncGenerator[Any, None]) -> None:
        super().__init__(events, headers={"Content-Type": EVENT_STREAM, "Cache-Control": "no-store"})
        self._events, self._started = events, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send_events(send))
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, (HttpError, SlipstreamError)):
                log.exception("%s %s failed while streaming", scope["method"], scope["path"])
            await self._send(send, _event(to_json(http_error(error).body())))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            async for event in self._events:
                await self._send(send, _event(to_json(event)))
        await self._send(send, _event(b"[DONE]"))

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": True})


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
