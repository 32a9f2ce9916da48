"""What the front answers: JSON, a stream of events, or an error in OpenAI's words."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slipstream.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    MappingError,
    MessageTooLarge,
    NotReady,
    PeerError,
    RequestError,
    SlipstreamError,
    Unauthorized,
    UnknownEngine,
    WeightsError,
)

JSON, EVENTS = "application/json", "text/event-stream"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that is complete."""

    content: bytes
    status: int = 200
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


Events: TypeAlias = AsyncGenerator[Any, None]
"""JSON values, each an event of the answer. What is raised before the first is an answer of its own."""

Answer: TypeAlias = Mapping[str, Any] | Reply | Events


class HttpError(Exception):
    """What only the front refuses. `code` is a word for programs, `param` the field that is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, dict(headers or {})


_STATUSES: tuple[tuple[type[SlipstreamError], int], ...] = (
    (UnknownEngine, 404),
    (MessageTooLarge, 413),
    (RequestError, 400),
    (MappingError, 400),
    (ConfigError, 400),
    (CheckpointError, 400),
    (WeightsError, 409),
    (NotReady, 503),
    (PeerError, 503),
    (DeadlineExceeded, 504),
    (Unauthorized, 401),
)
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 409: "conflict_error"}


def reply(value: Any, status: int = 200) -> Reply:
    return Reply(encoded(value), status)


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def status_of(error: Exception) -> int:
    if isinstance(error, HttpError):
        return error.status
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def error_value(error: Exception) -> dict[str, Any]:
    """In OpenAI's schema. Whatever was not raised on purpose keeps its text to the log: it may tell of anything."""
    status = status_of(error)
    if isinstance(error, HttpError):
        code, param = error.code or None, error.param
    else:
        code, param = type(error).__name__, None
    if isinstance(error, (HttpError, SlipstreamError)):
        message = str(error)
    else:
        message, code = "the front failed inside; its log says how", "internal_error"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_reply(error: Exception) -> Reply:
    headers = error.headers if isinstance(error, HttpError) else {"Retry-After": "1"} if status_of(error) == 503 else {}
    return Reply(encoded(error_value(error)), status_of(error), JSON, headers)
