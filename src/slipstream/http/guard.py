"""Nobody comes in without the token. Before anything is read, and whether or not there is such a path."""

from __future__ import annotations

import base64
import binascii
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.http.answers import HttpError, error_reply
from slipstream.http.exchange import send_reply

OPEN = ("/health",)
"""Says that the process is alive, and nothing else."""


class Guard:
    """`Authorization: Bearer TOKEN`; or Basic with the token as the password, for clients that only know a URL
    (`http://trainer:TOKEN@127.0.0.1:9001`)."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._may(scope):
            await self._app(scope, receive, send)
            return
        error = HttpError(
            401,
            "token missing or wrong: send the header 'Authorization: Bearer TOKEN'; the token is in the file `token` of the "
            "gateway's run directory",
            "invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await send_reply(error_reply(error), send)

    def _may(self, scope: Scope) -> bool:
        given = [value for key, value in scope["headers"] if key == b"authorization"]
        if len(given) != 1:
            return False
        kind, _, text = given[0].partition(b" ")
        if kind.lower() == b"basic":
            try:
                text = base64.b64decode(text.strip(), validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif kind.lower() != b"bearer":
            return False
        return hmac.compare_digest(text.strip(), self._token)
