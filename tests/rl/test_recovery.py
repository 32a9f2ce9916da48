"""`RecoveringBridge`: pending syncs and retries."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from slipstream.errors import ChecksumMismatch, EngineLost, MappingError, SlipstreamError, TransferError
from slipstream.rl.trainer.recovery import RecoveringBridge


class Bridge:
    """A fake whose syncs finish when the test sets their result."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, Future[Any]]] = []
        self.synced: list[str] = []

    def start_sync(self, params: str, in_flight: str, adapter: object) -> Future[Any]:
        assert all(future.done() for _, future in self.begun), "one at a time"
        self.begun.append((params, Future()))
        return self.begun[-1][1]

    def sync(self, params: str, in_flight: str, adapter: object) -> str:
        assert all(future.done() for _, future in self.begun)
        self.synced.append(params)
        return f"report of {params}"


@pytest.fixture
def bridge() -> Bridge:
    return Bridge()


@pytest.fixture
def fleet(bridge: Bridge) -> RecoveringBridge:
    return RecoveringBridge(bridge, patience=5.0)  # type: ignore[arg-type]


def test_the_report_of_a_started_sync_is_returned_once(bridge: Bridge, fleet: RecoveringBridge) -> None:
    assert fleet.finish_sync() is None
    fleet.start_sync("one")
    bridge.begun[0][1].set_result("report of one")
    assert fleet.finish_sync() == "report of one" and fleet.finish_sync() is None  # type: ignore[comparison-overlap]


def test_an_earlier_sync_finishes_first(bridge: Bridge, fleet: RecoveringBridge) -> None:
    fleet.start_sync("one")
    bridge.begun[0][1].set_result("report of one")
    fleet.start_sync("two")
    bridge.begun[1][1].set_result("report of two")
    assert fleet.sync("three") == "report of three"  # type: ignore[comparison-overlap]
    assert [params for params, _ in bridge.begun] == ["one", "two"] and bridge.synced == ["three"]


@pytest.mark.parametrize("error", [EngineLost, ChecksumMismatch, TransferError])
def test_a_sync_that_lost_an_engine_or_bytes_is_retried(
    bridge: Bridge, fleet: RecoveringBridge, error: type[SlipstreamError]
) -> None:
    fleet.start_sync("one")
    bridge.begun[0][1].set_exception(error("it died"))
    assert fleet.finish_sync() == "report of one" and bridge.synced == ["one"]  # type: ignore[comparison-overlap]


def test_permanent_errors_of_a_sync_are_raised(bridge: Bridge, fleet: RecoveringBridge) -> None:
    fleet.start_sync("one")
    bridge.begun[0][1].set_exception(MappingError("missing: lm_head.weight"))
    with pytest.raises(MappingError, match="lm_head"):
        fleet.finish_sync()
    assert fleet.finish_sync() is None and not bridge.synced


def test_a_started_sync_is_finished_before_a_retry(bridge: Bridge, fleet: RecoveringBridge) -> None:
    fleet.start_sync("one")
    bridge.begun[0][1].set_exception(EngineLost("it died"))
    calls = iter([EngineLost("it died"), None])

    def call() -> str:
        if (error := next(calls)) is not None:
            raise error
        return "done"

    assert fleet.retry(call) == "done" and bridge.synced == ["one"]
