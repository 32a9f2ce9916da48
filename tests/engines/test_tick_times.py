"""What the engine counts as time of the device. On a GPU, XLA returns from the dispatch of a decode program only when its loop
has ended; here the call sleeps instead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.engines.embedded.compute.programs import Programs
from tests.conformance.engines import request
from tests.engines.subjects import opened, stats

SECONDS = 0.5


def slowed(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        time.sleep(SECONDS)
        return original(*args, **named)

    return call


def test_a_dispatch_that_blocks_is_time_of_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as subject:
        subject.generate(request("warm", [5, 6, 7], max_tokens=4))  # compiles
        before = stats(subject)
        monkeypatch.setattr(Programs, "decode", slowed(Programs.decode))
        subject.generate(request("a", [9, 10, 11], max_tokens=4))
        after = stats(subject)
    spent = {phase: after["seconds"][phase] - before["seconds"][phase] for phase in after["seconds"]}
    assert spent["decode"] >= SECONDS, spent
    assert spent["prefill"] < spent["decode"] > spent["host"], spent  # the prefill had ended long before
