"""The state of a fleet in a few words, for messages about what a call waits for."""

from __future__ import annotations

from collections import Counter

from slipstream.types import EngineStatus, FleetStatus

MAX_NAMED = 3
"""Engines that are named; of more, the states are counted."""


def engines_in_words(status: FleetStatus) -> str:
    """Return `engine-0 has no weights, engine-1 is compiling decode 64`."""
    if not status.engines:
        return "no engine has registered"
    if len(status.engines) > MAX_NAMED:
        counts = Counter(e.activity.partition(" ")[0] or e.state for e in status.engines)
        return ", ".join(f"{count} {state}" for state, count in counts.most_common())
    return ", ".join(map(_in_words, status.engines))


def queue_in_words(status: FleetStatus) -> str:
    """Return the groups of the rollout queue by state."""
    if (queue := status.rollouts) is None:
        return "no prompts submitted"
    return f"{queue.waiting} groups wait, {queue.running} run, {queue.finished} are finished"


def _in_words(engine: EngineStatus) -> str:
    name = engine.info.name
    if engine.activity:
        return f"{name} is {engine.activity}"
    if engine.is_paused:
        return f"{name} is paused"
    if engine.state != "ready":
        return f"{name} {'has no weights' if engine.state == 'empty' else f'is {engine.state}'}"
    return f"{name} has {engine.num_requests} request(s)"
