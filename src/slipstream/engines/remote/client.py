"""HTTP to a server: every call with a deadline, every error with the server, the call, what was expected and what came."""

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

from slipstream.config import EngineConfig
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
        f"an engine of kind 'remote' needs an HTTP library ({error}); pip install 'slipstream-rl[remote]'"
    ) from None

CALL_SECONDS = 60.0
CONNECT_SECONDS = 10.0
_SHOWN = 600
"""Characters of a server's answer that an error repeats."""


class Maker(NamedTuple):
    """What errors say of a server."""

    name: str
    token: str
    """The variable with its key."""
    generation: str
    """The path whose refusals are about a request."""
    unknown: str
    """Why it may not know a path."""


MAKERS = {
    "vllm": Maker(
        *("vLLM", "SLIPSTREAM_VLLM_TOKEN", "/v1/completions"),
        "was it started with VLLM_SERVER_DEV_MODE=1? If it is an SGLang server, say dialect=sglang",
    ),
    "sglang": Maker(
        *("SGLang", "SLIPSTREAM_SGLANG_TOKEN", "/generate"),
        "is it an SGLang server, of a version that Slipstream knows?",
    ),
}


class Client:
    """`seconds` bounds calls that say nothing else; infinity is for those that wait as long as the server is paused. Proxies
    of the environment are not used: the key is for the server."""

    def __init__(self, options: EngineConfig, seconds: float = CALL_SECONDS) -> None:
        self.url, self._seconds, self.maker = options.url.rstrip("/"), seconds, MAKERS[options.dialect]
        self.who = f"the {self.maker.name} server at {self.url}"
        token = _token(options, self.maker)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # A connection for each call: a server closes those that rest, or that saw an error, just as the next call uses them.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, limits=limits, timeout=timeout, verify=_tls(options), trust_env=False
        )

    async def get(self, path: str, seconds: float | None = None) -> Any:
        return self._json(f"GET {path}", await self._call("GET", path, None, seconds))

    async def post(self, path: str, body: Mapping[str, Any] | None = None, seconds: float | None = None) -> Any:
        """The answer's JSON; None where it has no body."""
        return self._json(f"POST {path}", await self._call("POST", path, body, seconds))

    async def order(self, path: str, body: Mapping[str, Any] | None = None, seconds: float | None = None) -> None:
        """Where 200 says everything."""
        await self._call("POST", path, body, seconds)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """What a streamed answer brings, as it comes; there is no deadline between two events, as the server may be paused.
        Leaving it early closes the connection, which ends the request in the server."""
        call = f"POST {path}"
        with self._explained(call):
            async with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise self._refused(call, answer)
                async for line in answer.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    text = line.removeprefix("data:").strip()
                    if text == "[DONE]":
                        return
                    yield self._parsed(call, text)
        raise self.nonsense(call, "a stream that ends with [DONE]", "one that ended before")

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float | None
    ) -> httpx.Response:
        call, seconds = f"{method} {path}", self._seconds if seconds is None else seconds
        with self._explained(call):
            try:
                async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                    answer = await self._http.request(method, path, json=body)
            except TimeoutError:
                raise DeadlineExceeded(f"{self.who} did not answer {call} within {seconds:g} s") from None
        if answer.status_code != 200:
            raise self._refused(call, answer)
        return answer

    def _json(self, call: str, answer: httpx.Response) -> Any:
        return self._parsed(call, answer.text) if answer.content else None

    @contextlib.contextmanager
    def _explained(self, call: str):  # type: ignore[no-untyped-def]
        try:
            yield
        except httpx.HTTPError as error:
            raise EngineLost(f"{self.who} cannot be reached for {call}: {type(error).__name__}: {error}") from None

    def _parsed(self, call: str, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self.nonsense(call, "JSON", text) from None

    def _refused(self, call: str, answer: httpx.Response) -> SlipstreamError:
        status, said = answer.status_code, _message(answer.text)
        what = f"{self.who} answered {call} with {status} instead of 200: {said}"
        if status in (401, 403):
            return Unauthorized(f"{what}; its API key goes into {self.maker.token}, or a file named by token_file")
        if status == 404 and "/v1/" not in call:
            return ConfigError(f"{what}; {self.maker.unknown}")
        if status in (400, 422) and self.maker.generation in call:
            return InvalidSampling(what)
        if status == 429:
            return NotReady(f"{what}; it is busy, and another engine may not be")
        return EngineFailure(what)

    def nonsense(self, call: str, expected: str, found: Any) -> ProtocolMismatch:
        return ProtocolMismatch(f"{self.who} answered {call} with {str(found)[:_SHOWN]!r}; expected {expected}")


def _message(text: str) -> str:
    """Of an error, as servers word it; or all that came."""
    try:
        answer = json.loads(text)
        found = next(answer[key] for key in ("error", "message", "detail") if key in answer)
        return str(found["message"] if isinstance(found, dict) else found)[:_SHOWN]
    except (ValueError, KeyError, TypeError, StopIteration, RecursionError):
        return text[:_SHOWN]


def _token(options: EngineConfig, maker: Maker) -> str:
    if not options.token_file:
        return os.environ.get(maker.token, "").strip()
    try:
        token = Path(options.token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the key of the {maker.name} server cannot be read from {options.token_file}: {error}"
        ) from None
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{options.token_file} should hold the {maker.name} server's key, one line of printable characters"
        )
    return token


def _tls(options: EngineConfig) -> ssl.SSLContext | bool:
    if not options.certificate:
        return True
    try:
        return ssl.create_default_context(cafile=options.certificate)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificate {options.certificate} cannot be loaded: {error}") from None
