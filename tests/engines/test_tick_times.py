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


@pytest.mark.parametrize(("is_first", "phase"), [(False, "decode"), (True, "host")])
def test_a_dispatch_that_blocks_is_time_of_its_program_unless_it_compiles(
    is_first: bool, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as subject:
        subject.generate(request("warm", [5, 6, 7], max_tokens=4))  # compiles
        if is_first:
            choice = subject.engine._compute._executor._programs.choice  # type: ignore[attr-defined]
            monkeypatch.setattr(choice, "compiled", {})
        before = stats(subject)
        monkeypatch.setattr(Programs, "decode", slowed(Programs.decode))
        subject.generate(request("a", [9, 10, 11], max_tokens=1))  # one call
        after = stats(subject)
    spent = {name: after["seconds"][name] - before["seconds"][name] for name in after["seconds"]}
    assert spent[phase] >= SECONDS and phase == max(spent, key=lambda name: spent[name]), spent
