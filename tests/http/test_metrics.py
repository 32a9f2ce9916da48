"""Prometheus metrics of a fleet."""

from slipstream.http.metrics import Metrics
from slipstream.types import EngineStatus, FleetStatus
from tests.gateway.test_registry import info


def test_metrics_per_engine():
    engines = (
        EngineStatus(info("a"), "ready", 3, 0.1, hit_tokens=30, looked_up_tokens=40),
        EngineStatus(info("b"), "ready", 0, 0.1, circuit="open", num_faults=7),
        EngineStatus(info("c"), "ready", 0, 0.1, circuit="half-open", num_faults=5),
    )
    lines = Metrics().text(FleetStatus(4, 1.0, 10, engines, num_retried=6), in_flight=2).decode().splitlines()
    for line in (
        'slipstream_engine_circuit{engine="a"} 0.0',
        'slipstream_engine_circuit{engine="b"} 2.0',
        'slipstream_engine_circuit{engine="c"} 1.0',
        'slipstream_engine_faults_total{engine="b"} 7.0',
        'slipstream_engine_prompt_tokens_total{cached="yes",engine="a"} 30.0',
        'slipstream_engine_prompt_tokens_total{cached="no",engine="a"} 10.0',
        "slipstream_retried_requests_total 6.0",
        'slipstream_engine_requests{engine="a"} 3.0',
    ):
        assert line in lines, (line, lines)
