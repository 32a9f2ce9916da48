"""Bearer-token authentication, checked before routing or reading the body."""

from __future__ import annotations

import base64
import binascii
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.http.errors import HttpError, error_response

PUBLIC_PATHS = ("/health",)
"""Paths that need no token. `/health` says only that the process is alive."""


class BearerAuth:
    """ASGI middleware: `Authorization: Bearer TOKEN`, or Basic with the token as the password for clients that take only a
    URL (`http://trainer:TOKEN@127.0.0.1:9001`)."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS or self._is_authorized(scope):
            await self._app(scope, receive, send)
            return
        error = HttpError(
            401,
            "token missing or wrong: send the header 'Authorization: Bearer TOKEN'; the token is in the file `token` of the "
            "gateway's run directory",
            "invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(error)(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        headers = [value for key, value in scope["headers"] if key == b"authorization"]
        if len(headers) != 1:
            return False
        scheme, _, credentials = headers[0].partition(b" ")
        if scheme.lower() == b"basic":
            try:
                credentials = base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(credentials.strip(), self._token)
