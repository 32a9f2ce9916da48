"""The checker finds each broken promise in a history, and nothing in one that keeps them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.chaos.checker import check
from slipstream.chaos.history import Event, History

TRAINER, GATEWAY, FIRST, SECOND = 1, 2, 3, 4


def group(position: int, version: int, spans: list[list[int]]) -> dict[str, Any]:
    return {
        "id": f"p{position}",
        "position": position,
        "version": version,
        "spans": [spans],
        "lengths": [4],
        "engines": ["engine-0"],
        "tokens": f"t{position}",
    }


def good() -> list[list[Any]]:
    """`[pid, step, facts]`: two versions on two engines, and three groups, of which a restarted trainer takes one again. Then
    the gateway restarts."""
    events: list[list[Any]] = []
    for version in (0, 1):
        events.append([TRAINER, "sync.call", {"version": version}])
        for step in ("engine.staged", "engine.committed"):
            for pid, engine in ((FIRST, "engine-0"), (SECOND, "engine-1")):
                facts = {"version": version, "engine": engine, "digest": f"d{version}"}
                events.append([pid, step, facts])
        events.append([TRAINER, "sync.done", {"version": version, "engines": ["engine-0", "engine-1"]}])
    taken = [group(1, 1, [[0, 4, 1]]), group(2, 1, [[0, 2, 0], [2, 4, 1]])]
    events.append([TRAINER, "rollout.taken", {"after": 0, "groups": taken}])
    again = [copy.deepcopy(taken[1]), group(3, 1, [[0, 4, 1]])]
    events.append([9, "rollout.taken", {"after": 1, "groups": again}])
    events.append([GATEWAY, "launch.gateway", {"position": 3}])
    return events


def history(events: list[list[Any]]) -> History:
    return History(Event(float(at), pid, step, facts) for at, (pid, step, facts) in enumerate(events))


def test_a_history_that_keeps_every_promise() -> None:
    assert check(history(good()), 1) == []


def test_a_take_that_failed_is_repeated() -> None:
    events = good()
    events[13:13] = [[TRAINER, "rollout.taken", {"fault": "error"}], copy.deepcopy(events[12])]
    assert check(history(events), 1) == []
    del events[13]
    assert check(history(events), 1) == [f"the trainer (pid {TRAINER}) took from position 0 after it had reached 2"]


def swap(first: int, second: int) -> Callable[[list[list[Any]]], None]:
    def change(events: list[list[Any]]) -> None:
        events[first], events[second] = events[second], events[first]

    return change


def put(event: int, *path: Any) -> Callable[[list[list[Any]]], None]:
    """Set the value at a path in the facts of an event to the last element of `path`."""

    def change(events: list[list[Any]]) -> None:
        facts: Any = events[event][2]
        for key in path[:-2]:
            facts = facts[key]
        facts[path[-2]] = path[-1]

    return change


BROKEN: list[tuple[Callable[[list[list[Any]]], None], str]] = [
    (swap(2, 3), "version 0 was committed on an engine before engine-1 had staged it"),
    (put(4, "digest", "other"), "version 0 has different weights on engine-0 .* and engine-1"),
    (put(9, "version", 0), "committed version 0 after version 0"),
    (put(6, "version", 0), "made version 0 again, after version 0 was acknowledged"),
    (put(12, "groups", 1, "spans", [[[0, 4, 7]]]), "tokens of version 7, which engine-0 had not committed"),
    (put(12, "groups", 1, "spans", [[[0, 2, 1], [2, 4, 0]]]), r"versions \[1, 0\], which do not rise"),
    (put(12, "groups", 0, "spans", [[[0, 3, 1]]]), "has spans .* for 4 tokens"),
    (put(12, "groups", 0, "version", 3), "taken at version 3 with tokens of version 1, older than 1"),
    (put(13, "groups", 0, "tokens", "other"), "position 2 held group p2, and later p2 or other tokens"),
    (put(13, "groups", 1, "id", "p1"), "prompt p1 was taken at positions 1 and 3"),
    (put(13, "after", 2), "came at position 2, expected 3"),
    (put(14, "position", 2), "the trainer had taken 3 groups, and a gateway that started later .* knew of 2"),
]


@pytest.mark.parametrize(("change", "expected"), BROKEN, ids=[text.split(",")[0][:40] for _, text in BROKEN])
def test_a_broken_promise_is_found(change: Callable[[list[list[Any]]], None], expected: str) -> None:
    events = good()
    change(events)
    found = check(history(events), 1)
    assert any(re.search(expected, problem) for problem in found), found
