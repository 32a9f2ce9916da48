"""The differences between trainer and engine logprobs of a step, counted by cause, and the tokens that differ most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from slipstream.observe.recorder.rollouts import Chunk

TOLERANCE = {"float64": 5e-3, "float32": 5e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Mean |gap| in nats explained by arithmetic in the engine's dtype. bfloat16 has 8 bits of precision, so a logit of 10 is
rounded by up to 0.03. The random models of the tests show 0.014 in bfloat16, and 0.8 or more with two tensors swapped; the
limit lies between. Not calibrated on large models. On GPUs, float32 products may keep 10 bits (TF32), so the limit of float32
is close to that of float16."""
HISTOGRAM_EDGES = (0.0, *(float(f"{digit}e{power}") for power in range(-6, 1) for digit in (1, 3)), 10.0)
POSITION_EDGES = (0, *(1 << power for power in range(20)))
MAX_AGE = 8
"""Tokens this many versions old, or more, are counted together."""
_AGES = [*map(str, range(MAX_AGE)), f"{MAX_AGE}+"]
_POSITIONS = [str(edge) for edge in POSITION_EDGES]
_DISTANCES = [f"{edge:g}" for edge in HISTOGRAM_EDGES]
WORST = 3
"""Tokens that are listed of each step."""
QUANTILE_TOKENS = 1 << 20
"""Tokens from which quantiles are computed; of a larger step, every n-th."""


class StepMismatch:
    """Sums of |trainer − engine| over a step."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        self._gaps: list[np.ndarray] = []
        self._signed = 0.0
        self._worst: list[tuple[Any, ...]] = []

    def add(self, chunk: Chunk) -> None:
        if chunk.gaps is None:
            return
        known = np.isfinite(chunk.gaps)
        if not known.any():
            return
        owner = chunk.owners[known]
        gaps, ages, distance = chunk.gaps[known], chunk.ages[known], np.abs(chunk.gaps[known])
        self._gaps.append(distance.astype(np.float32))
        self._signed += float(gaps.sum())
        names, engines = np.unique([c.engine for c in chunk.completions], return_inverse=True)
        self._count("engine", names.tolist(), engines[owner], distance)
        self._count("staleness", _AGES, np.minimum(ages, MAX_AGE), distance)
        position = (np.arange(len(chunk.ids)) - np.repeat(chunk.starts, chunk.lengths))[known]
        self._count("position", _POSITIONS, np.searchsorted(POSITION_EDGES, position, "right") - 1, distance)
        self._count("histogram", _DISTANCES, np.searchsorted(HISTOGRAM_EDGES, distance, "right") - 1, distance)
        for at in np.argpartition(-distance, min(WORST, len(distance)) - 1)[:WORST]:
            sample, place = owner[at], np.flatnonzero(known)[at]
            engine = float(chunk.engine[place])
            self._worst.append(
                (
                    *(int(chunk.groups[sample]), int(chunk.places[sample]), int(position[at]), int(chunk.ids[place])),
                    chunk.completions[sample].engine,
                    *(int(ages[at]), engine, engine + float(gaps[at]), float(gaps[at])),
                )
            )

    def _count(self, kind: str, keys: Sequence[str], index: np.ndarray, distance: np.ndarray) -> None:
        tokens, totals = np.bincount(index, minlength=len(keys)), np.bincount(index, distance, len(keys))
        for key in np.flatnonzero(tokens).tolist():
            entry = self._sums[kind, keys[key]]
            entry[0] += int(tokens[key])
            entry[1] += float(totals[key])

    def scalars(self) -> dict[str, float]:
        """Columns of the table `steps`; empty if nothing is known."""
        if not self._gaps:
            return {}
        distance = np.concatenate(self._gaps)
        few = distance[:: -(-len(distance) // QUANTILE_TOKENS)]
        middle, high = np.quantile(few, [0.5, 0.99])
        return {
            "mismatch_mean": float(distance.mean(dtype=np.float64)),
            "mismatch_p50": float(middle),
            "mismatch_p99": float(high),
            "mismatch_max": float(distance.max()),
            "mismatch_signed": self._signed / len(distance),
            "mismatch_tokens": float(len(distance)),
        }

    def rows(self, step: int) -> Iterator[tuple[Any, ...]]:
        """Rows of the table `mismatch`."""
        return ((kind, step, key, int(tokens), total) for (kind, key), (tokens, total) in self._sums.items())

    def worst(self, step: int) -> Iterator[tuple[Any, ...]]:
        """Rows of the table `worst_tokens`."""
        return ((step, *row) for row in sorted(self._worst, key=lambda row: -abs(row[-1]))[:WORST])
