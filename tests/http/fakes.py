"""A scripted fleet behind the HTTP application, without sockets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
from fastapi import FastAPI

from slipstream.config import HttpConfig
from slipstream.gateway.tokens import TokenTable
from slipstream.http.app import create_app
from slipstream.http.state import Front
from slipstream.types import Completion, EngineInfo, EngineStatus, FleetStatus, Progress, VersionSpan

TOKEN = "a-token"


def engine_info(name: str = "one") -> EngineInfo:
    return EngineInfo(name, "fake", "fake-1", "float32", 1, (), (), (), "here", 128, 8, 0)


def completion(request_id: str, tokens: Sequence[int], text: str = "", sample: int = 0) -> Completion:
    spans = (VersionSpan(0, 0, len(tokens)),)
    logprobs = tuple(-1.0 for _ in tokens)
    return Completion(request_id, sample, (5,), tuple(tokens), text, logprobs, logprobs, "length", spans, "one")


def progress(request_id: str, start: int, tokens: Sequence[int]) -> Progress:
    return Progress(request_id, 0, start, tuple(tokens), tuple(-1.0 for _ in tokens))


class FakeFleet:
    """Answers a request with `results(request_id)`: lists are yielded, errors raised. Records control calls, with the engine
    if one is named."""

    def __init__(
        self,
        results: Any = None,
        failing: dict[str, Exception] | None = None,
        engines: Sequence[str] = ("one",),
        paused: Sequence[str] = (),
    ) -> None:
        self._results, self._failing = results, failing or {}
        self.calls: list[str] = []
        rows = (EngineStatus(engine_info(name), "ready", 0, 0.0, is_paused=name in paused) for name in engines)
        self.status_value = FleetStatus(0, 1.0, 0, tuple(rows))

    async def status(self) -> FleetStatus:
        self._fail("status")
        return self.status_value

    async def generate(self, requests: Sequence[Any]) -> AsyncIterator[list[Any]]:
        for item in self._results(requests[0].id):
            if isinstance(item, Exception):
                raise item
            yield item

    async def pause(self) -> None:
        self._fail("pause")
        self._set_paused(True)

    async def resume(self, engine: str = "") -> None:
        self._fail("resume", engine)
        self._set_paused(False)

    async def sleep(self, level: int) -> dict[str, Any]:
        self._fail("sleep")
        return {}

    async def reset_prefix_cache(self) -> None:
        self._fail("reset_prefix_cache")

    async def wake(self, tags: Any = None, engine: str = "") -> dict[str, Any]:
        self._fail("wake", engine)
        return {}

    def _set_paused(self, paused: bool) -> None:
        engines = tuple(replace(engine, is_paused=paused) for engine in self.status_value.engines)
        self.status_value = replace(self.status_value, engines=engines)

    def _fail(self, call: str, engine: str = "") -> None:
        if call != "status":
            self.calls.append(f"{call} {engine}".strip())
        if call in self._failing:
            raise self._failing[call]


def fake_app(fleet: Any, **config: Any) -> FastAPI:
    return create_app(Front.create(fleet, lambda: fleet, HttpConfig(**config)), TokenTable(TOKEN))


def endpoints() -> list[tuple[str, str, dict[str, Any]]]:
    """Method, path and OpenAPI description of every endpoint."""
    return [
        (method.upper(), path, operation)
        for path, operations in fake_app(FakeFleet()).openapi()["paths"].items()
        for method, operation in operations.items()
    ]


@contextlib.asynccontextmanager
async def front(fleet: Any, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(fake_app(fleet, **config), raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://front", headers=headers, timeout=60) as client:
        yield client
