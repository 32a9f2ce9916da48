"""Errors as clients see them: a status and OpenAI's `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.exceptions import HTTPException as RoutingError

from slipstream.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    EngineFailure,
    Forbidden,
    JournalUnavailable,
    MappingError,
    MessageTooLarge,
    NotReady,
    Overloaded,
    PeerError,
    RequestError,
    SessionBusy,
    SessionClosed,
    SlipstreamError,
    Unauthorized,
    UnknownAdapter,
    UnknownEngine,
    UnknownSession,
    WeightsError,
)

log = logging.getLogger(__name__)

JSON = "application/json"

_STATUSES = (
    (404, (UnknownEngine, UnknownAdapter, UnknownSession)),
    (413, MessageTooLarge),
    (429, Overloaded),
    (409, (SessionBusy, SessionClosed)),
    (400, (RequestError, MappingError, ConfigError, CheckpointError)),
    (409, WeightsError),
    (503, (NotReady, PeerError, JournalUnavailable)),
    (504, DeadlineExceeded),
    (403, Forbidden),
    (401, Unauthorized),
)
"""The first class that matches gives the status; 500 if none does."""
_PATH = re.compile(r"(?<![\w./:~])/(?!v1/|bridge/)(?:[^\s'\",;:()\[\]/]+/)+([^\s'\",;:()\[\]/]*)")
"""An absolute path of two or more parts, with its last part; not a path of this server."""
_ADDRESS = re.compile(
    r"\b(?:https?|grpc)://[^\s'\",;)]+|(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\d.]*\d)|\[[0-9a-fA-F:]*:[0-9a-fA-F:]+\](?::\d+)?"
    r"|(?<=\bat )[\w.-]+:\d+"
)
"""A URL, an IP address with or without a port, or a name with a port after "at"."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


class HttpError(HTTPException):
    """An error of the HTTP layer. `code` is for programs; `param` names the offending field."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code, self.param = code, param

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": redacted(self.detail), "type": kind, "param": self.param, "code": self.code}}


def redacted(text: str) -> str:
    """Return a message without absolute paths and addresses, which are nobody's business beyond the gateway's log."""
    return _ADDRESS.sub("…", _PATH.sub(r"…/\1", text))


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Describes error answers in the OpenAPI document."""

    error: ErrorDetail


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request is invalid; `param` names the field. Retry after a 429."},
    "5XX": {"model": ErrorAnswer, "description": "The fleet cannot serve the request. Retry after a 503."},
}


def http_error(error: Exception) -> HttpError:
    """Translate any exception. The text of an unexpected one stays in the log, because it may hold anything."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, EngineFailure) and "Traceback (most recent call last)" in str(error):
        log.error("an engine failed: %s", error)
        return HttpError(500, "an engine failed internally; its log and the gateway's tell why", type(error).__name__)
    if isinstance(error, SlipstreamError):
        status = next((status for status, kinds in _STATUSES if isinstance(error, kinds)), 500)
        if redacted(str(error)) != str(error):
            log.info("answered with %d, and without addresses and paths: %s", status, error)
        return HttpError(status, str(error), type(error).__name__)
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, RoutingError) and error.status_code == 404:
        return HttpError(404, "no such endpoint; GET /openapi.json lists them", "not_found")
    if isinstance(error, RoutingError) and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"method not allowed; this endpoint takes {allowed}"
        return HttpError(405, message, "method_not_allowed", headers=error.headers)
    return HttpError(500, "internal error; see the gateway's log", "internal_error")


def error_response(error: Exception, retry_seconds: int = 1) -> Response:
    error = http_error(error)
    retry = {"Retry-After": str(retry_seconds)} if error.status_code in (429, 503) else {}
    return Response(to_json(error.body()), error.status_code, {**retry, **(error.headers or {})}, JSON)


async def on_error(request: Request, error: Exception) -> Response:
    error = http_error(error)
    return error_response(error, request.app.state.front.admission.retry_seconds if error.status_code == 429 else 1)


def _validation_error(error: RequestValidationError) -> HttpError:
    """Report the first invalid field. A value that fits no alternative of a union has one error per alternative."""
    errors = error.errors()
    first = errors[0]
    kind, location, message = first["type"], first["loc"][1:], first["msg"]
    if kind == "unknown_field":
        param = str(location[0]) if location else first["ctx"]["name"]
        return HttpError(400, f"{param}: {message}" if location else message, kind, param)
    if not location:
        return HttpError(400, f"the body must be a JSON object, got {reprlib.repr(error.body)}", "invalid_type")
    param = str(location[0])
    if kind == "missing":
        return HttpError(400, f"{param} is missing", "missing_field", param)
    if kind == "none_required":
        return HttpError(400, f"{param} is not supported; leave it out", "unsupported", param)
    others = (e["msg"].removeprefix("Input should be ") for e in errors[1:] if e["loc"][1:2] == location[:1])
    expected = " or ".join(dict.fromkeys(text for text in others if not message.endswith(text)))
    given = error.body.get(param) if isinstance(error.body, dict) else first["input"]
    message = f"{param}: {message}{' or ' + expected if expected else ''}, got {reprlib.repr(given)}"
    return HttpError(400, message, "invalid_value", param)
