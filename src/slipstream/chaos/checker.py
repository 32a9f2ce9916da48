"""Checks the history of a run against what Slipstream promises, whatever faults happened in it.

It knows only the promises, not the code that keeps them:

- All engines that commit a version in one sync have staged it before any of them commits.
- One version number means one set of weights, on every engine and after every restart.
- A version that a sync has acknowledged is never followed by an older or equal one.
- Every token names a version that its engine had committed, and a completion's versions only rise.
- No group is older than the staleness bound when it is taken.
- A position in the order of taking always holds the same group with the same tokens, also for a restarted trainer.
- The trainer takes every position once, counted from where its last checkpoint was; no prompt is at two positions.
- A gateway that starts knows every position that a trainer has taken: nothing is acknowledged before it is on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from slipstream.chaos.history import History


def check(history: History, max_staleness: int) -> list[str]:
    """Return the promises that were broken; empty if none was."""
    return [
        *_updates(history),
        *_versions(history),
        *_groups(history, max_staleness),
        *_positions(history),
        *_durability(history),
    ]


def _updates(history: History) -> Iterator[str]:
    called: dict[int, float] = {}
    """By trainer: when it last called sync."""
    staged: dict[tuple[int, str], list[float]] = defaultdict(list)
    committed: dict[int, list[float]] = defaultdict(list)
    for event in history.of("sync.call", "engine.staged", "engine.committed", "sync.done"):
        version = event.facts["version"]
        match event.step:
            case "sync.call":
                called[event.pid] = event.at
            case "engine.staged":
                staged[version, event.facts["engine"]].append(event.at)
            case "engine.committed":
                committed[version].append(event.at)
            case _:
                since = called.get(event.pid, 0.0)
                first = min((at for at in committed[version] if at > since), default=None)
                if first is None:
                    yield f"a sync acknowledged version {version}, which no engine committed"
                    continue
                for engine in event.facts["engines"]:
                    if not any(since < at < first for at in staged[version, engine]):
                        yield f"version {version} was committed on an engine before {engine} had staged it"


def _versions(history: History) -> Iterator[str]:
    digests: dict[int, dict[str, str]] = defaultdict(dict)
    """By version: who first committed weights of each digest."""
    serving: dict[int, int] = {}
    for event in history.of("engine.committed"):
        version, engine = event.facts["version"], event.facts["engine"]
        digests[version].setdefault(event.facts["digest"], f"{engine} (pid {event.pid})")
        if version <= serving.get(event.pid, -1):
            yield f"{engine} (pid {event.pid}) committed version {version} after version {serving[event.pid]}"
        serving[event.pid] = version
    for version, found in digests.items():
        if len(found) > 1:
            yield f"version {version} has different weights on {' and '.join(found.values())}"
    acknowledged = -1
    for event in history.of("sync.call", "sync.done"):
        version = event.facts["version"]
        if event.step == "sync.call" and version <= acknowledged:
            yield f"a sync made version {version} again, after version {acknowledged} was acknowledged"
        if event.step == "sync.done":
            acknowledged = max(acknowledged, version)


def _groups(history: History, max_staleness: int) -> Iterator[str]:
    committed: dict[tuple[str, int], float] = {}
    for event in history.of("engine.committed"):
        committed.setdefault((event.facts["engine"], event.facts["version"]), event.at)
    for event in history.of("rollout.taken"):
        for group in event.facts["groups"]:
            name = f"group {group['id']}"
            for spans, length, engine in zip(group["spans"], group["lengths"], group["engines"], strict=True):
                yield from _spans(name, spans, length)
                for _, _, version in spans:
                    if committed.get((engine, version), float("inf")) > event.at:
                        yield f"{name} has tokens of version {version}, which {engine} had not committed"
            oldest = min((span[2] for spans in group["spans"] for span in spans), default=group["version"])
            if group["version"] - oldest > max_staleness:
                yield (
                    f"{name} was taken at version {group['version']} with tokens of version {oldest}, older than "
                    f"{max_staleness}"
                )


def _spans(name: str, spans: list[list[int]], length: int) -> Iterator[str]:
    stops = [0, *(stop for _, stop, _ in spans)]
    if [start for start, _, _ in spans] != stops[:-1] or stops[-1] != length:
        yield f"{name} has spans {spans} for {length} tokens"
    versions = [version for _, _, version in spans]
    if versions != sorted(set(versions)):
        yield f"{name} has tokens of versions {versions}, which do not rise"


def _positions(history: History) -> Iterator[str]:
    held: dict[int, tuple[str, str]] = {}
    """By position: id and tokens of the group that was taken there first."""
    trainer = reached = after = 0
    for event in history:
        if event.step != "rollout.taken":
            continue
        if event.is_fault:
            if event.facts["fault"] == "error":  # the call has failed and taken nothing
                reached = after
            continue
        after, groups = event.facts["after"], event.facts["groups"]
        if event.pid == trainer and after != reached:
            yield f"the trainer (pid {trainer}) took from position {after} after it had reached {reached}"
        if after > max(held, default=0):
            yield f"the trainer (pid {event.pid}) continued at position {after}, and only {max(held, default=0)} were taken"
        trainer, reached = event.pid, after + len(groups)
        for number, group in enumerate(groups, start=after + 1):
            if group["position"] != number:
                yield f"group {group['id']} came at position {group['position']}, expected {number}"
            found = (group["id"], group["tokens"])
            if held.setdefault(number, found) != found:
                yield f"position {number} held group {held[number][0]}, and later {group['id']} or other tokens"
    yield from _repeated({position: id for position, (id, _) in held.items()})


def _durability(history: History) -> Iterator[str]:
    taken = 0
    for event in history.of("rollout.taken", "launch.gateway"):
        if event.step == "rollout.taken":
            taken = max(taken, event.facts["after"] + len(event.facts["groups"]))
        elif event.facts["position"] < taken:
            yield (
                f"the trainer had taken {taken} groups, and a gateway that started later (pid {event.pid}) knew of "
                f"{event.facts['position']}"
            )


def _repeated(ids: dict[int, Any]) -> Iterator[str]:
    first: dict[Any, int] = {}
    for position, id in ids.items():
        if first.setdefault(id, position) != position:
            yield f"prompt {id} was taken at positions {first[id]} and {position}"
