"""What Prometheus reads: the fleet as it is, and what has come over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from slipstream.types import Completion, EngineState, FleetStatus

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = Counter(
            "slipstream_http_requests", "Calls answered.", ("path", "method", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "slipstream_http_request_seconds",
            "From a call's arrival to its answer's end.",
            ("path",),
            registry=self._registry,
        )
        self._tokens = Counter(
            "slipstream_http_tokens", "Tokens of prompts and completions.", ("kind",), registry=self._registry
        )

    def answered(self, path: str, method: str, status: int, seconds: float) -> None:
        self._calls.labels(path, method, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def generated(self, found: Sequence[Completion]) -> None:
        self._tokens.labels("prompt").inc(sum({c.prompt_index: len(c.prompt_token_ids) for c in found}.values()))
        self._tokens.labels("completion").inc(sum(len(c.token_ids) for c in found))

    def text(self, status: FleetStatus, in_flight: int) -> bytes:
        """In Prometheus' exposition format."""
        fleet = CollectorRegistry()
        fleet.register(_Fleet(status, in_flight))
        return generate_latest(fleet) + generate_latest(self._registry)


class _Fleet(Collector):
    def __init__(self, status: FleetStatus, in_flight: int) -> None:
        self._status, self._in_flight = status, in_flight

    def collect(self) -> Iterator[Any]:
        status = self._status
        yield GaugeMetricFamily("slipstream_policy_version", "Committed; -1 before the first.", value=status.version)
        yield GaugeMetricFamily("slipstream_gateway_uptime_seconds", "Of the gateway.", value=status.uptime_seconds)
        yield CounterMetricFamily(
            "slipstream_completions", "Delivered since the gateway started.", value=status.num_completions
        )
        yield CounterMetricFamily(
            "slipstream_retried_requests", "Sent to another engine after the first.", value=status.num_retried
        )
        yield GaugeMetricFamily("slipstream_http_in_flight", "Generations that came over HTTP.", value=self._in_flight)
        states = GaugeMetricFamily("slipstream_engines", "Engines in each state.", labels=("state",))
        for state in get_args(EngineState):
            states.add_metric((state,), sum(e.state == state for e in status.engines))
        yield states
        requests = GaugeMetricFamily("slipstream_engine_requests", "Sent to it and not answered.", labels=("engine",))
        versions = GaugeMetricFamily("slipstream_engine_version", "The policy that it serves.", labels=("engine",))
        circuits = GaugeMetricFamily(
            "slipstream_engine_circuit", "Of its breaker: 0 closed, 1 half-open, 2 open.", labels=("engine",)
        )
        faults = CounterMetricFamily("slipstream_engine_faults", "Calls that it failed itself.", labels=("engine",))
        prompts = CounterMetricFamily(
            "slipstream_engine_prompt_tokens",
            "Of prompts, by whether the engine had computed them before.",
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
