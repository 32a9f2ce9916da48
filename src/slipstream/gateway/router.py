"""Routes requests to engines by load and prefix affinity. Pure: loads and prompt prefixes in, engine names out."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from slipstream.gateway.prefix_affinity import Prefix, PrefixAffinity
from slipstream.types import SamplingParams

CHUNK = 1 / 4
"""Share of an engine's fair load that requests with the same prompt may add up to and still go to one engine together."""
PREFIX_WORTH = 1 / 2
"""Generated tokens an engine may have beyond its fair load for each prompt token in its cache. Prefill costs about a fifth of
decoding per token (benchmarks/results/decode_cpu.json), and engines decode many sequences at once."""


def route(
    weights: Mapping[str, int],
    loads: Mapping[str, int],
    prefixes: Mapping[str, Sequence[Prefix]] | None = None,
    affinity: PrefixAffinity | None = None,
    shares: Mapping[str, float] | None = None,
) -> dict[str, list[str]]:
    """Distribute requests over engines; return request ids by engine, in their original order.

    `weights` are the requests' tokens to generate by id, `loads` are the engines' present loads in tokens, and `shares` are the
    speeds of engines that are far slower than the others, which have 1. Heavy requests come first. Each goes to the engine that
    is done with it first, or to one that has its prefix cached and no more than its fair load. Requests with the same prompt go
    together, in chunks that keep the balance. `affinity` is updated with the result."""
    if not loads:
        raise ValueError("no engines to route to")
    if len(loads) == 1:
        return {name: list(weights) for name in loads} if weights else {}
    prefixes, affinity, shares = prefixes or {}, affinity or PrefixAffinity(), shares or {}
    speeds = {name: shares.get(name, 1.0) for name in loads}
    # In tokens of an engine of speed 1: when an engine is done.
    busy = {name: load / speeds[name] for name, load in loads.items()}
    fair = (sum(loads.values()) + sum(weights.values())) / sum(speeds.values())
    heap = [(busy[name], name) for name, speed in speeds.items() if speed == 1]
    heapq.heapify(heap)
    slow = [name for name, speed in speeds.items() if speed != 1]
    engine_of: dict[str, str] = {}
    for work, ids in _chunks(weights, prefixes, fair * CHUNK * min(speeds.values())):
        while heap and heap[0][0] != busy[heap[0][1]]:  # its load grew since it was pushed
            heapq.heapreplace(heap, (busy[heap[0][1]], heap[0][1]))
        candidates = [*(name for _, name in heap[:1]), *slow]
        first = min(candidates, key=lambda name: busy[name] + work / speeds[name])
        known = prefixes.get(ids[0], ())
        latest = max(busy[first] + work / speeds[first], fair)
        name = _engine_with_prefix(known, busy, speeds, work, latest, affinity) or first
        busy[name] += work / speeds[name]
        affinity.add(known, name)
        engine_of.update(dict.fromkeys(ids, name))
    routed: dict[str, list[str]] = {}
    for id in weights:
        routed.setdefault(engine_of[id], []).append(id)
    return routed


def _engine_with_prefix(
    known: Sequence[Prefix],
    busy: Mapping[str, float],
    speeds: Mapping[str, float],
    work: int,
    latest: float,
    affinity: PrefixAffinity,
) -> str | None:
    """Return the least loaded engine with the longest cached prefix, if it is done by `latest`, or later by the prefix's
    worth."""
    for length, names in affinity.engines_with(known):
        name = min((n for n in names if n in busy), key=busy.__getitem__, default=None)
        if name is not None and busy[name] + work / speeds[name] <= latest + length * PREFIX_WORTH:
            return name
    return None


def _chunks(
    weights: Mapping[str, int], prefixes: Mapping[str, Sequence[Prefix]], max_weight: float
) -> Iterator[tuple[int, list[str]]]:
    """Yield `(weight, ids)` of requests with the same prompt, split where they exceed `max_weight`; heaviest first."""
    by_prompt: dict[int | str, list[list[str]]] = {}
    last_weight: dict[int | str, int] = {}
    for id, weight in weights.items():
        known = prefixes.get(id)
        key: int | str = known[-1].key if known else id
        if key in last_weight and last_weight[key] + weight <= max_weight:
            by_prompt[key][-1].append(id)
            last_weight[key] += weight
        else:
            by_prompt.setdefault(key, []).append([id])
            last_weight[key] = weight
    chunks = [(sum(weights[id] for id in ids), ids) for chunks in by_prompt.values() for ids in chunks]
    yield from sorted(chunks, key=lambda chunk: chunk[0], reverse=True)


def weight(sampling: SamplingParams) -> int:
    """Estimate the cost of a request: the tokens it may generate."""
    return sampling.n * sampling.max_tokens
