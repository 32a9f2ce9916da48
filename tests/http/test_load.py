"""The load benchmark, small: everybody is served or refused in an orderly way."""

import importlib.util
import sys
from pathlib import Path

PATH = Path(__file__).parents[2] / "benchmarks" / "http_load.py"


def test_clients_that_are_quick_slow_or_leaving_are_all_served(served, monkeypatch):
    spec = importlib.util.spec_from_file_location("http_load", PATH)
    http_load = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "http_load", http_load)  # dataclasses look their module up
    spec.loader.exec_module(http_load)
    monkeypatch.setattr(http_load, "CALM_SECONDS", 0.1)
    report = http_load.run(served.bridge, clients=30, prompts=40, max_tokens=4, patience=120.0)
    assert report.is_orderly, report
    assert {kind: len(values) for kind, values in report.latencies.items()} == {"quick": 18, "slow": 9}
