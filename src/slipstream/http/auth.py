"""Bearer tokens and their roles, checked before routing or reading the body."""

from __future__ import annotations

import base64
import binascii
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.gateway.tokens import Role, TokenTable
from slipstream.http.errors import HttpError, error_response

PUBLIC_PATHS = ("/health",)
"""Paths that need no token. `/health` says only that the process is alive."""

CLIENT_PATHS = re.compile(
    r"/v1/completions|/generate|(?:/sessions/[^/]+)?/v1/chat/completions|/v1/sessions|/v1/sessions/[^/]+/close"
)
"""What a client may POST to. Everything else that is not a GET changes the fleet for all, and is for trainers."""


_LOOPBACK_HOST = re.compile(rb"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")


class BearerAuth:
    """ASGI middleware: `Authorization: Bearer TOKEN`, or Basic with the token as the password for clients that take only a
    URL (`http://trainer:TOKEN@127.0.0.1:9001`). With `tokenless`, local trainers may call the bridge dialect without one."""

    def __init__(self, app: ASGIApp, tokens: TokenTable, tokenless: bool = False) -> None:
        self._app, self._tokens, self._tokenless = app, tokens, tokenless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS or _is_dashboard(scope["path"]):
            await self._app(scope, receive, send)
            return
        token = _token(scope)
        role = self._tokens.role_of(token) if token is not None else None
        if self._tokenless and _is_local_trainer(scope):
            await self._app(scope, receive, send)
            return
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


def _is_dashboard(path: str) -> bool:
    """The dashboard has a login of its own (`observe/dashboard/access.py`), since browsers send no bearer tokens."""
    return path == "/dashboard" or path.startswith("/dashboard/")


def _may_call(role: Role, method: str, path: str) -> bool:
    match role:
        case "run" | "trainer":
            return True
        case "client":
            return method in ("GET", "HEAD") or CLIENT_PATHS.fullmatch(path) is not None
        case "viewer":
            return method in ("GET", "HEAD")
    return False  # an engine speaks gRPC


def _is_local_trainer(scope: Scope) -> bool:
    """Whether a call without a token may come from a local trainer. A web page that a browser on this machine shows could send
    such calls too. Browsers name the page's origin, and the host that they believe to call."""
    headers = dict(scope["headers"])
    return (
        (scope["path"] == "/generate" or scope["path"].startswith("/bridge/"))
        and not headers.keys() & {b"authorization", b"origin", b"sec-fetch-site"}
        and _LOOPBACK_HOST.fullmatch(headers.get(b"host", b"")) is not None
    )


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
