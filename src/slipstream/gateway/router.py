"""Which engine takes which request. Pure: loads in, names out."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from slipstream.types import SamplingParams


def route(weights: Mapping[str, int], loads: Mapping[str, int]) -> dict[str, list[str]]:
    """Shares requests out over engines by load, counted in tokens to generate: the largest first, each to the engine
    that has least to do. Order within an engine is kept. `weights` are the requests' by their ids, `loads` is what each engine
    has to do already."""
    if not loads:
        raise ValueError("no engines to route to")
    heap = [(load, name) for name, load in loads.items()]
    heapq.heapify(heap)
    chosen: dict[str, str] = {}
    for id in sorted(weights, key=weights.__getitem__, reverse=True):
        load, name = heapq.heappop(heap)
        chosen[id] = name
        heapq.heappush(heap, (load + weights[id], name))
    routed: dict[str, list[str]] = {}
    for id in weights:
        routed.setdefault(chosen[id], []).append(id)
    return routed


def weight(sampling: SamplingParams) -> int:
    """What a request costs an engine, roughly: the tokens it may generate."""
    return sampling.n * sampling.max_tokens
