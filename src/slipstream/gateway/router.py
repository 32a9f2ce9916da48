"""Which engine takes which request. Pure: loads in, names out."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from slipstream.types import Request


def route(requests: Sequence[Request], loads: Mapping[str, int]) -> dict[str, list[Request]]:
    """Shares requests out over engines by load, counted in tokens to generate: the largest first, each to the engine
    that has least to do. Order within an engine is kept. `loads` is what each engine has to do already."""
    if not loads:
        raise ValueError("no engines to route to")
    heap = [(load, name) for name, load in loads.items()]
    heapq.heapify(heap)
    chosen: dict[str, str] = {}
    for request in sorted(requests, key=weight, reverse=True):
        load, name = heapq.heappop(heap)
        chosen[request.id] = name
        heapq.heappush(heap, (load + weight(request), name))
    routed: dict[str, list[Request]] = {}
    for request in requests:
        routed.setdefault(chosen[request.id], []).append(request)
    return routed


def weight(request: Request) -> int:
    """What a request costs an engine, roughly: the tokens it may generate."""
    return request.sampling.n * request.sampling.max_tokens
