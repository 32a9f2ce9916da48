"""Prometheus metrics of a fleet, made from its status when Prometheus asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from slipstream.types import EngineState, EngineStatus, FleetStatus, RolloutStatus, UpdateTotals

DECISIONS = ("suspect", "quarantine", "probe", "release", "slow", "not slow", "drain", "undrain")
"""Kinds of decisions that have a series from the start, so that their first increase counts."""


class FleetCollector(Collector):
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
        decisions = CounterMetricFamily(
            "slipstream_engine_decisions", "Decisions about engines, such as quarantines.", labels=("kind",)
        )
        for kind in dict.fromkeys((*DECISIONS, *status.decision_counts)):
            decisions.add_metric((kind.replace(" ", "_"),), status.decision_counts.get(kind, 0))
        yield from (states, decisions)
        yield from _engines(status.engines)
        yield from _rollouts(status.rollouts or RolloutStatus())
        yield from _syncs(status.update_totals)


def _engines(engines: Sequence[EngineStatus]) -> Iterator[Any]:
    requests = GaugeMetricFamily("slipstream_engine_requests", "Unanswered requests.", labels=("engine",))
    versions = GaugeMetricFamily("slipstream_engine_version", "Policy version served.", labels=("engine",))
    circuits = GaugeMetricFamily(
        "slipstream_engine_circuit", "Circuit breaker: 0 closed, 1 half-open, 2 open.", labels=("engine",)
    )
    kv = GaugeMetricFamily("slipstream_engine_kv_use", "Share of the KV cache that holds tokens.", labels=("engine",))
    faults = CounterMetricFamily("slipstream_engine_faults", "Calls that the engine failed.", labels=("engine",))
    tokens = CounterMetricFamily(
        "slipstream_engine_generated_tokens", "Tokens generated since the engine registered.", labels=("engine",)
    )
    prompts = CounterMetricFamily(
        "slipstream_engine_prompt_tokens",
        "Prompt tokens, by whether they were in the prefix cache.",
        labels=("engine", "cached"),
    )
    for engine in engines:
        name = engine.info.name
        requests.add_metric((name,), engine.num_requests)
        versions.add_metric((name,), engine.info.version)
        circuits.add_metric((name,), ("closed", "half-open", "open").index(engine.circuit))
        kv.add_metric((name,), engine.kv_use)
        faults.add_metric((name,), engine.num_faults)
        tokens.add_metric((name,), engine.num_tokens)
        prompts.add_metric((name, "yes"), engine.hit_tokens)
        prompts.add_metric((name, "no"), engine.looked_up_tokens - engine.hit_tokens)
    yield from (requests, versions, circuits, kv, faults, tokens, prompts)


def _rollouts(rollouts: RolloutStatus) -> Iterator[Any]:
    groups = GaugeMetricFamily("slipstream_rollout_groups", "Groups in the rollout queue, by state.", labels=("state",))
    for state in ("waiting", "running", "finished"):
        groups.add_metric((state,), getattr(rollouts, state))
    yield groups
    for name, text, value in (
        ("taken", "Groups taken by the trainer since the run began.", rollouts.taken),
        ("failed", "Groups that ended with an error.", rollouts.failed),
        ("renewed", "Groups generated again, for being too old or from a wrong engine.", rollouts.renewed),
    ):
        yield CounterMetricFamily(f"slipstream_rollout_groups_{name}", text, value=value)
    staleness = HistogramMetricFamily("slipstream_rollout_staleness", "Versions that taken groups were behind.")
    below, buckets = 0, []
    for age, count in enumerate(rollouts.taken_by_age):
        below += count
        buckets.append((str(age), below))
    total = sum(age * count for age, count in enumerate(rollouts.taken_by_age))
    staleness.add_metric((), [*buckets, ("+Inf", below)], total)
    yield staleness
    yield GaugeMetricFamily(
        "slipstream_rollout_max_staleness", "Bound on the staleness of taken groups.", value=rollouts.max_staleness
    )


def _syncs(totals: UpdateTotals) -> Iterator[Any]:
    syncs = CounterMetricFamily("slipstream_syncs", "Weight updates, by how they ended.", labels=("result",))
    syncs.add_metric(("committed",), totals.committed)
    syncs.add_metric(("rolled_back",), totals.failed)
    seconds = SummaryMetricFamily(
        "slipstream_sync_seconds", "Time of committed updates by phase, of the slowest engine.", labels=("phase",)
    )
    for phase in dataclasses.fields(totals.phases):
        seconds.add_metric((phase.name,), totals.committed, getattr(totals.phases, phase.name))
    yield from (syncs, seconds)
    yield CounterMetricFamily(
        "slipstream_sync_bytes", "Bytes that engines received in updates.", value=totals.num_bytes
    )
