"""Bearer tokens and their roles, checked before routing or reading the body."""

from __future__ import annotations

import base64
import binascii

from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.gateway.tokens import Role, TokenTable
from slipstream.http.errors import HttpError, error_response

PUBLIC_PATHS = ("/health",)
"""Paths that need no token. `/health` says only that the process is alive."""

CLIENT_PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")
"""What a client may POST to. Everything else that is not a GET changes the fleet for all, and is for trainers."""


class BearerAuth:
    """ASGI middleware: `Authorization: Bearer TOKEN`, or Basic with the token as the password for clients that take only a
    URL (`http://trainer:TOKEN@127.0.0.1:9001`)."""

    def __init__(self, app: ASGIApp, tokens: TokenTable) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        token = _token(scope)
        role = self._tokens.role_of(token) if token is not None else None
        if role is not None and _may_call(role, scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        error = HttpError(
            401,
            "token missing or wrong: send the header 'Authorization: Bearer TOKEN'; the token is in the file `token` of the "
            "gateway's run directory",
            "invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        if role is not None:
            error = HttpError(403, f"a token of the role {role!r} does not permit this call", "forbidden")
        await error_response(error)(scope, receive, send)


def _may_call(role: Role, method: str, path: str) -> bool:
    match role:
        case "run" | "trainer":
            return True
        case "client":
            return method in ("GET", "HEAD") or path in CLIENT_PATHS
        case "viewer":
            return method in ("GET", "HEAD")
    return False  # an engine speaks gRPC


def _token(scope: Scope) -> bytes | None:
    """Return the token of a request; None if there is none, or more than one header."""
    headers = [value for key, value in scope["headers"] if key == b"authorization"]
    if len(headers) != 1:
        return None
    scheme, _, credentials = headers[0].partition(b" ")
    if scheme.lower() == b"basic":
        try:
            credentials = base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return None
    elif scheme.lower() != b"bearer":
        return None
    return credentials.strip()
