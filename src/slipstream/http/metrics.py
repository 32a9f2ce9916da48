"""Prometheus metrics of the HTTP server, beside those of the fleet (`fleet_metrics.py`)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.http.fleet_metrics import FleetCollector
from slipstream.runtime import tracing
from slipstream.types import Completion, FleetStatus

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ROUTE_PATH = "slipstream.route_path"
"""Key of the ASGI scope under which a route leaves its path. Unknown paths have none: they would be labels without end."""


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "slipstream_http_requests", "Requests answered.", ("path", "method", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "slipstream_http_request_seconds",
            "Time from a request's arrival to the end of its response.",
            ("path",),
            registry=self._registry,
        )
        self._tokens = Counter(
            "slipstream_http_tokens", "Tokens of prompts and completions.", ("kind",), registry=self._registry
        )

    def count_request(self, path: str, method: str, status: int, seconds: float) -> None:
        self._requests.labels(path, method, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def count_tokens(self, completions: Sequence[Completion]) -> None:
        prompts = {c.prompt_index: len(c.prompt_token_ids) for c in completions}
        self._tokens.labels("prompt").inc(sum(prompts.values()))
        self._tokens.labels("completion").inc(sum(len(c.token_ids) for c in completions))

    def text(self, status: FleetStatus, in_flight: int) -> bytes:
        """Render in Prometheus' exposition format."""
        fleet = CollectorRegistry()
        fleet.register(FleetCollector(status, in_flight))
        return generate_latest(fleet) + generate_latest(self._registry)


class MetricsMiddleware:
    """ASGI middleware that counts requests by route and status, measures how long they take, and traces them."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not tracing.is_on() or scope["type"] != "http":
            await self._counted(scope, receive, send)
            return
        headers = dict(scope["headers"])
        with tracing.span("http.request", headers.get(b"traceparent", b"").decode("latin-1")) as facts:
            await self._counted(scope, receive, send)
            facts["path"] = scope.get(ROUTE_PATH, "")

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = time.perf_counter(), 500

        async def observe(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observe)
        finally:
            if path := scope.get(ROUTE_PATH):
                self._metrics.count_request(path, scope["method"], status, time.perf_counter() - started)
