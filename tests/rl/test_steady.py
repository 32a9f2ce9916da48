"""Syncs that a trainer does not wait for, and what becomes of one that fails."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from slipstream.errors import EngineLost, MappingError
from slipstream.rl.steady import Steady


class Bridge:
    """Syncs end when a test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, Future[Any]]] = []
        self.synced: list[str] = []
        self.repaired: list[str] = []

    def start_sync(self, params: str, in_flight: str) -> Future[Any]:
        assert all(future.done() for _, future in self.begun), "one at a time"
        self.begun.append((params, Future()))
        return self.begun[-1][1]

    def sync(self, params: str, in_flight: str) -> str:
        assert all(future.done() for _, future in self.begun)
        self.synced.append(params)
        return f"report of {params}"

    def repair(self, params: str) -> None:
        self.repaired.append(params)


@pytest.fixture
def bridge() -> Bridge:
    return Bridge()


@pytest.fixture
def steady(bridge: Bridge) -> Steady:
    return Steady(bridge, patience=5.0)  # type: ignore[arg-type]


def test_the_report_of_a_started_sync_is_had_once(bridge: Bridge, steady: Steady) -> None:
    assert steady.finish_sync() is None
    steady.start_sync("one")
    bridge.begun[0][1].set_result("report of one")
    assert steady.finish_sync() == "report of one" and steady.finish_sync() is None  # type: ignore[comparison-overlap]


def test_the_one_before_ends_first(bridge: Bridge, steady: Steady) -> None:
    steady.start_sync("one")
    bridge.begun[0][1].set_result("report of one")
    steady.start_sync("two")
    bridge.begun[1][1].set_result("report of two")
    assert steady.sync("three") == "report of three"  # type: ignore[comparison-overlap]
    assert [params for params, _ in bridge.begun] == ["one", "two"] and bridge.synced == ["three"]


def test_one_that_an_engine_died_of_is_tried_again(bridge: Bridge, steady: Steady) -> None:
    steady.start_sync("one")
    bridge.begun[0][1].set_exception(EngineLost("it died"))
    assert steady.finish_sync() == "report of one" and bridge.synced == ["one"]  # type: ignore[comparison-overlap]


def test_one_that_is_wrong_is_raised(bridge: Bridge, steady: Steady) -> None:
    steady.start_sync("one")
    bridge.begun[0][1].set_exception(MappingError("missing: lm_head.weight"))
    with pytest.raises(MappingError, match="lm_head"):
        steady.finish_sync()
    assert steady.finish_sync() is None and not bridge.synced


def test_engines_are_mended_with_what_serves_after_the_sync_under_way(bridge: Bridge, steady: Steady) -> None:
    steady.start_sync("one")
    bridge.begun[0][1].set_result("report of one")
    calls = iter([EngineLost("it died"), None])

    def call() -> str:
        if (error := next(calls)) is not None:
            raise error
        return "done"

    assert steady.run(call) == "done" and bridge.repaired == ["one"]
