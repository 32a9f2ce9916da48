"""Prometheus metrics of the fleet and of the HTTP server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.types import Completion, EngineState, FleetStatus

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
        fleet.register(_FleetCollector(status, in_flight))
        return generate_latest(fleet) + generate_latest(self._registry)


class MetricsMiddleware:
    """ASGI middleware that counts requests by route and status, and measures how long they take."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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


class _FleetCollector(Collector):
    def __init__(self, status: FleetStatus, in_flight: int) -> None:
        self._status, self._in_flight = status, in_flight

    def collect(self) -> Iterator[Any]:
        status = self._status
        for family, name, text, value in (
            (GaugeMetricFamily, "policy_version", "Committed policy version; -1 before the first.", status.version),
            (GaugeMetricFamily, "gateway_uptime_seconds", "Gateway uptime.", status.uptime_seconds),
            (CounterMetricFamily, "completions", "Completions since the gateway started.", status.num_completions),
            (CounterMetricFamily, "retried_requests", "Requests retried on another engine.", status.num_retried),
            (GaugeMetricFamily, "http_in_flight", "Generations in flight over HTTP.", self._in_flight),
        ):
            yield family(f"slipstream_{name}", text, value=value)
        states = GaugeMetricFamily("slipstream_engines", "Engines by state.", labels=("state",))
        for state in get_args(EngineState):
            states.add_metric((state,), sum(e.state == state for e in status.engines))
        yield states
        requests = GaugeMetricFamily("slipstream_engine_requests", "Unanswered requests.", labels=("engine",))
        versions = GaugeMetricFamily("slipstream_engine_version", "Policy version served.", labels=("engine",))
        circuits = GaugeMetricFamily(
            "slipstream_engine_circuit", "Circuit breaker: 0 closed, 1 half-open, 2 open.", labels=("engine",)
        )
        faults = CounterMetricFamily("slipstream_engine_faults", "Calls that the engine failed.", labels=("engine",))
        prompts = CounterMetricFamily(
            "slipstream_engine_prompt_tokens",
            "Prompt tokens, by whether they were in the prefix cache.",
            labels=("engine", "cached"),
        )
        for engine in status.engines:
            name = engine.info.name
            requests.add_metric((name,), engine.num_requests)
            versions.add_metric((name,), engine.info.version)
            circuits.add_metric((name,), ("closed", "half-open", "open").index(engine.circuit))
            faults.add_metric((name,), engine.num_faults)
            prompts.add_metric((name, "yes"), engine.hit_tokens)
            prompts.add_metric((name, "no"), engine.looked_up_tokens - engine.hit_tokens)
        yield from (requests, versions, circuits, faults, prompts)
