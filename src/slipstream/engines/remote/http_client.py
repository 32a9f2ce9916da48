"""An HTTP client for inference servers. Every call has a timeout; every error names the server, the call, what was expected
and what came."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.config import RemoteConfig
from slipstream.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineFailure,
    EngineLost,
    InvalidSampling,
    NotReady,
    ProtocolMismatch,
    SlipstreamError,
    Unauthorized,
)

try:
    import httpx
except ImportError as error:
    raise ConfigError(
        f"an engine of kind 'remote' needs httpx ({error}); pip install 'slipstream-rl[remote]'"
    ) from None

CALL_SECONDS = 60.0
CONNECT_SECONDS = 10.0
_MAX_QUOTED = 600
"""Characters of a response that an error quotes."""


class ServerKind(NamedTuple):
    name: str
    token_variable: str
    """The environment variable that holds the API key."""
    generate_path: str
    """A 400 from this path is about one request."""
    not_found_hint: str
    """Why the server may not know a path."""


SERVER_KINDS = {
    "vllm": ServerKind(
        *("vLLM", "SLIPSTREAM_VLLM_TOKEN", "/v1/completions"),
        "was it started with VLLM_SERVER_DEV_MODE=1? For an SGLang server, set dialect=sglang",
    ),
    "sglang": ServerKind(
        *("SGLang", "SLIPSTREAM_SGLANG_TOKEN", "/generate"),
        "is it an SGLang server, of a version that Slipstream supports?",
    ),
}


class ServerClient:
    """`timeout` is the default of all calls, in seconds; infinity suits calls that wait while the server is paused.
    Environment proxies are ignored, so that the API key only reaches the server."""

    def __init__(self, options: RemoteConfig, timeout: float = CALL_SECONDS) -> None:
        self.url, self._timeout, self.kind = options.url.rstrip("/"), timeout, SERVER_KINDS[options.dialect]
        self.name = f"the {self.kind.name} server at {self.url}"
        token = _token(options, self.kind)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # One connection per call: servers close idle and failed connections, possibly just as the next call uses them.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            limits=limits,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            verify=_tls(options),
            trust_env=False,
        )

    async def get(self, path: str, timeout: float | None = None) -> Any:
        return self._json(f"GET {path}", await self._call("GET", path, None, timeout))

    async def post(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Return the response's JSON, or None if it has no body."""
        return self._json(f"POST {path}", await self._call("POST", path, body, timeout))

    async def command(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> None:
        """POST; the body of the response is ignored."""
        await self._call("POST", path, body, timeout)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the events of a streamed response. There is no timeout between two events, since the server may be paused.
        Leaving early closes the connection, which ends the request in the server."""
        call = f"POST {path}"
        with self._translate_errors(call):
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._status_error(call, response)
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    text = line.removeprefix("data:").strip()
                    if text == "[DONE]":
                        return
                    yield self._parse(call, text)
        raise self.mismatch(call, "a stream that ends with [DONE]", "one that ended before")

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> httpx.Response:
        call, timeout = f"{method} {path}", self._timeout if timeout is None else timeout
        with self._translate_errors(call):
            try:
                async with asyncio.timeout(None if math.isinf(timeout) else timeout):
                    response = await self._http.request(method, path, json=body)
            except TimeoutError:
                raise DeadlineExceeded(f"{self.name} did not answer {call} within {timeout:g} s") from None
        if response.status_code != 200:
            raise self._status_error(call, response)
        return response

    def _json(self, call: str, response: httpx.Response) -> Any:
        return self._parse(call, response.text) if response.content else None

    @contextlib.contextmanager
    def _translate_errors(self, call: str):  # type: ignore[no-untyped-def]
        try:
            yield
        except httpx.HTTPError as error:
            raise EngineLost(f"{self.name} cannot be reached for {call}: {type(error).__name__}: {error}") from None

    def _parse(self, call: str, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self.mismatch(call, "JSON", text) from None

    def _status_error(self, call: str, response: httpx.Response) -> SlipstreamError:
        status = response.status_code
        message = f"{self.name} answered {call} with {status} instead of 200: {_error_message(response.text)}"
        if status in (401, 403):
            return Unauthorized(f"{message}; put its API key into {self.kind.token_variable}, or into token_file")
        if status == 404 and "/v1/" not in call:
            return ConfigError(f"{message}; {self.kind.not_found_hint}")
        if status in (400, 422) and self.kind.generate_path in call:
            return InvalidSampling(message)
        if status == 429:
            return NotReady(f"{message}; it is busy, and another engine may not be")
        return EngineFailure(message)

    def mismatch(self, call: str, expected: str, found: Any) -> ProtocolMismatch:
        return ProtocolMismatch(f"{self.name} answered {call} with {str(found)[:_MAX_QUOTED]!r}; expected {expected}")


def _error_message(text: str) -> str:
    """Return the message of an error response, or all of it if it has another shape."""
    try:
        response = json.loads(text)
        error = next(response[key] for key in ("error", "message", "detail") if key in response)
        return str(error["message"] if isinstance(error, dict) else error)[:_MAX_QUOTED]
    except (ValueError, KeyError, TypeError, StopIteration, RecursionError):
        return text[:_MAX_QUOTED]


def _token(options: RemoteConfig, kind: ServerKind) -> str:
    if not options.token_file:
        return os.environ.get(kind.token_variable, "").strip()
    try:
        token = Path(options.token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the API key of the {kind.name} server cannot be read from {options.token_file}: {error}"
        ) from None
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{options.token_file} must hold the {kind.name} server's API key: one line of printable ASCII characters"
        )
    return token


def _tls(options: RemoteConfig) -> ssl.SSLContext | bool:
    if not options.certificate:
        return True
    try:
        return ssl.create_default_context(cafile=options.certificate)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificate {options.certificate} cannot be loaded: {error}") from None
