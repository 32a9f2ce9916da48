"""Which engine takes which request. Pure: loads and beginnings of prompts in, names out."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from slipstream.gateway.affinity import Affinity, Prefix
from slipstream.types import SamplingParams

PIECE = 1 / 4
"""Of an engine's fair share: what prompts that are alike may come to, and still go to one engine together."""
WORTH = 1 / 2
"""Tokens to generate that an engine may have beyond its fair share, for each token of a beginning that it knows. Computing one
anew costs about a fifth of generating one (benchmarks/results/decode_cpu.json), and engines generate many at a time."""


def route(
    weights: Mapping[str, int],
    loads: Mapping[str, int],
    beginnings: Mapping[str, Sequence[Prefix]] | None = None,
    affinity: Affinity | None = None,
) -> dict[str, list[str]]:
    """Shares requests out over engines by load, counted in tokens to generate: the largest first, each to the engine that
    has least to do, or to one that has computed the beginning of its prompt, unless that has more than its fair share to do.
    Prompts that are alike go together, in pieces that keep the balance. Order within an engine is kept. `weights` are the
    requests' by their ids, `loads` is what each engine has to do already; what `affinity` knows, it knows better afterwards."""
    if not loads:
        raise ValueError("no engines to route to")
    if len(loads) == 1:
        return {name: list(weights) for name in loads} if weights else {}
    beginnings, affinity = beginnings or {}, affinity or Affinity()
    busy, fair = dict(loads), (sum(loads.values()) + sum(weights.values())) / len(loads)
    heap = [(load, name) for name, load in loads.items()]
    heapq.heapify(heap)
    chosen: dict[str, str] = {}
    for work, ids in _pieces(weights, beginnings, fair * PIECE):
        while heap[0][0] != busy[heap[0][1]]:  # it was given something as somebody's home
            heapq.heapreplace(heap, (busy[heap[0][1]], heap[0][1]))
        known = beginnings.get(ids[0], ())
        name = _home(known, busy, max(heap[0][0], fair - work), affinity) or heap[0][1]
        busy[name] += work
        affinity.learn(known, name)
        chosen.update(dict.fromkeys(ids, name))
    routed: dict[str, list[str]] = {}
    for id in weights:
        routed.setdefault(chosen[id], []).append(id)
    return routed


def _home(known: Sequence[Prefix], busy: Mapping[str, int], most: float, affinity: Affinity) -> str | None:
    """Of the engines that have the longest beginning and no more than `most` to do, but for its worth, the least busy."""
    for length, names in affinity.homes(known):
        name = min((n for n in names if n in busy), key=busy.__getitem__, default=None)
        if name is not None and busy[name] <= most + length * WORTH:
            return name
    return None


def _pieces(
    weights: Mapping[str, int], beginnings: Mapping[str, Sequence[Prefix]], most: float
) -> Iterator[tuple[int, list[str]]]:
    """`(weight, ids)` of requests with the same prompt, cut where they come to more than `most`; the heaviest first."""
    alike: dict[int | str, list[list[str]]] = {}
    sums: dict[int | str, int] = {}
    for id, weight in weights.items():
        known = beginnings.get(id)
        key: int | str = known[-1].key if known else id
        if key in sums and sums[key] + weight <= most:
            alike[key][-1].append(id)
            sums[key] += weight
        else:
            alike.setdefault(key, []).append([id])
            sums[key] = weight
    pieces = [(sum(weights[id] for id in ids), ids) for found in alike.values() for ids in found]
    yield from sorted(pieces, key=lambda piece: piece[0], reverse=True)


def weight(sampling: SamplingParams) -> int:
    """What a request costs an engine, roughly: the tokens it may generate."""
    return sampling.n * sampling.max_tokens
