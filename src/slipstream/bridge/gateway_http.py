"""Calls of the gateway's HTTP server, with the standard library."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from slipstream.errors import GatewayLost, SlipstreamError, from_wire


class GatewayHttp:
    """Errors have the types that the gateway raised."""

    def __init__(self, url: str, token: str, timeout: float, ca: str = "") -> None:
        """`ca` is the file of the CA that signed the server's certificate; by default the system's."""
        self.url, self._timeout = url, timeout
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        handlers: list[Any] = [urllib.request.ProxyHandler({})]  # loopback needs no proxy
        if ca:
            handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca)))
        self._open = urllib.request.build_opener(*handlers).open

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with self._open(request, timeout=self._timeout) as answer:
                content: dict[str, Any] = json.load(answer)
                return content
        except urllib.error.HTTPError as error:
            raise _typed(path, error) from None
        except (OSError, ValueError) as error:
            raise GatewayLost(f"the gateway at {self.url} did not answer {path}: {error}; is it running?") from None


def _typed(path: str, error: urllib.error.HTTPError) -> SlipstreamError:
    try:
        fields = json.load(error)["error"]
        kind, message = str(fields["code"]), str(fields["message"])
    except (ValueError, KeyError, TypeError):
        kind, message = "", f"{path} failed with HTTP status {error.code}"
    kind = {"invalid_api_key": "Unauthorized", "forbidden": "Forbidden", "not_ready": "NotReady"}.get(kind, kind)
    return from_wire(kind, message)
